"""`rigbook do`: the project's own remote actions: shown, asked for, run, recorded."""

from __future__ import annotations

import os
import secrets
import time
from typing import TYPE_CHECKING, Any

import typer

from state.errors import USAGE, RigbookError
from tui.cli.common import confirm, ctx, emit, journal, project, root, say, table, wait_for
from tui.cli.exec import Ended, Kept
from tui.cli.rig import rig_of, sinks

if TYPE_CHECKING:
    from state.journal import Journal
    from state.project import Project


def do(
    action: str = typer.Argument(None, help="Its name in [actions]; without one they are listed."),
    timeout: float = typer.Option(0.0, "--timeout", help="Stop it after this many seconds, on the far side too."),
) -> None:
    """Run one of the project's own [actions]: shown first, asked for, recorded, however it ends.

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
    limit = timeout or what.timeout
    plan = {"action": action, "host": what.host, "run": what.run, "timeout": limit}
    say(f"{action}: on {what.host}: {' '.join(what.run)}" + (f" (stopped after {limit:g} s)" if limit else ""))
    if ctx.dry_run:
        emit({**plan, "dry_run": True}, "")
        return
    confirm(f"Run {action} on {what.host}?")
    run, ended = wait_for(_do(loaded, action, limit))
    if ctx.json:
        emit({"run": run, "action": action, **ended.as_dict()})
    if ended.result.state != "exited":
        say(f"{what.host}: {ended.result.describe()}")
    raise typer.Exit(ended.code)


async def _do(loaded: Project, action: str, timeout: float | None) -> tuple[str, Ended]:
    from state.events import RunFinished, RunStarted, RunStatus

    what = loaded.actions[action]
    run = f"action-{action}-{secrets.token_hex(4)}"
    show_out, show_err = (None, None) if ctx.json else sinks(what.host, 1)
    out, err = _Both(show_out), _Both(show_err)
    book = journal()
    try:
        settle(book)
        async with rig_of(loaded) as rig:
            link = await rig.link(what.host)
            settings = {"run": what.run, **({"timeout": timeout} if timeout else {}), "controller": _identity()}
            book.append(RunStarted(run=run, what="action", name=action, host=what.host, settings=settings))
            began = time.monotonic()

            def finish(status: RunStatus, end: str, exit: int | None = None) -> None:
                tail = {"stdout": _tail(out.tail), "stderr": _tail(err.tail), "end": end}
                seconds = round(time.monotonic() - began, 3)
                book.append(RunFinished(run=run, status=status, exit=exit, result=tail, seconds=seconds))

            try:
                found = await link.stream(what.run, out=out, err=err, timeout=timeout)
            except RigbookError as error:
                finish("lost", str(error))
                raise
            except BaseException as error:
                # Ctrl-C, or whoever read our output has gone. TERM was sent; nobody saw how it ended.
                finish("lost", f"given up here ({type(error).__name__}); its end was not seen")
                raise
            # An end that nobody saw is `lost`, and is not made into a failure of the command.
            status: RunStatus = "done" if found.ok else "lost" if found.state == "unknown" else "failed"
            finish(status, found.describe(), found.exit)
            return run, Ended(found, time.monotonic() - began, out, err)
    finally:
        book.close()


class _Both(Kept):
    """Also keeps the end, for the book; the whole is for the one who ran it."""

    LIMIT = 4000

    def __init__(self, show: Any) -> None:
        super().__init__(show, None)
        self.tail = b""

    def __call__(self, data: bytes) -> None:
        self.tail = (self.tail + data)[-self.LIMIT :]
        super().__call__(data)


def _tail(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _identity() -> dict[str, Any]:
    """This process, so that a later one can tell that it is gone."""
    from remote.probe import procs

    now = procs.stat(os.getpid())
    machine = {"node": os.uname().nodename, "boot_id": procs.boot_id()}
    return {**machine, "pid": os.getpid(), "starttime": now.starttime if now else 0}


def settle(book: Journal) -> None:
    """Actions whose rigbook was killed before it could record their end: nobody knows how they ended."""
    from remote.probe import procs
    from state.book import open_book
    from state.events import RunFinished

    for run in open_book(root()).runs.values():
        who = run.settings.get("controller")
        if run.what != "action" or run.status != "running" or not who or who["node"] != os.uname().nodename:
            continue  # one that another machine started is not ours to judge
        if who["boot_id"] == procs.boot_id() and procs.alive(who["pid"], who["starttime"]):
            continue
        end = "rigbook was killed while it ran; its end was not seen"
        book.append(RunFinished(run=run.run, status="lost", result={"end": end}))
