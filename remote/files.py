"""Files on a host. A name either holds the whole of a file or what it held before: never a part.

`sftp` is slow in Python and breaks when a login script prints, so files travel as the input and output of
ordinary commands. Every write goes to a temporary name, is counted, synced and renamed: a lost link reads as
end of input on the far side, so without the count half a file would take the name of a whole one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import secrets
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path, PurePosixPath

from remote import shell
from remote.connect import CHUNK, Feed, Link
from remote.result import Result
from state.errors import USAGE, RigbookError

# What the C locale's strerror says -> the error's id. Users act differently on each of these.
_REASONS = {
    "No space left on device": "file.no-space",
    "Disk quota exceeded": "file.quota",
    "Read-only file system": "file.read-only",
    "Permission denied": "file.denied",
    "No such file or directory": "file.not-found",
    "cannot open": "file.not-found",
    "Is a directory": "file.is-directory",
    "Not a directory": "file.not-directory",
}


def check(result: Result, what: str) -> Result:
    if result.state == "exited" and result.exit:
        text = result.error_text()
        for words, id in _REASONS.items():
            if words in text:
                raise RigbookError(id, f"{what}: {words}", host=result.host)
    return result.check(what)


async def _store(link: Link, remote: str, feed: Feed, size: int, mode: int | None) -> None:
    target, temporary = shell.path(remote), shell.path(f"{remote}.{secrets.token_hex(4)}.part")
    chmod = f'chmod {mode:o} "$t"&&' if mode is not None else ""
    script = (
        f"LC_ALL=C;export LC_ALL;umask 077;t={temporary};"
        f'if dd of="$t" bs=262144 conv=fsync 2>"$t.err";then rm -f "$t.err";'
        f'else cat "$t.err" >&2;rm -f "$t" "$t.err";exit 74;fi;'
        f'[ "$(wc -c <"$t")" -eq {size} ]||{{ rm -f "$t";echo "only a part arrived" >&2;exit 75;}};'
        f'{chmod}mv -f "$t" {target}||{{ rm -f "$t";exit 73;}}'
    )
    errors = bytearray()
    result = await link.stream(script=script, feed=feed, out=lambda _: None, err=errors.extend)
    check(Result(result.state, result.exit, result.signal, b"", bytes(errors), result.reason, link.name), remote)


async def write(link: Link, remote: str, data: bytes, mode: int = 0o600) -> None:
    """Replace `remote` by `data`; durable when this returns."""
    await _store(link, remote, data, len(data), mode)


async def put(link: Link, local: Path, remote: str, mode: int | None = None) -> None:
    """Copy a local file; `mode` None takes over the local one."""
    try:
        file = await asyncio.to_thread(open, local, "rb")
    except OSError as error:
        raise RigbookError("file.not-found", f"{local}: {error.strerror}", exit_code=USAGE) from error
    with file:
        info = os.fstat(file.fileno())
        await _store(link, remote, _chunks(file, info.st_size), info.st_size, (mode or info.st_mode) & 0o7777)


async def _chunks(file: io.BufferedIOBase, size: int) -> AsyncIterator[bytes]:
    # The size is fixed when we start: a file that grows meanwhile (a log) is copied as it was.
    while size > 0:
        data = await asyncio.to_thread(file.read, min(CHUNK, size))
        if not data:
            return
        size -= len(data)
        yield data


async def read(link: Link, remote: str, offset: int = 0, limit: int | None = None) -> bytes:
    """The bytes from `offset` on, `limit` of them at most."""
    end = f"|head -c {int(limit)}" if limit is not None else ""
    script = f"LC_ALL=C;export LC_ALL;exec <{shell.path(remote)}||exit 66;tail -c +{int(offset) + 1}{end}"
    return check(await link.run(script=script), remote).stdout


async def get(link: Link, remote: str, local: Path) -> None:
    """Copy a remote file here. The size is asked for first, so that a cut copy is never taken for a whole one."""
    script = f"LC_ALL=C;export LC_ALL;exec <{shell.path(remote)}||exit 66;wc -c <{shell.path(remote)};exec cat"
    errors, head, expected, got = bytearray(), bytearray(), -1, 0
    local.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{local.name}.", dir=local.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:

            def sink(data: bytes) -> None:
                nonlocal expected, got
                if expected < 0:
                    head.extend(data)
                    line, found, data = bytes(head).partition(b"\n")
                    if not found:
                        return
                    expected = int(line)
                got += len(data)
                file.write(data)

            result = await link.stream(script=script, out=sink, err=errors.extend)
            file.flush()
            os.fsync(file.fileno())
        check(Result(result.state, result.exit, result.signal, b"", bytes(errors), result.reason, link.name), remote)
        if got < expected:
            raise RigbookError("file.short", f"{remote}: {got} of {expected} bytes arrived", host=link.name)
        os.replace(name, local)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def pack(tree: Mapping[str, bytes | Path]) -> bytes:
    """A tar of {relative name: content}. The same tree gives the same bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted(tree):
            parts = PurePosixPath(name).parts
            if not parts or PurePosixPath(name).is_absolute() or ".." in parts:
                raise RigbookError("file.bad-name", f"{name!r} leads out of its directory", exit_code=USAGE)
            content = tree[name]
            data = content if isinstance(content, bytes) else content.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mode = 0o600 if isinstance(content, bytes) else 0o700 if os.access(content, os.X_OK) else 0o600
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


async def put_tree(link: Link, tree: Mapping[str, bytes | Path], remote_dir: str) -> None:
    """Files into `remote_dir` (made when missing), in one round trip. After a cut, some of them may be there."""
    data = await asyncio.to_thread(pack, tree)
    where = shell.path(remote_dir)
    script = f"LC_ALL=C;export LC_ALL;umask 077;mkdir -p {where}&&cd {where}&&exec tar -xf -"
    check(await link.run(script=script, stdin=data), remote_dir)
