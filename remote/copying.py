"""What both directions of a copy share: words for what went wrong, the far program, what a copy came to."""

from __future__ import annotations

import errno
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from remote.connect import Link
from remote.result import Result
from state.errors import USAGE, RigbookError

Progress = Callable[[int, int], None]  # bytes that are there, bytes in all

LARGE = 8 << 20  # bytes from which a cut copy is gone on with
PREFIX = 1 << 20  # bytes that tell one version of a large file from another, beside its size and time
PIECE = 1 << 20
SMALL = 512 << 10  # bytes that go in one call, on routes that cannot stream

BOOT = "import sys,zlib;r=sys.stdin.buffer;n=int(sys.argv[1]);exec(zlib.decompress(r.read(n)))"

# Users act differently on each of these.
ERRNO = {
    "ENOSPC": "file.no-space",
    "EDQUOT": "file.quota",
    "EROFS": "file.read-only",
    "EACCES": "file.denied",
    "EPERM": "file.denied",
    "ENOENT": "file.not-found",
    "EISDIR": "file.is-directory",
    "ENOTDIR": "file.not-directory",
    "ENAMETOOLONG": "file.bad-name",
    "ELOOP": "file.link-loop",
    "EFBIG": "file.too-big",
    "EIO": "file.io",
    "EBADMSG": "file.mismatch",
    "0": "file.special",
}
# What the C locale's strerror says, for what sh and its tools tell us.
REASONS = {
    "No space left on device": "file.no-space",
    "Disk quota exceeded": "file.quota",
    "Read-only file system": "file.read-only",
    "Permission denied": "file.denied",
    "Operation not permitted": "file.denied",
    "No such file or directory": "file.not-found",
    "cannot open": "file.not-found",
    "Is a directory": "file.is-directory",
    "Not a directory": "file.not-directory",
    "File name too long": "file.bad-name",
    "Too many levels of symbolic links": "file.link-loop",
    "File too large": "file.too-big",
    "Input/output error": "file.io",
    "special file": "file.special",
    "the digests differ": "file.mismatch",
}
HINTS = {
    "file.is-directory": "Name the file in it, or end the name with a slash.",
    "file.special": "It is a device, a socket or a pipe; only files and directories are copied.",
}


@dataclass(frozen=True)
class Copied:
    """What a copy came to, for people and for the book."""

    size: int
    sha256: str | None  # None: the file has holes, or the far side has no way to compute it
    checked: bool = True  # both ends computed the same digest
    resumed: int = 0  # bytes that an earlier try had brought
    through: str = ""  # the name was a link to this
    noexec: bool = False  # it is a program, and nothing can be started from that file system
    by: str = "courier"


def check(result: Result, what: str) -> Result:
    if result.state == "exited" and result.exit:
        text = result.error_text()
        for words, id in REASONS.items():
            if words in text:
                raise RigbookError(id, f"{what}: {words}", host=result.host, hint=HINTS.get(id))
    return result.check(what)


def refused(answer: Mapping[str, Any], what: str, host: str | None) -> RigbookError:
    """The error for an answer of the courier's."""
    id = ERRNO.get(str(answer["errno"]), "file.failed")
    return RigbookError(id, f"{what}: {answer['message']}", host=host, hint=HINTS.get(id))


def here(error: OSError, what: str) -> RigbookError:
    """A local file that cannot be read or written, in the same words."""
    id = ERRNO.get(errno.errorcode.get(error.errno or 0, ""), "file.failed")
    usage = id in ("file.not-found", "file.is-directory", "file.not-directory", "file.special")
    return RigbookError(id, f"{what} (on this machine): {error.strerror}", exit_code=USAGE if usage else 1)


@cache
def program() -> bytes:
    return zlib.compress(resources.files("remote").joinpath("courier.py").read_bytes(), 9)


async def python_of(link: Link) -> str | None:
    try:
        return await link.python()
    except RigbookError as error:
        if error.id != "host.no-python":
            raise
        return None


def converses(link: Link) -> bool:
    """Whether the far end can be answered while it runs. A guest agent takes all input first, and gives all output
    last."""
    from remote.proxmox import AgentLink

    return not isinstance(link, AgentLink)


def call(python: str, ask: Mapping[str, Any]) -> list[str]:
    return [python, "-I", "-S", "-c", BOOT, str(len(program())), json.dumps(ask)]
