"""`rigbook exec`: one command, or one script, on one host or many."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from state.errors import USAGE, RigbookError
from tui.cli.common import ctx, emit, project, say, table, wait_for
from tui.cli.rig import chosen, own_stdin, rig_of, sinks

if TYPE_CHECKING:
    from remote.connect import Link, Rig
    from remote.result import Result
    from state.project import Project


@dataclass(frozen=True)
class Ask:
    """What is to be run, the same for every host."""

    argv: list[str] | None
    script: str | None
    timeout: float | None
    cwd: str | None
    sudo: bool
    limit: int | None
    first_failure: bool
    stdin: bool  # ours goes to the command


@dataclass
class Ended:
    """How it went on one host."""

    result: Result
    seconds: float
    out: Kept
    err: Kept
    error: RigbookError | None = None
    remark: str | None = None

    @property
    def code(self) -> int:
        return self.result.code

    def as_dict(self) -> dict[str, Any]:
        result, error = self.result, self.error
        row: dict[str, Any] = {
            "host": result.host,
            "state": result.state,
            "exit": result.exit,
            "signal": result.signal,
            "code": self.code,
            "reason": result.reason or self.remark or "",
            "seconds": round(self.seconds, 3),
        }
        for name, kept in (("stdout", self.out), ("stderr", self.err)):
            row[name] = kept.data.decode("utf-8", "backslashreplace")
            if not _is_text(kept.data):
                row[f"{name}_base64"] = base64.b64encode(kept.data).decode()
            row[f"{name}_dropped"] = kept.dropped
        row["error"] = {"id": error.id, "message": error.message, "hint": error.hint} if error else None
        return row


class Kept:
    """One output of one host: shown as it comes, kept for --json, and cut at the limit, which is said."""

    def __init__(self, show: Callable[[bytes], None] | None, limit: int | None) -> None:
        self.data = bytearray()
        self.size = 0
        self.dropped = 0
        self._show, self._limit = show, limit

    def __call__(self, data: bytes) -> None:
        if self._limit is not None:
            room = max(0, self._limit - self.size)
            self.dropped += max(0, len(data) - room)
            data = data[:room]
        self.size += len(data)
        if self._show is None:
            self.data += data
        else:
            # The beginning is looked at when the command could not be started.
            if len(self.data) < 4096:
                self.data += data[: 4096 - len(self.data)]
            if data:
                self._show(data)


def _is_text(data: bytes | bytearray) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def exec_(
    words: list[str] = typer.Argument(None, metavar="HOST… -- COMMAND…", help="Hosts, then -- and the command."),
    script: str = typer.Option("", "--script", metavar="FILE", help="Run this script (-: stdin); arguments behind --."),
    all_: bool = typer.Option(False, "--all", help="On every host of the project."),
    timeout: float = typer.Option(0.0, "--timeout", help="Stop it after this many seconds, on the far side too."),
    cwd: str = typer.Option("", "--cwd", help="Working directory there."),
    sudo: bool = typer.Option(False, "--sudo", help="As root, by sudo -n: refused at once if it wants a password."),
    limit: int = typer.Option(0, "--limit", metavar="BYTES", help="Keep this much of each output; says what it drops."),
    first_failure: bool = typer.Option(False, "--first-failure", help="On the first failure, stop the other hosts."),
) -> None:
    """Run a command or a script on hosts: rigbook exec HOST… -- COMMAND ARGUMENT…

    Arguments arrive exactly as given; no shell on the way changes them. Exits with the command's own code (128+n for
    signal n), 255 when it cannot be known; on several hosts with the highest, and a table on stderr says how each
    ended. A script's first line names its interpreter (else sh); it needs no file on the host. --json gives one line a
    host, when it is done there.

    Example:  rigbook exec llm -- nvidia-smi -L
    """
    loaded = project()
    names, behind = _split(loaded, words or [], script, all_)
    ask = _ask(behind, script, timeout, cwd, sudo, limit, first_failure, len(names))
    ended = wait_for(_exec(loaded, names, ask))
    if len(names) > 1 and not ctx.json:
        say(_table(ended))
    elif not ctx.json:
        _remarks(ended[0])
    failed = [each.code for each in ended if each.error is None or each.error.id != "exec.given-up"]
    raise typer.Exit(max(failed))


def _split(loaded: Project, words: list[str], script: str, all_: bool) -> tuple[list[str], list[str]]:
    """Hosts, and what stands behind the `--`."""
    usage = RigbookError("usage", "rigbook exec HOST… -- COMMAND ARGUMENT…", exit_code=USAGE)
    at = words.index("--") if "--" in words else len(words)
    hosts, behind = words[:at], words[at + 1 :]
    if not script and not behind:
        raise usage
    if bool(hosts) == all_:
        raise usage if not all_ else RigbookError("usage", "name hosts, or give --all", exit_code=USAGE)
    return list(dict.fromkeys(chosen(loaded, hosts or None))), behind


def _ask(
    behind: list[str], script: str, timeout: float, cwd: str, sudo: bool, limit: int, first: bool, count: int
) -> Ask:
    from remote.scripts import SUDO, script_of

    common = (timeout or None, cwd or None, sudo, limit or None, first)
    if not script:
        return Ask([*SUDO, *behind] if sudo else behind, None, *common, stdin=count == 1)
    try:
        source = sys.stdin.buffer.read() if script == "-" else Path(script).read_bytes()
    except OSError as error:
        raise RigbookError("exec.no-script", f"{script}: {error.strerror}", exit_code=USAGE) from error
    # Under sudo the script itself comes by stdin.
    return Ask(None, script_of(source, behind, sudo=sudo), *common, stdin=count == 1 and script != "-" and not sudo)


async def _exec(loaded: Project, names: list[str], ask: Ask) -> list[Ended]:
    from remote.result import Result

    async with rig_of(loaded) as rig:
        work = {name: asyncio.ensure_future(_one(rig, name, ask, len(names))) for name in names}
        failed = ""
        try:
            for done in asyncio.as_completed([_named(name, task) for name, task in work.items()]):
                name = await done
                if not failed and ask.first_failure and not work[name].cancelled() and work[name].result().code:
                    failed = name
                    for task in work.values():
                        task.cancel()
        finally:
            # Ctrl-C, or one that failed: each tells its command to end, for which the links must still be there.
            for task in work.values():
                task.cancel()
            await asyncio.wait(work.values())
        ended = []
        for name, task in work.items():
            if task.cancelled():
                why = f"given up, since it failed on {failed}; TERM was sent, its end was not waited for"
                error = RigbookError("exec.given-up", why, host=name)
                row = Ended(Result("unknown", reason=why, host=name), 0.0, Kept(None, 0), Kept(None, 0), error)
                if ctx.json:
                    emit(row.as_dict())
            else:
                row = task.result()
            ended.append(row)
        return ended


async def _named(name: str, task: asyncio.Task[Ended]) -> str:
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()):
        raise error
    return name


async def _one(rig: Rig, name: str, ask: Ask, count: int) -> Ended:
    from remote.result import Result

    show_out, show_err = (None, None) if ctx.json else sinks(name, count)
    out, err = Kept(show_out, ask.limit), Kept(show_err, ask.limit)
    began = time.monotonic()
    link: Link | None = None
    try:
        link = await rig.link(name)
        result = await link.stream(
            ask.argv, script=ask.script, feed=own_stdin() if ask.stdin else b"", out=out, err=err,
            timeout=ask.timeout, cwd=ask.cwd,
        )  # fmt: skip
        ended = Ended(replace(result, host=name), time.monotonic() - began, out, err)
        await _explain(link, ask, ended)
    except RigbookError as error:
        if error.exit_code == USAGE:
            raise
        # As ssh does: what the command would have said is not known.
        if not ctx.json:
            say(f"error[{error.id}]: {error.message} (on {name})" + (f"\n  {error.hint}" if error.hint else ""))
        ended = Ended(Result("unknown", reason=error.message, host=name), time.monotonic() - began, out, err, error)
    if ctx.json:
        emit(ended.as_dict())
    return ended


async def _explain(link: Link, ask: Ask, ended: Ended) -> None:
    """Why it did not start, if it did not."""
    from remote.scripts import sudo_refusal, why_not

    result = replace(ended.result, stdout=bytes(ended.out.data), stderr=bytes(ended.err.data))
    if ask.sudo and (refusal := sudo_refusal(result)):
        user = link.route().get("user", "the user")
        hint = f"rigbook types no passwords. In sudoers there: {user} ALL=(root) NOPASSWD: COMMAND"
        ended.error = RigbookError("exec.sudo-refused", refusal, host=link.name, hint=hint)
    elif result.exit in (126, 127) and ask.argv and not ask.sudo:
        ended.remark = await why_not(link, ask.argv[0], ask.cwd)


def _remarks(ended: Ended) -> None:
    """What is to be said beside the output."""
    host = ended.result.host
    for name, kept in (("stdout", ended.out), ("stderr", ended.err)):
        if kept.dropped:
            say(f"{host}: {name} was cut after {kept.size} bytes; {kept.dropped} more were dropped")
    if ended.error is not None and ended.error.id == "exec.sudo-refused":
        say(f"error[exec.sudo-refused]: {ended.error.message} (on {host})\n  {ended.error.hint}")
    elif ended.remark:
        say(f"{host}: {ended.remark}")
    elif ended.result.state != "exited" and ended.error is None:
        say(f"{host}: {ended.result.describe()}")


def _table(ended: list[Ended]) -> str:
    rows = []
    for each in ended:
        dropped = each.out.dropped + each.err.dropped
        why = each.error.message if each.error else each.remark or ""
        why += f"{'; ' if why else ''}{dropped} bytes of output dropped" if dropped else ""
        what = "unknown" if each.result.state == "unknown" else each.result.describe()
        rows.append([each.result.host, what, f"{each.seconds:.1f} s", str(each.out.size), str(each.err.size), why])
    good = sum(each.result.ok for each in ended)
    return table(rows, ["host", "end", "time", "stdout", "stderr", ""]) + f"\n{good} of {len(ended)} succeeded"
