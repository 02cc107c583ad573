"""What the app knows at one moment, as immutable values. Only the collector makes them; screens only read them.

None means unknown, never zero. A time is seconds since the epoch; an age is `Snapshot.at` minus a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class JobView:
    """A job as its host tells it."""

    host: str
    id: str
    name: str
    state: str  # running, finished, vanished, lost_reboot, unknown, absent
    exit: int | None = None
    pid: int | None = None
    started: float | None = None
    ended: float | None = None
    run: str = ""


@dataclass(frozen=True)
class GpusView:
    """A host's GPUs as last told: in a few words, and line by line."""

    at: float | None = None  # by the host's clock
    words: str = ""
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostView:
    """A declared host: what the file says, the state of its link, and what it last told, with the time of telling."""

    name: str
    kind: str
    route: str
    on: str | None = None
    played: bool = False
    link: str = "unknown"  # unknown, connecting, up, down
    reason: str = ""  # why it is down
    answered: float | None = None  # last answer
    retry_at: float | None = None
    round_trip: float | None = None  # seconds
    figures: Mapping[str, Any] = field(
        default_factory=lambda: NOTHING
    )  # load1, mem_used, mem_total, …: whatever it last told
    jobs: tuple[JobView, ...] = ()
    jobs_at: float | None = None
    gpus: GpusView = field(default_factory=GpusView)


@dataclass(frozen=True)
class Progress:
    """What a run's own event lines say so far."""

    done: float | None = None
    total: float | None = None
    unit: str = ""
    rate: float | None = None  # units/s
    eta: float | None = None  # seconds
    at: float | None = None  # when it was said
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: NOTHING)
    warnings: tuple[str, ...] = ()
    error: str = ""
    result: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    lines: int = 0


@dataclass(frozen=True)
class RunView:
    """One run of anything, from the journal, with its live progress where its files are mirrored here."""

    run: str
    what: str  # stage, server, bench, action, demo
    name: str
    host: str | None
    job: str | None
    status: str  # running, done, failed, lost, stopped, skipped
    started: float | None
    seconds: float | None = None
    exit: int | None = None
    result: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class StageView:
    """A stage of the pipeline in the order of work, with the run that speaks for it."""

    name: str
    help: str
    state: str  # not started, running, done, failed, lost, stopped, unknown
    run: RunView | None = None
    in_recipe: bool = True  # False: a step beside the recipe; `rigbook run` does not know it


@dataclass(frozen=True)
class ServerView:
    """A profile and the server that runs by it, if any."""

    profile: str
    engine: str
    host: str | None
    port: int | None
    speculative: str = ""
    state: str = "not started"  # starting, loading, ready, stopped, vanished, not started
    detail: str = ""
    run: str | None = None
    since: float | None = None
    figures: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    figures_at: float | None = None
    figures_problem: str = ""
    args: tuple[tuple[str, str], ...] = ()
    bench: str = ""  # the last benchmark that this profile took part in, in one line


@dataclass(frozen=True)
class WarningView:
    where: str
    check: str
    message: str
    at: float | None = None


@dataclass(frozen=True)
class NextView:
    id: str
    title: str
    priority: int = 2
    done_when: str = ""


@dataclass(frozen=True)
class FactView:
    key: str
    value: str
    unit: str | None
    source: str
    at: float | None = None
    state: str = "fresh"


@dataclass(frozen=True)
class LogSource:
    """A file on this machine that can be followed: a run's mirrored output, or what an action said."""

    key: str
    title: str
    path: str
    state: str
    at: float | None


@dataclass(frozen=True)
class VersionView:
    """One event of the journal, as a version of the book that one can go back to."""

    seq: int
    at: float | None
    actor: str
    kind: str
    what: str


@dataclass(frozen=True)
class Snapshot:
    """Everything at one moment."""

    at: float = 0.0
    project: str = ""
    goal: str = ""
    seq: int | None = None  # version of the book; None: not read yet
    hosts: tuple[HostView, ...] = ()
    stages: tuple[StageView, ...] = ()
    servers: tuple[ServerView, ...] = ()
    runs: tuple[RunView, ...] = ()  # newest first
    benches: tuple[Any, ...] = ()  # bodies of benchmark records, newest first
    warnings: tuple[WarningView, ...] = ()
    next_steps: tuple[NextView, ...] = ()
    facts: Mapping[str, FactView] = field(default_factory=lambda: NOTHING)
    versions: tuple[VersionView, ...] = ()  # newest first
    plans: tuple[Any, ...] = ()  # clean-up and other plans of the book, newest first
    logs: tuple[LogSource, ...] = ()  # newest first
    problems: tuple[str, ...] = ()  # of the project file or of the journal
    loaded: bool = False  # whether the journal has been looked at

    def run(self, run: str | None) -> RunView | None:
        return next((r for r in self.runs if r.run == run), None)

    def host(self, name: str | None) -> HostView | None:
        return next((h for h in self.hosts if h.name == name), None)

    @property
    def bare_jobs(self) -> tuple[JobView, ...]:
        """Running jobs that the book knows no run of: started by hand, or from another copy of the project."""
        known = {run.job for run in self.runs}
        return tuple(j for host in self.hosts for j in host.jobs if j.state == "running" and j.id not in known)

    @property
    def running(self) -> tuple[RunView, ...]:
        return tuple(r for r in self.runs if r.status == "running")
