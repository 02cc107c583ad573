"""A local file to a host: `files.put` and `files.write`."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import io
import json
import os
import secrets
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from remote import courier, shell
from remote.connect import CHUNK, Link
from remote.copying import (
    LARGE,
    PIECE,
    PREFIX,
    SMALL,
    Copied,
    Progress,
    call,
    check,
    converses,
    here,
    program,
    python_of,
    refused,
)
from remote.proxmox import bootstrap_only
from remote.result import Result
from state.errors import UNREACHABLE, RigbookError


async def write(link: Link, remote: str, data: bytes, mode: int = 0o600) -> None:
    """Replace `remote` by `data`; durable when this returns."""
    python = await python_of(link)
    if python is None:
        await _put_by_sh(link, remote, _blocks(data), len(data), mode, hashlib.sha256(data).hexdigest())
        return
    ask = {"do": "put", "path": remote, "size": len(data), "mode": mode, "key": "", "resume": False}
    body = courier.record(b"D", len(data)) + data if data else b""
    digest = hashlib.sha256(data).digest()
    stdin = program() + body + courier.record(b"E", 32) + digest
    _outcome(await link.run(call(python, ask), stdin=stdin), remote, digest.hex())


async def put(
    link: Link, local: Path, remote: str, mode: int | None = None, *, progress: Progress | None = None
) -> Copied:
    """Copy a local file; `mode` None takes over the local one. A name that ends in a slash is a directory's."""
    if remote.endswith("/") and remote.strip("/"):
        remote += local.name
    try:
        # Without O_NONBLOCK, opening a pipe that nobody writes to would wait for ever.
        descriptor = os.open(local, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise here(error, str(local)) from error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        info = os.fstat(file.fileno())
        if stat.S_ISDIR(info.st_mode):
            raise here(OSError(errno.EISDIR, os.strerror(errno.EISDIR)), str(local))
        if not stat.S_ISREG(info.st_mode):
            raise here(OSError(0, "special file"), str(local))
        if not converses(link) and info.st_size > SMALL:
            raise bootstrap_only(link)
        permissions = stat.S_IMODE(mode or info.st_mode)
        python = await python_of(link)
        if python is not None:
            return await _Put(link, python, file, info, remote, permissions, progress).run()
        digest = await asyncio.to_thread(_digest_of, file, info.st_size)
        feed = _counted(_pieces(file, info.st_size), info.st_size, progress)
        return await _put_by_sh(link, remote, feed, info.st_size, permissions, digest)


class _Put:
    def __init__(
        self, link: Link, python: str, file: io.FileIO, info: os.stat_result, remote: str, mode: int,
        progress: Progress | None,
    ) -> None:  # fmt: skip
        self.link, self.python, self.file, self.info, self.remote = link, python, file, info, remote
        self.progress = progress or (lambda done, total: None)
        self.mode = mode
        self.sparse = courier.is_sparse(info)
        key = _key(file.fileno(), info) if info.st_size >= LARGE and not self.sparse else ""
        self.ask = {"do": "put", "path": remote, "size": info.st_size, "mode": mode, "key": key, "resume": bool(key)}
        self.digest = hashlib.sha256()
        self.answers = bytearray()
        self.answered = asyncio.Event()
        self.resumed = 0

    async def run(self) -> Copied:
        errors = bytearray()
        work = asyncio.ensure_future(
            self.link.stream(
                call(self.python, self.ask), feed=self._records(), out=self._answer, err=errors.extend,
                bulk=self.info.st_size >= LARGE,
            )
        )  # fmt: skip
        # An end without an answer must not leave the feed waiting for one.
        work.add_done_callback(lambda _: self.answered.set())
        try:
            found = await work
        except BaseException:
            work.cancel()
            raise
        result = Result(
            found.state, found.exit, found.signal, bytes(self.answers), bytes(errors), found.reason, found.host
        )
        told = _outcome(result, self.remote, self.digest.hexdigest())
        return Copied(
            self.info.st_size, None if self.sparse else told["sha256"], True, self.resumed, told.get("through", ""),
            told["noexec"] and bool(self.mode & 0o111),
        )  # fmt: skip

    def _answer(self, data: bytes) -> None:
        self.answers += data
        if b"\n" in data:
            self.answered.set()

    async def _records(self) -> AsyncIterator[bytes]:
        yield program()
        at, size = 0, self.info.st_size
        if self.ask["resume"]:
            await self.answered.wait()
            offer = json.loads(bytes(self.answers).partition(b"\n")[0] or b'{"errno": 0}')
            if "errno" in offer:
                return  # it has told why not
            if 0 < offer["have"] <= size:
                have = await asyncio.to_thread(self._same, offer["have"], offer["sha256"])
                at = self.resumed = have
            yield at.to_bytes(8, "big")
        for is_data, length in courier.extents(self.file.fileno(), at, size) if self.sparse else [(True, size - at)]:
            if not is_data:
                self.digest.update(courier.record(b"H", length))
                yield courier.record(b"H", length)
                at += length
                self.progress(at, size)
                continue
            async for piece in self._piecewise(at, at + length):
                yield piece
                at += len(piece) - courier.HEAD.size
                self.progress(at, size)
        yield courier.record(b"E", 32) + self.digest.digest()

    async def _piecewise(self, begin: int, end: int) -> AsyncIterator[bytes]:
        # The next piece is read while this one is encrypted and sent.
        ahead = asyncio.ensure_future(asyncio.to_thread(self._piece, begin, end))
        while begin < end:
            piece = await ahead
            begin += len(piece) - courier.HEAD.size
            if begin < end:
                ahead = asyncio.ensure_future(asyncio.to_thread(self._piece, begin, end))
            yield piece

    def _piece(self, begin: int, end: int) -> bytes:
        data = os.pread(self.file.fileno(), min(PIECE, end - begin), begin)
        if not data:
            raise RigbookError("file.mismatch", f"{self.file.name} (on this machine) shrank while it was copied")
        self.digest.update(data)
        return courier.record(b"D", len(data)) + data

    def _same(self, have: int, theirs: str) -> int:
        """How much of what an earlier try brought is ours: all of it, or nothing."""
        digest = hashlib.sha256()
        if courier.digest_of(self.file.fileno(), have, digest) and digest.hexdigest() == theirs:
            self.digest = digest
            return have
        return 0


def _key(descriptor: int, info: os.stat_result) -> str:
    """Names one version of one file, so that a part is gone on with only by the copy that it is of."""
    text = b"%d %d " % (info.st_size, info.st_mtime_ns) + os.pread(descriptor, PREFIX, 0)
    return hashlib.sha256(text).hexdigest()[:16]


def _outcome(result: Result, what: str, digest: str) -> dict[str, Any]:
    """The last line that the courier said, checked against our own digest."""
    lines = result.stdout.splitlines()
    told: dict[str, Any] = {}
    with contextlib.suppress(ValueError, IndexError):
        told = json.loads(lines[-1])
    if "errno" in told:
        raise refused(told, what, result.host)
    if result.state == "exited" and result.exit == 75:
        raise RigbookError(
            "file.short", f"{what}: the link was lost on the way", host=result.host, exit_code=UNREACHABLE
        )
    result.check(what)
    if told.get("sha256") != digest:
        raise RigbookError("file.mismatch", f"{what}: the digests differ", host=result.host)
    return told


async def _put_by_sh(link: Link, remote: str, feed: AsyncIterator[bytes], size: int, mode: int, digest: str) -> Copied:
    """Without a Python there. The digest is compared where there is a sha256sum."""
    folder, slash, name = remote.rpartition("/")
    part = f"{folder}{slash}.{name[:60]}.{secrets.token_hex(6)}.part"
    script = (
        f"LC_ALL=C;export LC_ALL;umask 077;f={shell.path(remote)};t={shell.path(part)};"
        '[ ! -d "$f" ]||{ echo "Is a directory" >&2;exit 74;};'
        '[ ! -e "$f" ]||[ -f "$f" ]||{ echo "special file" >&2;exit 74;};'
        'if [ -L "$f" ];then f=$(readlink -f "$f")||exit 74;fi;'
        'e=$( { dd of="$t" bs=262144 conv=fsync >/dev/null; } 2>&1)||{ printf %s "$e" >&2;rm -f "$t";exit 74;};'
        f'[ "$(wc -c <"$t")" -eq {size} ]||{{ rm -f "$t";exit 75;}};'
        'if s=$(sha256sum <"$t" 2>/dev/null);then '
        f'[ "${{s%% *}}" = {digest} ]||{{ rm -f "$t";echo "the digests differ" >&2;exit 74;}};echo checked;fi;'
        f'chmod {mode:o} "$t"&&mv -f "$t" "$f"||{{ rm -f "$t";exit 73;}}'
    )
    out, errors = bytearray(), bytearray()
    if size <= SMALL:
        result = await link.run(script=script, stdin=b"".join([piece async for piece in feed]))
    else:
        found = await link.stream(script=script, feed=feed, out=out.extend, err=errors.extend)
        result = Result(found.state, found.exit, found.signal, bytes(out), bytes(errors), found.reason, link.name)
    if result.state == "exited" and result.exit == 75:
        raise RigbookError("file.short", f"{remote}: only a part arrived", host=link.name)
    check(result, remote)
    return Copied(size, digest, b"checked" in result.stdout, by="sh")


async def _blocks(data: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(data), CHUNK):
        yield data[at : at + CHUNK]


async def _pieces(file: io.FileIO, size: int) -> AsyncIterator[bytes]:
    at = 0
    while at < size:
        data = await asyncio.to_thread(os.pread, file.fileno(), min(CHUNK, size - at), at)
        if not data:
            return
        at += len(data)
        yield data


async def _counted(feed: AsyncIterator[bytes], size: int, progress: Progress | None) -> AsyncIterator[bytes]:
    done = 0
    async for data in feed:
        yield data
        done += len(data)
        if progress:
            progress(done, size)


def _digest_of(file: io.FileIO, size: int) -> str:
    digest, at = hashlib.sha256(), 0
    while at < size and (data := os.pread(file.fileno(), min(PIECE, size - at), at)):
        digest.update(data)
        at += len(data)
    return digest.hexdigest()
