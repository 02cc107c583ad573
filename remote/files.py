"""Single files on a host. A name either holds the whole of a file or what it held before: never a part.

`sftp` is slow in Python, breaks when a login script prints, and may be switched off, so files travel as the input
and output of an ordinary program: `courier.py`, sent over the link and run from memory, and two lines of sh where
there is no Python. Every write goes to a name of its own, is counted, compared by SHA-256, synced and renamed: a lost
link reads as end of input on the far side, so without the count half a file would take the name of a whole one.
Large files go on where an earlier try was cut, after both ends have agreed on what is there.

Directories are in trees.py and sync.py.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from remote import shell
from remote.connect import Link
from remote.copying import Copied, Progress, check
from remote.download import get, read
from remote.sync import sync_tree
from remote.trees import TreeCopied, get_tree, put_tree
from remote.upload import put, write
from state.errors import USAGE, RigbookError

__all__ = [
    "Copied",
    "Progress",
    "TreeCopied",
    "check",
    "get",
    "get_tree",
    "is_directory",
    "pack",
    "put",
    "put_tree",
    "read",
    "sync_tree",
    "write",
]


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


async def is_directory(link: Link, remote: str) -> bool:
    """Whether the name is a directory's there, or a link to one."""
    found = await link.run(script=f"[ -d {shell.path(remote)} ]", timeout=20)
    if found.exit == 1:
        return False
    return found.check(f"looking at {remote}").ok
