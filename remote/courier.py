"""The far end of a file copy: one program for both directions. It runs on the other machine from memory, so it is
standard library only, Python 3.9 syntax, and imports nothing of ours.

    put    in: records, then the end          out: one line {"have": bytes of an earlier try, "sha256"} if asked to
                                              resume, then one line of what came of it
    get    in: one line {"offset", "sha256"}  out: one line of what the file is, then records, then the end
           if asked to resume

A record is one byte of kind and eight of length: `D` and that many bytes of the file; `H`, a hole of that many bytes,
for which nothing travels; `E`, the end, and 32 bytes of SHA-256; `X`, an error, and that many bytes of JSON. The
digest runs along with the bytes, over the data and, for a hole, over the record that told of it; of a file without
holes it is simply the SHA-256.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # `typing` takes longer to import than a small file to copy
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO, Any

CHUNK = 1 << 20
HEAD = struct.Struct(">cQ")
STALE = 86400.0  # s after which a part that nobody writes to is not resumed any more
NOEXEC = 8  # ST_NOEXEC of statvfs(3)


def record(kind: bytes, length: int) -> bytes:
    return HEAD.pack(kind, length)


def extents(descriptor: int, begin: int, end: int) -> Iterator[tuple[bool, int]]:
    """(is data, length) over begin..end; one extent of data where the file system knows no holes."""
    at = begin
    while at < end:
        try:
            data = os.lseek(descriptor, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                yield True, end - at
                return
            data = end
        data = min(data, end)
        if data > at:
            yield False, data - at
            at = data
            continue
        hole = min(os.lseek(descriptor, at, os.SEEK_HOLE), end)
        yield True, hole - at
        at = hole


def is_sparse(info: os.stat_result) -> bool:
    return info.st_blocks * 512 < info.st_size


def digest_of(descriptor: int, size: int, digest: Any) -> bool:
    """Take the first `size` bytes of a file into the digest; those of its holes as records, as the sender did."""
    info = os.fstat(descriptor)
    parts = extents(descriptor, 0, size) if is_sparse(info) else [(True, size)]
    at = 0
    for is_data, length in parts:
        end = at + length
        if not is_data:
            digest.update(record(b"H", length))
            at = end
        while at < end:
            data = os.pread(descriptor, min(CHUNK, end - at), at)
            if not data:
                return False
            digest.update(data)
            at += len(data)
    return True


def expand(path: str) -> bytes:
    if path == "~" or path.startswith("~/"):
        path = os.path.expanduser("~") + path[1:]
    return os.fsencode(path)


def fail(out: IO[bytes], number: int, what: str) -> int:
    say(out, {"errno": errno.errorcode.get(number, str(number)), "message": what})
    return 74


def say(out: IO[bytes], answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()


# ── put ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def put(ask: dict[str, Any], source: IO[bytes], out: IO[bytes]) -> int:
    asked = expand(ask["path"])
    # A link is written through: what it points to gets the new content, and the link stays one.
    final = os.path.realpath(asked) if os.path.islink(asked) else asked
    before = None
    with contextlib.suppress(FileNotFoundError):
        before = os.stat(final)
    if before is not None and stat.S_ISDIR(before.st_mode):
        return fail(out, errno.EISDIR, os.strerror(errno.EISDIR))
    if before is not None and not stat.S_ISREG(before.st_mode):
        return fail(out, 0, "special file")
    if asked.endswith(b"/"):
        return fail(out, errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    folder, name = os.path.split(final)
    folder = folder or b"."
    clear_stale(folder, name, ask["key"])
    part, descriptor, kept = open_part(folder, name, ask["key"])
    done = False
    try:
        have, digest = 0, hashlib.sha256()
        if kept:
            have = min(os.fstat(descriptor).st_size, ask["size"])
            if is_sparse(os.fstat(descriptor)) or not digest_of(descriptor, have, digest):
                have, digest = 0, hashlib.sha256()
        if ask["resume"]:
            say(out, {"have": have, "sha256": digest.hexdigest()})
            have = struct.unpack(">Q", exactly(source, 8))[0]
            if have == 0:
                digest = hashlib.sha256()
        os.ftruncate(descriptor, have)
        os.lseek(descriptor, have, os.SEEK_SET)
        if not receive(source, descriptor, digest):
            raise ValueError("the digests differ")
        size = os.fstat(descriptor).st_size
        if size != ask["size"]:
            raise ValueError(f"{size} of {ask['size']} bytes arrived")
        if before is not None and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            with contextlib.suppress(PermissionError):  # root that writes into somebody's file leaves it theirs
                os.fchown(descriptor, before.st_uid, before.st_gid)
        os.fchmod(descriptor, ask["mode"])
        os.fsync(descriptor)
        os.replace(part, final)
        done = True
        sync_folder(folder)
    except EOFError:
        # The link was lost. What came of a large file waits for the next try.
        done = kept_worth(ask, descriptor) and keep(folder, name, ask["key"], part)
        return 75
    except ValueError as error:
        return fail(out, errno.EBADMSG, str(error))
    finally:
        if not done:
            os.unlink(part)
        os.close(descriptor)
    try:
        noexec = bool(os.statvfs(folder).f_flag & NOEXEC)
    except OSError:
        noexec = False
    told: dict[str, Any] = {"sha256": digest.hexdigest(), "size": size, "noexec": noexec}
    if final != asked:
        told["through"] = os.fsdecode(final)
    say(out, told)
    return 0


def kept_worth(ask: dict[str, Any], descriptor: int) -> bool:
    return bool(ask["key"]) and os.fstat(descriptor).st_size > 0


def part_name(name: bytes, key: str) -> bytes:
    # Cut, so that a name of the greatest length has room for the rest.
    return b"." + name[:150] + b"." + key.encode() + b".part"


def open_part(folder: bytes, name: bytes, key: str) -> tuple[bytes, int, bool]:
    """A file of our own to write into: (path, descriptor, whether it holds an earlier try)."""
    theirs = -1
    if key:
        path = os.path.join(folder, part_name(name, key))
        theirs = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(theirs, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return path, theirs, True
        except OSError:
            pass  # somebody copies the same file just now, or still waits on a link that was cut: do it beside them
    path = os.path.join(folder, part_name(name, os.urandom(6).hex()))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody clears it away either
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if theirs >= 0:
        # What they have is a good beginning: both ends compare it before it is gone on with.
        with contextlib.suppress(OSError):
            while data := os.read(theirs, CHUNK):
                write_all(descriptor, data)
        os.close(theirs)
    return path, descriptor, theirs >= 0


def keep(folder: bytes, name: bytes, key: str, part: bytes) -> bool:
    """Leave our part where the next try looks for it. False when it is not ours to give: somebody writes there."""
    kept = os.path.join(folder, part_name(name, key))
    if kept == part:
        return True
    try:
        descriptor = os.open(kept, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(part, kept)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def clear_stale(folder: bytes, name: bytes, key: str) -> None:
    """Parts of this very name whose writer is gone and that are too old to be gone on with."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    head = b"." + name[:150] + b"."
    for other in names:
        if not (other.startswith(head) and other.endswith(b".part")) or other == part_name(name, key or ""):
            continue
        path = os.path.join(folder, other)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime > STALE:
                os.unlink(path)
        except OSError:
            pass
        finally:
            os.close(descriptor)


def exactly(source: IO[bytes], length: int) -> bytes:
    data = source.read(length)
    if len(data) < length:
        raise EOFError
    return data


def receive(source: IO[bytes], descriptor: int, digest: Any) -> bool:
    """Write what the records say. True when the digest at their end is ours."""
    hole_last = False
    while True:
        kind, length = HEAD.unpack(exactly(source, HEAD.size))
        if kind == b"E":
            if hole_last:
                os.ftruncate(descriptor, os.lseek(descriptor, 0, os.SEEK_CUR))
            return bool(exactly(source, length) == digest.digest())
        if kind == b"H":
            digest.update(record(kind, length))
            os.lseek(descriptor, length, os.SEEK_CUR)
            hole_last = True
            continue
        if kind != b"D":
            raise ValueError("not a record")
        hole_last = False
        while length:
            data = exactly(source, min(CHUNK, length))
            digest.update(data)
            length -= len(data)
            write_all(descriptor, data)


def sync_folder(folder: bytes) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some file systems cannot sync a directory
    finally:
        os.close(descriptor)


# ── get ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def get(ask: dict[str, Any], source: IO[bytes], out: IO[bytes]) -> int:
    path = expand(ask["path"])
    info = os.stat(path)
    if stat.S_ISDIR(info.st_mode):
        return fail(out, errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(info.st_mode):
        return fail(out, 0, "special file")
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    info = os.fstat(descriptor)
    # The size is fixed now: of a file that grows meanwhile (a log), what there was is copied.
    size, sparse = info.st_size, is_sparse(info)
    resume = ask["resume_from"] is not None and size >= ask["resume_from"] and not sparse
    told = {"size": size, "mode": stat.S_IMODE(info.st_mode), "mtime_ns": info.st_mtime_ns, "resume": resume}
    if os.path.islink(path):
        told["through"] = os.fsdecode(os.path.realpath(path))
    say(out, told)
    offset, digest = 0, hashlib.sha256()
    if resume:
        wanted = json.loads(source.readline() or b'{"offset": 0}')
        if 0 < wanted["offset"] <= size:
            offset = wanted["offset"]
            if not digest_of(descriptor, offset, digest) or digest.hexdigest() != wanted["sha256"]:
                offset, digest = 0, hashlib.sha256()
        say(out, {"offset": offset})
    for is_data, length in extents(descriptor, offset, size) if sparse else [(True, size - offset)]:
        if not is_data:
            digest.update(record(b"H", length))
            out.write(record(b"H", length))
            offset += length
        end = offset + length if is_data else offset
        while offset < end:
            data = os.pread(descriptor, min(CHUNK, end - offset), offset)
            if not data:
                why = json.dumps({"errno": "EBADMSG", "message": "the file shrank while it was read"}).encode()
                out.write(record(b"X", len(why)) + why)
                out.flush()
                return 74
            digest.update(data)
            offset += len(data)
            out.write(record(b"D", len(data)))
            out.write(data)
    out.write(record(b"E", 32) + digest.digest())
    out.flush()
    return 0


def main(ask: dict[str, Any], source: IO[bytes], out: IO[bytes]) -> int:
    os.umask(0o077)
    try:
        return {"put": put, "get": get}[ask["do"]](ask, source, out)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 75
    except OSError as error:
        return fail(out, error.errno or 0, error.strerror or str(error))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[2]), sys.stdin.buffer, sys.stdout.buffer))
