"""What dead work still holds, and giving it back. Standard library and Python 3.9 syntax only.

A process is an *orphan* only by provenance: it carries the marker of a job of this very state directory (or that job's
supervisor saw it), and that job has ended. Names, command lines and parents say nothing: an engine's worker often
hangs under a shell, and somebody else's server looks just like ours. Everything else is left alone and listed as such.
"""

import os
import signal
import time
from typing import Any, Dict, List, Optional, Set, Tuple

from remote.probe import jobdir, procs


def holders(jobs: str) -> Dict[str, Any]:
    return scan(os.path.expanduser(jobs))


def reclaim(jobs: str, items: List[Dict[str, Any]], grace: float) -> List[Dict[str, Any]]:
    return apply(os.path.expanduser(jobs), items, grace)


def scan(jobs: str) -> Dict[str, Any]:
    """All processes with provenance, or with a GPU, and their class: orphan, live, foreign, protected."""
    jobs = os.path.realpath(jobs)
    states = {job["id"]: job for job in jobdir.listing(jobs)}
    trees = _trees(jobs, states)
    sockets = procs.listening()
    own = procs.ancestors(os.getpid())
    boot, here = procs.boot_id(), procs.namespace(os.getpid())
    found = []
    for pid in procs.pids():
        now = procs.stat(pid)
        if now is None:
            continue
        job, by, run = _provenance(pid, now.starttime, jobs, trees)
        links = procs.descriptors(pid) if job else None
        gpu = procs.gpu_files(links or procs.descriptors(pid) or [])
        if job is None and not gpu:
            continue
        if not procs.alive(pid, now.starttime):
            continue
        kind, why = _classify(pid, job, states, own)
        found.append(
            {
                "class": kind,
                "why": why,
                "pid": pid,
                "starttime": now.starttime,
                "boot_id": boot,
                "pid_namespace": procs.namespace(pid) or here,
                "ppid": now.ppid,
                "state": now.state,
                "job": job,
                "run": run,
                "job_name": states.get(job or "", {}).get("name", ""),
                "job_state": states.get(job or "", {}).get("state"),
                "provenance": by,
                "command": procs.command(pid, 200),
                "rss": procs.rss(pid),
                "ports": procs.ports_of(links or [], sockets),
                "gpu_files": gpu,
            }
        )
    memory = _available()
    found.sort(key=lambda entry: (entry["starttime"], entry["pid"]))
    return {"boot_id": boot, "memory_available": memory, "at": time.time(), "processes": found}


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


def _provenance(
    pid: int, starttime: int, jobs: str, trees: Dict[Tuple[int, int], str]
) -> Tuple[Optional[str], str, str]:
    """(job, how we know, run) of a process; job None when nothing says that it is ours."""
    marked = procs.markers(pid)
    if "RIGBOOK_JOB" in marked:
        id = marked["RIGBOOK_JOB"]
        # The marker of another project's state directory does not make it ours to end.
        if marked.get("RIGBOOK_JOB_DIR") == os.path.join(jobs, id):
            return id, "marker", marked.get("RIGBOOK_RUN", "")
        return "other:" + id, "marker", marked.get("RIGBOOK_RUN", "")
    if (pid, starttime) in trees:
        return trees[(pid, starttime)], "tree", ""
    return None, "", ""


def _classify(pid: int, job: Optional[str], states: Dict[str, Any], own: Set[int]) -> Tuple[str, str]:
    if job is None:
        return "foreign", "it carries no marker of ours"
    if job not in states:
        return "foreign", "its job is not one of this state directory"
    if pid in own or pid == 1:
        return "protected", "we run below it"
    state = states[job]["state"]
    if state in jobdir.ENDED:
        return "orphan", "its job is " + state
    return "live", "its job is " + state


def _available() -> Optional[int]:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def apply(jobs: str, items: List[Dict[str, Any]], grace: float) -> List[Dict[str, Any]]:
    """End exactly these processes: TERM, `grace` seconds, KILL. Each is checked again right before each signal."""
    outcomes: Dict[int, Dict[str, Any]] = {}
    pending: List[Dict[str, Any]] = []
    began = time.monotonic()

    def note(item: Dict[str, Any], outcome: str, reason: str = "") -> None:
        outcomes[item["pid"]] = {
            "pid": item["pid"],
            "outcome": outcome,
            "reason": reason,
            "seconds": round(time.monotonic() - began, 3),
        }

    for item in items:
        refusal = _signal(jobs, item, signal.SIGTERM)
        if refusal is None:
            pending.append(item)
        else:
            note(item, *refusal)
    for number, seconds, word in ((None, grace, "ended by TERM"), (signal.SIGKILL, 10.0, "ended by KILL")):
        if number is not None:
            for item in list(pending):
                refusal = _signal(jobs, item, number)
                if refusal is not None:
                    pending.remove(item)
                    note(item, *refusal)
        deadline = time.monotonic() + seconds
        while pending:
            for item in list(pending):
                if not procs.alive(item["pid"], item["starttime"]):
                    pending.remove(item)
                    note(item, word)
            if not pending or time.monotonic() > deadline:
                break
            time.sleep(0.02)
    for item in pending:
        states = "".join(sorted(set(procs.thread_states(item["pid"]))))
        note(item, "still there", "in uninterruptible sleep (D)" if "D" in states else "thread states " + states)
    return [outcomes[item["pid"]] for item in items]


def _signal(jobs: str, item: Dict[str, Any], number: int) -> Optional[Tuple[str, str]]:
    """Send when the plan still describes the world; else (outcome, reason)."""
    pid, starttime = item["pid"], item["starttime"]
    if item["boot_id"] != procs.boot_id():
        return "gone", "the machine was started anew since"
    if pid <= 1 or pid in procs.ancestors(os.getpid()):
        return "refused", "we run below it"
    now = procs.stat(pid)
    if now is None or now.starttime != starttime or not procs.alive(pid, starttime):
        return "gone", "it had ended before" if now is None else "the pid belongs to another process now"
    if procs.namespace(pid) not in (item["pid_namespace"], None):
        return "refused", "it is in another pid namespace than planned"
    directory = os.path.join(os.path.realpath(jobs), item["job"])
    state = jobdir.state(directory)["state"]
    if state not in jobdir.ENDED:
        return "refused", "its job is %s now" % state
    trees = _trees(os.path.realpath(jobs), {item["job"]: {"state": state}})
    if _provenance(pid, starttime, os.path.realpath(jobs), trees)[0] != item["job"]:
        return "refused", "nothing says any more that it belongs to the job"
    return None if procs.send(pid, starttime, number) else ("gone", "it had ended before")
