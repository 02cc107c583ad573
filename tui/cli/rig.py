"""`rigbook probe | shell`, and what the commands that work on hosts share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import typer

from state.errors import UNREACHABLE, USAGE, RigbookError
from tui.cli.common import emit, journal, project, say, table, wait_for

if TYPE_CHECKING:
    from remote.connect import Rig
    from remote.result import Result
    from state.project import Project


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
