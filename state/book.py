"""The book: what all events of a journal add up to, at any version. A pure function of events and project outline.

Cheap to import and to run: no pydantic, no templates. Equal sets of events give equal books, in whatever order they
arrived from whichever copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from state import facts as fact_rules
from state.benchmarks import BenchRecord
from state.benchmarks import from_dict as bench_from_dict
from state.errors import USAGE, RigbookError
from state.facts import Fact
from state.journal import Journal
from state.outline import Outline, journal_path, read_outline
from state.record import GENESIS, Record

if TYPE_CHECKING:
    from state.tables import Project


@dataclass(eq=False)
class Said:
    """What every entry has: its event, when and by whom. `id` names it in commands."""

    id: str
    seq: int
    at: str
    actor: str
    actor_kind: str


@dataclass(eq=False)
class Note(Said):
    """What somebody noted, at large or about a section."""

    text: str
    section: str | None = None


@dataclass(eq=False)
class Instruction(Said):
    """A standing rule for everyone."""

    text: str


@dataclass(eq=False)
class Assumption(Said):
    """What is taken for granted."""

    text: str
    because: str = ""


@dataclass(eq=False)
class Decision(Said):
    """What was decided, and instead of what."""

    title: str
    text: str = ""
    alternatives: list[str] = field(default_factory=list)
    because: str = ""
    supersedes: str | None = None
    superseded_by: str | None = None


@dataclass(eq=False)
class Discovery(Said):
    """What was found out; `refuted` ones are kept."""

    title: str
    text: str = ""
    evidence: str | list[str] = ""
    status: str = "holds"
    guard: str | dict[str, Any] | None = None


@dataclass(eq=False)
class NextStep(Said):
    """What is to be done, and whether it is."""

    title: str
    priority: int = 2
    depends_on: list[str] = field(default_factory=list)
    done_when: str = ""
    otherwise: str = ""
    done_at: str = ""
    done_text: str = ""
    done_by: str = ""


@dataclass(eq=False)
class Alert(Said):
    """What a check warned of."""

    where: str
    check: str
    message: str
    times: int = 1  # the same warning again is counted, not repeated


@dataclass(eq=False)
class Failure(Said):
    """A probe that failed."""

    host: str
    what: str
    reason: str


@dataclass(eq=False)
class Run:
    """One execution of anything. It runs until an event says how it ended."""

    run: str
    seq: int
    what: str = "stage"
    name: str = ""
    host: str | None = None
    job: str | None = None
    key: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    started: str = ""
    ended: str = ""
    status: str = "running"
    exit: int | None = None
    result: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None
    actor: str = ""


@dataclass(eq=False)
class Server:
    """A server in its latest known state."""

    run: str
    profile: str
    state: str
    at: str
    seq: int
    detail: str | list[str] | dict[str, Any] | None = None
    host: str | None = None
    history: list[tuple[str, str]] = field(default_factory=list)  # (at, state)


@dataclass(eq=False)
class Artifact:
    """A file that a run made."""

    name: str
    path: str
    at: str
    seq: int
    host: str | None = None
    sha256: str | None = None
    bytes: int | None = None
    run: str | None = None


@dataclass(eq=False)
class Benchmark:
    """A benchmark record and the event that brought it."""

    bench: BenchRecord
    id: str
    at: str
    seq: int
    run: str | None = None


@dataclass(eq=False)
class Plan:
    """A plan, and what came of it."""

    plan: str
    action: str
    at: str
    seq: int
    host: str | None = None
    items: list[Any] = field(default_factory=list)
    applied_at: str = ""
    verified: bool | None = None  # None: never applied
    outcome: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class Book:
    """A version of the project-state document."""

    seq: int
    head: str
    generated_at: str  # the moment as of which ages are told; by default that of the last event
    project: Outline
    goal: str = ""
    events: int = 0
    purged: int = 0
    unknown_events: int = 0  # written by a newer rigbook
    facts: dict[str, Fact] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    artifacts: list[Artifact] = field(default_factory=list)
    benchmarks: list[Benchmark] = field(default_factory=list)
    servers: dict[str, Server] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    discoveries: list[Discovery] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)
    next_steps: list[NextStep] = field(default_factory=list)
    warnings: list[Alert] = field(default_factory=list)
    failures: dict[str, Failure] = field(default_factory=dict)  # hosts that did not answer when last looked at
    failed_looks: dict[tuple[str, str], Failure] = field(default_factory=dict)  # (host, what): parts that could not be
    prose: dict[str, str] = field(default_factory=dict)  # section → what people wrote there

    def facts_under(self, prefix: str) -> list[Fact]:
        """Facts whose key begins with `prefix`, by key."""
        return [self.facts[key] for key in sorted(self.facts) if key.startswith(prefix)]

    def value(self, key: str, default: Any = None) -> Any:
        """The believed value of a fact, or `default` where there is no such fact."""
        return self.facts[key].value if key in self.facts else default

    def played(self, host: str | None) -> bool:
        """Whether a host is a stand-in that the demo plays."""
        return bool(host and self.project.hosts.get(host, {}).get("played"))

    @property
    def conflicts(self) -> list[Fact]:
        return [self.facts[key] for key in sorted(self.facts) if self.facts[key].state == "conflict"]


def project_book(
    records: Iterable[Record], project: Project | Outline, *, until: int | None = None, now: str | None = None
) -> Book:
    """The book after the event `until` (a seq; default: all of them), with ages as of `now` (RFC 3339)."""
    outline = project if isinstance(project, Outline) else project.outline
    kept = [record for record in records if until is None or record.seq <= until]
    seq = max((record.seq for record in kept), default=0)
    head = next((record.hash for record in reversed(kept) if record.seq == seq), GENESIS)
    # Copies exchange events in any order; what they add up to must not depend on it. Within one origin, times never
    # go backwards (the journal sees to that), so its own order is kept.
    kept.sort(key=lambda record: (record.ts, record.origin, record.counter))
    last = kept[-1].ts if kept else ""
    book = Book(seq=seq, head=head, generated_at=now or last, project=outline, goal=outline.goal, events=len(kept))
    for record in kept:
        if record.body is None:
            book.purged += 1
        elif not record.known:
            book.unknown_events += 1
        else:
            _FOLD[record.kind](book, record, record.current_body)
    for decision in book.decisions:
        for other in book.decisions:
            if decision.supersedes == other.id:
                other.superseded_by = decision.id
    for server in book.servers.values():
        server.host = book.runs[server.run].host if server.run in book.runs else None
    fact_rules.settle(book.facts, book.generated_at)
    return book


def open_book(root: Path, until: int | None = None, *, now: str | None = None) -> Book:
    """The book of the project at `root`; empty when nothing was recorded yet.

    Raises RigbookError `book.no-such-version` (exit code 2) and what `Journal.open` raises.
    """
    outline = read_outline(root)
    records = stored_records(root, until)
    newest = records[-1].seq if records else 0
    if until is not None and (until > newest or until < 0):
        raise RigbookError(
            "book.no-such-version",
            f"there is no version {until}; the book is at {newest}",
            hint="`rigbook book log` lists versions",
            exit_code=USAGE,
        )
    return project_book(records, outline, now=now)


def stored_records(root: Path, until: int | None = None) -> list[Record]:
    """The events of the project at `root`; none when nothing was recorded yet."""
    path = journal_path(root)
    if not path.exists():
        return []
    try:
        journal = Journal.open(path, read_only=True)
    except RigbookError as error:
        if error.id == "journal.absent":  # somebody else is making it at this moment
            return []
        raise
    with journal:
        return list(journal.records(until=until))


# ── one function per kind of event ───────────────────────────────────────────────────────────────────────────────


def _said(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "seq": record.seq,
        "at": record.ts,
        "actor": record.actor,
        "actor_kind": record.actor_kind,
    }


def _opened(book: Book, record: Record, body: dict[str, Any]) -> None:
    # The project file is the truth for both; the event tells what held when the file is gone.
    book.goal = book.project.goal or body["goal"]


def _fact(book: Book, record: Record, body: dict[str, Any]) -> None:
    seen = fact_rules.observation_of(body, record.id, record.seq, record.ts, record.actor)
    fact_rules.observe(book.facts, body["key"], seen)
    if seen.source.host and seen.owner == "machine":
        _answered(book, seen.source.host, [body["key"]])


def _confirmed(book: Book, record: Record, body: dict[str, Any]) -> None:
    for key, event in body["facts"].items():
        fact_rules.confirm(book.facts, key, event, body["observed_at"])
    if body["host"]:
        _answered(book, body["host"], list(body["facts"]))


def _answered(book: Book, host: str, keys: list[str]) -> None:
    """A host told of `keys`: what could not be looked at before could be now."""
    book.failures.pop(host, None)
    envs = [name for name, env in book.project.envs.items() if env.get("host") == host]
    for where, what in list(book.failed_looks):
        if where == host and any(fact_rules.concerns(key, host, what, envs) for key in keys):
            del book.failed_looks[where, what]


def _probe_failed(book: Book, record: Record, body: dict[str, Any]) -> None:
    envs = {name: str(env.get("host", "")) for name, env in book.project.envs.items()}
    fact_rules.look_failed(book.facts, body["host"], body["what"], body["reason"], record.ts, envs)
    failure = Failure(**_said(record), **body)
    if body["what"] in fact_rules.WHOLE_HOST:
        book.failures[body["host"]] = failure
    else:
        book.failed_looks[body["host"], body["what"]] = failure


def _run_started(book: Book, record: Record, body: dict[str, Any]) -> None:
    # The end of a run may have been recorded before its start arrived from another copy.
    run = book.runs.setdefault(body["run"], Run(run=body["run"], seq=record.seq))
    for name, value in body.items():
        setattr(run, name, value)
    run.seq, run.started, run.actor = record.seq, record.ts, record.actor


def _run_finished(book: Book, record: Record, body: dict[str, Any]) -> None:
    run = book.runs.setdefault(body["run"], Run(run=body["run"], seq=record.seq, name=body["run"]))
    run.status, run.exit, run.result = body["status"], body["exit"], body["result"]
    run.seconds, run.ended = body["seconds"], record.ts


def _artifact(book: Book, record: Record, body: dict[str, Any]) -> None:
    made = Artifact(at=record.ts, seq=record.seq, **body)
    # Made again at the same place: the file is the new one.
    book.artifacts = [old for old in book.artifacts if (old.host, old.path) != (made.host, made.path)] + [made]


def _benchmark(book: Book, record: Record, body: dict[str, Any]) -> None:
    bench = bench_from_dict(body["bench"])
    book.benchmarks.append(Benchmark(bench=bench, id=record.id, at=record.ts, seq=record.seq, run=body["run"]))


def _server(book: Book, record: Record, body: dict[str, Any]) -> None:
    server = book.servers.get(body["run"])
    history = [*(server.history if server else ()), (record.ts, body["state"])]
    book.servers[body["run"]] = Server(at=record.ts, seq=record.seq, history=history, **body)


def _plan_made(book: Book, record: Record, body: dict[str, Any]) -> None:
    book.plans[body["plan"]] = Plan(at=record.ts, seq=record.seq, **body)


def _plan_applied(book: Book, record: Record, body: dict[str, Any]) -> None:
    unknown = Plan(plan=body["plan"], action="", at=record.ts, seq=record.seq)
    plan = book.plans.setdefault(body["plan"], unknown)
    plan.applied_at, plan.verified, plan.outcome = record.ts, body["verified"], body["outcome"]


def _warned(book: Book, record: Record, body: dict[str, Any]) -> None:
    for old in book.warnings:
        if (old.where, old.check, old.message) == (body["where"], body["check"], body["message"]):
            old.times, old.at, old.seq = old.times + 1, record.ts, record.seq
            return
    book.warnings.append(Alert(**_said(record), **body))


def _next_done(book: Book, record: Record, body: dict[str, Any]) -> None:
    for step in book.next_steps:
        if step.id == body["next"]:
            step.done_at, step.done_text, step.done_by = record.ts, body["text"], record.actor


def _prose(book: Book, record: Record, body: dict[str, Any]) -> None:
    book.prose[body["section"]] = body["text"]


_FOLD: dict[str, Callable[[Book, Record, dict[str, Any]], object]] = {
    "project.opened": _opened,
    "fact.observed": _fact,
    "facts.confirmed": _confirmed,
    "probe.failed": _probe_failed,
    "run.started": _run_started,
    "run.finished": _run_finished,
    "artifact.made": _artifact,
    "benchmark.recorded": _benchmark,
    "server.state": _server,
    "plan.made": _plan_made,
    "plan.applied": _plan_applied,
    "warned": _warned,
    "note.added": lambda book, record, body: book.notes.append(Note(**_said(record), **body)),
    "decision.made": lambda book, record, body: book.decisions.append(Decision(**_said(record), **body)),
    "discovery.made": lambda book, record, body: book.discoveries.append(Discovery(**_said(record), **body)),
    "assumption.made": lambda book, record, body: book.assumptions.append(Assumption(**_said(record), **body)),
    "instruction.added": lambda book, record, body: book.instructions.append(Instruction(**_said(record), **body)),
    "next.added": lambda book, record, body: book.next_steps.append(NextStep(**_said(record), **body)),
    "next.done": _next_done,
    "prose.edited": _prose,
    "purged": lambda book, record, body: None,
}
