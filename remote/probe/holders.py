"""Who holds a GPU, by open files: these, not NVML's list, keep its memory. Standard library, Python 3.9 syntax only.

NVML names the process that made a context; the memory lives until the last descriptor or mapping of the device file
is gone, be it in a forked child or in one stuck thread. So both are looked at and joined by pid.

Looking is cheap because it is remembered: a process (pid, start time) is looked into again when the number of its
descriptors changed (one stat on kernels since 6.2), when NVML names it, and in any case every `REFRESH_S`.
"""

import os
import re
import stat as modes
import threading
import time
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

from remote.probe import procs

REFRESH_S = 30.0
SOCKETS_S = 10.0
FEW_S = 5.0  # kernels before 6.2 do not tell the number of descriptors
HARMLESS = ("/dev/null", "/dev/pts/", "/dev/tty", "/dev/urandom", "/dev/random", "/dev/zero", "/dev/shm/", "/dev/fuse")
TICKS = os.sysconf("SC_CLK_TCK")


class Seen(NamedTuple):
    files: int  # descriptors when we looked; 0: the kernel does not tell
    at: float
    nodes: Dict[str, int]  # device file -> descriptors
    minors: Tuple[int, ...]
    readable: bool


class Stuck(NamedTuple):
    since: float
    wchan: str


class Scanner:
    """Remembers processes from one look to the next."""

    def __init__(self) -> None:
        self._seen: Dict[Tuple[int, int], Seen] = {}
        self._stuck: Dict[Tuple[int, int, str], Stuck] = {}
        self._majors: Dict[int, str] = {}
        self._majors_at = -REFRESH_S
        self._lock = threading.Lock()
        self.table: Dict[int, procs.Stat] = {}  # all processes, at the last look
        self.listening: Dict[str, Dict[str, Any]] = {}  # socket -> port; reading the kernel's table takes 10 ms
        self._listening_at = -SOCKETS_S

    def scan(self, named: Iterable[int] = (), deep: bool = False) -> Dict[str, Any]:
        """All holders, with the evidence that classifies them. `named`: pids that NVML lists. `deep`: look into every
        process now, and at what is mapped but closed."""
        with self._lock:
            return self._scan(set(named), deep)

    def _scan(self, named: Set[int], deep: bool) -> Dict[str, Any]:
        began, used = time.monotonic(), time.thread_time()
        if began - self._majors_at >= REFRESH_S:
            self._majors, self._majors_at = majors(), began
        table: Dict[int, procs.Stat] = {}
        looked = unreadable = 0
        fresh: Dict[Tuple[int, int], Seen] = {}
        for pid in procs.pids():
            now = procs.stat(pid)
            if now is None:
                continue
            table[pid] = now
            key = (pid, now.starttime)
            seen = self._seen.get(key)
            if seen is None or deep or pid in named or self._stale(pid, seen, began):
                seen = self.look(pid, began, deep or pid in named)
                looked += 1
            fresh[key] = seen
            unreadable += not seen.readable
        self._seen, self.table = fresh, table
        holding = [pid for pid, now in table.items() if pid in named or fresh[(pid, now.starttime)].nodes]
        if holding and (deep or began - self._listening_at >= SOCKETS_S):
            self.listening, self._listening_at = procs.listening(), began
        sockets = {"socket:[%s]" % inode: entry["port"] for inode, entry in self.listening.items()}
        found = [self._describe(pid, table, fresh[(pid, table[pid].starttime)], sockets, began) for pid in holding]
        self._forget(found)
        return {
            "boot_id": procs.boot_id(),
            "pid_namespace": procs.namespace(os.getpid()),
            "at": time.time(),
            "ticks": int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS),
            "processes": [entry for entry in found if entry is not None],
            "missing": sorted(pid for pid in named if pid not in table),
            "seen": len(table),
            "looked": looked,
            "unreadable": unreadable,
            "seconds": round(time.monotonic() - began, 6),
            "cpu_seconds": round(time.thread_time() - used, 6),
        }

    def _stale(self, pid: int, seen: Seen, now: float) -> bool:
        if now - seen.at >= (REFRESH_S if seen.files else FEW_S):
            return True
        return bool(seen.files) and seen.files != _count(pid)

    def look(self, pid: int, now: float, deep: bool) -> Seen:
        """The device files of one process."""
        links = _links(pid)
        if links is None:
            return Seen(0, now, {}, (), False)
        nodes: Dict[str, int] = {}
        minors: Set[int] = set()
        for name, link in links:
            if link[:1] != "/" or ("nvidia" not in link and (link[:5] != "/dev/" or link.startswith(HARMLESS))):
                continue
            node, minor = self._node("/proc/%d/fd/%s" % (pid, name), link)
            if node is not None:
                nodes[node] = nodes.get(node, 0) + 1
                if minor is not None:
                    minors.add(minor)
        if deep:
            for link in mapped(pid):
                node, minor = self._node("/proc/%d/root%s" % (pid, link), link)
                if node is not None:
                    nodes.setdefault(node, 0)  # mapped, and its descriptor closed
                    if minor is not None:
                        minors.add(minor)
        return Seen(_count(pid), now, nodes, tuple(sorted(minors)), True)

    def _node(self, path: str, link: str) -> Tuple[Optional[str], Optional[int]]:
        """(device file, number of the GPU) when this is one of NVIDIA's or VFIO's, by name or by device number: in a
        container the same device may have another name."""
        link = link[: -len(" (deleted)")] if link.endswith(" (deleted)") else link
        found = re.match(r"/dev/nvidia(\d+)$", link)
        if found:
            return link, int(found.group(1))
        if link.startswith(("/dev/nvidia", "/dev/vfio/")):
            return link, None
        if not self._majors:
            return None, None
        try:
            info = os.stat(path)
        except OSError:
            return None, None
        name = self._majors.get(os.major(info.st_rdev)) if modes.S_ISCHR(info.st_mode) else None
        if name is None:
            return None, None
        gpu = name in ("nvidia", "nvidia-frontend") and os.minor(info.st_rdev) < 200
        return link, os.minor(info.st_rdev) if gpu else None

    def _describe(
        self, pid: int, table: Dict[int, procs.Stat], seen: Seen, sockets: Dict[str, Any], now: float
    ) -> Optional[Dict[str, Any]]:
        entry = table[pid]
        threads, stuck = self._threads(pid, entry.starttime, now)
        if entry.state in "ZX" and not set(threads) - set("ZX"):
            return None  # a zombie has let go of everything; one whose thread still lives has not
        found = describe(pid, entry, table, sockets)
        found.update(
            nodes=dict(seen.nodes), gpus=list(seen.minors), threads=threads, stuck=stuck, readable=seen.readable
        )
        return found

    def _threads(self, pid: int, starttime: int, now: float) -> Tuple[Dict[str, int], List[Dict[str, Any]]]:
        """States of all threads, and those in uninterruptible sleep with what they wait on and for how long."""
        states: Dict[str, int] = {}
        stuck = []
        try:
            tids = os.listdir("/proc/%d/task" % pid)
        except OSError:
            tids = []
        for tid in tids:
            state = _thread_state(pid, tid)
            if state is None:
                continue
            states[state] = states.get(state, 0) + 1
            key = (pid, starttime, tid)
            if state == "D":
                wchan = _word("/proc/%d/task/%s/wchan" % (pid, tid)) or "?"
                known = self._stuck.get(key)
                if known is None or known.wchan != wchan:
                    known = self._stuck[key] = Stuck(now, wchan)
                stuck.append({"tid": int(tid), "wchan": wchan, "seconds": round(now - known.since, 3)})
            else:
                self._stuck.pop(key, None)
        return states, stuck

    def _forget(self, found: List[Optional[Dict[str, Any]]]) -> None:
        alive = {(entry["pid"], entry["starttime"]) for entry in found if entry}
        self._stuck = {key: value for key, value in self._stuck.items() if key[:2] in alive}


def majors() -> Dict[int, str]:
    """Device number -> name of NVIDIA's character devices, as the kernel has them registered."""
    found = {}
    for line in _text("/proc/devices").split("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit() and name.startswith("nvidia"):
            found[int(number)] = name
    return found


def mapped(pid: int) -> List[str]:
    """Device files that a process has mapped. A mapping holds the file as a descriptor does."""
    found = set()
    try:
        with open("/proc/%d/maps" % pid, "rb") as file:
            for line in file:
                if b"/dev/" in line:
                    found.add(line.split(None, 5)[5].strip().decode("utf-8", "replace"))
    except (OSError, IndexError):
        pass
    return sorted(found)


def describe(pid: int, entry: procs.Stat, table: Dict[int, procs.Stat], sockets: Dict[str, Any]) -> Dict[str, Any]:
    """Identity and circumstances of one process: what `classes.classify` decides upon."""
    status = _status(pid)
    group = cgroup(pid)
    parent, leader, session = table.get(entry.ppid), table.get(entry.pgrp), table.get(entry.session)
    links = [link for _, link in _links(pid) or []]
    mark = procs.markers(pid)
    inner = [int(n) for n in status.get("NSpid", "").split()] or [pid]
    return {
        "pid": pid,
        "starttime": entry.starttime,
        "boot_id": procs.boot_id(),
        "pid_namespace": procs.namespace(pid),
        "nspid": inner,
        "ppid": entry.ppid,
        "pgrp": entry.pgrp,
        "session": entry.session,
        "state": entry.state,
        "uid": int(status.get("Uid", "-1").split()[0]),
        "guest_uid": guest_uid(pid, int(status.get("Uid", "-1").split()[0])),
        "comm": entry.comm,
        "exe": _link("/proc/%d/exe" % pid),
        "command": procs.command(pid, 300),
        "argv0": procs.command(pid, 4096).partition(" ")[0],
        "cgroup": group,
        "guest": guest(group),
        "unit": unit(group),
        "markers": mark,
        "parent": {"pid": entry.ppid, "comm": parent.comm, "session": parent.session} if parent else None,
        "leads": entry.pgrp == pid,
        "leader_alive": leader is not None and leader.state not in "ZX" and entry.pgrp != pid,
        "session_alive": session is not None and session.state not in "ZX" and entry.session != pid,
        "ports": sorted({sockets[link] for link in links if link in sockets}),
        "rss": procs.rss(pid),
        "started": _started(entry.starttime),
    }


def cgroup(pid: int) -> str:
    """The path that says most: the unified hierarchy's, or under cgroup v1 the longest."""
    paths = [line.split(":", 2)[2] for line in _text("/proc/%d/cgroup" % pid).splitlines() if line.count(":") >= 2]
    known = [path for path in paths if guest(path) or unit(path)]
    return max(known or paths, key=len) if paths else ""


def guest(group: str) -> Optional[Dict[str, str]]:
    """The container or machine that a cgroup path names: Proxmox's and plain LXC's, Docker's and Podman's, QEMU's."""
    found = re.match(r"/lxc\.monitor[./]([^/]+)", group)
    if found:
        return {"kind": "lxc-monitor", "id": found.group(1)}
    inner = re.search(r"(?:docker|libpod)[-/]([0-9a-f]{12})[0-9a-f]*", group)
    nested = {"nested": "docker:" + inner.group(1)} if inner else {}
    found = re.match(r"/lxc/([^/]+)", group) or re.match(r"/lxc\.payload[./]([^/]+)", group)
    if found:
        return dict({"kind": "lxc", "id": found.group(1)}, **nested)
    found = re.match(r"/qemu\.slice/(\d+)\.scope", group)
    if found:
        return {"kind": "vm", "id": found.group(1)}
    return {"kind": "docker", "id": inner.group(1)} if inner else None


def unit(group: str) -> Optional[str]:
    """The systemd service that a process belongs to. A login session's scope and a user's manager are none."""
    names = re.findall(r"/([^/]+\.service)", re.sub(r"^/lxc/[^/]+(/ns)?", "", group))
    names = [name for name in names if not re.match(r"(user@|ssh|rigbook-job-)", name)]
    return names[-1] if names else None


def guest_uid(pid: int, uid: int) -> Optional[int]:
    """The uid inside an unprivileged container (root there is 100000 here); None where it has none."""
    for line in _text("/proc/%d/uid_map" % pid).splitlines():
        inside, outside, length = (int(word) for word in line.split())
        if outside <= uid < outside + length:
            return uid - outside + inside
    return None


def maps_under(pid: int, prefix: str) -> bool:
    """Whether a process has loaded libraries from below this directory."""
    wanted = os.fsencode(prefix.rstrip("/") + "/")
    try:
        with open("/proc/%d/maps" % pid, "rb") as file:
            return any(wanted in line for line in file)
    except OSError:
        return False


def foreign_ports(pid: int) -> List[int]:
    """Ports that listen in the network namespace of a process. They may belong to others there: unknown is not dead."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in _text("/proc/%d/net/%s" % (pid, name)).splitlines()[1:]:
            part = line.split()
            if len(part) > 9 and part[3] == "0A":
                found.add(int(part[1].rpartition(":")[2], 16))
    return sorted(found)


def _started(starttime: int) -> Optional[float]:
    found = re.search(r"^btime (\d+)", _text("/proc/stat"), re.M)
    return int(found.group(1)) + starttime / TICKS if found else None


def _links(pid: int) -> Optional[List[Tuple[str, str]]]:
    folder = "/proc/%d/fd" % pid
    found = []
    try:
        for name in os.listdir(folder):
            try:
                found.append((name, os.readlink(folder + "/" + name)))
            except OSError:
                continue
    except OSError:
        return None
    return found


def _count(pid: int) -> int:
    try:
        return os.stat("/proc/%d/fd" % pid).st_size
    except OSError:
        return 0


def _status(pid: int) -> Dict[str, str]:
    pairs = (line.partition(":") for line in _text("/proc/%d/status" % pid).splitlines())
    return {key: value.strip() for key, _, value in pairs}


def _thread_state(pid: int, tid: str) -> Optional[str]:
    try:
        with open("/proc/%d/task/%s/stat" % (pid, tid), "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return None


def _link(path: str) -> Optional[str]:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _word(path: str) -> str:
    return _text(path).strip()


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
