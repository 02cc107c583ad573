"""What a job may use up, where the kernel does not keep the limit, and how much its log may grow.

Standard library and Python 3.9 syntax only. The log: the job writes straight into out.log, with no program in between
that could die and take the job's output with it. Past the quota the supervisor punches the middle out of the file: the
head and the tail stay, with their offsets, and readers are told what is missing (holes.json, and `log_quota` in
events.jsonl). Where the file system cannot do that (old NFS, old ZFS) the event says so and the log goes on.
"""

import contextlib
import json
import os
import time
from typing import Any, Dict, List, Optional

from remote.probe import jobdir, procs

QUOTA = 8 << 30  # bytes of a log that are kept
PUNCH_HOLE, KEEP_SIZE = 2, 1  # fallocate modes


def over(pids: List[int], memory: Optional[int], tasks: Optional[int]) -> str:
    """The sentence for a job's record when it uses more than it may, "" while it does not."""
    if tasks is not None:
        threads = sum(len(procs.thread_states(pid)) for pid in pids)
        if threads > tasks:
            return "it had %d threads, more than its cap of %d" % (threads, tasks)
    # Resident pages that processes share are counted in each: only the dearer, exact sum may end a job.
    if memory is not None and sum(procs.resident(pid) or 0 for pid in pids) > memory:
        used = sum(procs.proportional(pid) or 0 for pid in pids)
        if used > memory:
            return "it used %d MiB, more than its cap of %d MiB" % (used >> 20, memory >> 20)
    return ""


class LogQuota:
    """Looks at a job's log now and then. `quota`: bytes that may stay."""

    def __init__(self, directory: str, quota: int) -> None:
        self.directory, self.quota = directory, quota
        self.path = os.path.join(directory, "out.log")
        self.problem: Optional[str] = None  # why nothing can be dropped; "" when it can; None: not tried yet

    def look(self) -> None:
        try:
            size = os.stat(self.path).st_size
        except OSError:
            return
        holes = jobdir.holes(self.directory, "out.log")
        low, high = holes[0] if holes else (0, 0)
        if size < high:  # somebody cut the log: what was dropped from it is history
            os.unlink(os.path.join(self.directory, "holes.json"))
            return
        if self.problem or size - (high - low) <= self.quota:
            return
        if self.problem is None:
            self.problem = self._try()
            if self.problem:
                self._say({"from": high, "to": high, "problem": self.problem})
                return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if not holes:
                low = high = _line_start(descriptor, self.quota // 4)
            # Half of the quota stays behind the hole, so that there is not a new one for every line.
            end = _line_start(descriptor, size - self.quota // 2)
            if end <= high:
                return
            # Noted first, punched then: who reads looks at the note after reading, and never takes zeros for a log.
            jobdir.write_json(os.path.join(self.directory, "holes.json"), {"out.log": [[low, end]]})
            _punch(descriptor, low, end - low)
        finally:
            os.close(descriptor)
        self._say({"from": high, "to": end})

    def _try(self) -> str:
        """Whether this file system can drop a file's middle: tried on another file, since a note is not taken back."""
        path = os.path.join(self.directory, "punch.tmp")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, b"x" * 8192)
            return _punch(descriptor, 0, 4096)
        finally:
            os.close(descriptor)
            os.unlink(path)

    def _say(self, event: Dict[str, Any]) -> None:
        """A line among the job's own: one write, and on a line of its own even if the job is amid one."""
        event.update(kind="log_quota", t=time.time(), file="out.log", quota=self.quota)
        path = os.path.join(self.directory, "events.jsonl")
        line = json.dumps(event).encode() + b"\n"
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, b"\n" + line if torn else line)
            finally:
                os.close(descriptor)


def _line_start(descriptor: int, offset: int) -> int:
    """The first start of a line at or after `offset`; `offset` itself where the next MiB has none."""
    data = os.pread(descriptor, 1 << 20, offset)
    return offset + data.find(b"\n") + 1 if b"\n" in data else offset


def _punch(descriptor: int, offset: int, length: int) -> str:
    try:
        import ctypes

        call = ctypes.CDLL(None, use_errno=True).fallocate
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if call(descriptor, PUNCH_HOLE | KEEP_SIZE, offset, length) == 0:
            return ""
        return os.strerror(ctypes.get_errno())
    except (ImportError, AttributeError, OSError) as error:
        return str(error)
