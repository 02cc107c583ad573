"""What `ssh -G` said, kept between commands: asking for 50 hosts costs as much as connecting to them.

One file an answer, in the user's cache directory, each with the marks of the files that the answer stands on. Whoever
may write there could lead us anywhere, so a directory of somebody else's, or open to others, is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

OLD_ENOUGH_S = 2.0  # a file changed since may change again without a trace: the clock of a file system is coarse
KEPT_S = 30 * 86400.0  # an answer of a month ago is asked for again, which clears up after hosts that are gone

Mark = tuple[int, int, int] | None  # a file's mtime (ns), size and inode; None: it is not there


class Answer(NamedTuple):
    marks: dict[str, Mark]
    values: dict[str, tuple[str, ...]]

    @property
    def holds(self) -> bool:
        return all(mark(path) == before for path, before in self.marks.items())


def mark(path: str) -> Mark:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)


def load(key: tuple[str, ...]) -> Answer | None:
    """The answer on disk, if there is one that still holds."""
    if (folder := _folder()) is None:
        return None
    try:
        kept = json.loads(_file(folder, key).read_bytes())
        if kept["key"] != list(key) or not 0 <= time.time() - kept["at"] < KEPT_S:
            return None
        marks: dict[str, Mark] = {path: tuple(before) if before else None for path, before in kept["marks"].items()}
        answer = Answer(marks, {name: tuple(said) for name, said in kept["values"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # not there, or damaged: ask
    return answer if answer.holds else None


def store(key: tuple[str, ...], answer: Answer) -> None:
    """Keep it, unless a file that it stands on was changed a moment ago. A cache that cannot be written is none."""
    newest = max((before[0] for before in answer.marks.values() if before), default=0)
    if time.time_ns() - newest < OLD_ENOUGH_S * 1e9 or (folder := _folder()) is None:
        return
    kept = {"key": key, "at": time.time(), "marks": answer.marks, "values": answer.values}
    file = _file(folder, key)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError, ValueError):
        temporary.write_bytes(json.dumps(kept).encode())
        os.replace(temporary, file)


def _file(folder: Path, key: tuple[str, ...]) -> Path:
    digest = hashlib.sha256("\0".join(key).encode("utf-8", "surrogateescape")).hexdigest()
    return folder / f"{digest[:32]}.json"


def _folder() -> Path | None:
    """Ours, and closed to others; None when there is no such place."""
    from platformdirs import user_cache_path

    folder = user_cache_path("rigbook") / "ssh-config"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = folder.stat()
    except OSError:
        return None
    return folder if info.st_uid == os.geteuid() and not info.st_mode & 0o022 else None
