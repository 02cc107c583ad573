"""A job's files as a stream, every byte once. Standard library and Python 3.9 syntax only.

The reader tells what it has: a name, an offset (below 0: so many bytes before the end), the inode it came from, and a
digest of its last bytes. A file that is still that one goes on from there; another one (replaced, cut, rewritten) is
said to be, with `reset`, and begins at 0.
Frames, with the bytes behind them:

    {"file": "out.log", "offset": 4096, "inode": 77}           bytes of it
    {"file": "out.log", "offset": 4096, "skip": 1048576}       the log quota dropped so many: go on behind them
    {"file": "out.log", "reset": "replaced", "inode": 78, "had": 4096}
    {"idle": true}                                             all that there is has been sent

and as result {"ended": bool}: whether the job was over BEFORE the last look found nothing. Looked at after, the last
lines that it wrote between the two would be lost.
"""

import hashlib
import os
import time
from typing import Any, Dict, List, Optional, Tuple

from remote.probe import jobdir

CHUNK = 256 << 10
POLL_S = (0.02, 0.06)  # between two looks: while lines come, and later. A line shows within 150 ms
LOOK_S = 1.0  # between two looks at the job's state, which are dearer; a new exit.json is seen at once
TURN = 16 * CHUNK  # bytes of one file before the next has its turn


class File:
    """One file being followed."""

    def __init__(self, directory: str, asked: Dict[str, Any]) -> None:
        self.name = asked["name"]
        if self.name.startswith("/") or ".." in self.name.split("/"):
            raise ValueError("a job's file is named relative to its directory")
        self.directory = directory
        self.path = os.path.join(directory, self.name)
        self.offset = int(asked.get("offset", 0))
        self.inode = asked.get("inode")  # None: the reader does not know, and takes what is there
        self.check = asked.get("check")  # [from, sha256] of what the reader has up to its offset
        self.descriptor: Optional[int] = None

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def pump(self, stream: Any) -> bool:
        """Send what is new; False when there was nothing."""
        if self.descriptor is None and not self._open(stream):
            return False
        sent = 0
        while sent < TURN:
            count = self._piece(stream)
            if not count:
                break
            sent += count
        if sent:
            return True
        return self._moved(stream)

    def _open(self, stream: Any) -> bool:
        try:
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        info = os.fstat(self.descriptor)
        if self.offset < 0:
            self.offset = max(0, info.st_size + self.offset)
        if self.inode is not None and info.st_ino != self.inode:
            # Rotated away while nobody read: its rest first, when it still lies here under another name.
            old = self._find(self.inode)
            if old is not None and os.fstat(old).st_size >= self.offset:
                os.close(self.descriptor)
                self.descriptor = old
                return True
            if old is not None:
                os.close(old)
            self._reset(stream, "replaced", info.st_ino)
        elif info.st_size < self.offset:
            self._reset(stream, "cut", info.st_ino)
        elif not self._same():
            self._reset(stream, "rewritten", info.st_ino)
        self.inode, self.check = info.st_ino, None
        return True

    def _find(self, inode: int) -> Optional[int]:
        folder = os.path.dirname(self.path)
        for entry in os.scandir(folder):
            if entry.name.startswith(os.path.basename(self.path)) and entry.inode() == inode:
                return os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
        return None

    def _same(self) -> bool:
        """Whether what lies before the offset is what the reader has: a file may have been cut and have grown again."""
        if not self.check or self.descriptor is None:
            return True
        begin, digest = self.check
        if any(low < self.offset and begin < high for low, high in jobdir.holes(self.directory, self.name)):
            return True  # dropped here after it was read there: nothing to compare
        return bool(hashlib.sha256(os.pread(self.descriptor, self.offset - begin, begin)).hexdigest() == digest)

    def _piece(self, stream: Any) -> int:
        assert self.descriptor is not None
        data = os.pread(self.descriptor, CHUNK, self.offset)
        if not data:
            return 0
        # The quota notes a hole before it makes it, so what was read before a look that finds no hole is no hole.
        skip, data = self._cut(data)
        if skip:
            stream.send({"file": self.name, "offset": self.offset, "skip": skip})
            self.offset += skip
            return skip
        stream.send({"file": self.name, "offset": self.offset, "inode": self.inode}, data)
        self.offset += len(data)
        return len(data)

    def _cut(self, data: bytes) -> Tuple[int, bytes]:
        """(bytes to skip here, or else the bytes before the next hole)."""
        for low, high in jobdir.holes(self.directory, self.name):
            if low <= self.offset < high:
                return high - self.offset, b""
            if self.offset < low < self.offset + len(data):
                return 0, data[: low - self.offset]
        return 0, data

    def _moved(self, stream: Any) -> bool:
        """Whether the name means another file now, or this one was cut. Called when this one has nothing more."""
        assert self.descriptor is not None
        try:
            info = os.stat(self.path)
        except FileNotFoundError:
            return False  # the next one may come
        if info.st_ino != os.fstat(self.descriptor).st_ino:
            if os.fstat(self.descriptor).st_size > self.offset:
                return True  # it grew between our two looks: its last bytes first
            self.close()
            self.descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.inode = os.fstat(self.descriptor).st_ino
            self._reset(stream, "replaced", self.inode)
            return True
        if info.st_size < self.offset:
            self._reset(stream, "cut", info.st_ino)
            return True
        return False

    def _reset(self, stream: Any, why: str, inode: int) -> None:
        stream.send({"file": self.name, "reset": why, "inode": inode, "had": self.offset})
        self.offset, self.inode = 0, inode


def follow(stream: Any, jobs: str, id: str, files: List[Dict[str, Any]], wait: bool) -> Dict[str, Any]:
    """Send what is new in these files; with `wait`, until the job is over."""
    directory = os.path.join(os.path.realpath(os.path.expanduser(jobs)), id)
    followed = [File(directory, asked) for asked in files]
    over, look_at, quiet, idle = False, 0.0, 0, False
    try:
        while True:
            now = time.monotonic()
            if now >= look_at or not wait:
                over, look_at = jobdir.over(directory), now + LOOK_S
            elif not over and os.path.exists(os.path.join(directory, "exit.json")):
                over = jobdir.over(directory)
            # A list: every file has its turn.
            if any([file.pump(stream) for file in followed]):
                quiet, idle = 0, False
                continue
            if over or not wait:
                return {"ended": over}
            if not idle:
                idle = True
                stream.send({"idle": True})
            quiet += 1
            stream.wait(POLL_S[quiet > 25])
    finally:
        for file in followed:
            file.close()
