"""`rigbook probe | exec | shell | put | get | do`: the machines, one command at a time."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from state.errors import UNREACHABLE, USAGE, RigbookError
from tui.cli.common import confirm, ctx, emit, journal, project, say, table, wait_for

if TYPE_CHECKING:
    from remote.connect import Link, Rig
    from remote.result import Result
    from state.project import Project

UNKNOWN = 255  # what ssh exits with when it cannot know how the command ended


@asynccontextmanager
async def rig_of(loaded: Project) -> AsyncIterator[Rig]:
    from remote.connect import Rig

    async with Rig(loaded) as rig:
        yield rig


def chosen(loaded: Project, hosts: list[str] | None) -> list[str]:
    """The hosts that were named, or all. A name that is not declared is a usage error, told before anything happens."""
    for name in hosts or []:
        if name not in loaded.hosts:
            known = ", ".join(loaded.hosts) or "none"
            raise RigbookError(
                "host.not-declared", f"no host {name!r} in rigbook.toml (there are: {known})", exit_code=USAGE
            )
    return list(hosts or loaded.hosts)


def probe(names: list[str] = typer.Argument(None, metavar="[HOST]…", help="Which hosts; all when left out.")) -> None:
    """Look at hosts and write what they are into the book.

    Example:  rigbook probe llm
    """
    loaded = project()
    rows = wait_for(_probe(loaded, chosen(loaded, names)))
    from state.render.text import quantity

    cells = [[r["host"], r["key"], quantity(r["value"], r["unit"])] for r in rows if r["kind"] == "fact.observed"]
    emit(rows, table(cells, ["host", "fact", "value"]) if cells else "")
    failures = [r for r in rows if r["kind"] == "probe.failed"]
    for failure in failures:
        say(f"{failure['host']}: {failure['what']}: {failure['reason']}")
    if failures:
        raise typer.Exit(UNREACHABLE)


async def _probe(loaded: Project, names: list[str]) -> list[dict[str, Any]]:
    from remote.inventory import probe_host
    from state.condense import append_observations
    from state.events import FactObserved, ProbeFailed

    async def look(rig: Rig, name: str) -> list[Any]:
        try:
            return list(await probe_host(await rig.link(name), loaded))
        except RigbookError as error:
            return [ProbeFailed(host=name, what="access", reason=str(error))]

    async with rig_of(loaded) as rig:
        found = await asyncio.gather(*(look(rig, name) for name in names))
    book = journal()
    try:
        # Host by host, in the order of the file: one transaction each.
        for events in found:
            if events:
                append_observations(book, events)
    finally:
        book.close()
    rows = []
    for name, events in zip(names, found, strict=True):
        for event in events:
            fact = isinstance(event, FactObserved)
            row = {"host": name, "kind": event.kind}
            row |= {"key": event.key, "value": event.value, "unit": event.unit} if fact else {}
            row |= {} if fact else {"what": event.what, "reason": event.reason}
            rows.append(row)
    return rows


def exec_(
    words: list[str] = typer.Argument(..., metavar="HOST… -- COMMAND…", help="Hosts, then -- and the command."),
    timeout: float = typer.Option(0.0, "--timeout", help="Stop it after this many seconds, on the far side too."),
    cwd: str = typer.Option("", "--cwd", help="Working directory there."),
) -> None:
    """Run a command on hosts: rigbook exec HOST… -- COMMAND ARGUMENT…

    Arguments arrive exactly as given; no shell on the way changes them. Exits with the command's own code (128+n for
    signal n), 255 when it cannot be known; on several hosts with the highest.

    Example:  rigbook exec llm -- nvidia-smi -L
    """
    if "--" not in words or words[0] == "--" or words[-1] == "--":
        raise RigbookError("usage", "rigbook exec HOST… -- COMMAND ARGUMENT…", exit_code=USAGE)
    at = words.index("--")
    loaded = project()
    names, argv = chosen(loaded, words[:at]), words[at + 1 :]
    refused: set[str] = set()  # hosts whose error was told already
    results = wait_for(_exec(loaded, names, argv, timeout or None, cwd or None, refused))
    if ctx.json:
        emit([_as_dict(result) for result in results])
    for result in results:
        if result.state != "exited" and result.host not in refused:
            say(f"{result.host}: {result.describe()}")
    raise typer.Exit(max(result.code for result in results))


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "host": result.host,
        "state": result.state,
        "exit": result.exit,
        "signal": result.signal,
        "code": result.code,
        "reason": result.reason,
        "stdout": result.stdout.decode("utf-8", "backslashreplace"),
        "stderr": result.stderr.decode("utf-8", "backslashreplace"),
    }


async def _exec(
    loaded: Project, names: list[str], argv: list[str], timeout: float | None, cwd: str | None, refused: set[str]
) -> list[Result]:
    from remote.result import Result

    async def one(rig: Rig, name: str) -> Result:
        out, err = (bytearray(), bytearray()) if ctx.json else (None, None)
        to_out, to_err = (out.extend, err.extend) if out is not None and err is not None else sinks(name, len(names))
        feed = own_stdin() if len(names) == 1 else b""
        try:
            link = await rig.link(name)
            found = await link.stream(argv, feed=feed, out=to_out, err=to_err, timeout=timeout, cwd=cwd)
        except RigbookError as error:
            if error.exit_code == USAGE:
                raise
            # As ssh does: what the command would have said is not known.
            say(f"error[{error.id}]: {error.message} (on {name})" + (f"\n  {error.hint}" if error.hint else ""))
            refused.add(name)
            return Result("unknown", reason=error.message, host=name)
        if out is None or err is None:
            return found
        return Result(found.state, found.exit, found.signal, bytes(out), bytes(err), found.reason, name)

    async with rig_of(loaded) as rig:
        return list(await asyncio.gather(*(one(rig, name) for name in names)))


def sinks(name: str, count: int) -> tuple[Callable[[bytes], None], Callable[[bytes], None]]:
    """Where output goes: as it is for one host; line by line under the host's name for several."""
    if count == 1:
        return _writer(sys.stdout.buffer), _writer(sys.stderr.buffer)
    return _prefixed(name, sys.stdout.buffer), _prefixed(name, sys.stderr.buffer)


def _writer(stream: Any) -> Callable[[bytes], None]:
    def write(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return write


def _prefixed(name: str, stream: Any) -> Callable[[bytes], None]:
    begin = True

    def write(data: bytes) -> None:
        nonlocal begin
        for line in data.splitlines(keepends=True):
            stream.write((name.encode() + b": " if begin else b"") + line)
            begin = line.endswith(b"\n")
        stream.flush()

    return write


async def own_stdin() -> AsyncIterator[bytes]:
    """What is piped into us. A terminal is not read: `rigbook shell` is for that."""
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return
    from remote.stdin import chunks

    async for data in chunks(sys.stdin.fileno()):
        yield data


def shell(host: str = typer.Argument(..., help="The host.")) -> None:
    """A login shell on a host.

    Example:  rigbook shell llm
    """
    loaded = project()
    (name,) = chosen(loaded, [host])

    async def work() -> Result:
        from remote.terminal import attach

        async with rig_of(loaded) as rig:
            return await attach(await rig.link(name))

    result = wait_for(work())
    if result.state != "exited":
        say(f"{name}: {result.describe()}")
    raise typer.Exit(result.code)


def put(
    host: str = typer.Argument(..., help="The host."),
    local: Path = typer.Argument(..., help="A file here, or a directory."),
    remote: str = typer.Argument(..., help="Its name there; ~/ is the home there."),
) -> None:
    """Copy a file to a host. It has its name there only when all of it has arrived.

    Example:  rigbook put llm bench.json '~/bench.json'
    """

    async def work(link: Link) -> int:
        if local.is_dir():
            files = {str(p.relative_to(local)): p for p in sorted(local.rglob("*")) if p.is_file()}
            await link.put_tree(files, remote)
            return len(files)
        await link.put(local, remote)
        return 1

    count = _with_link(host, work)
    emit(
        {"host": host, "local": str(local), "remote": remote, "files": count},
        f"{count} {'file' if count == 1 else 'files'} to {host}:{remote}",
    )


def get(
    host: str = typer.Argument(..., help="The host."),
    remote: str = typer.Argument(..., help="A file there."),
    local: Path = typer.Argument(Path("."), help="Its name here, or a directory."),
) -> None:
    """Copy a file from a host. It has its name here only when all of it has arrived.

    Example:  rigbook get llm '~/bench.json'
    """
    target = local / Path(remote).name if local.is_dir() else local

    async def work(link: Link) -> None:
        await link.get(remote, target)

    _with_link(host, work)
    emit({"host": host, "remote": remote, "local": str(target), "bytes": target.stat().st_size}, str(target))


def _with_link(host: str, work: Callable[[Link], Any]) -> Any:
    loaded = project()
    (name,) = chosen(loaded, [host])

    async def run() -> Any:
        async with rig_of(loaded) as rig:
            return await work(await rig.link(name))

    return wait_for(run())


def do(action: str = typer.Argument(None, help="Its name in [actions]; without one they are listed.")) -> None:
    """Run one of the project's own [actions]: shown first, asked for, recorded.

    Example:  rigbook do nvlink-check --dry-run
    """
    loaded = project()
    if action is None:
        rows = [{"action": name, "host": a.host, "run": a.run} for name, a in loaded.actions.items()]
        text = table([[r["action"], r["host"], " ".join(r["run"])] for r in rows], ["action", "host", "command"])
        emit(rows, text)
        return
    if action not in loaded.actions:
        known = ", ".join(loaded.actions) or "none"
        raise RigbookError("action.unknown", f"no action {action!r} (there are: {known})", exit_code=USAGE)
    what = loaded.actions[action]
    say(f"{action}: on {what.host}: {' '.join(what.run)}")
    if ctx.dry_run:
        emit({"action": action, "host": what.host, "run": what.run}, "")
        return
    confirm(f"Run {action} on {what.host}?")
    result = wait_for(_do(loaded, action))
    if ctx.json:
        emit(_as_dict(result))
    if result.state != "exited":
        say(f"{result.host}: {result.describe()}")
    raise typer.Exit(result.code)


async def _do(loaded: Project, action: str) -> Result:
    import secrets
    import time

    from remote.result import Result
    from state.events import RunFinished, RunStarted, RunStatus

    what = loaded.actions[action]
    run = f"action-{action}-{secrets.token_hex(4)}"
    out, err = bytearray(), bytearray()
    show_out, show_err = sinks(what.host, 1)

    def keep(into: bytearray, show: Callable[[bytes], None]) -> Callable[[bytes], None]:
        def sink(data: bytes) -> None:
            into.extend(data)
            if not ctx.json:
                show(data)

        return sink

    book = journal()
    try:
        async with rig_of(loaded) as rig:
            link = await rig.link(what.host)
            book.append(RunStarted(run=run, what="action", name=action, host=what.host, settings={"run": what.run}))
            began = time.monotonic()
            found = await link.stream(what.run, out=keep(out, show_out), err=keep(err, show_err))
        # An end that nobody saw is `lost`, and is not made into a failure of the command.
        status: RunStatus = "done" if found.ok else "lost" if found.state == "unknown" else "failed"
        tail = {"stdout": _tail(out), "stderr": _tail(err), "end": found.describe()}
        seconds = round(time.monotonic() - began, 3)
        book.append(RunFinished(run=run, status=status, exit=found.exit, result=tail, seconds=seconds))
    finally:
        book.close()
    return Result(found.state, found.exit, found.signal, bytes(out), bytes(err), found.reason, what.host)


def _tail(data: bytearray, limit: int = 4000) -> str:
    """The end of an output, for the book; the whole is for the one who ran it."""
    return bytes(data[-limit:]).decode("utf-8", "replace")
