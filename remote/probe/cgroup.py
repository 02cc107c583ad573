"""A job's own control group, where one can be had: everything that a job starts stays in it, however often it forks.

Standard library and Python 3.9 syntax only. The group lies below the supervisor's own: in the unit that systemd
delegates to us, or, as root where there is no systemd, beside us. Where it cannot be made, None: the subreaper has to
do. Nothing here touches a group that is not provably that one job's.
"""

import contextlib
import os
import signal
import time
from typing import Any, Dict, List, Optional, Tuple

from remote.probe import procs

PREFIX = "rigbook-job-"


def mount() -> Optional[str]:
    """Where the unified hierarchy is mounted."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                if right.split(" ", 1)[0] == "cgroup2":
                    return left.split()[4].encode().decode("unicode_escape")
    except OSError:
        pass
    return None


def of(pid: Any) -> Optional[str]:
    """The directory of a process's group; None where it cannot be seen from here."""
    top = mount()
    if top is None:
        return None
    try:
        with open("/proc/%s/cgroup" % pid, encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                if line.startswith("0::"):
                    path = line[3:].rstrip("\n")
                    return None if "/.." in path else os.path.normpath(top + "/" + path)
    except OSError:
        pass
    return None


def make(name: str, memory: Optional[int], tasks: Optional[int]) -> Tuple[Optional[str], List[str]]:
    """(the group's directory or None, which caps it keeps: "memory", "tasks")."""
    own = of("self")
    if own is None or not os.access(own, os.W_OK):
        return None, []
    for entry in os.listdir(own):
        if entry.startswith(PREFIX):
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(own, entry))  # left by one that was killed; fails while anything is in it
    folder = os.path.join(own, name)
    kept = []
    try:
        os.mkdir(folder)
    except FileExistsError:
        pass
    except OSError:
        return None, []
    for file, value, word in (("memory.max", memory, "memory"), ("pids.max", tasks, "tasks")):
        if value is not None and _write(os.path.join(folder, file), str(value)):
            kept.append(word)
            if word == "memory":
                _write(os.path.join(folder, "memory.swap.max"), "0")  # a cap that swaps instead is none
    return folder, kept


def kept_around(memory: Optional[int], tasks: Optional[int]) -> List[str]:
    """Which caps the group that we ourselves are in keeps already: systemd gave them to our unit."""
    own = of("self") or ""
    found = []
    for file, value, word in (("memory.max", memory, "memory"), ("pids.max", tasks, "tasks")):
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(own, file)) as opened:
                if value is not None and int(opened.read()) <= value:
                    found.append(word)
    return found


def put(folder: str, pid: int) -> bool:
    """Move a process into the group."""
    return _write(os.path.join(folder, "cgroup.procs"), str(pid))


def guard(folder: str, name: str) -> Optional[str]:
    """Why this group must not be ended, None when it may: it is this job's own and we are not in it."""
    top = mount()
    if top is None or not folder.startswith(top + "/"):
        return "it is not a control group of this machine"
    if os.path.normpath(folder) != folder or os.path.basename(folder) != name or not name.startswith(PREFIX):
        return "it is not the group of this job"
    own = of("self")
    if own is None or (own + "/").startswith(folder + "/"):
        return "we run in it"
    return None


def members(folder: Optional[str]) -> List[int]:
    found = []
    for base, _, _ in os.walk(folder) if folder else ():
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(base, "cgroup.procs")) as file:
                found += [int(word) for word in file.read().split() if word != "0"]
    return found


def populated(folder: Optional[str]) -> bool:
    """Whether any process is left in it; zombies do not count. A group that is gone has none."""
    if not folder:
        return False
    try:
        with open(os.path.join(folder, "cgroup.events")) as file:
            return "populated 1" in file.read()
    except OSError:
        return False


def kill(folder: str, name: str, seconds: float = 10.0) -> Optional[str]:
    """KILL everything in the group; None when it is empty, else why it is not."""
    refused = guard(folder, name)
    if refused:
        return refused
    deadline = time.monotonic() + seconds
    while populated(folder):
        # cgroup.kill is newer (Linux 5.14) and misses nothing; without it, until no fork is faster than we.
        if not _write(os.path.join(folder, "cgroup.kill"), "1"):
            for pid in members(folder):
                now = procs.stat(pid)
                if now is not None:
                    procs.send(pid, now.starttime, signal.SIGKILL)
        if time.monotonic() > deadline:
            return "it still holds %d processes" % len(members(folder))
        time.sleep(0.02)
    return None


def remove(folder: Optional[str]) -> None:
    for base, _, _ in os.walk(folder, topdown=False) if folder else ():
        with contextlib.suppress(OSError):
            os.rmdir(base)


def oom_kills(folder: Optional[str]) -> int:
    return _events(folder, "memory.events").get("oom_kill", 0)


def oom_around() -> int:
    """Processes killed for want of memory in the groups that we ourselves are in, whoever made them."""
    found = oom_kills(of("self"))
    with contextlib.suppress(OSError):
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if "memory" in controllers.split(","):  # version 1, as older systems have it
                    found += _events("/sys/fs/cgroup/memory" + path, "memory.oom_control").get("oom_kill", 0)
    return found


def _events(folder: Optional[str], name: str) -> Dict[str, int]:
    try:
        with open(os.path.join(folder or "", name)) as file:
            return {word: int(count) for word, count in (line.split() for line in file)}
    except (OSError, ValueError):
        return {}


def _write(path: str, text: str) -> bool:
    try:
        with open(path, "w") as file:
            file.write(text)
        return True
    except OSError:
        return False
