"""Runs one job, apart from whoever started it. Standard library and Python 3.9 syntax only.

    python3 -I -S STAGE/supervisor.pyz adopt JOBDIR STAGE   make the staged directory the job's (or drop it: there is
                                                            one already), then as `start`
    ... start JOBDIR    begin (once, however often it is called), print the status
    ... stop JOBDIR S   ask it to end, within S seconds; insist; print the status
    ... run JOBDIR      what systemd is given          ... post JOBDIR     what systemd runs when the unit is down

The supervisor leads a session of its own and is a *child subreaper*: whatever its job starts, forked twice or in a
session of its own, becomes its child when its parent dies. Where it can it also gives the job a control group. So
when the main process ends it can find all that is left and end it (TERM, then KILL), which neither process groups nor
a walk along parents can.
"""

import contextlib
import errno
import fcntl
import json
import os
import signal
import time
from typing import Any, Dict, List, Optional, Tuple

from remote.probe import caps, cgroup, ending, jobdir, procs, unit

GRACE = 10.0  # s from TERM to KILL when nobody says otherwise
TREE_S = 2.0  # between two looks at which processes there are
CAPS_S = 0.5
STALE_S = 3600.0
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def main(argv: List[str]) -> int:
    what, directory = argv[0], os.path.realpath(argv[1])
    if what == "adopt":
        user = unit.session_bound() if unit.scope() is None else ""
        if user and not os.path.isdir(directory):
            drop(os.path.realpath(argv[2]))
            print(json.dumps({"id": os.path.basename(directory), "refused": "session-bound", "user": user}))
            return 0
        adopt(os.path.realpath(argv[2]), directory)
        start(directory)
        tidy(os.path.dirname(directory))
    elif what == "start":
        start(directory)
    elif what == "run":
        lock = take_lock(directory)
        if lock is not None:
            redirect(directory)
            supervise(directory, lock, None)
        return 0
    elif what == "post":
        ending.post(directory)
        return 0
    elif what == "stop":
        ending.stop(directory, float(argv[2]))
    else:
        raise SystemExit("adopt, start, stop, run or post")
    status = jobdir.state(directory)
    if what == "stop" and status["state"] in jobdir.ENDED:
        status["left"] = ending.remaining(directory)
    print(json.dumps(status))
    return 0


def take_lock(directory: str) -> Optional[int]:
    """The job's lock, or None when somebody has started this job already."""
    descriptor = os.open(os.path.join(directory, "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + 10
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Held by its supervisor, or for an instant by somebody who looks at the state.
            if os.path.exists(os.path.join(directory, "start.json")) or time.monotonic() > deadline:
                os.close(descriptor)
                return None
            time.sleep(0.02)
            continue
        if os.path.exists(os.path.join(directory, "start.json")):
            os.close(descriptor)
            return None
        return descriptor


def adopt(stage: str, directory: str) -> None:
    """Give the staged directory its name, in one step; whoever comes second finds the first one's job."""
    complete = os.path.join(stage, "~complete")
    if not os.path.exists(complete):
        raise SystemExit("only a part of the job arrived")  # tar takes a cut archive for a whole one
    os.unlink(complete)
    try:
        os.rename(stage, directory)
        jobdir.sync_directory(os.path.dirname(directory))
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        drop(stage)


def tidy(root: str) -> None:
    """Drop what submissions that were cut left behind, long ago."""
    for entry in os.scandir(root):
        with contextlib.suppress(OSError):
            if entry.name.startswith(".stage-") and time.time() - entry.stat().st_mtime > STALE_S:
                drop(entry.path)


def drop(stage: str) -> None:
    import shutil

    shutil.rmtree(stage, ignore_errors=True)


def start(directory: str) -> None:
    """Start the job unless it was started before. Returns when start.json is on disk."""
    if os.path.exists(os.path.join(directory, "start.json")):
        return
    spec = jobdir.read_json(os.path.join(directory, "spec.json"))
    assert spec is not None
    how = unit.scope()
    if how is not None and unit.start(directory, spec, how):
        return
    lock = take_lock(directory)
    if lock is None:
        return
    told, tell = os.pipe()
    if os.fork() == 0:
        try:
            os.close(told)
            os.setsid()
            redirect(directory)
            supervise(directory, lock, tell)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(lock)
    os.close(tell)
    while os.read(told, 1):
        pass


def redirect(directory: str) -> None:
    """Nothing of the session may stay open, else the connection that started us hangs until the job ends."""
    null = os.open(os.devnull, os.O_RDWR)
    path = os.path.join(directory, "supervisor.log")
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def supervise(directory: str, lock: int, tell: Optional[int]) -> None:
    """Run the job to its end. `tell` is closed when start.json is durable; without it we are a unit of systemd's."""
    subreaper = become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    spec = jobdir.read_json(os.path.join(directory, "spec.json"))
    assert spec is not None
    ending.reserve(directory)
    name = unit.name(directory)
    group, kept = cgroup.make(name, spec.get("memory_max"), spec.get("tasks_max"))
    gate, open_gate = os.pipe()
    failed, say_failed = os.pipe()
    main = os.fork()
    if main == 0:
        become_job(directory, spec, gate, open_gate, say_failed)
    os.close(gate)
    os.close(say_failed)
    if group is not None and not cgroup.put(group, main):
        group, kept = None, []  # then we keep the caps ourselves
    if tell is None:
        tasks = spec.get("tasks_max")
        kept += cgroup.kept_around(spec.get("memory_max"), None if tasks is None else tasks + unit.OUR_TASKS)
    spare_us()
    identity = procs.stat(main)
    own = procs.stat(os.getpid())
    first = procs.stat(1)
    assert identity is not None and own is not None
    started, boottime = time.time(), time.clock_gettime(time.CLOCK_BOOTTIME)
    invocation = os.environ.get("INVOCATION_ID")
    of_systemd = {"name": name + ".service", "invocation": invocation, "cgroup": cgroup.of("self")}
    jobdir.write_json(
        os.path.join(directory, "start.json"),
        {
            "v": 2,
            "boot_id": procs.boot_id(),
            "init": first.starttime if first else None,
            "pid": main,
            "starttime": identity.starttime,
            "pid_namespace": procs.namespace(os.getpid()),
            "supervisor": {"pid": os.getpid(), "starttime": own.starttime, "subreaper": subreaper},
            "unit": of_systemd if tell is None else None,
            "cgroup": group,
            "started": started,
            "boottime": boottime,
        },
    )
    # Only now may the job begin: a job that ran has a start.json, whatever happens next.
    os.write(open_gate, b"g")
    os.close(open_gate)
    if tell is not None:
        os.close(tell)
    error = os.read(failed, 4096).decode("utf-8", "replace")  # EOF when exec worked
    os.close(failed)
    watched = Watch(directory, main, spec, group, kept)
    status, usage = watched.to_the_end()
    # Who asked for a quick stop does not wait for what it left behind either.
    swept, left = ending.sweep(group, name, min(ending.SWEEP_GRACE, watched.grace))
    died = signal.Signals(os.WTERMSIG(status)).name[3:] if os.WIFSIGNALED(status) else None
    kills = max(cgroup.oom_kills(group), cgroup.oom_around() - watched.oom_before)
    record = {
        "v": 2,
        "exit": None if died else os.WEXITSTATUS(status),
        "signal": died,
        "stopped": watched.stopped,
        # The kernel killed something of it for want of memory; that was its main process if a KILL ended it.
        "oom": watched.over == "memory" or (kills > 0 and died == "KILL"),
        "oom_kills": kills,
        "swept": swept,
        "left": left,
        "started": started,
        "ended": time.time(),
        # By a clock that nobody sets: the two times above are for people.
        "seconds": round(time.clock_gettime(time.CLOCK_BOOTTIME) - boottime, 3),
        "boot_id": procs.boot_id(),
        "max_rss": usage.ru_maxrss * 1024,
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
    }
    if error or watched.why:
        record["error"] = error or watched.why
    elif record["oom"]:
        record["error"] = "the kernel killed it for want of memory"
    ending.write_exit(directory, record)
    cgroup.remove(group)


def spare_us() -> None:
    """When memory runs out the kernel shall choose the job, which is large, and leave us to tell of it."""
    with contextlib.suppress(OSError):
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("-900")  # only root may


def become_subreaper() -> bool:
    try:
        import ctypes

        return bool(ctypes.CDLL(None, use_errno=True).prctl(36, 1, 0, 0, 0) == 0)  # PR_SET_CHILD_SUBREAPER
    except Exception:
        return False  # a Python without ctypes: the sweep then sees only what kept its parents


def become_job(directory: str, spec: Dict[str, Any], gate: int, open_gate: int, say_failed: int) -> None:
    """In the child: wait for the gate, then become the job's main process. Never returns."""
    try:
        os.close(open_gate)
        os.setpgid(0, 0)
        if os.read(gate, 1) != b"g":
            os._exit(125)  # the supervisor died before it could record us
        environment = jobdir.read_json(os.path.join(directory, "environment.json")) or dict(os.environ)
        argv = [word.replace("{job}", directory) for word in spec["argv"]]
        extra = {name: value.replace("{job}", directory) for name, value in spec.get("env", {}).items()}
        environment.update(PYTHONUNBUFFERED="1")
        environment.update(extra)
        if os.path.isdir(os.path.join(directory, "src")):
            paths = [os.path.join(directory, "src"), extra.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = ":".join(path for path in paths if path)
        # By these three a process that outlives its job is known to be ours.
        environment.update(RIGBOOK_JOB=spec["id"], RIGBOOK_RUN=spec.get("run", ""), RIGBOOK_JOB_DIR=directory)
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(os.path.join(directory, "out.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        cwd = spec.get("cwd")
        os.chdir(os.path.expanduser(cwd.replace("{job}", directory)) if cwd else directory)
        for number in (signal.SIGPIPE, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # Python ignores SIGPIPE, and exec would hand that on
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.execvpe(argv[0], argv, environment)
    except BaseException as error:
        os.write(say_failed, ("%s: %s" % (type(error).__name__, error)).encode("utf-8", "replace")[:4000])
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


class Watch:
    """Waits for the main process, passes a request to stop on, and looks at what the job uses."""

    def __init__(self, directory: str, main: int, spec: Dict[str, Any], group: Optional[str], kept: List[str]) -> None:
        self.directory, self.main, self.group = directory, main, group
        self.stopped, self.grace = False, GRACE
        self.over = ""  # the cap that ended it
        self.why = ""
        # What the kernel keeps we need not.
        self.memory = None if "memory" in kept else spec.get("memory_max")
        self.tasks = None if "tasks" in kept else spec.get("tasks_max")
        self.log = caps.LogQuota(directory, spec.get("log_quota") or caps.QUOTA)
        self.oom_before = cgroup.oom_around()
        self._tree: List[List[int]] = []

    def to_the_end(self) -> Tuple[int, Any]:
        """(wait status, resource usage) of the main process."""
        kill_at = float("inf")
        now = time.monotonic()
        tree_at, caps_at = now + 0.3, now + CAPS_S
        while True:
            ended = ending.reap(self.main)
            if ended is not None:
                with contextlib.suppress(OSError):
                    self.log.look()
                return ended
            now = time.monotonic()
            if now >= kill_at:
                os.killpg(self.main, signal.SIGKILL)
                kill_at = float("inf")
            if now >= tree_at:
                self._remember()
                tree_at = now + TREE_S
            if now >= caps_at:
                caps_at = now + CAPS_S
                self._look()
                if self.over:
                    os.killpg(self.main, signal.SIGKILL)
            got = signal.sigtimedwait(SIGNALS, max(0.0, min(tree_at, caps_at, kill_at) - time.monotonic()))
            if got is not None and got.si_signo in (signal.SIGTERM, signal.SIGINT) and not self.stopped:
                self.stopped = True
                asked = jobdir.read_json(os.path.join(self.directory, "stop.json")) or {}
                self.grace = float(asked.get("grace", GRACE))
                kill_at = time.monotonic() + self.grace
                # Not reaped yet, so neither the pid nor the group can belong to somebody else.
                os.killpg(self.main, signal.SIGTERM)

    def _remember(self) -> None:
        """The processes by identity, for whoever comes when we have been killed."""
        tree = [
            [pid, entry.starttime] for pid in procs.descendants(os.getpid()) for entry in [procs.stat(pid)] if entry
        ]
        if tree != self._tree:
            self._tree = tree
            with contextlib.suppress(OSError):  # a full disk must not end the job
                jobdir.write_json(os.path.join(self.directory, "tree.json"), {"processes": tree})

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            self.log.look()
        if self.memory is not None or self.tasks is not None:
            pids = cgroup.members(self.group) if self.group else procs.descendants(os.getpid())
            self.why = caps.over(pids, self.memory, self.tasks)
            if self.why:
                self.over = "tasks" if "threads" in self.why else "memory"
