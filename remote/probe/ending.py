"""How a job ends: swept to the last process, and recorded whatever the disk says.

Standard library and Python 3.9 syntax only: this runs on other machines.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from typing import Any, Dict, List, Optional, Tuple

from remote.probe import cgroup, jobdir, procs, unit

SWEEP_GRACE = 5.0
SWEEP_LIMIT = 30.0  # s after which what does not die (a thread in uninterruptible sleep) is reported, not awaited
SLOT = 4096  # bytes kept for exit.json, so that a disk that is full at the end still has room for it
BALLAST = 64 << 10  # bytes given back when even that does not help (a copy-on-write file system)


def reap(main: int) -> Optional[Tuple[int, Any]]:
    """Collect all children that have ended; the main process's (wait status, usage) when it is among them."""
    found = None
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == main:
            found = (status, usage)


def living(group: Optional[str]) -> List[Tuple[int, int]]:
    """(pid, start time) of what is left below us and in the job's control group."""
    found = {}
    for pid in [*procs.descendants(os.getpid()), *cgroup.members(group)]:
        now = procs.stat(pid)
        if now is not None and procs.alive(pid, now.starttime):
            found[pid] = now.starttime
    return list(found.items())


def sweep(
    group: Optional[str], name: str, grace: float = SWEEP_GRACE
) -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
    """End what the job left behind: TERM, `grace` seconds, KILL, until two looks find nothing. (ended, what would not
    end)."""
    known: Dict[Tuple[int, int], Dict[str, Any]] = {}
    began = time.monotonic()
    empty, termed = 0, set()
    while True:
        reap(-1)
        left = living(group)
        for pid, begun in left:
            entry = {"pid": pid, "starttime": begun, "command": procs.command(pid, 120)}
            known.setdefault((pid, begun), entry)
        empty = 0 if left else empty + 1
        waited = time.monotonic() - began
        if empty >= 2 or (left and waited > SWEEP_LIMIT):
            stuck = [known.pop(identity) for identity in left]
            return list(known.values()), stuck
        if left and waited > grace and group is not None:
            cgroup.kill(group, name, 0.0)
        for identity in left:
            if waited > grace:
                procs.send(identity[0], identity[1], signal.SIGKILL)
            elif identity not in termed:
                termed.add(identity)
                procs.send(identity[0], identity[1], signal.SIGTERM)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05 if left else 0.005)


def reserve(directory: str) -> None:
    """Blocks for exit.json, taken while there is room. On copy-on-write file systems this promises nothing."""
    for name, size in (("exit.slot", SLOT), ("exit.ballast", BALLAST)):
        with open(os.path.join(directory, name), "wb") as file:
            file.write(b" " * size)
            file.flush()
            os.fsync(file.fileno())


def write_exit(directory: str, record: Dict[str, Any]) -> None:
    """Tries until it is written. While we hold the lock the job counts as running, which is nearer the truth than
    "vanished"; the system's journal is told meanwhile."""
    slot, ballast = os.path.join(directory, "exit.slot"), os.path.join(directory, "exit.ballast")
    text = json.dumps(record).encode()
    while len(text) > SLOT and (record["swept"] or record["left"]):
        record["swept" if record["swept"] else "left"].pop()
        record["cut"] = True
        text = json.dumps(record).encode()
    pause = 0.25
    while True:
        try:
            with contextlib.suppress(FileNotFoundError):
                with open(os.path.join(directory, "out.log"), "rb") as log:
                    os.fsync(log.fileno())  # the log is whole on disk before the end is
            with open(slot, "r+b" if os.path.exists(slot) else "wb") as file:
                file.write(text.ljust(SLOT))
                file.flush()
                os.fsync(file.fileno())
            os.rename(slot, os.path.join(directory, "exit.json"))
            jobdir.sync_directory(directory)
            break
        except OSError as error:
            if not os.path.isdir(directory):
                tell("job %s ended (%s), but its directory is gone" % (directory, text.decode()[:600]))
                return
            if os.path.exists(ballast):
                with contextlib.suppress(OSError):
                    os.unlink(ballast)
            elif pause == 0.5:
                tell("job %s ended (%s), but that cannot be recorded: %s" % (directory, text.decode()[:600], error))
            time.sleep(pause)
            pause = min(pause * 2, 8.0)
    with contextlib.suppress(OSError):
        os.unlink(ballast)


def tell(text: str) -> None:
    """To the system's journal, which may have room where the job's disk has none."""
    logger = unit.program("logger")
    if logger is not None:
        words = [logger, "-t", "rigbook-job", text]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=10, check=False)


def post(directory: str) -> None:
    """After the unit is down (ExecStopPost): record the end where the supervisor could not, since it was killed."""
    start = jobdir.read_json(os.path.join(directory, "start.json"))
    mine = os.environ.get("INVOCATION_ID", "")
    if start is None or os.path.exists(os.path.join(directory, "exit.json")):
        return
    if (start.get("unit") or {}).get("invocation") != mine or jobdir.lock_held(directory):
        return  # another run of that name, which found the job started already
    result, how = os.environ.get("SERVICE_RESULT", ""), os.environ.get("EXIT_STATUS", "")
    group = start.get("cgroup")
    oom = result == "oom-kill"
    asked = os.path.exists(os.path.join(directory, "stop.json"))
    record = {
        "v": 1,
        "exit": None,
        # What the job would have said is not known: it was ended with its supervisor, by this.
        "signal": how if how in ("KILL", "TERM") and not oom else "KILL",
        "stopped": asked,
        "oom": oom,
        "by": "systemd",
        "error": "its supervisor was killed%s, and the job with it (systemd: %s)"
        % (" for want of memory" if oom else "", result),
        "swept": [],
        "left": [],
        "started": start["started"],
        "ended": time.time(),
        "seconds": round(time.clock_gettime(time.CLOCK_BOOTTIME) - start["boottime"], 3),
        "boot_id": procs.boot_id(),
    }
    if not cgroup.guard(group or "", unit.name(directory)):
        cgroup.remove(group)
    write_exit(directory, record)


def stop(directory: str, grace: float) -> None:
    """Ask the job to end and wait until it has; insist; look whether all is gone."""
    now = jobdir.state(directory)
    if now["state"] != "running" or "pid" not in now:
        return
    jobdir.write_json(os.path.join(directory, "stop.json"), {"grace": grace, "asked": time.time()})
    name, group = unit.name(directory), now.get("cgroup")
    if jobdir.lock_held(directory):
        supervisor = now["supervisor"]
        procs.send(supervisor["pid"], supervisor["starttime"], signal.SIGTERM)
        deadline = time.monotonic() + grace + SWEEP_LIMIT + 5
        while jobdir.state(directory)["state"] == "running" and time.monotonic() < deadline:
            # A supervisor that was stopped (SIGSTOP, a debugger) passes nothing on.
            if time.monotonic() > deadline - SWEEP_LIMIT - 4 and _frozen(supervisor["pid"]):
                break
            time.sleep(0.02)
        if jobdir.state(directory)["state"] != "running":
            return
        if now.get("unit"):
            procs.send(supervisor["pid"], supervisor["starttime"], signal.SIGKILL)
            unit.stop(directory)
    # No supervisor, or a deaf one: what it saw last, and whatever is in the job's group.
    members = _known(directory, now, group)
    for pid, begun in members:
        procs.send(pid, begun, signal.SIGTERM)
    procs.wait_gone(members, grace)
    if group is not None:
        cgroup.kill(group, name, SWEEP_GRACE)
    members = _known(directory, now, group)
    for pid, begun in members:
        procs.send(pid, begun, signal.SIGKILL)
    procs.wait_gone(members, SWEEP_GRACE)


def _frozen(pid: int) -> bool:
    now = procs.stat(pid)
    return now is not None and now.state in "Tt"


def _known(directory: str, now: Dict[str, Any], group: Optional[str]) -> List[Tuple[int, int]]:
    """(pid, start time) of every living process that is provably this job's. Never one that we run below."""
    tree = jobdir.read_json(os.path.join(directory, "tree.json")) or {"processes": []}
    found = {(now["pid"], now["starttime"]), *((pid, begun) for pid, begun in tree["processes"])}
    if not cgroup.guard(group or "", unit.name(directory)):
        found |= {(pid, entry.starttime) for pid in cgroup.members(group) for entry in [procs.stat(pid)] if entry}
    for pid in procs.pids():
        entry = procs.stat(pid)
        if entry is not None and procs.markers(pid).get("RIGBOOK_JOB_DIR") == directory:
            found.add((pid, entry.starttime))
    own = procs.ancestors(os.getpid())
    return [(pid, begun) for pid, begun in found if pid not in own and procs.alive(pid, begun)]


def remaining(directory: str) -> List[Dict[str, Any]]:
    """What still lives of a job that is over: the proof of a stop is that this is empty."""
    start = jobdir.read_json(os.path.join(directory, "start.json"))
    if start is None or start["boot_id"] != procs.boot_id():
        return []
    found = _known(directory, start, start.get("cgroup"))
    return [{"pid": pid, "starttime": begun, "command": procs.command(pid, 120)} for pid, begun in found]
