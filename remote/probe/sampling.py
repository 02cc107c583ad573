"""Processes and load, looked at again and again, cheaply. Standard library and Python 3.9 syntax only.

A look at a process is one read of /proc/PID/stat through a descriptor that stays open: such a descriptor belongs to
that very process and fails when it has ended, whoever has its pid by then. A line that reads as it did a second ago
is not taken apart again; most processes of a machine sleep. What a process keeps (command line, owner, marker) is read
when it first shows, when its name changes (exec), and in turn once in a while.
"""

import os
import resource
import time
from typing import Any, Dict, List, Optional, Tuple

from remote.probe import procs

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
TURNS = 60  # looks in which every process's command line is read anew once
SPARE = 64  # descriptors left to everything else


class Seen:
    __slots__ = ("descriptor", "entry", "line")

    def __init__(self, descriptor: Optional[int]) -> None:
        self.descriptor = descriptor
        self.line = b""
        self.entry: Dict[str, Any] = {}


class Table:
    """All processes that we can see. `look` gives what changed since the last look."""

    def __init__(self) -> None:
        self._seen: Dict[int, Seen] = {}
        self._turn = 0
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 8192 if hard < 0 else min(8192, hard)
        if 0 < soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        self._room = (soft if soft > 0 else 8192) - SPARE

    def look(self) -> Tuple[List[Dict[str, Any]], List[int]]:
        """(new and changed entries, pids that are gone)."""
        changed: List[Dict[str, Any]] = []
        self._turn = (self._turn + 1) % TURNS
        seen, present = self._seen, set()
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            pid = int(name)
            known = seen.get(pid)
            line = self._line(pid, known)
            if line is None and known is not None:
                # That one has ended. Its pid may be somebody else's by now.
                self._drop(pid)
                known = None
                line = self._line(pid, None)
            if line is None:
                continue
            present.add(pid)
            known = seen.get(pid) or known
            if known is None:
                known = seen[pid] = Seen(None)
            if line != known.line or pid % TURNS == self._turn:
                entry = self._entry(pid, line, known)
                if entry != known.entry:
                    known.entry = entry
                    changed.append(entry)
                known.line = line
        gone = [pid for pid in seen if pid not in present]
        for pid in gone:
            self._drop(pid)
        return changed, gone

    def entries(self) -> List[Dict[str, Any]]:
        return [known.entry for known in self._seen.values() if known.entry]

    def close(self) -> None:
        for pid in list(self._seen):
            self._drop(pid)

    def _drop(self, pid: int) -> None:
        known = self._seen.pop(pid)
        if known.descriptor is not None:
            os.close(known.descriptor)

    def _line(self, pid: int, known: Optional[Seen]) -> Optional[bytes]:
        try:
            if known is not None and known.descriptor is not None:
                return os.pread(known.descriptor, 1024, 0)
            descriptor = os.open("/proc/%d/stat" % pid, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            line = os.pread(descriptor, 1024, 0)
        except OSError:
            os.close(descriptor)
            return None
        if known is None and len(self._seen) < self._room:
            self._seen[pid] = Seen(descriptor)
        else:
            os.close(descriptor)
        return line

    def _entry(self, pid: int, line: bytes, known: Seen) -> Dict[str, Any]:
        head, _, tail = line.rpartition(b")")
        part = tail.split()
        name = head.partition(b"(")[2].decode("utf-8", "replace")
        old, starttime = known.entry, int(part[19])
        kept = old and old["starttime"] == starttime and old["name"] == name and pid % TURNS != self._turn
        if kept:
            command, uid, job, run = old["command"], old["uid"], old["job"], old["run"]
        else:
            marked = procs.markers(pid)
            command, job, run = procs.command(pid), marked.get("RIGBOOK_JOB"), marked.get("RIGBOOK_RUN")
            try:
                uid = os.stat("/proc/%d" % pid).st_uid
            except OSError:
                uid = -1
        return {
            "pid": pid,
            "ppid": int(part[1]),
            "starttime": starttime,
            "pgrp": int(part[2]),
            "session": int(part[3]),
            "uid": uid,
            "state": part[0].decode(),
            "name": name,
            "command": command,
            # A kernel thread has no memory, which is not the same as having none resident.
            "rss": int(part[21]) * PAGE if int(part[20]) else None,
            "threads": int(part[17]),
            "cpu": round((int(part[11]) + int(part[12])) / TICKS, 2),  # s, since it began
            "job": job,
            "run": run,
        }


def processes(all: bool = True) -> List[Dict[str, Any]]:
    """Every process that we can see, or only those that carry our marker. Bytes and seconds."""
    table = Table()
    try:
        table.look()
        return [entry for entry in table.entries() if all or entry["job"]]
    finally:
        table.close()


class Figures:
    """What of a machine moves: load, processor, memory."""

    def __init__(self) -> None:
        self._files = [os.open("/proc/" + name, os.O_RDONLY | os.O_CLOEXEC) for name in ("stat", "meminfo", "loadavg")]
        self._before: Optional[Tuple[int, int]] = None

    def close(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)

    def look(self) -> Dict[str, Any]:
        """`cpu` is the share of all cores that worked since the last look (0 to 1), None at the first."""
        # The first line of stat is the sum over all cores; the interrupt counters behind it are long and not needed.
        ticks = [int(word) for word in os.pread(self._files[0], 256, 0).split(b"\n", 1)[0].split()[1:9]]
        total, rest = sum(ticks), ticks[3] + ticks[4]
        before, self._before = self._before, (total, rest)
        cpu = None
        if before is not None and total > before[0]:
            cpu = round(1 - (rest - before[1]) / (total - before[0]), 4)
        memory = {}
        for line in os.pread(self._files[1], 4096, 0).split(b"\n"):
            if line.startswith((b"MemTotal", b"MemAvailable", b"SwapTotal", b"SwapFree")):
                key, value = line.split()[:2]
                memory[key[:-1].decode()] = int(value) * 1024
        return {
            "cpu": cpu,
            "load": [float(word) for word in os.pread(self._files[2], 128, 0).split()[:3]],
            "memory_total": memory.get("MemTotal"),
            "memory_available": memory.get("MemAvailable"),
            "swap_total": memory.get("SwapTotal"),
            "swap_free": memory.get("SwapFree"),
        }


def live(stream: Any, every: float = 1.0) -> None:
    """A look every so many seconds: the figures, and of the processes those that are new, changed or gone."""
    table, figures = Table(), Figures()
    try:
        due = time.monotonic()
        while True:
            changed, gone = table.look()
            stream.send(dict(figures.look(), wall=time.time(), changed=changed, gone=gone))
            due = max(due + every, time.monotonic())
            stream.wait(due - time.monotonic())
    finally:
        table.close()
        figures.close()
