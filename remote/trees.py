"""Directories over a link: one tar stream, unpacked beside the target and put in place when all of it has arrived.

Symbolic links, modes, times and empty directories are kept; owners are not. A pipe, a socket or a device is left out
and named. A directory that did not exist appears whole or not at all; into one that exists, files move one by one, each
of them whole. A cut link must not read as a short archive (tar takes an end between two files for the end), so the
last entry is a mark that we look for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import shutil
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from remote import shell
from remote.connect import Link
from remote.copying import Progress, check, here
from remote.result import Result
from state.errors import UNREACHABLE, RigbookError

BATCH = 512 << 10


@dataclass
class TreeCopied:
    """What a copy of a directory came to."""

    files: int = 0
    directories: int = 0
    links: int = 0
    size: int = 0  # bytes of all files
    skipped: list[str] = field(default_factory=list)  # what is no file, directory or link
    by: str = "tar"
    sent: int | None = None  # bytes that travelled, where it is known


# ── put ──────────────────────────────────────────────────────────────────────────────────────────────────────────

# $d the target, $m the mark. In an existing directory the new files wait inside it: it may be a mount point.
_UNPACK = """LC_ALL=C;export LC_ALL;umask 077
command -v tar >/dev/null||{ echo "no tar here" >&2;exit 70;}
if [ -d "$d" ];then t=$d/.$m.part;elif [ -e "$d" ]||[ -L "$d" ];then echo "Not a directory" >&2;exit 74
else p=$(dirname "$d")&&mkdir -p "$p"&&t=$p/.$m.part||exit 74;fi
mkdir "$t"||exit 74
gone() { chmod -R u+rwX "$t" 2>/dev/null;rm -rf "$t";exit "$1"; }
trap 'gone 75' HUP INT TERM
tar -xopf - -C "$t"||gone 74
[ -e "$t/$m" ]||gone 75
chmod u+rwx "$t"&&rm -f "$t/$m"
merge() { for f in "$1"/* "$1"/.[!.]* "$1"/..?*;do
n=$2/${f##*/}
if [ -L "$f" ]||[ ! -d "$f" ];then [ -e "$f" ]||[ -L "$f" ]||continue
if [ -L "$n" ];then rm -f "$n"||return 1;elif [ -d "$n" ];then echo "$n: Is a directory" >&2;return 1;fi
mv -f "$f" "$n"||return 1
elif [ -d "$n" ];then (merge "$f" "$n")||return 1
elif [ -e "$n" ]||[ -L "$n" ];then echo "$n: Not a directory" >&2;return 1
else mv "$f" "$n"||return 1;fi;done;}
if [ -d "$d" ];then merge "$t" "$d"||gone 74;chmod -R u+rwX "$t";rm -rf "$t";else mv "$t" "$d"||gone 74;fi"""


async def put_tree(link: Link, local: Path, remote: str, *, progress: Progress | None = None) -> TreeCopied:
    """Copy a directory to `remote`, which becomes it, or gets its files if there is one already."""
    mark = f"rigbook-{secrets.token_hex(8)}"
    copied = TreeCopied()
    script = f"d={shell.path(remote.rstrip('/') or '/')};m={mark};{_UNPACK}"
    out, errors = bytearray(), bytearray()

    async def feed() -> AsyncIterator[bytes]:
        blocks = tar_of(local, mark, copied)
        while block := await asyncio.to_thread(next, blocks, b""):
            yield block
            if progress:
                progress(copied.size, 0)

    try:
        found = await link.stream(script=script, feed=feed(), out=out.extend, err=errors.extend)
    except OSError as error:
        raise here(error, str(error.filename or local)) from error
    _said(found, errors, link, remote)
    return copied


def _said(found: Result, errors: bytearray, link: Link, what: str) -> None:
    if found.state == "exited" and (found.exit == 75 or b"Unexpected EOF" in errors):
        raise RigbookError("file.short", f"{what}: only a part arrived", host=link.name, exit_code=UNREACHABLE)
    if found.state == "exited" and found.exit == 70:
        raise RigbookError("host.no-tar", f"{what}: there is no tar", host=link.name, hint="apt install tar")
    check(Result(found.state, found.exit, found.signal, b"", bytes(errors), found.reason, link.name), what)


def tar_of(root: Path, mark: str, copied: TreeCopied) -> Iterator[bytes]:
    """The archive in blocks, while it is made. Counts into `copied`."""
    held = bytearray()
    for path, info in _walk(os.fspath(root), "."):
        name = os.path.relpath(path, root)
        entry = tarfile.TarInfo(name)
        entry.mode, entry.mtime = stat.S_IMODE(info.st_mode), int(info.st_mtime)
        if stat.S_ISDIR(info.st_mode):
            entry.type = tarfile.DIRTYPE
            copied.directories += name != "."
        elif stat.S_ISLNK(info.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
            copied.links += 1
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb", buffering=0, opener=_plainly) as file:
                entry.size = os.fstat(file.fileno()).st_size
                held += _header(entry)
                left = entry.size
                while left:
                    data = file.read(min(BATCH, left))
                    if not data:
                        raise RigbookError("file.mismatch", f"{path} (on this machine) shrank while it was copied")
                    left -= len(data)
                    copied.size += len(data)
                    held += data
                    if len(held) >= BATCH:
                        yield bytes(held)
                        held.clear()
                held += b"\0" * (-entry.size % tarfile.BLOCKSIZE)
            copied.files += 1
            continue
        else:
            copied.skipped.append(name)
            continue
        held += _header(entry)
    held += _header(tarfile.TarInfo(mark)) + b"\0" * (2 * tarfile.BLOCKSIZE)
    yield bytes(held)


def _header(entry: tarfile.TarInfo) -> bytes:
    return entry.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")


def _plainly(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _walk(path: str, name: str) -> Iterator[tuple[str, os.stat_result]]:
    """A directory before what is in it, in a fixed order."""
    yield path, os.stat(path) if name == "." else os.lstat(path)
    with os.scandir(path) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, entry.name)
        else:
            yield entry.path, entry.stat(follow_symlinks=False)


# ── get ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def get_tree(link: Link, remote: str, local: Path, *, progress: Progress | None = None) -> TreeCopied:
    """Copy a directory to `local`, which becomes it, or gets its files if there is one already."""
    mark = f"rigbook-{secrets.token_hex(8)}"
    # The mark comes behind tar's own end: what arrived up to it is all that tar wrote.
    script = (
        f"LC_ALL=C;export LC_ALL;command -v tar >/dev/null||exit 70;d={shell.path(remote)};"
        '[ -e "$d" ]||{ echo "No such file or directory" >&2;exit 66;};'
        '[ -d "$d" ]||{ echo "Not a directory" >&2;exit 66;};cd "$d"||{ echo "Permission denied" >&2;exit 66;};'
        f"tar -cf - .;r=$?;echo {mark} $r;[ $r -le 1 ]||exit 74"
    )
    try:
        if local.exists() and not local.is_dir():
            raise NotADirectoryError(20, os.strerror(20))
        stage = (local if local.is_dir() else local.parent) / f".{mark}.part"
        stage.parent.mkdir(parents=True, exist_ok=True)
        stage.mkdir(mode=0o700)
    except OSError as error:
        raise here(error, str(local)) from error
    pipe = _Pipe()
    unpacking = asyncio.ensure_future(asyncio.to_thread(_unpack, pipe, stage, link.name, progress))
    errors = bytearray()
    try:
        try:
            found = await link.stream(script=script, out=pipe.feed, err=errors.extend)
        finally:
            await pipe.close()
        copied, rest = await unpacking
        _said(found, errors, link, remote)
        if mark.encode() not in rest:
            raise RigbookError("file.short", f"{remote}: only a part arrived", host=link.name, exit_code=UNREACHABLE)
        await asyncio.to_thread(_place, stage, local)
        return copied
    except (OSError, tarfile.TarError) as error:
        if isinstance(error, OSError):
            raise here(error, str(local)) from error
        _said(found, errors, link, remote)
        raise RigbookError("file.mismatch", f"{remote}: not a tar archive: {error}", host=link.name) from error
    finally:
        with contextlib.suppress(BaseException):
            await unpacking
        await asyncio.to_thread(shutil.rmtree, stage, True)


class _Pipe:
    """From the event loop to the thread that unpacks, with a bound on what waits between them."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes] = queue.Queue(64)
        self._held = b""
        self.over = False

    async def feed(self, data: bytes) -> None:
        try:
            self._queue.put_nowait(data)
        except queue.Full:
            await asyncio.to_thread(self._queue.put, data)

    async def close(self) -> None:
        await self.feed(b"")

    def read(self, size: int) -> bytes:
        """Up to `size` bytes, fewer only at the end (called by the thread)."""
        parts, got = [self._held], len(self._held)
        while got < size and not self.over:
            data = self._queue.get()
            self.over = not data
            parts.append(data)
            got += len(data)
        whole = b"".join(parts)
        self._held = whole[size:]
        return whole[:size]

    def rest(self) -> bytes:
        """Everything up to the end; only its tail is kept."""
        tail = self._held
        self._held = b""
        while not self.over:
            data = self._queue.get()
            self.over = not data
            tail = (tail + data)[-BATCH:]
        return tail


def _unpack(pipe: _Pipe, stage: Path, host: str, progress: Progress | None) -> tuple[TreeCopied, bytes]:
    copied = TreeCopied()
    try:
        with tarfile.open(fileobj=pipe, mode="r|", bufsize=64 * tarfile.BLOCKSIZE, errors="surrogateescape") as tar:  # type: ignore[call-overload]
            unpack(tar, stage, copied, host, progress)
            # tar reads in blocks of its own and may hold the mark already.
            ahead = bytes(tar.fileobj.buf)
        return copied, ahead + pipe.rest()
    finally:
        pipe.rest()  # who feeds must never wait for a reader that has given up


def unpack(
    tar: tarfile.TarFile, root: Path, copied: TreeCopied, host: str | None = None, progress: Progress | None = None
) -> None:
    """Unpack into `root`, an empty directory of ours. Nothing is ever written through a link or out of it: a name's
    parents must be directories that this archive made."""
    made: set[str] = {""}
    others: set[str] = set()
    modes: list[tuple[str, int, float]] = []

    def refuse(name: str, why: str) -> RigbookError:
        return RigbookError("file.bad-name", f"the archive holds {name!r}, {why}; nothing was put in place", host=host)

    def parent(name: str) -> None:
        above = os.path.dirname(name)
        if above in made:
            return
        if above in others:
            raise refuse(name, f"and {above!r} is no directory")
        parent(above)
        os.mkdir(root / above, 0o700)
        made.add(above)

    for entry in tar:
        name = os.path.normpath(entry.name) if entry.name else ""
        if name.startswith("/") or ".." in entry.name.split("/") or not name or "\0" in name:
            raise refuse(entry.name, "which leads out of its directory")
        if name == ".":
            modes.append((name, entry.mode, entry.mtime))
            continue
        parent(name)
        path = root / name
        if name in made:
            if not entry.isdir():
                raise refuse(entry.name, "which is a directory as well")
            continue
        if name in others:
            os.unlink(path)
            others.discard(name)
        if entry.isdir():
            os.mkdir(path, 0o700)
            made.add(name)
            modes.append((name, entry.mode, entry.mtime))
            copied.directories += 1
            continue
        if entry.issym():
            os.symlink(entry.linkname, path)
            copied.links += 1
        elif entry.islnk():
            target = os.path.normpath(entry.linkname)
            if target not in others or os.path.islink(root / target):
                raise refuse(entry.name, f"a link to {entry.linkname!r}, which it does not hold")
            os.link(root / target, path)
            copied.files += 1
        elif entry.isreg():
            content: IO[bytes] | None = tar.extractfile(entry)
            assert content is not None
            _write(path, content, entry)
            copied.files += 1
            copied.size += entry.size
            if progress:
                progress(copied.size, 0)
        else:
            copied.skipped.append(name)
            continue
        others.add(name)
    # Last, and from the inside out: a directory that may not be written to is filled by now.
    for name, mode, mtime in reversed(modes):
        os.utime(root / name, (mtime, mtime))
        os.chmod(root / name, (mode & 0o777) | (0o700 if name == "." else 0))


def _write(path: Path, content: IO[bytes], entry: tarfile.TarInfo) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        shutil.copyfileobj(content, file, BATCH)
        os.fchmod(descriptor, entry.mode & 0o777)
        os.utime(descriptor, (entry.mtime, entry.mtime))


def _place(stage: Path, local: Path) -> None:
    if local.is_dir():
        _merge(stage, local)
    else:
        os.rename(stage, local)


def _merge(source: Path, target: Path) -> None:
    for entry in list(os.scandir(source)):
        there = target / entry.name
        if not entry.is_dir(follow_symlinks=False):
            os.replace(entry.path, there)  # IsADirectoryError when it is one
        elif there.is_dir():
            os.chmod(entry.path, 0o700)
            _merge(Path(entry.path), there)
        else:
            os.rename(entry.path, there)
