"""Runs: a job on a host, mirrored while it works, written into the book exactly once when it ends.

The job outlives us. Everything that the controller knows can be found again: the job's state on the host, its
mirrored files under `.rigbook/runs/RUN/`, and the journal. So a controller that was killed anywhere starts again, finds
the run that it had begun, goes on following it, and records what it says as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from remote import jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec, JobStatus
from state import events
from state.errors import REFUSED, UNREACHABLE, RigbookError
from state.events import RunKind, RunStatus
from state.journal import Journal
from state.project import Project, find

STAGE_PACKAGES = (str(Path(__file__).parent),)  # stages travel as source


@dataclass(frozen=True)
class Update:
    """What a face may show while a run works: the job's own event lines, and our own words about it."""

    run: str
    name: str
    kind: str  # progress, metric, fact, warning, error, result, artifact (the job's); started, attached, done, … (ours)
    data: dict[str, Any] = field(default_factory=dict)


@dataclass
class Work:
    """A project at work: its machines, its journal, and somebody who is told what happens."""

    project: Project
    rig: Rig
    journal: Journal
    report: Callable[[Update], None] = lambda update: None


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `status` is one of done, failed, lost, stopped, skipped."""

    run: str
    status: RunStatus
    exit: int | None
    result: dict[str, Any]
    seconds: float
    error: str | None = None

    def check(self, what: str, host: str | None = None) -> Outcome:
        """Self where the run is done; otherwise raises RigbookError with the stage's own sentence."""
        if self.status in {"done", "skipped"}:
            return self
        refused = self.exit == REFUSED
        raise RigbookError(
            "run.refused" if refused else f"run.{self.status}",
            f"{what} {'was refused' if refused else 'ended as ' + self.status}: {self.error or 'it gave no reason'}",
            host=host,
            hint=f"its log: rigbook jobs logs {self.run}",
            exit_code=REFUSED if refused else 1,
        )


def run_folder(project: Project, run: str) -> Path:
    """Where a run's mirrored files lie, beside the project."""
    return project.root / ".rigbook" / "runs" / run


def job_key(value: Any) -> str:
    """A short digest of what a job is to do: the same work has the same job ids, whoever starts it."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


async def run_job(
    work: Work,
    host: str,
    *,
    name: str,
    what: RunKind,
    argv: list[str],
    files: dict[str, bytes],
    env: dict[str, str],
    settings: dict[str, Any],
    key: str,
) -> Outcome:
    """Run one job to its end and record it. Attaches to the job where an earlier controller started it.

    `key` names the work; a job of that key that is running is followed, one that ended well and was not recorded yet
    is recorded and counts.
    """
    link = await work.rig.link(host)
    run, status = await _next_attempt(work, link, f"{name}-{key}")
    started = events.RunStarted(run=run, what=what, name=name, host=host, job=run, key=key, settings=settings)
    work.journal.append_once(started, unless="run.started", run=run)
    if status is None or status.state == "absent":
        spec = JobSpec(id=run, name=name, argv=argv, files=files, env=env, packages=list(STAGE_PACKAGES), run=run)
        await jobs.submit(link, spec)
        work.report(Update(run, name, "started", {"host": host}))
    else:
        work.report(Update(run, name, "attached", {"host": host, "state": status.state}))
    await follow(work, link, run, name)
    return await settle(work, link, run, name)


async def _next_attempt(work: Work, link: Link, stem: str) -> tuple[str, JobStatus | None]:
    """The run to look at: the one that works or has ended well without a record, else the first free number."""
    known = {job.id: job for job in await jobs.list_jobs(link)}
    finished = finished_runs(work.journal)
    attempt = 1
    while True:
        run = f"{stem}-{attempt}"
        job = known.get(run)
        if job is None:
            return run, None
        if job.state == "running":
            return run, job
        if run not in finished:
            if job.state == "finished" and job.exit == 0:
                return run, job
            if (await settle(work, link, run, stem)).status == "done":
                return run, job
        attempt += 1


async def follow(work: Work, link: Link, run: str, name: str) -> None:
    """Mirror a job's log and events until it has ended, passing every event line on. Survives a lost connection."""
    folder = run_folder(work.project, run)
    folder.mkdir(parents=True, exist_ok=True)
    seen = 0
    waited = 1.0

    def tell() -> None:
        nonlocal seen, waited
        waited = 1.0
        for offset, event in event_lines(folder / "events.jsonl", seen):
            seen = offset
            work.report(Update(run, name, event["kind"], event))

    while True:
        try:
            link = await work.rig.link(link.name)  # made anew where it was lost
            if await jobs.mirror(link, run, folder, live=True, grew=tell):
                tell()
                return
        except RigbookError as error:
            if error.exit_code != UNREACHABLE:
                raise
            # The job goes on without us. We look again often: once the link is back, everything is to be here soon.
            work.report(Update(run, name, "unreachable", {"message": str(error), "retry_in": waited}))
            await asyncio.sleep(waited)
            waited = min(waited * 1.5, 3.0)


def event_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset after it, event) for each whole line from `offset` on. A line that is no event is passed over."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
        offset += len(line)
        with contextlib.suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict) and isinstance(event.get("kind"), str):
                yield offset, event


async def settle(work: Work, link: Link, run: str, name: str) -> Outcome:
    """Record how a run ended, with everything it said, in one transaction. Harmless when it is recorded already."""
    status = await jobs.status(link, run)
    if status.state in {"running", "unknown"}:
        raise RigbookError("run.not-ended", f"{run} is {status.state}", host=link.name, exit_code=UNREACHABLE)
    folder = run_folder(work.project, run)
    with contextlib.suppress(RigbookError):
        await jobs.mirror(link, run, folder)
    said = [event for _, event in event_lines(folder / "events.jsonl")]
    results: list[dict[str, Any]] = [e["result"] for e in said if e["kind"] == "result"]
    error = next((e["message"] for e in reversed(said) if e["kind"] == "error"), None)
    word = _status_word(status)
    if word == "lost" and results:
        # Killed with its supervisor, but after its last word, which a stage says when its manifest is on the disk.
        word, error = "done", None
    elif error is None:
        error = _last_words(folder / "out.log", status)
    outcome = Outcome(run, word, status.exit, results[-1] if results else {}, _seconds(status), error)
    if run not in finished_runs(work.journal):
        notes = [event for _, event in event_lines(folder / "mirror.jsonl")]
        ended_events = [*_facts([*said, *notes], run, link.name), _finished(outcome)]
        started = started_runs(work.journal).get(run)
        if started is not None and started.what == "server" and outcome.status != "stopped":
            # Nobody asked it to end: whoever reads the book must not go on thinking that it answers.
            state = events.ServerState(run=run, profile=started.name, state="vanished", detail=outcome.error)
            ended_events.append(state)
        work.journal.append_once(*ended_events, unless="run.finished", run=run)
    ended = {"result": outcome.result, "seconds": outcome.seconds, "error": outcome.error}
    work.report(Update(run, name, outcome.status, ended))
    return outcome


def _status_word(status: JobStatus) -> RunStatus:
    if status.state == "finished":
        if status.stopped or status.exit == 143:
            return "stopped"
        return "done" if status.exit == 0 else "failed"
    return "lost"


def _seconds(status: JobStatus) -> float:
    if status.seconds is not None:
        return status.seconds  # by a clock of the host's that nobody sets
    if status.started is None:
        return 0.0
    return max(0.0, (status.ended or time.time()) - status.started)


def _last_words(log: Path, status: JobStatus) -> str | None:
    """Why a job failed when it said nothing itself: the end of its log."""
    if status.state == "finished" and status.exit == 0:
        return None
    lines = []
    if log.exists():
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 65536))
            lines = jobs.shown(file.read().rstrip())
    how = status.describe()
    return f"{how}; last line: {lines[-1][:300]}" if lines else how


def _facts(said: list[dict[str, Any]], run: str, host: str) -> list[events.Event]:
    out: list[events.Event] = []
    for event in said:
        if event["kind"] == "fact":
            out.append(
                events.FactObserved(
                    key=event["key"],
                    value=event["value"],
                    unit=event.get("unit"),
                    confidence="measured",
                    owner="machine",
                    source=events.Source(host=host, run=run),
                    observed_at=datetime.fromtimestamp(event["t"], UTC),
                )
            )
        elif event["kind"] == "artifact":
            out.append(
                events.ArtifactMade(
                    run=run,
                    name=event["name"],
                    path=event["path"],
                    host=host,
                    sha256=event["sha256"],
                    bytes=event["bytes"],
                )
            )
        elif event["kind"] == "warning":
            out.append(events.Warned(where=run, check=event["check"], message=event["message"]))
        elif event["kind"] == "log_quota":
            out.append(events.Warned(where=run, check="job.log-quota", message=_dropped(event)))
        elif event["kind"] == "log_reset":
            said_so = f"{event['file']} was {event['why']} on {host}; what it held is kept as {event['kept']}"
            out.append(events.Warned(where=run, check="job.log-reset", message=said_so))
    return out


def _dropped(event: dict[str, Any]) -> str:
    if "problem" in event:
        return f"the log grew past its quota of {event['quota']} bytes, and nothing can be dropped: {event['problem']}"
    return f"bytes {event['from']} to {event['to']} of the log were dropped by its quota of {event['quota']} bytes"


def _finished(outcome: Outcome) -> events.RunFinished:
    result = outcome.result if outcome.error is None else {**outcome.result, "error": outcome.error}
    return events.RunFinished(
        run=outcome.run, status=outcome.status, exit=outcome.exit, result=result, seconds=outcome.seconds
    )


def started_runs(journal: Journal) -> dict[str, events.RunStarted]:
    return {r.event.run: r.event for r in journal.records() if isinstance(r.event, events.RunStarted)}


def finished_runs(journal: Journal) -> dict[str, events.RunFinished]:
    return {r.event.run: r.event for r in journal.records() if isinstance(r.event, events.RunFinished)}


async def settle_all(work: Work) -> list[Outcome]:
    """Bring the book up to date: record every run that ended while nobody was looking. Unreachable hosts are left."""
    finished = finished_runs(work.journal)
    outcomes = []
    for run, started in started_runs(work.journal).items():
        if run in finished or started.job is None or started.host not in work.project.hosts:
            continue
        with contextlib.suppress(RigbookError):
            link = await work.rig.link(started.host)
            status = await jobs.status(link, started.job)
            if status.state not in {"running", "unknown"}:
                outcomes.append(await settle(work, link, run, started.name))
    return outcomes


@contextlib.contextmanager
def alone(lock: Path, busy: RigbookError) -> Iterator[None]:
    """Hold a lock file while working; raise `busy` where another process holds it. A killed holder lets go."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise busy from None
        yield


@contextlib.asynccontextmanager
async def open_work(root: Path, report: Callable[[Update], None] = lambda update: None) -> AsyncIterator[Work]:
    """A Work for the project in `root`, closed at the end."""
    from state.project import journal_path, load

    project = load(find(root))
    journal = Journal.open(journal_path(project.root))
    try:
        async with Rig(project) as rig:
            yield Work(project, rig, journal, report)
    finally:
        journal.close()
