"""Whose every process is that holds something. Standard library and Python 3.9 syntax only.

Whose a process is, `classes` says, from what is gathered here: the mark of a job of this very state directory (or that
job's supervisor saw it), whether that job has ended, who launched it, what it serves. Names and command lines say
nothing: an engine's worker often hangs under a shell, and somebody else's server looks just like ours.
"""

import os
import socket
import time
from typing import Any, Dict, Iterable, List, Optional, Tuple

from remote.probe import classes, holders, jobdir, nvml, procs

Process = Dict[str, Any]
SCANNER = holders.Scanner()
CONNECT_S = 0.3


def all_holders(jobs: str, **more: Any) -> Dict[str, Any]:
    return scan(os.path.expanduser(jobs), **more)


class World:
    """What a judgement needs to know beside the process itself; looked up once a scan."""

    def __init__(
        self, jobs: str, interpreters: Iterable[str], listening: Optional[Dict[str, Dict[str, Any]]] = None
    ) -> None:
        self.jobs = os.path.realpath(jobs)
        self.interpreters = list(interpreters)
        self.states = {job["id"]: job for job in jobdir.listing(self.jobs)}
        self.trees = _trees(self.jobs, self.states)
        self.own = procs.ancestors(os.getpid())
        self.net = holders._link("/proc/self/ns/net")
        self.listening = procs.listening() if listening is None else listening
        self.answers: Dict[int, bool] = {}


def scan(jobs: str, interpreters: Iterable[str] = ()) -> Dict[str, Any]:
    """All processes with provenance, or with a GPU, and their class; and what NVML says beside them."""
    world = World(jobs, interpreters)
    gpus = nvml.read()
    named = {entry["pid"] for gpu in gpus["gpus"] for entry in nvml.listed(gpu)}
    seen = SCANNER.scan(named, deep=True)
    if any(p["threads"].get("D") for p in seen["processes"]):
        # A disk at work or stuck for good? Only time tells the two apart.
        time.sleep(classes.STUCK_S + 0.1)
        seen = SCANNER.scan(named)
    found = {p["pid"]: p for p in seen["processes"]}
    table = {pid: now for pid in procs.pids() for now in [procs.stat(pid)] if now is not None}
    sockets = {"socket:[%s]" % inode: entry["port"] for inode, entry in world.listening.items()}
    for pid, now in table.items():
        if pid not in found and _provenance(pid, now.starttime, world)[0] and procs.alive(pid, now.starttime):
            found[pid] = bare(pid, now, table, sockets)
    judge(found, table, world)
    entries = sorted(found.values(), key=lambda p: (p["starttime"], p["pid"]))
    return {
        "boot_id": seen["boot_id"],
        "memory_available": _available(),
        "at": time.time(),
        "ticks": seen["ticks"],
        "processes": entries,
        "missing": seen["missing"],
        "nvml": gpus,
    }


def gpu_processes(
    scanner: holders.Scanner, jobs: str, interpreters: Iterable[str], named: Iterable[int], deep: bool
) -> Dict[str, Any]:
    """The holders of GPUs alone, each with its class: what is looked at again and again."""
    seen = scanner.scan(named, deep)
    found = {p["pid"]: p for p in seen["processes"]}
    if found:
        judge(found, scanner.table, World(jobs, interpreters, scanner.listening))
    return seen


def bare(pid: int, now: procs.Stat, table: Dict[int, procs.Stat], sockets: Dict[str, int]) -> Process:
    """A process that holds no GPU, in the same words."""
    p = holders.describe(pid, now, table, sockets)
    states = procs.thread_states(pid)
    p.update(nodes={}, gpus=[], threads={state: states.count(state) for state in set(states)}, stuck=[], readable=True)
    return p


def judge(found: Dict[int, Process], table: Dict[int, procs.Stat], world: World) -> None:
    """Add `class` and `why` to every process, and the evidence that they rest on."""
    children: Dict[int, List[int]] = {}
    for pid, now in table.items():
        children.setdefault(now.ppid, []).append(pid)
    for p in found.values():
        _evidence(p, table, world)
    for p in found.values():
        # Knocking at a server's door is left to where the answer counts.
        asked = p["job"] is None and p["interpreter"] is not None
        p["answers"] = _answers(p["pid"], p["ports"], world) if asked else []
        p["live_children"] = asked and any(_serves(pid, world) for pid in _below(p["pid"], children))
    while True:
        for p in found.values():
            p["class"], p["why"] = classes.classify(p)
        # What dead work launched is dead work, too.
        late = [
            p
            for p in found.values()
            if not p["reparented"] and found.get(p["ppid"], {}).get("class") in ("unclaimed", "unkillable")
        ]
        if not late:
            break
        for p in late:
            p["reparented"] = True
    for p in found.values():
        job = p["job"] or {}
        p["run"] = p["markers"].get("RIGBOOK_RUN", "")
        p["job_name"], p["job_state"] = job.get("name", ""), job.get("state")
        p["evidence"] = classes.evidence(p) if p["class"] == "unclaimed" else []
        p["gpu_files"] = sorted(node for node in p["nodes"] if node.startswith("/dev/nvidia"))
        p["job_id"] = job.get("id", "")
        p["provenance"] = job.get("by", "")


def _below(pid: int, children: Dict[int, List[int]]) -> List[int]:
    found, level = [], [pid]
    while level:
        level = [child for parent in level for child in children.get(parent, [])]
        found += level
    return found


def _evidence(p: Process, table: Dict[int, procs.Stat], world: World) -> None:
    id, by = _provenance(p["pid"], p["starttime"], world)
    ours = bool(id) and not id.startswith("other:")
    known = world.states.get(id.replace("other:", "", 1), {})
    p["job"] = {"id": id, "by": by, "ours": ours, "state": known.get("state"), "name": known.get("name", "")}
    if not id:
        p["job"] = None
    p["own"] = p["pid"] in world.own
    parent = table.get(p["ppid"])
    # A session is inherited: who is in another one than its parent, and did not open it, was not launched by it.
    p["reparented"] = parent is not None and 0 != p["session"] != p["pid"] and parent.session != p["session"]
    if p["session"] == 0 or p["pgrp"] == 0:
        p["session_alive"] = True  # led by somebody outside of our pid namespace, whom we cannot see
    p["interpreter"] = next((path for path in world.interpreters if runs(p, path)), None)


def runs(p: Process, python: str) -> bool:
    """Whether a process runs this interpreter. Many environments link to one binary: then its libraries decide."""
    if p["argv0"] == python:
        return True
    root = "/proc/%d/root" % p["pid"]
    real = holders._link("%s%s" % (root, python))
    try:
        same = os.path.samestat(os.stat(root + python), os.stat("/proc/%d/exe" % p["pid"]))
    except OSError:
        return False
    prefix = os.path.dirname(os.path.dirname(python))
    return same and (real is None or holders.maps_under(p["pid"], prefix))


def _answers(pid: int, ports: Iterable[int], world: World) -> List[int]:
    """Those ports on which somebody answers. What listens in another network than ours counts: we cannot ask there."""
    if holders._link("/proc/%d/ns/net" % pid) != world.net:
        return holders.foreign_ports(pid)
    for port in ports:
        if port not in world.answers:
            addresses = {entry["address"] for entry in world.listening.values() if entry["port"] == port}
            here = {"0.0.0.0": "127.0.0.1", "::": "::1"}
            world.answers[port] = any(_connects(here.get(address, address), port) for address in sorted(addresses))
    return [port for port in ports if world.answers[port]]


def _serves(pid: int, world: World) -> bool:
    return bool(_answers(pid, procs.ports_of(procs.descriptors(pid) or [], world.listening), world))


def _connects(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), CONNECT_S):
            return True
    except socket.timeout:
        return True  # a full backlog: somebody is there, and busy
    except OSError:
        return False


def _trees(jobs: str, states: Dict[str, Any]) -> Dict[Tuple[int, int], str]:
    """(pid, starttime) -> job, as the supervisors of ended jobs last saw it. A program that renames itself
    (setproctitle) overwrites its environment, and with it the marker; this remains."""
    found = {}
    boot = procs.boot_id()
    for id, job in states.items():
        if job["state"] not in jobdir.ENDED:
            continue
        try:
            start = jobdir.read_json(os.path.join(jobs, id, "start.json")) or {}
            tree = jobdir.read_json(os.path.join(jobs, id, "tree.json")) or {}
            if start.get("boot_id") == boot:
                for pid, starttime in tree.get("processes", []):
                    found[(pid, starttime)] = id
        except (OSError, ValueError, TypeError):
            continue
    return found


def _provenance(pid: int, starttime: int, world: World) -> Tuple[str, str]:
    """(job, how we know) of a process; ("", "") when nothing says that it is ours."""
    marked = procs.markers(pid)
    if "RIGBOOK_JOB" in marked:
        id = marked["RIGBOOK_JOB"]
        # The marker of another project's state directory does not make it ours to end.
        if marked.get("RIGBOOK_JOB_DIR") == os.path.join(world.jobs, id):
            return id, "marker"
        return "other:" + id, "marker"
    if (pid, starttime) in world.trees:
        return world.trees[(pid, starttime)], "tree"
    return "", ""


def _available() -> Optional[int]:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def judged(pid: int, now: procs.Stat, world: World) -> Process:
    """One process with its class; a child's rests on its parent's, so the ancestors are judged with it."""
    table = {other: stat for other in procs.pids() for stat in [procs.stat(other)] if stat is not None}
    table[pid] = now
    sockets = {"socket:[%s]" % inode: entry["port"] for inode, entry in world.listening.items()}
    wanted, at = {pid}, now.ppid
    while at > 1 and at in table and at not in wanted:
        wanted.add(at)
        at = table[at].ppid
    wanted.update(_below(pid, _children(table)))
    found = {}
    for other in wanted:
        p = bare(other, table[other], table, sockets)
        seen = SCANNER.look(other, time.monotonic(), other == pid)
        p.update(nodes=dict(seen.nodes), gpus=list(seen.minors), readable=seen.readable)
        found[other] = p
    judge(found, table, world)
    return found[pid]


def _children(table: Dict[int, procs.Stat]) -> Dict[int, List[int]]:
    children: Dict[int, List[int]] = {}
    for pid, now in table.items():
        children.setdefault(now.ppid, []).append(pid)
    return children
