"""Giving back what dead work holds. Standard library and Python 3.9 syntax only.

A plan is frozen: it names processes by identity, and every one is judged anew (`whose`, `classes`) right before every
signal. What has changed in the least is left alone, and told.
"""

import os
import signal
import time
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

from remote.probe import procs, whose

Process = Dict[str, Any]


def reclaim(jobs: str, items: List[Dict[str, Any]], grace: float, **more: Any) -> List[Dict[str, Any]]:
    return apply(os.path.expanduser(jobs), items, grace, **more)


class Now:
    """An item of a plan beside what is there now."""

    def __init__(self, item: Dict[str, Any], jobs: str, interpreters: Iterable[str]) -> None:
        self.item = item
        self.boot = procs.boot_id()
        self.stat = procs.stat(item["pid"])
        self.process: Optional[Process] = None
        if self.stat is not None and item["pid"] > 1:
            self.process = whose.judged(item["pid"], self.stat, whose.World(jobs, interpreters))

    def of(self, key: str) -> Any:
        return (self.process or {}).get(key)


def _gone(now: Now) -> bool:
    return now.stat is None or not procs.alive(now.item["pid"], now.stat.starttime)


def _class_changed(now: Now) -> bool:
    kind, planned = now.of("class"), now.item["kind"]
    if planned == "foreign":
        return kind not in ("foreign", "unclaimed")  # named by the user; ours alive and protected never are
    return bool(kind != planned)


# (name, what has changed, outcome, reason). The first that is true keeps the signal back.
Change = Tuple[str, Callable[[Now], bool], str, str]
CHANGES: List[Change] = [
    ("boot", lambda now: now.item["boot_id"] != now.boot, "gone", "the machine was started anew since"),
    ("ended", _gone, "gone", "it had ended before"),
    (
        "starttime",
        lambda now: now.stat is not None and now.stat.starttime != now.item["starttime"],
        "gone",
        "the pid belongs to another process now",
    ),
    (
        "namespace",
        lambda now: now.of("pid_namespace") not in (now.item["pid_namespace"], None),
        "refused",
        "it is in another pid namespace than planned",
    ),
    (
        "cgroup",
        lambda now: now.item.get("cgroup") is not None and now.of("cgroup") != now.item["cgroup"],
        "refused",
        "it is in another cgroup than planned",
    ),
    (
        "program",
        lambda now: now.item.get("exe") is not None and now.of("exe") != now.item["exe"],
        "refused",
        "it runs another program than planned",
    ),
    (
        "job",
        lambda now: now.item["kind"] == "orphan" and now.of("job_id") != now.item["job"],
        "refused",
        "nothing says any more that it belongs to the job",
    ),
    ("class", _class_changed, "refused", ""),
]


def refusal(now: Now) -> Optional[Tuple[str, str]]:
    """(outcome, reason) when the plan does not describe the world any more."""
    for _, changed, outcome, reason in CHANGES:
        if changed(now):
            return outcome, reason or "it is %s now: %s" % (now.of("class"), now.of("why"))
    return None


def apply(
    jobs: str, items: List[Dict[str, Any]], grace: float, interpreters: Iterable[str] = ()
) -> List[Dict[str, Any]]:
    """End exactly these processes: TERM (launchers first), `grace` seconds, KILL. One that would start itself anew is
    stopped before it is killed, and what planned processes have spawned since is ended with them."""
    outcomes: Dict[int, Dict[str, Any]] = {}
    began = time.monotonic()

    def note(item: Dict[str, Any], outcome: str, reason: str = "") -> None:
        outcomes[item["pid"]] = {
            "pid": item["pid"],
            "outcome": outcome,
            "reason": reason,
            "seconds": round(time.monotonic() - began, 3),
        }

    def wait(seconds: float, word: str) -> None:
        deadline = time.monotonic() + seconds
        while pending:
            for item in list(pending):
                if not procs.alive(item["pid"], item["starttime"]):
                    pending.remove(item)
                    note(item, word)
            if not pending or time.monotonic() > deadline:
                break
            time.sleep(0.02)

    pending: List[Dict[str, Any]] = []
    for item in launchers_first(items):
        refused = _signal(jobs, item, signal.SIGTERM, interpreters)
        if refused is None:
            pending.append(item)
        else:
            note(item, *refused)
    wait(grace, "ended by TERM")
    spawned: List[Dict[str, Any]] = []
    if pending:
        for item in list(pending):
            refused = _signal(jobs, item, signal.SIGSTOP, interpreters)
            if refused is not None:
                pending.remove(item)
                note(item, *refused)
        spawned = _spawned(pending, items)
        for child in spawned:
            procs.send(child["pid"], child["starttime"], signal.SIGKILL)
        for item in list(pending):
            refused = _signal(jobs, item, signal.SIGKILL, interpreters)
            if refused is not None:
                procs.send(item["pid"], item["starttime"], signal.SIGCONT)
                pending.remove(item)
                note(item, *refused)
        pending += spawned
        wait(10.0, "ended by KILL")
    for item in pending:
        states = "".join(sorted(set(procs.thread_states(item["pid"]))))
        note(item, "still there", "in uninterruptible sleep (D)" if "D" in states else "thread states " + states)
    for child in spawned:
        outcomes[child["pid"]].update(spawned_by=child["parent"], starttime=child["starttime"])
    return [outcomes[item["pid"]] for item in [*items, *spawned]]


def launchers_first(items: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Parents before children: a launcher that is asked first ends its workers in good order, and starts none anew."""
    parents = {item["pid"]: (procs.stat(item["pid"]) or procs.Stat("", "", 0, 0, 0, 0)).ppid for item in items}

    def depth(pid: int) -> int:
        count = 0
        while parents.get(pid) in parents and count < len(parents):
            pid, count = parents[pid], count + 1
        return count

    return sorted(items, key=lambda item: depth(item["pid"]))


def _spawned(stopped: List[Dict[str, Any]], items: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Children of stopped processes that are younger than the plan: they can have no other reason to be."""
    planned = {(item["pid"], item["starttime"]) for item in items}
    newest = max(item.get("seen_until") or item["starttime"] for item in items)
    found: List[Dict[str, Any]] = []
    tree = procs.children()
    level = [item["pid"] for item in stopped]
    while level:
        below = [(parent, child) for parent in level for child in tree.get(parent, [])]
        level = []
        for parent, child in below:
            now = procs.stat(child)
            if now is None or now.ppid != parent or (child, now.starttime) in planned or now.starttime <= newest:
                continue
            found.append({"pid": child, "starttime": now.starttime, "parent": parent})
            level.append(child)
    return found


def _signal(
    jobs: str, item: Dict[str, Any], number: int, interpreters: Iterable[str] = ()
) -> Optional[Tuple[str, str]]:
    """Send when the plan still describes the world; else (outcome, reason)."""
    refused = refusal(Now(item, jobs, interpreters))
    if refused is not None:
        return refused
    return None if procs.send(item["pid"], item["starttime"], number) else ("gone", "it had ended before")
