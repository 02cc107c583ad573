"""A job's files, every byte exactly once, whatever happens to the connection.

The far file is only ever appended to, so a byte offset says all. What we have is the local file, and its size is the
offset: there is no second record that could disagree with it. Beside it `.NAME.source` holds the far file's inode, and
the last bytes are compared whenever we come back: a file that was replaced, cut or rewritten over there is not taken
for the old one. What we had is then kept as NAME.gen1 (2, 3…), `mirror.jsonl` says so, and NAME begins again.

What the log quota dropped in the middle of a log is a hole here, too: the offsets behind it stay true.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remote.connect import Link, backoff
from remote.probe.client import Frame
from state.errors import UNREACHABLE, RigbookError

TAIL = 4096  # bytes before the offset that are compared
SYNC_S = 1.0
TRIES = 6  # connections without one answer before a look at what there is now gives up


class Piece(NamedTuple):
    """Bytes of a file from `offset` on; `skipped` bytes before them were dropped by the log quota. `reset` says why the
    file begins again at 0: it was replaced, cut, or rewritten."""

    offset: int
    data: bytes
    skipped: int = 0
    reset: str = ""


def shown(data: bytes) -> list[str]:
    """The lines of a log as a terminal would leave them: of a progress bar, which draws over itself with carriage
    returns, the last state. For looking at only: files and offsets keep every byte."""
    lines = data.replace(b"\r\n", b"\n").removesuffix(b"\n").split(b"\n") if data else []
    return [line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace") for line in lines]


def _digest(tail: bytes, offset: int) -> list[Any]:
    return [offset - len(tail), hashlib.sha256(tail).hexdigest()]


async def pieces(
    link: Link,
    id: str,
    file: str = "out.log",
    offset: int = 0,
    *,
    until_end: bool = True,
    lost: Callable[[RigbookError], None] = lambda error: None,
) -> AsyncGenerator[Piece, None]:
    """A job's file from `offset` on, until the job is over; with `until_end` False only what there is now.

    A negative offset counts from the end. Reconnects by itself, for as long as it takes, and goes on where it was;
    `lost` is told of each failure.
    """
    jobs = f"{await link.state_dir()}/jobs"
    asked: dict[str, Any] = {"name": file, "offset": offset}
    tail, failures = b"", 0
    while True:
        asked["check"] = _digest(tail, asked["offset"]) if tail else None
        try:
            probe = await link.probe()
            stream = probe.stream("follow", jobs=jobs, id=id, files=[asked], wait=until_end)
            async with contextlib.aclosing(stream) as frames:
                async for frame in frames:
                    failures = 0
                    head = frame.header
                    if "ok" in head:
                        return
                    if "reset" in head:
                        tail = b""
                        asked.update(offset=0, inode=head["inode"])
                        yield Piece(0, b"", reset=head["reset"])
                    elif "skip" in head:
                        tail = b""
                        asked["offset"] += head["skip"]
                        yield Piece(asked["offset"], b"", skipped=head["skip"])
                    elif "file" in head:
                        at = head["offset"]
                        tail = (tail + frame.data)[-TAIL:]
                        asked.update(offset=at + len(frame.data), inode=head["inode"])
                        yield Piece(at, frame.data)
        except RigbookError as error:
            failures += 1
            if error.exit_code != UNREACHABLE or (failures > TRIES and not until_end):
                raise
            lost(error)
            await asyncio.sleep(backoff(min(failures, 4)))


async def follow(
    link: Link, id: str, file: str = "out.log", offset: int = 0, *, until_end: bool = True
) -> AsyncGenerator[tuple[int, bytes], None]:
    """(offset, bytes) as of `pieces`; what the quota dropped shows as a jump of the offset. A file that begins again
    is an error."""
    async with contextlib.aclosing(pieces(link, id, file, offset, until_end=until_end)) as found:
        async for piece in found:
            if piece.reset:
                raise RigbookError(
                    "job.file-reset",
                    f"{id}/{file} was {piece.reset} while it was read",
                    host=link.name,
                    hint="Read it again from the start.",
                )
            if piece.data:
                yield piece.offset, piece.data


class Copy:
    """The local copy of one file. Several processes may bring it up to date at once: each write is made under a lock
    and only of what is not there yet."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._source = path.with_name(f".{path.name}.source")
        self._descriptor: int | None = None
        self._inode: int | None = None
        self._synced = time.monotonic()
        self._dirty = False

    def asked(self) -> dict[str, Any]:
        """What we have, for the far side. Waits for whoever writes just now."""
        self._lock()
        assert self._descriptor is not None
        try:
            size = os.fstat(self._descriptor).st_size
            tail = os.pread(self._descriptor, TAIL, max(0, size - TAIL))
            check = _digest(tail, size) if tail else None
            return {"name": self.name, "offset": size, "inode": self._inode, "check": check}
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def take(self, frame: Frame) -> bool:
        """One frame of the far side's. True when we have something new."""
        head = frame.header
        self._lock()
        assert self._descriptor is not None
        try:
            size = os.fstat(self._descriptor).st_size
            if "reset" in head:
                return self._reset(head, size)
            if "skip" not in head:
                if self._inode is None:
                    self._remember(head["inode"])
                elif self._inode != head["inode"]:
                    return False  # somebody else has seen a later file already
            end = head["offset"] + head.get("skip", len(frame.data))
            if head["offset"] > size:
                raise RigbookError("job.copy-cut", f"{self.path} was cut while it was written; try again")
            if end <= size:
                return False
            if "skip" in head:
                os.ftruncate(self._descriptor, end)
            else:
                # A kill in the middle of this leaves a shorter file, which is as good an offset as any.
                view = memoryview(frame.data)[size - head["offset"] :]
                while view:
                    view = view[os.write(self._descriptor, view) :]
            self._dirty = True
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    @property
    def due(self) -> bool:
        return self._dirty and time.monotonic() - self._synced > SYNC_S

    def sync(self) -> None:
        if self._dirty and self._descriptor is not None:
            os.fdatasync(self._descriptor)
            self._dirty, self._synced = False, time.monotonic()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self) -> None:
        while True:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._descriptor = os.open(self.path, flags, 0o600)
                self._inode = None
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                same = os.path.samestat(os.fstat(self._descriptor), self.path.stat())
            except FileNotFoundError:
                same = False
            if same:
                break
            self.close()  # it was put aside while we waited
        if self._inode is None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                self._inode = int(json.loads(self._source.read_bytes())["inode"])

    def _remember(self, inode: int) -> None:
        temporary = self._source.with_name(f"{self._source.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"inode": inode}))
        os.replace(temporary, self._source)
        self._inode = inode

    def _reset(self, head: dict[str, Any], size: int) -> bool:
        if size < head["had"] or (head["reset"] == "replaced" and self._inode == head["inode"]):
            return False  # somebody else was faster
        number = 1
        while (kept := self.path.with_name(f"{self.path.name}.gen{number}")).exists():
            number += 1
        event = {"kind": "log_reset", "t": time.time(), "file": self.path.name, "why": head["reset"], "had": size}
        with open(self.path.with_name("mirror.jsonl"), "ab") as notes:
            notes.write(json.dumps({**event, "kept": kept.name}).encode() + b"\n")
        os.rename(self.path, kept)
        # Between these two a kill leaves no file, and the old inode on record: the far side then says `replaced`,
        # and an empty copy is put aside. Nothing is lost or doubled by that.
        self._remember(head["inode"])
        assert self._descriptor is not None
        self._dirty = False
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.close(self._descriptor)
        self._descriptor = descriptor
        return True


def _asked(copy: Copy) -> dict[str, Any]:
    try:
        return copy.asked()
    except OSError as error:
        raise _cannot(copy, error) from error


def _taken(copy: Copy, frame: Frame) -> bool:
    try:
        return copy.take(frame)
    except OSError as error:
        raise _cannot(copy, error) from error


def _cannot(copy: Copy, error: OSError) -> RigbookError:
    """Our own disk is full, or not ours to write to: what is written by now is whole, and the next try goes on."""
    said = error.strerror or str(error)
    return RigbookError("job.copy-failed", f"{copy.path} cannot be written on this machine: {said}")


async def mirror(
    link: Link,
    id: str,
    dest_dir: Path,
    files: Sequence[str] = ("out.log", "events.jsonl"),
    *,
    live: bool = False,
    grew: Callable[[], None] = lambda: None,
) -> bool:
    """Bring the local copies up to date; True when the job is over and they are complete.

    With `live` it goes on until the job is over, calling `grew` whenever something came; a lost link raises.
    """
    jobs = f"{await link.state_dir()}/jobs"
    probe = await link.probe()
    copies = {name: Copy(dest_dir / name, name) for name in files}
    try:
        asked = [await asyncio.to_thread(_asked, copy) for copy in copies.values()]
        stream = probe.stream("follow", jobs=jobs, id=id, files=asked, wait=live)
        async with contextlib.aclosing(stream) as frames:
            async for frame in frames:
                if "ok" in frame.header:
                    return bool(frame.header["result"]["ended"])
                if "file" in frame.header and _taken(copies[frame.header["file"]], frame):
                    grew()
                for copy in copies.values():
                    if copy.due or "idle" in frame.header:
                        await asyncio.to_thread(copy.sync)
        return False
    finally:
        for copy in copies.values():
            with contextlib.suppress(OSError):
                copy.sync()
            copy.close()
