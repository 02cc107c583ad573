"""The tables of `rigbook.toml` as strict pydantic models. `state.project` reads files into them."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from state.errors import USAGE, RigbookError
from state.outline import Outline

T = TypeVar("T")
Value = str | int | float | bool
Route = Literal["ssh", "pct", "agent"]
HostKind = Literal["proxmox", "lxc", "vm", "linux", "local"]
EngineName = Literal["sglang", "vllm", "reference"]


class Table(BaseModel):
    """A table of the file. `max-tokens` and `max_tokens` are the same key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)

    @model_validator(mode="before")
    @classmethod
    def _underscores(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        known = cls.model_fields
        return {
            (name.replace("-", "_") if isinstance(name, str) and name.replace("-", "_") in known else name): value
            for name, value in raw.items()
        }


class ProjectInfo(Table):
    name: str = Field(min_length=1, description="what the project is called, everywhere")
    goal: str = Field(default="", description="one or two sentences: what is wanted; the first section of the book")
    instructions: list[str] = Field(default=[], description="standing rules for everyone, people and agents")
    ssh_config: str | None = Field(
        default=None,
        description="an OpenSSH client configuration for every host, relative to this file; default: your own",
    )


class Host(Table):
    kind: HostKind = Field(description="what sort of machine this is")
    on: str | None = Field(default=None, description="the host that this guest runs on")
    vmid: int | None = Field(default=None, ge=1, description="its number on the Proxmox host")
    ssh: str | None = Field(
        default=None,
        description="anything ssh understands: an alias or user@host[:port]; a guest can do without, by on and vmid",
    )
    route: Route | None = Field(
        default=None,
        description="how it is reached; default: ssh where that is set, else pct (lxc) or the guest agent (vm)",
    )
    state_dir: str = Field(default="~/.local/state/rigbook", description="where jobs live on that host; never /tmp")
    played: bool = Field(default=False, description="a stand-in that the demo plays; shown as such everywhere")

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


class Env(Table):
    host: str = Field(description="the host it lies on")
    python: str = Field(description="absolute path of its python")
    vars: dict[str, str] = Field(default={}, description="environment variables for everything that runs in it")


class Target(Table):
    path: str = Field(description="directory of the target model, on the pipeline's host")
    name: str | None = Field(
        default=None, description="how servers and the book call it; default: the directory's name"
    )
    package: str | None = Field(
        default=None, description="a Python package that carries the model; left out: the directory must be there"
    )
    special_tokens: dict[str, int] = Field(default={}, description="tokens whose ids must hold; preflight checks them")


class Speculative(Table):
    algorithm: str = Field(description="as the engine spells it, e.g. EAGLE3 (not EAGLE: another code path)")
    steps: int = Field(ge=1, description="draft steps per verify step")
    topk: int = Field(default=1, ge=1, description="branches kept per draft step; 1 is a chain")
    draft_tokens: int = Field(ge=1, description="tokens the target verifies at once; a chain has steps + 1")


class Profile(Table):
    extends: str | None = Field(default=None, description="a profile to start from; its tables are merged key by key")
    env: str = Field(description="the env the server runs in")
    engine: EngineName = Field(description="which server")
    port: int = Field(ge=1, le=65535, description="TCP port on the env's host")
    args: dict[str, Value] = Field(default={}, description="server arguments, as the engine spells them, without --")
    vars: dict[str, str] = Field(default={}, description="environment variables of the server")
    draft: str | None = Field(default=None, description="directory of the draft model")
    speculative: Speculative | None = Field(default=None, description="speculative decoding; left out: none")


class PromptsTable(Table):
    seeds: bool = Field(default=True, description="use the prompts that ship with rigbook")
    self_written: int = Field(default=400, ge=0, description="prompts that the target writes itself")
    held_self: int = Field(default=24, ge=1, description="of those, held out for measuring")
    held_people: int = Field(default=24, ge=1, description="prompts written by people, held out for measuring")
    temperature: float = Field(default=1.0, ge=0, description="sampling temperature while it writes prompts")
    max_tokens: int = Field(default=64, ge=1, description="longest prompt it may write, tokens")
    seed: int = Field(default=0, description="random seed")


class GenerateTable(Table):
    profile: str = Field(default="baseline", description="the server profile that answers")
    max_tokens: int = Field(default=160, ge=1, description="longest response, tokens")
    temperature: float = Field(default=0.7, ge=0, description="sampling temperature of responses")
    concurrency: int = Field(default=64, ge=1, description="requests in flight")


class TokenizeTable(Table):
    max_len: int = Field(default=512, ge=2, description="longest sample, tokens; longer ones are cut and counted")


class MixTable(Table):
    seed: int = Field(default=0, description="random seed of the shuffle")


class VocabTable(Table):
    size: int = Field(default=8192, ge=1, description="draft vocabulary, tokens")


class HiddenTable(Table):
    layers: list[int] = Field(default=[], description="layers whose inputs the drafter sees; empty: 2, L//2, L-3")
    dtype: str = Field(
        default="bfloat16", description="number format the target computes in (states are stored in bf16)"
    )


class TrainTable(Table):
    ttt_steps: int = Field(default=3, ge=1, description="training-time-test steps")
    minutes: float = Field(default=2.75, gt=0, description="time budget, minutes")
    batch_tokens: int = Field(default=512, ge=1, description="tokens a step, prompts included")
    lr: float = Field(default=1e-3, gt=0, description="peak learning rate")
    dtype: str = Field(default="bfloat16", description="number format of the matrix products")
    seed: int = Field(default=0, description="random seed")


class PredictTable(Table):
    steps: int = Field(default=3, ge=1, description="draft steps to predict accept length for")


class BenchTable(Table):
    rounds: int = Field(default=3, ge=1, description="server launches per arm, interleaved")
    max_tokens: int = Field(default=64, ge=1, description="output tokens a request")
    prompts: int = Field(default=8, ge=1, description="held-out prompts per kind")
    steps: int = Field(default=3, ge=1, description="draft steps of the n-gram lookup it is compared with")


class Pipeline(Table):
    host: str = Field(description="the host the stages run on")
    env: str = Field(description="the env they run in")
    workdir: str = Field(description="where their artifacts go, one directory a stage")
    prompts: PromptsTable = Field(default_factory=PromptsTable, description="prompts to train and measure on")
    generate: GenerateTable = Field(default_factory=GenerateTable, description="the target's own responses")
    tokenize: TokenizeTable = Field(default_factory=TokenizeTable, description="token ids and loss mask")
    mix: MixTable = Field(default_factory=MixTable, description="shuffle; drop what overlaps with held-out prompts")
    vocab: VocabTable = Field(default_factory=VocabTable, description="map between draft and target vocabulary")
    hidden: HiddenTable = Field(default_factory=HiddenTable, description="hidden states of the target")
    train: TrainTable = Field(default_factory=TrainTable, description="the drafter's training")
    predict: PredictTable = Field(default_factory=PredictTable, description="accept length predicted offline")
    bench: BenchTable = Field(default_factory=BenchTable, description="the benchmark at the end")


class Rule(Table):
    forbid: str = Field(description="what preflight refuses, e.g. args.kv-cache-dtype=fp8*")
    because: str = Field(description="why, told with the refusal")


class Action(Table):
    host: str = Field(description="where it runs")
    run: list[str] = Field(min_length=1, description="the command, one argument an item; no shell")


class Secret(Table):
    file: str | None = Field(default=None, description="file that holds it")
    env: str | None = Field(default=None, description="environment variable that holds it")
    host: str = Field(description="the host where it is; the secret itself never leaves it")

    @model_validator(mode="after")
    def _one_place(self) -> Secret:
        if (self.file is None) == (self.env is None):
            raise ValueError("say either file or env")
        return self


class Project(Table):
    """The whole file. `.profiles` have `extends` resolved already."""

    project: ProjectInfo = Field(description="what this is about")
    hosts: dict[str, Host] = Field(default={}, description="the machines")
    envs: dict[str, Env] = Field(default={}, description="Python environments on them")
    target: Target | None = Field(default=None, description="the model that the drafter drafts for")
    profiles: dict[str, Profile] = Field(default={}, description="named server configurations")
    pipeline: Pipeline | None = Field(default=None, description="prompts → drafter → benchmark")
    rules: list[Rule] = Field(default=[], description="instructions that a machine can enforce")
    actions: dict[str, Action] = Field(default={}, description="scripted remote actions of your own")
    secrets: dict[str, Secret] = Field(default={}, description="where secrets are, never the secrets")

    _root: Path = PrivateAttr(default=Path("."))
    _outline: Outline = PrivateAttr(default=Outline())

    @property
    def root(self) -> Path:
        """The directory that holds the file."""
        return self._root

    @property
    def outline(self) -> Outline:
        """The same file as the book sees it."""
        return self._outline

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
