"""A file of a host to this machine: `files.get` and `files.read`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from remote import courier, shell
from remote.connect import Link
from remote.copying import LARGE, Copied, Progress, call, check, converses, here, program, python_of, refused
from remote.result import Result
from state.errors import RigbookError


async def read(link: Link, remote: str, offset: int = 0, limit: int | None = None) -> bytes:
    """The bytes from `offset` on, `limit` of them at most."""
    end = f"|head -c {int(limit)}" if limit is not None else ""
    script = f"LC_ALL=C;export LC_ALL;exec <{shell.path(remote)}||exit 66;tail -c +{int(offset) + 1}{end}"
    return check(await link.run(script=script), remote).stdout


async def get(link: Link, remote: str, local: Path, *, progress: Progress | None = None) -> Copied:
    """Copy a remote file here, with its mode. The name holds what it held before until all of it is here."""
    if os.path.islink(local):
        local = Path(os.path.realpath(local))
    try:
        if local.is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if local.exists() and not local.is_file():
            raise OSError(0, "special file")
        local.parent.mkdir(parents=True, exist_ok=True)
        python = await python_of(link)
        if python is None:
            return await _get_by_sh(link, remote, local, progress)
        return await _Get(link, python, remote, local, progress).run()
    except OSError as error:
        raise here(error, str(local)) from error


class _Get:
    """Reads the courier's records as they come."""

    def __init__(self, link: Link, python: str, remote: str, local: Path, progress: Progress | None) -> None:
        self.link, self.python, self.remote, self.local = link, python, remote, local
        self.progress = progress or (lambda done, total: None)
        self.held = bytearray()
        self.told: dict[str, Any] | None = None
        self.offset: int | None = None  # where the records begin
        self.at = 0
        self.left = 0  # bytes of the record of data that is being read
        self.digest = hashlib.sha256()
        self.theirs = b""
        self.part: Path | None = None
        self.descriptor = -1
        self.keep = False
        self.have: tuple[int, Any] = 0, None
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.failure: RigbookError | None = None

    async def run(self) -> Copied:
        ask = {"do": "get", "path": self.remote, "resume_from": LARGE if converses(self.link) else None}
        errors = bytearray()
        try:
            try:
                found = await self.link.stream(
                    call(self.python, ask), feed=self._feed(), out=self._take, err=errors.extend
                )
            finally:
                if not self.reply.done():
                    self.reply.cancel()
            if self.failure:
                raise self.failure
            result = Result(found.state, found.exit, found.signal, b"", bytes(errors), found.reason, found.host)
            if not self.theirs:
                # What came of a large file waits for the next try.
                self.keep = result.state == "unknown" and self.told is not None and self.told["resume"]
                result.check(self.remote)
                why = f": {found.reason}" if found.reason else ""
                raise RigbookError("file.short", f"{self.remote}: only a part arrived{why}", host=self.link.name)
            result.check(self.remote)
            assert self.told is not None and self.part is not None
            if self.theirs != self.digest.digest() or self.at != self.told["size"]:
                raise RigbookError("file.mismatch", f"{self.remote}: the digests differ", host=self.link.name)
            await asyncio.to_thread(self._finish)
        except asyncio.CancelledError:
            self.keep = self.told is not None and self.told["resume"]
            raise
        finally:
            self._close()
        holes, through = self.told.get("holes", False), self.told.get("through", "")
        return Copied(
            self.told["size"],
            None if holes else self.theirs.hex(),
            True,
            self.offset or 0,
            through,
        )

    async def _feed(self) -> AsyncIterator[bytes]:
        yield program()
        if not converses(self.link):
            return
        with contextlib.suppress(asyncio.CancelledError):
            yield await self.reply

    async def _take(self, data: bytes) -> None:
        self.held += data
        while self.held and self.failure is None and not self.theirs:
            if self.told is None or self.offset is None:
                line, found, rest = bytes(self.held).partition(b"\n")
                if not found:
                    return
                self.held = bytearray(rest)
                await asyncio.to_thread(self._header, json.loads(line))
                continue
            if self.left:
                # What has come is written in one go, in a thread: hashing and a slow disk leave the loop alone.
                now = bytes(self.held[: self.left])
                del self.held[: self.left]
                self.left -= len(now)
                await asyncio.to_thread(self._write, now)
                self.at += len(now)
                self.progress(self.at, self.told["size"])
                continue
            if len(self.held) < courier.HEAD.size:
                return
            kind, length = courier.HEAD.unpack_from(self.held)
            if kind in (b"E", b"X") and len(self.held) < courier.HEAD.size + length:
                return
            del self.held[: courier.HEAD.size]
            if kind == b"D":
                self.left = length
            elif kind == b"H":
                self.told["holes"] = True
                self.digest.update(courier.record(b"H", length))
                self.at += length
                self.progress(self.at, self.told["size"])
            elif kind == b"E":
                self.theirs = bytes(self.held[:length])
            elif kind == b"X":
                self.failure = refused(json.loads(self.held[:length]), self.remote, self.link.name)
            else:
                self.failure = RigbookError("file.mismatch", f"{self.remote}: not a record", host=self.link.name)

    def _header(self, told: dict[str, Any]) -> None:
        if "errno" in told:
            self.failure = refused(told, self.remote, self.link.name)
            return
        if self.told is None:
            self.told = told
            version = f"{told['size']} {told['mtime_ns']} {self.remote}".encode("utf-8", "surrogateescape")
            key = hashlib.sha256(version).hexdigest()[:16]
            self._open(key if told["resume"] else "")
            if not told["resume"]:
                self.offset = 0
                return
            have, digest = os.fstat(self.descriptor).st_size, hashlib.sha256()
            if not 0 < have <= told["size"] or not courier.digest_of(self.descriptor, have, digest):
                have, digest = 0, hashlib.sha256()
            self.have = have, digest
            answer = json.dumps({"offset": have, "sha256": digest.hexdigest()}).encode() + b"\n"
            self.link_loop.call_soon_threadsafe(self._answer, answer)
            return
        self.offset = self.at = told["offset"]
        if self.at:
            self.digest = self.have[1]
        os.ftruncate(self.descriptor, self.at)

    def _answer(self, line: bytes) -> None:
        if not self.reply.done():
            self.reply.set_result(line)

    @property
    def link_loop(self) -> asyncio.AbstractEventLoop:
        return self.reply.get_loop()

    def _open(self, key: str) -> None:
        folder, name = os.path.split(os.fsencode(self.local))
        courier.clear_stale(folder or b".", name, key)
        path, self.descriptor, _ = courier.open_part(folder or b".", name, key)
        self.part = Path(os.fsdecode(path))

    def _write(self, data: bytes) -> None:
        self.digest.update(data)
        view, at = memoryview(data), self.at
        while view:
            count = os.pwrite(self.descriptor, view, at)
            view, at = view[count:], at + count

    def _finish(self) -> None:
        assert self.told is not None and self.part is not None
        os.ftruncate(self.descriptor, self.told["size"])  # a hole at the end
        os.fchmod(self.descriptor, self.told["mode"] & 0o777)
        os.fsync(self.descriptor)
        os.replace(self.part, self.local)
        self.part = None
        courier.sync_folder(os.fsencode(self.local.parent))

    def _close(self) -> None:
        if self.descriptor >= 0:
            if self.part is not None and not (self.keep and self.at):
                with contextlib.suppress(FileNotFoundError):
                    self.part.unlink()
            os.close(self.descriptor)


async def _get_by_sh(link: Link, remote: str, local: Path, progress: Progress | None) -> Copied:
    """Without a Python there: the size, the bytes, and the digest if it has a sha256sum."""
    script = (
        f"LC_ALL=C;export LC_ALL;f={shell.path(remote)};"
        '[ ! -d "$f" ]||{ echo "Is a directory" >&2;exit 74;};'
        '[ ! -e "$f" ]||[ -f "$f" ]||{ echo "special file" >&2;exit 74;};'
        'exec <"$f"||exit 66;s=$(wc -c <"$f")||exit 66;echo $((s));head -c $((s));'
        'head -c $((s)) <"$f"|sha256sum 2>/dev/null'
    )
    folder, name = os.path.split(os.fsencode(local))
    path, descriptor, _ = courier.open_part(folder or b".", name, "")
    head, tail, errors = bytearray(), bytearray(), bytearray()
    expected, got, digest = -1, 0, hashlib.sha256()
    try:

        def sink(data: bytes) -> None:
            nonlocal expected, got
            if expected < 0:
                head.extend(data)
                line, found, data = bytes(head).partition(b"\n")
                if not found:
                    return
                expected = int(line)
            own = data[: expected - got]
            tail.extend(data[len(own) :])
            digest.update(own)
            got += len(own)
            view = memoryview(own)
            while view:
                view = view[os.write(descriptor, view) :]
            if progress:
                progress(got, expected)

        found = await link.stream(script=script, out=sink, err=errors.extend)
        result = Result(found.state, found.exit, found.signal, b"", bytes(errors), found.reason, link.name)
        if not (result.state == "exited" and got == expected):
            check(result, remote)
        if got != expected:
            raise RigbookError("file.short", f"{remote}: {got} of {expected} bytes arrived", host=link.name)
        theirs = bytes(tail).split(b" ", 1)[0].decode("ascii", "replace")
        if len(theirs) == 64 and theirs != digest.hexdigest():
            raise RigbookError("file.mismatch", f"{remote}: the digests differ", host=link.name)
        os.fsync(descriptor)
        os.replace(path, os.fsencode(local))
        path = b""
    finally:
        os.close(descriptor)
        if path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    return Copied(got, digest.hexdigest(), len(theirs) == 64, by="sh")
