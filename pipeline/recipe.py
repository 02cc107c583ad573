"""The stage graph as a table: what each stage reads, what it is told, and which server it needs.

Pure: it turns a project into specs. `pipeline.runs` runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec import to_builtins
from msgspec.structs import asdict

from state.errors import USAGE, RigbookError
from state.project import Pipeline, Project
from state.tables import EndpointTable

SELF_WRITTEN_AT_ONCE = 64  # prompts are short, and their number at once is not searched for


@dataclass(frozen=True)
class StageDef:
    """One stage of the pipeline. Inputs name (folder, file) below the workdir; the target model is outside of it."""

    name: str  # also its folder below the workdir
    module: str  # pipeline.stages.MODULE
    help: str
    inputs: dict[str, tuple[str, str]] = field(default_factory=dict)
    model: bool = False  # reads the target model, as input "model"
    settings: Callable[[Project], dict[str, Any]] = lambda project: {}
    server: Callable[[Pipeline], str | None] | None = None  # the profile that must answer while it runs
    transient: tuple[str, ...] = ()  # settings that say where or how fast: changing them keeps what is done


def _base_url(project: Project) -> str:
    """Where the project's own server answers; "" where it has none of its own."""
    profile = pipeline_of(project).generate.profile
    return f"http://127.0.0.1:{project.profile(profile).port}" if profile else ""


def _prompts(project: Project) -> dict[str, Any]:
    p = pipeline_of(project)
    if p.prompts.self_written and not p.generate.profile:
        raise RigbookError(
            "pipeline.no-profile",
            "prompts that the target writes itself need a server of our own, and pipeline.generate.profile is empty",
            hint="name a profile, or set pipeline.prompts.self_written = 0",
            exit_code=USAGE,
        )
    return {
        **to_builtins(p.prompts),
        "base_url": _base_url(project),
        "concurrency": p.generate.concurrency or SELF_WRITTEN_AT_ONCE,
    }


def _generate(project: Project) -> dict[str, Any]:
    table = pipeline_of(project).generate
    endpoints = [_endpoint(project, endpoint) for endpoint in table.endpoints]
    return {**asdict(table), "base_url": _base_url(project), "endpoints": endpoints}


def _endpoint(project: Project, endpoint: EndpointTable) -> dict[str, Any]:
    """Where the stage finds the key, in place of the secret's name. Raises RigbookError `pipeline.key-elsewhere`."""
    told = asdict(endpoint)
    if endpoint.key is not None:
        secret, host = project.secrets[endpoint.key], pipeline_of(project).host
        if secret.host != host:
            raise RigbookError(
                "pipeline.key-elsewhere",
                f"the key of endpoint {endpoint.name!r} is on {secret.host}, and the stage runs on {host}",
                hint=f"secrets never travel: put it on {host} and say so under [secrets]",
                exit_code=USAGE,
            )
        told["key"] = {"file": secret.file} if secret.file is not None else {"env": secret.env}
    return told


def _held(project: Project) -> dict[str, Any]:
    p = pipeline_of(project)
    # A measure: every prompt of it, however the answers end.
    return {
        **_generate(project),
        "temperature": 0.0,
        "max_tokens": p.bench.max_tokens,
        "token_budget": 0,
        "max_unfinished": 1.0,
    }


def _tokenize(project: Project) -> dict[str, Any]:
    declared = project.target.special_tokens if project.target is not None else {}
    told = {"special_tokens": declared} if declared else {}
    return {**asdict(pipeline_of(project).tokenize), **told, **_speech(project)}


def _predict(project: Project) -> dict[str, Any]:
    return {**asdict(pipeline_of(project).predict), **_speech(project)}


def _speech(project: Project) -> dict[str, Any]:
    """What was asked of the server that shapes prompts and answers: to rebuild them, it has to be known again."""
    table = pipeline_of(project).generate
    template = table.extra.get("chat_template_kwargs")
    reasoning = {"reasoning": table.reasoning} if table.reasoning != "auto" else {}
    return {**reasoning, **({"template": template} if template else {})}


def _only(name: str) -> Callable[[Project], dict[str, Any]]:
    def settings(project: Project) -> dict[str, Any]:
        table: dict[str, Any] = asdict(getattr(pipeline_of(project), name))
        return table

    return settings


def _hidden(project: Project) -> dict[str, Any]:
    """With where the server is and writes, if one is asked. Raises RigbookError `pipeline.no-hidden-dir`."""
    table = pipeline_of(project).hidden
    if table.how != "sglang":
        return asdict(table)
    profile = project.profile(table.profile)
    told = {**project.env(profile.env).vars, **profile.vars}
    missing = [name for name in ("RIGBOOK_HIDDEN_DIR", "RIGBOOK_HIDDEN_LAYERS") if not told.get(name)]
    if missing:
        raise RigbookError(
            "pipeline.no-hidden-dir",
            f"profile {table.profile!r} is to write hidden states, and its vars have no {' and no '.join(missing)}",
            hint="name a folder on the server's host, and the layers as in pipeline.hidden.layers, with commas",
            exit_code=USAGE,
        )
    return {**asdict(table), "base_url": f"http://127.0.0.1:{profile.port}", "folder": told["RIGBOOK_HIDDEN_DIR"]}


def _answers(pipeline: Pipeline) -> str | None:
    return pipeline.generate.profile or None


# What the model is decides what a row is; which server answered, how fast and for how much, does not.
WHERE = ("base_url", "concurrency")
ANSWERED = (*WHERE, "profile", "endpoints", "max_cost", "max_unfinished")

STAGES: tuple[StageDef, ...] = (
    StageDef(
        "prompts",
        "prompts",
        "prompts to train and measure on",
        model=True,
        settings=_prompts,
        server=_answers,
        transient=WHERE,
    ),
    StageDef(
        "generate",
        "generate",
        "the target's own responses",
        {"prompts": ("prompts", "train.jsonl"), "budgets": ("prompts", "budgets.json")},
        model=True,
        settings=_generate,
        server=_answers,
        transient=ANSWERED,
    ),
    StageDef(
        "held_self",
        "generate",
        "greedy responses to held-out prompts that the model wrote",
        {"prompts": ("prompts", "held_self.jsonl")},
        model=True,
        settings=_held,
        server=_answers,
        transient=ANSWERED,
    ),
    StageDef(
        "held_people",
        "generate",
        "greedy responses to held-out prompts that people wrote",
        {"prompts": ("prompts", "held_people.jsonl")},
        model=True,
        settings=_held,
        server=_answers,
        transient=ANSWERED,
    ),
    StageDef(
        "tokenize",
        "tokenize",
        "token ids and loss mask",
        {
            "rows": ("generate", "rows.jsonl"),
            "ready": ("prompts", "ready.jsonl"),
            "tokenized": ("prompts", "tokenized.jsonl"),
        },
        model=True,
        settings=_tokenize,
    ),
    StageDef(
        "mix",
        "mix",
        "shuffle; drop what overlaps with the held-out prompts",
        {
            "rows": ("tokenize", "rows.jsonl"),
            "held_self": ("held_self", "rows.jsonl"),
            "held_people": ("held_people", "rows.jsonl"),
        },
        model=True,
        settings=_only("mix"),
    ),
    StageDef(
        "vocab",
        "vocab",
        "map between draft and target vocabulary",
        {"rows": ("mix", "rows.jsonl")},
        model=True,
        settings=_only("vocab"),
    ),
    StageDef(
        "hidden",
        "hidden",
        "hidden states of the target",
        {"rows": ("mix", "rows.jsonl")},
        model=True,
        settings=_hidden,
        server=lambda pipeline: pipeline.hidden.profile if pipeline.hidden.how == "sglang" else None,
        transient=("base_url", "folder", "profile", "batch_tokens"),
    ),
    StageDef(
        "train",
        "train",
        "the drafter's training",
        {"hidden": ("hidden", ""), "vocab": ("vocab", "vocab.safetensors")},
        model=True,
        settings=_only("train"),
        transient=("processes",),
    ),
    StageDef(
        "export",
        "export",
        "the drafter in SGLang's layout",
        {"checkpoint": ("train", "")},
        model=True,
    ),
    StageDef(
        "audit",
        "audit",
        "every tensor of the drafter against what the server expects",
        {"drafter": ("export", "drafter"), "checkpoint": ("train", "")},
        model=True,
    ),
    StageDef(
        "predict",
        "predict",
        "accept length predicted offline on held-out responses",
        {
            "drafter": ("export", "drafter"),
            "held_self": ("held_self", "rows.jsonl"),
            "held_people": ("held_people", "rows.jsonl"),
        },
        model=True,
        settings=_predict,
    ),
)
BY_NAME = {stage.name: stage for stage in STAGES}


def pipeline_of(project: Project) -> Pipeline:
    """The [pipeline] table. Raises RigbookError `pipeline.none` where the project has none."""
    if project.pipeline is None:
        raise RigbookError("pipeline.none", "rigbook.toml has no [pipeline] table", exit_code=USAGE)
    if project.target is None:
        raise RigbookError("pipeline.no-target", "rigbook.toml has no [target] table", exit_code=USAGE)
    return project.pipeline


def folder(project: Project, stage: str) -> str:
    """The stage's artifact folder on the pipeline's host."""
    return f"{pipeline_of(project).workdir.rstrip('/')}/{stage}"


def spec(project: Project, stage: StageDef) -> dict[str, Any]:
    """The spec.json of a stage, without `events` (the job's own folder, known when it is submitted)."""
    inputs = {
        name: f"{folder(project, source)}/{file}" if file else folder(project, source)
        for name, (source, file) in stage.inputs.items()
    }
    if stage.model:
        assert project.target is not None
        inputs["model"] = project.target.path
    return {
        "stage": stage.name,
        "out": folder(project, stage.name),
        "inputs": inputs,
        "settings": stage.settings(project),
        "transient": list(stage.transient),
    }


def select(names: list[str], from_: str | None = None, until: str | None = None) -> list[StageDef]:
    """The stages asked for, in the graph's order. `all` and no name both mean every one."""
    for name in [*names, *(n for n in (from_, until) if n)]:
        if name != "all" and name not in BY_NAME:
            from difflib import get_close_matches

            near = get_close_matches(name, BY_NAME, 1)
            raise RigbookError(
                "stage.unknown",
                f"no stage named {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                hint="stages: " + ", ".join(BY_NAME),
                exit_code=USAGE,
            )
    order = [stage.name for stage in STAGES]
    chosen = set(order) if not names or "all" in names else set(names)
    if from_:
        chosen &= set(order[order.index(from_) :])
    if until:
        chosen &= set(order[: order.index(until) + 1])
    return [stage for stage in STAGES if stage.name in chosen]
