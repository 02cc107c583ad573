"""A job directory and what it says about its job. Standard library and Python 3.9 syntax only.

    JOBS/ID/  spec.json       what to run; never changes
              supervisor.pyz  the program that runs it
              lock            flock-ed by the supervisor as long as it lives
              start.json      written before the main process may begin: boot id, pid, start time
              tree.json       the job's processes as last seen: still tells them when the supervisor was killed
              out.log         its output, append only          events.jsonl   what it reports
              holes.json      what the log quota dropped from the middle of out.log
              stop.json       somebody asked it to stop
              exit.json       how it ended; written last

State, in this order: exit.json: finished; another boot id: lost in a reboot; lock held, unit there, or (pid,
start time) of the main process alive: running; else vanished. Nobody guesses from a connection that failed.
"""

import contextlib
import fcntl
import json
import os
import time
from typing import Any, Dict, List, Optional, Tuple

from remote.probe import procs

ENDED = ("finished", "vanished", "lost_reboot")


def read_json(path: str) -> Optional[Dict[str, Any]]:
    """The object in a file that was written by rename; None when it is not there."""
    try:
        with open(path, "rb") as file:
            data = json.loads(file.read().decode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return None
    return data if isinstance(data, dict) else None


def write_json(path: str, data: Dict[str, Any]) -> None:
    """Whole and durable, or not at all."""
    temporary = "%s.%d.tmp" % (path, os.getpid())
    text = json.dumps(data, ensure_ascii=True, indent=1).encode() + b"\n"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        # A part of a file must not stay behind, least of all under the real name.
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_held(directory: str) -> bool:
    try:
        descriptor = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two who look do not disturb each other; who starts a job tries again for a while.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def state(directory: str) -> Dict[str, Any]:
    """The job's status as a dict of plain values. See the rule at the top."""
    id = os.path.basename(directory)
    found: Dict[str, Any] = {"id": id, "dir": directory, "state": "absent", "reason": "there is no such job"}
    if not os.path.isdir(directory):
        return found
    try:
        spec = read_json(os.path.join(directory, "spec.json")) or {}
        start = read_json(os.path.join(directory, "start.json"))
        found.update(name=spec.get("name", ""), run=spec.get("run", ""), digest=spec.get("digest", ""), reason="")
        if start is None:
            if lock_held(directory):
                found["state"] = "running"
                found["reason"] = "starting"
            else:
                found["reason"] = "submitted, but it was never started"
            return found
        for key in ("pid", "starttime", "started", "supervisor"):
            found[key] = start[key]
        unit = start.get("unit")
        found.update(
            backend="systemd" if unit else "supervisor", unit=unit and unit["name"], cgroup=start.get("cgroup")
        )
        end = read_json(os.path.join(directory, "exit.json"))
        if end is None and started_anew(start):
            found.update(state="lost_reboot", reason="the machine was started anew while it ran")
            return found
        if end is None:
            main = procs.alive(start["pid"], start["starttime"])
            if "boottime" in start:
                found["seconds"] = round(time.clock_gettime(time.CLOCK_BOOTTIME) - start["boottime"], 3)
            if lock_held(directory):
                found.update(
                    state="running", reason="" if main else "its main process has ended: what it left is ended"
                )
                return found
            if start["pid_namespace"] != procs.namespace(os.getpid()):
                found.update(state="unknown", reason="it was started in another pid namespace than this one")
                return found
            if unit and unit.get("cgroup") and os.path.isdir(unit["cgroup"]):
                # It stays until the unit's stop command, which records the end in the supervisor's place, has run.
                found.update(state="running", reason="its supervisor is gone: systemd is ending it")
                return found
            if main:
                found.update(state="running", reason="its supervisor is gone: its exit code will not be known")
                return found
            # It may have ended between our two looks.
            end = read_json(os.path.join(directory, "exit.json"))
        if end is None:
            found.update(state="vanished", reason="it was killed together with its supervisor: no exit was recorded")
            return found
        found.update(
            state="finished",
            exit=end["exit"],
            signal=end["signal"],
            ended=end["ended"],
            swept=end["swept"],
            left=end["left"],
            stopped=end["stopped"],
            oom=end.get("oom", False),
            seconds=end.get("seconds"),
            reason=end.get("error", ""),
        )
    except (ValueError, KeyError, TypeError, OSError) as error:
        # Damaged or unreadable: nobody knows, and that is what we say.
        found.update(state="unknown", reason="%s: %s" % (type(error).__name__, error))
    return found


def started_anew(start: Dict[str, Any]) -> bool:
    """Whether the machine, or the container, was started again since. LXC gives a container a boot id of its own; where
    one has its host's, its first process tells: an older one cannot have begun later."""
    if start["boot_id"] != procs.boot_id():
        return True
    first = procs.stat(1)
    if first is None or start.get("init") is None or first.starttime == start["init"]:
        return False
    return first.starttime > int(start["init"])


_over: Dict[str, Tuple[Tuple[int, int], Dict[str, Any]]] = {}  # what was said of jobs that are over


def known(directory: str) -> Dict[str, Any]:
    """As `state`, but a job that is over is read once: a host keeps the directories of a thousand of them."""
    try:
        info = os.stat(os.path.join(directory, "exit.json"))
    except OSError:
        return state(directory)
    mark = (info.st_ino, info.st_mtime_ns)
    if directory not in _over or _over[directory][0] != mark:
        _over[directory] = (mark, state(directory))
    return dict(_over[directory][1])


def listing(root: str) -> List[Dict[str, Any]]:
    """All jobs, oldest first."""
    try:
        names = [name for name in os.listdir(root) if not name.startswith(".")]
    except FileNotFoundError:
        return []
    jobs = [known(os.path.join(root, name)) for name in names if os.path.isdir(os.path.join(root, name))]
    return sorted(jobs, key=lambda job: (job.get("started", 0), job["id"]))


def over(directory: str) -> bool:
    """Whether nothing more can come from this job."""
    return state(directory)["state"] in (*ENDED, "absent")


def holes(directory: str, file: str) -> List[Tuple[int, int]]:
    """[from, to) of what the log quota dropped from a file, in order."""
    if file != "out.log":
        return []
    try:
        with open(os.path.join(directory, "holes.json"), "rb") as opened:
            return [(int(low), int(high)) for low, high in json.loads(opened.read())["out.log"]]
    except FileNotFoundError:
        return []


def job(jobs: str, id: str) -> Dict[str, Any]:
    return state(os.path.join(root(jobs), id))


def jobs(jobs: str) -> List[Dict[str, Any]]:
    return listing(root(jobs))


def root(jobs: str) -> str:
    return os.path.realpath(os.path.expanduser(jobs))
