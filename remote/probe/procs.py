"""Processes as /proc tells of them. Standard library and Python 3.9 syntax only: this runs on other machines.

The identity of a process is (boot id, pid namespace, pid, start time); a pid alone may mean somebody else a moment
later. Everything here returns None for "cannot be seen", never 0.
"""

import os
import signal
import time
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Set

MARKERS = ("RIGBOOK_JOB", "RIGBOOK_RUN", "RIGBOOK_JOB_DIR", "RIGBOOK_PROBE")


class Stat(NamedTuple):
    comm: str
    state: str
    ppid: int
    pgrp: int
    session: int
    starttime: int  # clock ticks since boot: /proc/PID/stat field 22


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def clock() -> Dict[str, Any]:
    return {"wall": time.time(), "monotonic": time.monotonic(), "boot_id": boot_id()}


def pids() -> Iterator[int]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def stat(pid: int) -> Optional[Stat]:
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
    # The name may hold spaces and parentheses; only the last ')' ends it.
    head, _, tail = text.rpartition(")")
    rest = tail.split()
    if len(rest) < 20:
        return None
    return Stat(head.partition("(")[2], rest[0], int(rest[1]), int(rest[2]), int(rest[3]), int(rest[19]))


def alive(pid: int, starttime: int) -> bool:
    """Whether this very process still holds anything. A zombie leader whose other threads live does."""
    now = stat(pid)
    if now is None or now.starttime != starttime:
        return False
    if now.state not in "ZX":
        return True
    return any(state not in "ZX" for state in thread_states(pid))


def thread_states(pid: int) -> List[str]:
    states = []
    try:
        for tid in os.listdir("/proc/%d/task" % pid):
            with open("/proc/%d/task/%s/stat" % (pid, tid), "rb") as file:
                states.append(file.read().rpartition(b")")[2].split()[0].decode())
    except (OSError, IndexError):
        pass
    return states


def namespace(pid: int) -> Optional[str]:
    try:
        return os.readlink("/proc/%d/ns/pid" % pid)
    except OSError:
        return None


def command(pid: int, limit: int = 400) -> str:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            text = file.read(16384)
    except OSError:
        return ""
    # On one line, whatever an argument holds: `python -c` is given whole programs.
    return " ".join(text.replace(b"\0", b" ").decode("utf-8", "replace").split())[:limit]


def markers(pid: int) -> Dict[str, str]:
    """The RIGBOOK_* variables that the process was started with; {} when there are none or they cannot be seen."""
    try:
        with open("/proc/%d/environ" % pid, "rb") as file:
            pairs = file.read().split(b"\0")
    except OSError:
        return {}
    found = {}
    for pair in pairs:
        name, _, value = pair.partition(b"=")
        if name.startswith(b"RIGBOOK_") and name.decode("ascii", "replace") in MARKERS:
            found[name.decode()] = value.decode("utf-8", "surrogateescape")
    return found


def rss(pid: int) -> Optional[int]:
    """Resident bytes: exact from smaps_rollup where we may read it, else the kernel's running count."""
    for name, key in (("smaps_rollup", b"Rss:"), ("status", b"VmRSS:")):
        try:
            with open("/proc/%d/%s" % (pid, name), "rb") as file:
                for line in file:
                    if line.startswith(key):
                        return int(line.split()[1]) * 1024
        except (OSError, ValueError, IndexError):
            continue
    return None


def resident(pid: int) -> Optional[int]:
    """Resident bytes by the kernel's running count: cheap, and counts what is shared in every process."""
    try:
        with open("/proc/%d/statm" % pid) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def proportional(pid: int) -> Optional[int]:
    """Resident bytes with what is shared divided among those who share it; dear to ask for."""
    try:
        with open("/proc/%d/smaps_rollup" % pid, "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return resident(pid)


def descriptors(pid: int) -> Optional[List[str]]:
    """What the process's file descriptors point to; None when we may not look."""
    folder = "/proc/%d/fd" % pid
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    found = []
    for name in names:
        try:
            found.append(os.readlink(folder + "/" + name))
        except OSError:
            continue
    return found


def listening() -> Dict[str, Dict[str, Any]]:
    """Socket inode -> {port, address} of every TCP socket that listens in our network namespace."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            with open("/proc/net/" + name) as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            part = line.split()
            if len(part) > 9 and part[3] == "0A":
                address, _, port = part[1].partition(":")
                found[part[9]] = {"port": int(port, 16), "address": _address(address), "uid": int(part[7])}
    return found


def _address(hexed: str) -> str:
    import socket

    # The kernel prints 32-bit words in the machine's byte order.
    words = [bytes.fromhex(hexed[at : at + 8])[::-1] for at in range(0, len(hexed), 8)]
    packed = b"".join(words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def ports_of(links: List[str], sockets: Dict[str, Dict[str, Any]]) -> List[int]:
    inodes = [link[8:-1] for link in links if link.startswith("socket:[")]
    return sorted({sockets[inode]["port"] for inode in inodes if inode in sockets})


def gpu_files(links: List[str]) -> List[str]:
    """The NVIDIA device files held open: these, not nvidia-smi's list, keep GPU memory allocated."""
    return sorted({link for link in links if link.startswith("/dev/nvidia")})


def children() -> Dict[int, List[int]]:
    """Parent pid -> pids, over the whole of /proc."""
    found: Dict[int, List[int]] = {}
    for pid in pids():
        now = stat(pid)
        if now is not None:
            found.setdefault(now.ppid, []).append(pid)
    return found


def descendants(root: int) -> List[int]:
    """All below `root`, parents first. With a child subreaper as root nothing that was started below it escapes."""
    tree = children()
    found: List[int] = []
    level = [root]
    while level:
        level = [child for pid in level for child in tree.get(pid, [])]
        found.extend(level)
    return found


def ancestors(pid: int) -> Set[int]:
    found = {pid}
    while True:
        now = stat(pid)
        if now is None or now.ppid <= 0:
            return found
        pid = now.ppid
        found.add(pid)


def send(pid: int, starttime: int, number: int) -> bool:
    """Signal this very process; False when it is gone. The pidfd is held before the identity is read, so a pid that
    is reused in between gets nothing."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        now = stat(pid)
        if now is None or now.starttime != starttime:
            return False
        signal.pidfd_send_signal(descriptor, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)


def wait_gone(identities: List[Any], seconds: float) -> List[Any]:
    """Wait until none of these (pid, starttime) is alive; those that still are."""
    deadline = time.monotonic() + seconds
    left = [(pid, start) for pid, start in identities if alive(pid, start)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [(pid, start) for pid, start in left if alive(pid, start)]
    return left
