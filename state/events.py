"""What can happen, as a pydantic union on `kind`: the only things that the journal holds.

An event is written once and never rewritten. When a shape changes, its `v` goes up and `state.upcasters` gets a
pure function from the old body to the new one, which is applied while reading.

Importing this module is dear (pydantic); the read path (`state.journal`, `state.book`) works on plain bodies.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal, Union

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from state.benchmarks import BenchRecord
from state.upcasters import CURRENT, escape_bad_bytes, upcast

Confidence = Literal["measured", "derived", "claimed", "assumed"]
RunKind = Literal["stage", "server", "bench", "action", "demo"]
RunStatus = Literal["done", "failed", "lost", "stopped", "skipped"]
ServerPhase = Literal["starting", "loading", "ready", "stopped", "vanished"]


class _Shape(BaseModel):
    # Unknown fields are refused: a typo must not be lost in silence.
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, ser_json_inf_nan="constants")

    @model_validator(mode="before")
    @classmethod
    def _visible_bytes(cls, raw: Any) -> Any:
        return escape_bad_bytes(raw)


class Event(_Shape):
    """Base of all events."""

    kind: str
    v: int = 1


class Source(_Shape):
    """Where a value comes from. One without host, command and run is a claim."""

    host: str | None = None
    command: str | None = None  # what was run or read to learn it
    run: str | None = None
    note: str | None = None  # for claims: who says so, and where


# ── what machines observe ────────────────────────────────────────────────────────────────────────────────────────


class ProjectOpened(Event):
    kind: Literal["project.opened"] = "project.opened"
    name: str
    goal: str = ""
    instructions: list[str] = []


class FactObserved(Event):
    """A keyed value, looked at again. `value=None` says: looked for, and not known. It is never zero."""

    kind: Literal["fact.observed"] = "fact.observed"
    key: str = Field(min_length=1)
    value: Any = None
    unit: str | None = None
    confidence: Confidence = "measured"
    owner: Literal["machine", "person"] = "machine"
    source: Source = Source()
    observed_at: AwareDatetime | None = None  # None: when it was recorded


class FactsConfirmed(Event):
    """Facts that were looked at again and are what they were: one event instead of one per fact."""

    kind: Literal["facts.confirmed"] = "facts.confirmed"
    host: str | None = None
    facts: dict[str, str]  # key → id of the event whose value was seen again
    observed_at: AwareDatetime


class ProbeFailed(Event):
    """Looking failed. What was known stays known; it is shown as not looked at since."""

    kind: Literal["probe.failed"] = "probe.failed"
    host: str
    what: str  # "system", "gpus", … or a fact key prefix
    reason: str


class RunStarted(Event):
    kind: Literal["run.started"] = "run.started"
    run: str
    what: RunKind
    name: str
    host: str | None = None
    job: str | None = None
    key: str | None = None  # hash of the whole specification: equal key, equal work
    settings: dict[str, Any] = {}


class RunFinished(Event):
    kind: Literal["run.finished"] = "run.finished"
    run: str
    status: RunStatus
    exit: int | None = None  # None: not known, which is not success
    result: dict[str, Any] = {}
    seconds: float | None = None


class ArtifactMade(Event):
    kind: Literal["artifact.made"] = "artifact.made"
    run: str | None = None
    name: str
    path: str
    host: str | None = None
    sha256: str | None = None
    bytes: int | None = None


class BenchmarkRecorded(Event):
    kind: Literal["benchmark.recorded"] = "benchmark.recorded"
    run: str | None = None
    bench: BenchRecord


class ServerState(Event):
    kind: Literal["server.state"] = "server.state"
    run: str
    profile: str
    state: ServerPhase
    detail: str | list[str] | dict[str, Any] | None = None


class PlanMade(Event):
    kind: Literal["plan.made"] = "plan.made"
    plan: str
    action: str
    host: str | None = None
    items: list[Any] = []


class PlanApplied(Event):
    kind: Literal["plan.applied"] = "plan.applied"
    plan: str
    verified: bool
    outcome: dict[str, Any] = {}


class Warned(Event):
    kind: Literal["warned"] = "warned"
    where: str  # host, run or file
    check: str  # id that `rigbook explain` knows
    message: str


# ── what people say ──────────────────────────────────────────────────────────────────────────────────────────────


class NoteAdded(Event):
    kind: Literal["note.added"] = "note.added"
    text: str = Field(min_length=1)
    section: str | None = None  # id of a section of the book; None: a note at large


class DecisionMade(Event):
    kind: Literal["decision.made"] = "decision.made"
    title: str = Field(min_length=1)
    text: str = ""
    alternatives: list[str] = []
    because: str = ""
    supersedes: str | None = None  # event id of the decision that no longer holds


class DiscoveryMade(Event):
    kind: Literal["discovery.made"] = "discovery.made"
    title: str = Field(min_length=1)
    text: str = ""
    evidence: str | list[str] = ""  # a run, a file, a command: what it rests on
    status: Literal["holds", "refuted"] = "holds"
    guard: str | dict[str, Any] | None = None  # what preflight enforces because of it


class AssumptionMade(Event):
    kind: Literal["assumption.made"] = "assumption.made"
    text: str = Field(min_length=1)
    because: str = ""


class InstructionAdded(Event):
    kind: Literal["instruction.added"] = "instruction.added"
    text: str = Field(min_length=1)


class NextAdded(Event):
    kind: Literal["next.added"] = "next.added"
    title: str = Field(min_length=1)
    priority: int = Field(default=2, ge=1, le=5)  # 1 first
    depends_on: list[str] = []  # event ids of other next steps
    done_when: str = ""
    otherwise: str = ""  # what to do if it fails


class NextDone(Event):
    kind: Literal["next.done"] = "next.done"
    next: str  # event id of the next step
    text: str = ""


class ProseEdited(Event):
    kind: Literal["prose.edited"] = "prose.edited"
    section: str
    text: str


class Purged(Event):
    """The body of another event was taken out (a secret). The hash chain still covers what it was."""

    kind: Literal["purged"] = "purged"
    event: str  # id of the event
    reason: str


AnyEvent = Annotated[
    Union[  # noqa: UP007 (a tuple of this length reads better without bars)
        ProjectOpened,
        FactObserved,
        FactsConfirmed,
        ProbeFailed,
        RunStarted,
        RunFinished,
        ArtifactMade,
        BenchmarkRecorded,
        ServerState,
        PlanMade,
        PlanApplied,
        Warned,
        NoteAdded,
        DecisionMade,
        DiscoveryMade,
        AssumptionMade,
        InstructionAdded,
        NextAdded,
        NextDone,
        ProseEdited,
        Purged,
    ],
    Field(discriminator="kind"),
]


@cache
def _adapter() -> TypeAdapter[AnyEvent]:
    return TypeAdapter(AnyEvent)


def parse(kind: str, v: int, body: dict[str, Any]) -> Event:
    """The event of a stored body of any version. Raises pydantic.ValidationError, or KeyError for a kind or
    version that is newer than this program."""
    current, newest = upcast(kind, v, body)
    return _adapter().validate_python({**current, "kind": kind, "v": newest})


def body_of(event: Event) -> dict[str, Any]:
    """What is stored of an event besides its kind and version: JSON values only, but NaN and infinities stay."""
    return event.model_dump(mode="json", exclude={"kind", "v"})


assert all(CURRENT.get(model.model_fields["kind"].default) for model in Event.__subclasses__())
