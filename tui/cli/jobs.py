"""`rigbook jobs`: detached jobs on the rig. They go on without us; these commands look, wait and stop."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import typer

from state.errors import REFUSED, UNREACHABLE, USAGE, RigbookError
from tui.cli.common import confirm, ctx, emit, project, say, table, wait_for
from tui.cli.rig import chosen, rig_of

if TYPE_CHECKING:
    from remote.connect import Link, Rig
    from remote.jobs import JobStatus
    from state.project import Project

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
HOST = typer.Option("", "--host", help="The job's host; looked for everywhere when left out.")


@app.command("list")
def list_(
    names: list[str] = typer.Argument(None, metavar="[HOST]…", help="Which hosts; all when left out."),
    running: bool = typer.Option(False, "--running", help="Only those that run."),
) -> None:
    """Every job on the rig, oldest first. What a host says itself; one that cannot be asked is named.

    Example:  rigbook jobs list --running
    """
    loaded = project()
    found, failures = wait_for(_list(loaded, chosen(loaded, names)))
    rows = [{"host": host, **job.as_dict()} for host, job in found if not running or job.state == "running"]
    cells = [
        [job.id, host, job.name, job.describe(), _age(job), str(job.pid or "")]
        for host, job in found
        if not running or job.state == "running"
    ]
    emit(rows, table(cells, ["job", "host", "name", "state", "time", "pid"]) if cells else "no jobs")
    for host, why in failures.items():
        say(f"{host}: not asked: {why}")
    if failures:
        raise typer.Exit(UNREACHABLE)


async def _list(loaded: Project, names: list[str]) -> tuple[list[tuple[str, JobStatus]], dict[str, str]]:
    from remote.jobs import list_jobs

    failures: dict[str, str] = {}

    async def look(rig: Rig, name: str) -> list[tuple[str, JobStatus]]:
        try:
            return [(name, job) for job in await list_jobs(await rig.link(name))]
        except RigbookError as error:
            failures[name] = str(error)
            return []

    async with rig_of(loaded) as rig:
        found = [pair for part in await asyncio.gather(*(look(rig, name) for name in names)) for pair in part]
    return sorted(found, key=lambda pair: pair[1].started or 0), failures


def _age(job: JobStatus) -> str:
    if job.seconds is None and job.started is None:
        return ""
    # The host's own count where it has one: its clock and ours may be apart.
    seconds = job.seconds if job.seconds is not None else max(0.0, (job.ended or time.time()) - (job.started or 0))
    return (
        f"{seconds:.1f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


@app.command()
def start(
    host: str = typer.Argument(..., help="The host."),
    command: list[str] = typer.Argument(..., metavar="-- COMMAND…", help="What to run; give it behind --."),
    name: str = typer.Option("", "--name", help="What to call it; default: the program."),
    id: str = typer.Option("", "--id", help="Its id: starting the same id twice gives the same job."),
    cwd: str = typer.Option("", "--cwd", help="Working directory there; default: the job's own."),
    memory: float = typer.Option(0.0, "--memory", metavar="GIB", help="End it when it uses more memory."),
    tasks: int = typer.Option(0, "--tasks", metavar="N", help="End it when it has more threads."),
    log: float = typer.Option(0.0, "--log", metavar="GIB", help="Keep so much of its log, head and tail; default: 8."),
) -> None:
    """Start a detached job: it outlives the connection and us.

    Example:  rigbook jobs start llm --memory 64 -- python3 train.py --steps 1000
    """
    import secrets

    from remote.jobs import JobSpec, digest, submit

    name = name or command[0].rpartition("/")[2]
    safe = "".join(c if c.isalnum() or c in "._-" else "-" for c in name).strip("-.") or "job"
    spec = JobSpec(
        id=id or f"{safe}-{secrets.token_hex(4)}",
        name=name,
        argv=command,
        cwd=cwd or None,
        memory_max=int(memory * (1 << 30)) or None,
        tasks_max=tasks or None,
        log_quota=int(log * (1 << 30)) or None,
    )
    loaded = project()
    (where,) = chosen(loaded, [host])

    async def work() -> JobStatus:
        async with rig_of(loaded) as rig:
            return await submit(await rig.link(where), spec)

    job = wait_for(work())
    if job.digest and job.digest != digest(spec):
        raise RigbookError(
            "job.other-command",
            f"there is a job {job.id} already, and it runs something else ({job.describe()})",
            host=where,
            hint=f"What it is: rigbook jobs show {job.id}. For another job give another --id, or none.",
            exit_code=REFUSED,
        )
    emit({"host": where, **job.as_dict()}, job.id)
    say(f"{job.describe()}; its log: rigbook jobs logs -f {job.id}")


def _on(id: str, host: str, work: Callable[[Link, JobStatus], Coroutine[Any, Any, Any]]) -> Any:
    """Find the job by its id, on `host` or anywhere, and do something about it."""
    from remote.jobs import status

    loaded = project()
    names = chosen(loaded, [host] if host else None)

    async def find() -> Any:
        failures: dict[str, str] = {}

        async def look(rig: Rig, name: str) -> tuple[Link, JobStatus] | None:
            try:
                link = await rig.link(name)
            except RigbookError as error:
                failures[name] = str(error)
                return None
            job = await status(link, id)
            if job.state == "unknown":
                failures[name] = job.reason
            return (link, job) if job.dir and (job.state != "absent" or job.reason.startswith("submitted")) else None

        async with rig_of(loaded) as rig:
            found = [pair for pair in await asyncio.gather(*(look(rig, name) for name in names)) if pair]
            if len(found) == 1:
                return await work(*found[0])
        if found:
            where = ", ".join(link.name for link, _ in found)
            raise RigbookError("job.several", f"{id} is on {where}", hint="Say which: --host NAME", exit_code=USAGE)
        if failures:
            asked = "; ".join(f"{name}: {why}" for name, why in failures.items())
            raise RigbookError("job.unknown", f"{id} was not found, but {asked}", exit_code=UNREACHABLE)
        raise RigbookError("job.absent", f"there is no job {id} on {', '.join(names)}", hint="rigbook jobs list")

    return wait_for(find())


@app.command()
def show(id: str = typer.Argument(..., help="The job."), host: str = HOST) -> None:
    """What a job is and how it stands, with the end of its log.

    Example:  rigbook jobs show train-1a2b3c4d
    """

    async def work(link: Link, job: JobStatus) -> tuple[str, JobStatus, bytes]:
        from remote.jobs import follow

        log = bytearray()
        async for _, data in follow(link, id, offset=-4000, until_end=False):
            log += data
        return link.name, job, bytes(log)

    where, job, log = _on(id, host, work)
    from remote.jobs import shown

    lines = shown(log)[-15:]
    text = [f"{job.id} ({job.name}) on {where}: {job.describe()}", f"directory  {job.dir}", f"time       {_age(job)}"]
    watched = f"systemd ({job.unit})" if job.unit else f"its supervisor, {job.supervisor}"
    text += [f"pid        {job.pid}, watched by {watched}"] if job.pid else []
    text += [f"ended with it: {command}" for command in job.swept] + [
        f"would not end: {command}" for command in job.left
    ]
    emit({"host": where, **job.as_dict(), "log": "\n".join(lines)}, "\n".join([*text, "", *lines]))


@app.command()
def logs(
    id: str = typer.Argument(..., help="The job."),
    follow_: bool = typer.Option(False, "-f", "--follow", help="Go on until the job is over."),
    file: str = typer.Option("out.log", "--file", help="Another file of its directory, e.g. events.jsonl."),
    host: str = HOST,
) -> None:
    """A job's log, byte for byte; with -f as it grows, through lost connections; with --json one line each.

    Example:  rigbook jobs logs -f train-1a2b3c4d
    """

    async def work(link: Link, job: JobStatus) -> None:
        from remote.jobs import pieces

        rest = b""
        async for piece in pieces(link, id, file, until_end=follow_, lost=lambda error: say(f"waiting: {error}")):
            if piece.skipped:
                say(f"[{piece.skipped} bytes dropped by the log quota]")
            elif piece.reset:
                say(f"[{file} was {piece.reset} there: it begins again]")
                rest = b""
            elif ctx.json:
                *whole, rest = (rest + piece.data).split(b"\n")
                for each in whole:
                    emit({"line": each.decode("utf-8", "replace")})
            else:
                sys.stdout.buffer.write(piece.data)
                sys.stdout.buffer.flush()
        if rest:
            emit({"line": rest.decode("utf-8", "replace")})

    _on(id, host, work)


@app.command()
def wait(id: str = typer.Argument(..., help="The job."), host: str = HOST) -> None:
    """Wait until a job is over; exits with its code (128+n for signal n), 255 when nobody knows.

    Example:  rigbook jobs wait train-1a2b3c4d && rigbook run export
    """

    async def work(link: Link, job: JobStatus) -> JobStatus:
        from remote.jobs import wait

        return await wait(link, id)

    job = _on(id, host, work)
    emit(job.as_dict(), f"{job.id}: {job.describe()}")
    raise typer.Exit(_code(job))


def _code(job: JobStatus) -> int:
    from remote.result import signal_number

    if job.state != "finished":
        return 255
    return job.exit if job.exit is not None else 128 + signal_number(job.signal)


@app.command()
def stop(
    id: str = typer.Argument(..., help="The job."),
    grace: float = typer.Option(10.0, "--grace", help="Seconds from TERM to KILL."),
    host: str = HOST,
) -> None:
    """Stop a job and everything that it started: TERM, then KILL, then a look whether all is gone.

    Example:  rigbook jobs stop train-1a2b3c4d --grace 60
    """

    async def ask(link: Link, job: JobStatus) -> tuple[str, JobStatus]:
        return link.name, job

    where, job = _on(id, host, ask)
    if job.state == "running":
        confirm(f"Stop {job.id} ({job.name}) on {where}?")

        async def work(link: Link, job: JobStatus) -> JobStatus:
            from remote.jobs import stop

            return await stop(link, id, grace)

        job = _on(id, where, work)
    emit(job.as_dict(), f"{job.id}: {job.describe()}")
    if not job.over:
        raise typer.Exit(UNREACHABLE)
    if job.left:
        say("would not end: " + "; ".join(job.left))
        raise typer.Exit(5)
