"""`rigbook put | get`: files and directories to a host and back."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import typer

from state.errors import USAGE, RigbookError
from tui.cli.common import confirm, emit, project, say, wait_for
from tui.cli.progress import Meter
from tui.cli.rig import chosen, rig_of

if TYPE_CHECKING:
    from remote.connect import Link
    from remote.files import Copied, TreeCopied

DELETE = typer.Option(False, "--delete", help="Of a directory: take away there what is not here, too.")


def put(
    host: str = typer.Argument(..., help="The host."),
    local: Path = typer.Argument(..., help="A file here, or a directory."),
    remote: str = typer.Argument(..., help="Its name there; ~/ is the home there; with a / at the end, where it goes."),
    delete: bool = DELETE,
) -> None:
    """Copy a file or a directory to a host. It has its name there only when all of it has arrived and was checked.

    A large file that was cut goes on where it was. Into a directory that exists, only what differs is sent, where both
    ends have rsync.

    Example:  rigbook put llm bench.json '~/bench.json'
    """
    if delete:
        confirm(f"Delete what {remote} on {host} has and {local} has not?")

    async def work(link: Link, meter: Meter) -> Copied | TreeCopied:
        from remote import files

        if not local.is_dir():
            if delete:
                raise RigbookError("usage", "--delete is for directories", exit_code=USAGE)
            return await files.put(link, local, remote, progress=meter)
        target = f"{remote}{local.resolve().name}" if remote.endswith("/") and remote != "/" else remote
        if delete or await files.is_directory(link, target):
            return await files.sync_tree(link, local, target, delete=delete, progress=meter)
        return await files.put_tree(link, local, target, progress=meter)

    _copy(host, f"{local} to {host}", {"local": str(local), "remote": remote}, work)


def get(
    host: str = typer.Argument(..., help="The host."),
    remote: str = typer.Argument(..., help="A file there, or a directory."),
    local: Path = typer.Argument(Path("."), help="Its name here, or a directory that exists, where it goes."),
    delete: bool = typer.Option(False, "--delete", help="Of a directory: take away here what is not there, too."),
) -> None:
    """Copy a file or a directory from a host. It has its name here only when all of it has arrived and was checked.

    Example:  rigbook get llm '~/bench.json'
    """
    name = PurePosixPath(remote).name
    target = local / name if local.is_dir() and name not in ("", "~", "..") else local
    if delete:
        confirm(f"Delete what {target} has and {remote} on {host} has not?")

    async def work(link: Link, meter: Meter) -> Copied | TreeCopied:
        from remote import files

        if await files.is_directory(link, remote):
            if delete or target.is_dir():
                return await files.sync_tree(link, target, remote, fetch=True, delete=delete, progress=meter)
            return await files.get_tree(link, remote, target, progress=meter)
        if delete:
            raise RigbookError("usage", "--delete is for directories", exit_code=USAGE)
        return await files.get(link, remote, target, progress=meter)

    _copy(host, f"{remote} from {host}", {"remote": remote, "local": str(target)}, work)


def _copy(
    host: str, what: str, names: dict[str, str], work: Callable[[Link, Meter], Awaitable[Copied | TreeCopied]]
) -> None:
    loaded = project()
    (name,) = chosen(loaded, [host])

    async def run() -> tuple[Copied | TreeCopied, float]:
        async with rig_of(loaded) as rig:
            link = await rig.link(name)
            began = time.monotonic()
            with Meter(what) as meter:
                found = await work(link, meter)
            return found, time.monotonic() - began

    copied, seconds = wait_for(run())
    emit({"host": host, **names, **asdict(copied), "seconds": round(seconds, 3)}, f"{what}: {_told(copied, seconds)}")
    for line in _remarks(copied):
        say(f"{host}: {line}")


def _told(copied: Any, seconds: float) -> str:
    from state.render.text import duration, size

    pace = f"{size(copied.size)} in {duration(seconds)}, {size(copied.size / max(seconds, 1e-3))}/s"
    if hasattr(copied, "files"):
        by = f", by {copied.by}" + (f", {size(copied.sent)} travelled" if copied.sent is not None else "")
        more = f", {copied.links} links" if copied.links else ""
        return f"{copied.files} {'file' if copied.files == 1 else 'files'}{more}, {pace}{by}"
    digest = f", sha256 {copied.sha256[:16]}…" if copied.sha256 else ""
    gone_on = f", gone on after {size(copied.resumed)}" if copied.resumed else ""
    return f"{pace}{gone_on}{digest}{', checked at both ends' if copied.checked else ''}"


def _remarks(copied: Any) -> list[str]:
    """What one would not expect."""
    if hasattr(copied, "files"):
        skipped = ", ".join(copied.skipped[:5]) + (" …" if len(copied.skipped) > 5 else "")
        return [f"left out, being no files, directories or links: {skipped}"] if copied.skipped else []
    lines = [f"the name is a link; {copied.through} is what was copied"] if copied.through else []
    if copied.noexec:
        lines.append("it cannot be started from there: that file system is mounted noexec (file.noexec)")
    if not copied.checked:
        lines.append("no sha256sum there: only the size was checked")
    return lines
