"""The tables of `rigbook.toml` as strict, frozen structs. `state.project` reads files into them.

msgspec rather than pydantic: the tables are made each time that any command starts, and here that costs a
millisecond. What is wrong with a file that does not fit is worked out by their pydantic twins (`state.models`).
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct, field

from state.errors import USAGE, RigbookError
from state.outline import Outline

T = TypeVar("T")
Value = str | int | float | bool
Route = Literal["ssh", "pct", "agent"]
HostKind = Literal["proxmox", "lxc", "vm", "linux", "local"]
EngineName = Literal["sglang", "vllm", "reference"]


class Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. `max-tokens` and `max_tokens` are the same key."""


class ProjectInfo(Table, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="what the project is called, everywhere", min_length=1)]
    goal: Annotated[str, Meta(description="one or two sentences: what is wanted; the first section of the book")] = ""
    instructions: Annotated[list[str], Meta(description="standing rules for everyone, people and agents")] = []
    ssh_config: Annotated[
        str | None,
        Meta(description="an OpenSSH client configuration for every host, relative to this file; default: your own"),
    ] = None


class Host(Table, frozen=True, kw_only=True):
    kind: Annotated[HostKind, Meta(description="what sort of machine this is")]
    on: Annotated[str | None, Meta(description="the host that this guest runs on")] = None
    vmid: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="its number on the Proxmox host")] = None
    ssh: Annotated[
        str | None,
        Meta(
            description="anything ssh understands: an alias or user@host[:port]; a guest can do without, by on and vmid"
        ),
    ] = None
    route: Annotated[
        Route | None,
        Meta(description="how it is reached; default: ssh where that is set, else pct (lxc) or the guest agent (vm)"),
    ] = None
    state_dir: Annotated[str, Meta(description="where jobs live on that host; never /tmp")] = "~/.local/state/rigbook"
    played: Annotated[bool, Meta(description="a stand-in that the demo plays; shown as such everywhere")] = False

    @property
    def reached_by(self) -> Literal["local", "ssh", "pct", "agent", "none"]:
        """The way that its links take."""
        if self.kind == "local":
            return "local"
        if self.route is not None:
            return self.route
        if self.ssh is not None:
            return "ssh"
        guests: dict[str, Literal["pct", "agent"]] = {"lxc": "pct", "vm": "agent"}
        return guests.get(self.kind, "none") if self.on and self.vmid else "none"


class Env(Table, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="the host it lies on")]
    python: Annotated[str, Meta(description="absolute path of its python")]
    vars: Annotated[dict[str, str], Meta(description="environment variables for everything that runs in it")] = {}


class Target(Table, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="directory of the target model, on the pipeline's host")]
    name: Annotated[str | None, Meta(description="how servers and the book call it; default: the directory's name")] = (
        None
    )
    package: Annotated[
        str | None, Meta(description="a Python package that carries the model; left out: the directory must be there")
    ] = None
    special_tokens: Annotated[
        dict[str, int], Meta(description="tokens whose ids must hold; preflight checks them")
    ] = {}


class Speculative(Table, frozen=True, kw_only=True):
    algorithm: Annotated[str, Meta(description="as the engine spells it, e.g. EAGLE3 (not EAGLE: another code path)")]
    steps: Annotated[int, Meta(description="draft steps per verify step", ge=1)]
    topk: Annotated[int, Meta(description="branches kept per draft step; 1 is a chain", ge=1)] = 1
    draft_tokens: Annotated[int, Meta(description="tokens the target verifies at once; a chain has steps + 1", ge=1)]


class Profile(Table, frozen=True, kw_only=True):
    extends: Annotated[str | None, Meta(description="a profile to start from; its tables are merged key by key")] = None
    env: Annotated[str, Meta(description="the env the server runs in")]
    engine: Annotated[EngineName, Meta(description="which server")]
    port: Annotated[int, Meta(description="TCP port on the env's host", ge=1, le=65535)]
    args: Annotated[dict[str, Value], Meta(description="server arguments, as the engine spells them, without --")] = {}
    vars: Annotated[dict[str, str], Meta(description="environment variables of the server")] = {}
    draft: Annotated[str | None, Meta(description="directory of the draft model")] = None
    speculative: Annotated[Speculative | None, Meta(description="speculative decoding; left out: none")] = None


class Source(Table, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="what its rows are called", min_length=1)]
    path: Annotated[str, Meta(description="a file or folder on the pipeline's host")]
    format: Annotated[
        Literal["auto", "jsonl", "json", "parquet", "dataset", "text", "paragraphs"],
        Meta(description="what is in it; auto: by the names of its files"),
    ] = "auto"
    rows: Annotated[int, Meta(description="at most so many rows of it, chosen by the seed; 0: all", ge=0)] = 0
    tokens: Annotated[int, Meta(description="response tokens to train on from it; 0: no limit", ge=0)] = 0
    held: Annotated[int, Meta(description="prompts of it that are held out for measuring", ge=0)] = 0
    own_answers: Annotated[
        bool, Meta(description="its last answers are the target's own: they are kept, not asked for anew")
    ] = False


class PromptsTable(Table, frozen=True, kw_only=True):
    sources: Annotated[list[Source], Meta(description="files and data sets with prompts")] = []
    seeds: Annotated[bool, Meta(description="use the prompts that ship with rigbook")] = True
    self_written: Annotated[int, Meta(description="prompts that the target writes itself", ge=0)] = 400
    held_self: Annotated[int, Meta(description="of those, held out for measuring", ge=1)] = 24
    held_people: Annotated[int, Meta(description="prompts written by people, held out for measuring", ge=1)] = 24
    temperature: Annotated[float, Meta(description="sampling temperature while it writes prompts", ge=0)] = 1.0
    max_tokens: Annotated[int, Meta(description="longest prompt it may write, tokens", ge=1)] = 64
    seed: Annotated[int, Meta(description="random seed")] = 0


class EndpointTable(Table, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="what it is called in rows, progress and results", min_length=1)]
    base_url: Annotated[str, Meta(description="where it answers, e.g. https://openrouter.ai/api/v1")]
    model: Annotated[str, Meta(description="the target's name there")] = "default"
    key: Annotated[str | None, Meta(description="the [secrets] entry with its key, on the pipeline's host")] = None
    headers: Annotated[dict[str, str], Meta(description="further HTTP headers; never a key")] = {}
    body: Annotated[
        dict[str, Any], Meta(description="further fields of requests to it, e.g. provider = { order = [...] }")
    ] = {}
    price_in: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="dollars per million prompt tokens; 0: free")
    ] = None
    price_out: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="dollars per million response tokens; 0: free")
    ] = None
    concurrency: Annotated[int, Meta(description="requests in flight at most; 0: find its limit", ge=0)] = 0
    stream: Annotated[bool, Meta(description="stream answers: proxies cut connections that are silent for long")] = True

    def __post_init__(self) -> None:
        scheme, _, rest = self.base_url.partition("://")
        if scheme not in ("http", "https") or not rest:
            raise ValueError(f"base_url must begin with http:// or https://, not {self.base_url!r}")
        if "@" in rest.partition("/")[0] or "?" in rest:
            raise ValueError("base_url must hold no credentials and no query: say where the key is with `key`")
        if any(name.lower() in ("authorization", "x-api-key", "api-key", "cookie") for name in self.headers):
            raise ValueError("headers must hold no key: say where it is with `key`")


class GenerateTable(Table, frozen=True, kw_only=True):
    profile: Annotated[
        str, Meta(description='the server profile that answers; "": none of our own, only the endpoints')
    ] = "baseline"
    max_tokens: Annotated[int, Meta(description="longest response, tokens", ge=1)] = 160
    temperature: Annotated[float, Meta(description="sampling temperature of responses", ge=0)] = 0.7
    concurrency: Annotated[int, Meta(description="requests in flight at the profile; 0: find its limit", ge=0)] = 64
    seed: Annotated[int, Meta(description="random seed; each row has its own from it")] = 0
    extra: Annotated[
        dict[str, Any], Meta(description="further fields of every request: top_p, chat_template_kwargs")
    ] = {}
    token_budget: Annotated[int, Meta(description="response tokens in all; 0: every prompt is answered", ge=0)] = 0
    reasoning: Annotated[
        Literal["auto", "yes", "no"],
        Meta(description="does the target think first? auto: its chat template says; missing thoughts stop the stage"),
    ] = "auto"
    max_unfinished: Annotated[
        float, Meta(description="share of responses that may end at max_tokens; more stop the stage", ge=0, le=1)
    ] = 1.0
    max_cost: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="dollars that the stage may cost; left out: no cap")
    ] = None
    endpoints: Annotated[list[EndpointTable], Meta(description="more servers of the same target")] = []


class TokenizeTable(Table, frozen=True, kw_only=True):
    max_len: Annotated[int, Meta(description="longest sample, tokens; longer ones are cut and counted", ge=2)] = 512


class MixTable(Table, frozen=True, kw_only=True):
    seed: Annotated[int, Meta(description="random seed of the shuffle")] = 0


class VocabTable(Table, frozen=True, kw_only=True):
    size: Annotated[int, Meta(description="draft vocabulary, tokens", ge=1)] = 8192


class HiddenTable(Table, frozen=True, kw_only=True):
    how: Annotated[
        Literal["torch", "transformers", "sglang"],
        Meta(
            description="torch: our own decoder; transformers: that library, for other architectures; sglang: the "
            "patched server of `profile` writes them"
        ),
    ] = "torch"
    profile: Annotated[str, Meta(description="sglang: the profile to ask, with RIGBOOK_HIDDEN_DIR in its vars")] = ""
    layers: Annotated[
        list[int], Meta(description="layers whose outputs the drafter sees, counted from 0; empty: 1, L//2-1, L-4")
    ] = []
    device: Annotated[str, Meta(description="where the target computes: cpu, cuda or auto")] = "cpu"
    batch_tokens: Annotated[int, Meta(description="tokens of one forward pass; 0: what suits the device", ge=0)] = 0
    dtype: Annotated[str, Meta(description="number format the target computes in (states are stored in bf16)")] = (
        "bfloat16"
    )


class TrainTable(Table, frozen=True, kw_only=True):
    ttt_steps: Annotated[int, Meta(description="training-time-test steps", ge=1)] = 3
    minutes: Annotated[float, Meta(description="time budget, minutes, where steps and epochs are 0", gt=0)] = 2.75
    steps: Annotated[int, Meta(description="optimiser steps, exactly; 0: by epochs or minutes", ge=0)] = 0
    epochs: Annotated[float, Meta(description="passes over the data; 0: by steps or minutes", ge=0)] = 0.0
    batch_tokens: Annotated[int, Meta(description="tokens a step, prompts included", ge=1)] = 512
    pieces: Annotated[
        int, Meta(description="pieces that a step is worked in, over all processes; 0: one for each process", ge=0)
    ] = 0
    processes: Annotated[int, Meta(description="processes that train together, one a GPU (torchrun)", ge=1)] = 1
    device: Annotated[str, Meta(description="where it trains: cpu, cuda or auto")] = "cpu"
    start: Annotated[
        str, Meta(description="ridge (a regression on the states), random, or the directory of a drafter to go on from")
    ] = "ridge"
    train_head: Annotated[bool, Meta(description="train the head too, which else stays the target's rows")] = False
    loss: Annotated[
        Literal["kl", "lk-lambda", "lk-alpha"], Meta(description="forward KL, or one of the LK losses (acceptance)")
    ] = "kl"
    lr: Annotated[float, Meta(description="peak learning rate", gt=0)] = 1e-3
    warmup: Annotated[int, Meta(description="steps until the learning rate is at its peak", ge=20)] = 20
    weight_decay: Annotated[float, Meta(description="AdamW's weight decay", ge=0)] = 0.0
    clip: Annotated[float, Meta(description="greatest norm of a step's gradient; 0: any", ge=0)] = 0.0
    held_rows: Annotated[
        int, Meta(description="rows set aside, to predict the accept length on while it trains", ge=0)
    ] = 0
    dtype: Annotated[str, Meta(description="number format of the matrix products")] = "bfloat16"
    seed: Annotated[int, Meta(description="random seed")] = 0


class PredictTable(Table, frozen=True, kw_only=True):
    steps: Annotated[int, Meta(description="draft steps to predict accept length for", ge=1)] = 3


class BenchTable(Table, frozen=True, kw_only=True):
    rounds: Annotated[int, Meta(description="server launches per arm, interleaved", ge=1)] = 3
    max_tokens: Annotated[int, Meta(description="output tokens a request", ge=1)] = 64
    prompts: Annotated[int, Meta(description="held-out prompts per kind", ge=1)] = 8
    steps: Annotated[int, Meta(description="draft steps of the n-gram lookup it is compared with", ge=1)] = 3


class Pipeline(Table, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="the host the stages run on")]
    env: Annotated[str, Meta(description="the env they run in")]
    workdir: Annotated[str, Meta(description="where their artifacts go, one directory a stage")]
    prompts: Annotated[PromptsTable, Meta(description="prompts to train and measure on")] = field(
        default_factory=PromptsTable
    )
    generate: Annotated[GenerateTable, Meta(description="the target's own responses")] = field(
        default_factory=GenerateTable
    )
    tokenize: Annotated[TokenizeTable, Meta(description="token ids and loss mask")] = field(
        default_factory=TokenizeTable
    )
    mix: Annotated[MixTable, Meta(description="shuffle; drop what overlaps with held-out prompts")] = field(
        default_factory=MixTable
    )
    vocab: Annotated[VocabTable, Meta(description="map between draft and target vocabulary")] = field(
        default_factory=VocabTable
    )
    hidden: Annotated[HiddenTable, Meta(description="hidden states of the target")] = field(default_factory=HiddenTable)
    train: Annotated[TrainTable, Meta(description="the drafter's training")] = field(default_factory=TrainTable)
    predict: Annotated[PredictTable, Meta(description="accept length predicted offline")] = field(
        default_factory=PredictTable
    )
    bench: Annotated[BenchTable, Meta(description="the benchmark at the end")] = field(default_factory=BenchTable)


class Rule(Table, frozen=True, kw_only=True):
    forbid: Annotated[str, Meta(description="what preflight refuses, e.g. args.kv-cache-dtype=fp8*")]
    because: Annotated[str, Meta(description="why, told with the refusal")]


class Action(Table, frozen=True, kw_only=True):
    host: Annotated[str, Meta(description="where it runs")]
    run: Annotated[list[str], Meta(description="the command, one argument an item; no shell", min_length=1)]
    timeout: Annotated[
        Annotated[float, Meta(gt=0)] | None, Meta(description="stop it after this many seconds, on the far side too")
    ] = None


class Secret(Table, frozen=True, kw_only=True):
    file: Annotated[str | None, Meta(description="file that holds it")] = None
    env: Annotated[str | None, Meta(description="environment variable that holds it")] = None
    host: Annotated[str, Meta(description="the host where it is; the secret itself never leaves it")]

    def __post_init__(self) -> None:
        if (self.file is None) == (self.env is None):
            raise ValueError("say either file or env")


class Project(Table, frozen=True, kw_only=True, dict=True):
    """The whole file. `.profiles` have `extends` resolved already."""

    project: Annotated[ProjectInfo, Meta(description="what this is about")]
    hosts: Annotated[dict[str, Host], Meta(description="the machines")] = {}
    envs: Annotated[dict[str, Env], Meta(description="Python environments on them")] = {}
    target: Annotated[Target | None, Meta(description="the model that the drafter drafts for")] = None
    profiles: Annotated[dict[str, Profile], Meta(description="named server configurations")] = {}
    pipeline: Annotated[Pipeline | None, Meta(description="prompts → drafter → benchmark")] = None
    rules: Annotated[list[Rule], Meta(description="instructions that a machine can enforce")] = []
    actions: Annotated[dict[str, Action], Meta(description="scripted remote actions of your own")] = {}
    secrets: Annotated[dict[str, Secret], Meta(description="where secrets are, never the secrets")] = {}

    @property
    def root(self) -> Path:
        """The directory that holds the file."""
        root: Path = self.__dict__.get("root_", Path("."))
        return root

    @property
    def outline(self) -> Outline:
        """The same file as the book sees it."""
        outline: Outline = self.__dict__.get("outline_", Outline())
        return outline

    def profile(self, name: str) -> Profile:
        """The profile with everything it extends merged in. Raises RigbookError `profile.unknown`."""
        return _named(self.profiles, name, "profile")

    def host(self, name: str) -> Host:
        """Raises RigbookError `host.unknown`."""
        return _named(self.hosts, name, "host")

    def env(self, name: str) -> Env:
        """Raises RigbookError `env.unknown`."""
        return _named(self.envs, name, "env")


def _named(table: dict[str, T], name: str, what: str) -> T:
    if name in table:
        return table[name]
    known = f"this project has: {', '.join(table)}" if table else f"this project has no {what}s"
    near = difflib.get_close_matches(name, table, 1)
    raise RigbookError(
        f"{what}.unknown",
        f"no {what} named {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
        hint=known,
        exit_code=USAGE,
    )
