"""Runs one job, apart from whoever started it. Standard library and Python 3.9 syntax only.

    python3 -I -S STAGE/supervisor.pyz adopt JOBDIR STAGE   make the staged directory the job's (or drop it: there is
                                                            one already), then as `start`
    ... start JOBDIR    begin (once, however often it is called), print the status
    ... stop JOBDIR S   ask it to end, within S seconds
    ... run JOBDIR      what systemd-run is given

The supervisor leads a session of its own and is a *child subreaper*: whatever its job starts, forked twice or in a
session of its own, becomes its child when its parent dies. So when the main process ends it can find all that is
left and end it (TERM, then KILL), which neither process groups nor a walk along parents can.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional, Tuple

from remote.probe import jobdir, procs

GRACE = 10.0  # s from TERM to KILL when nobody says otherwise
SWEEP_GRACE = 5.0
SWEEP_LIMIT = 30.0  # s after which what does not die (a thread in uninterruptible sleep) is reported, not awaited
SLOT = 4096  # bytes kept for exit.json, so that a disk that is full at the end still has room for it
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def main(argv: List[str]) -> int:
    what, directory = argv[0], os.path.realpath(argv[1])
    if what == "adopt":
        adopt(os.path.realpath(argv[2]), directory)
        start(directory)
    elif what == "start":
        start(directory)
    elif what == "run":
        lock = take_lock(directory)
        if lock is not None:
            supervise(directory, lock, None)
        return 0
    elif what == "stop":
        stop(directory, float(argv[2]))
    else:
        raise SystemExit("adopt, start, stop or run")
    print(json.dumps(jobdir.state(directory)))
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
        shutil.rmtree(stage, ignore_errors=True)


def start(directory: str) -> None:
    """Start the job unless it was started before. Returns when start.json is on disk."""
    if os.path.isdir("/run/systemd/system") and _start_unit(directory):
        return
    lock = take_lock(directory)
    if lock is None:
        return
    told, tell = os.pipe()
    if os.fork() == 0:
        try:
            os.close(told)
            os.setsid()
            # Nothing of the session may stay open, else the connection that started us hangs until the job ends.
            null = os.open(os.devnull, os.O_RDWR)
            log = os.open(
                os.path.join(directory, "supervisor.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
            os.dup2(null, 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
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


def _start_unit(directory: str) -> bool:
    """Start as a transient unit, which logind does not take down with the session. Never run on our test machines."""
    systemd = shutil.which("systemd-run")
    if systemd is None:
        return False
    scope = [] if os.geteuid() == 0 else ["--user"]
    if scope:
        linger = "/var/lib/systemd/linger/" + os.environ.get("USER", "")
        if not os.path.exists(linger):
            return False  # a user's units end with the user's last session
        os.environ.setdefault("XDG_RUNTIME_DIR", "/run/user/%d" % os.geteuid())
    if os.path.exists(os.path.join(directory, "start.json")):
        return True
    # The login environment goes by file: --setenv would show it in argv.
    jobdir.write_json(os.path.join(directory, "environment.json"), dict(os.environ))
    unit = "rigbook-job-%s" % os.path.basename(directory)
    archive = os.path.join(directory, "supervisor.pyz")
    run = [sys.executable, "-I", "-S", archive, "run", directory]
    # A unit of that name that exists already is the same job: the lock decides who runs it.
    settings = ["--quiet", "--collect", "--unit=" + unit, "-p", "Type=exec", "-p", "TimeoutStopSec=60"]
    subprocess.run(
        [systemd, *settings, *scope, "--", *run],
        check=False,
        stdin=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if os.path.exists(os.path.join(directory, "start.json")):
            return True
        time.sleep(0.02)
    return False


def supervise(directory: str, lock: int, tell: Optional[int]) -> None:
    """Run the job to its end. `tell` is closed when start.json is durable."""
    subreaper = become_subreaper()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    spec = jobdir.read_json(os.path.join(directory, "spec.json"))
    assert spec is not None
    reserve(directory)
    gate, open_gate = os.pipe()
    failed, say_failed = os.pipe()
    main = os.fork()
    if main == 0:
        become_job(directory, spec, gate, open_gate, say_failed)
    os.close(gate)
    os.close(say_failed)
    identity = procs.stat(main)
    own = procs.stat(os.getpid())
    assert identity is not None and own is not None
    started = time.time()
    with open("/proc/self/cgroup") as file:
        cgroup = file.read().strip().rpartition("\n")[2]
    jobdir.write_json(
        os.path.join(directory, "start.json"),
        {
            "v": 1,
            "boot_id": procs.boot_id(),
            "pid": main,
            "starttime": identity.starttime,
            "pid_namespace": procs.namespace(os.getpid()),
            "supervisor": {"pid": os.getpid(), "starttime": own.starttime, "subreaper": subreaper},
            "cgroup": cgroup,
            "started": started,
        },
    )
    # Only now may the job begin: a job that ran has a start.json, whatever happens next.
    os.write(open_gate, b"g")
    os.close(open_gate)
    if tell is not None:
        os.close(tell)
    error = os.read(failed, 4096).decode("utf-8", "replace")  # EOF when exec worked
    os.close(failed)
    status, usage, stopped = watch(directory, main)
    swept, left = sweep()
    code: Optional[int] = None
    died: Optional[str] = None
    if os.WIFSIGNALED(status):
        died = signal.Signals(os.WTERMSIG(status)).name[3:]
    else:
        code = os.WEXITSTATUS(status)
    record = {
        "v": 1,
        "exit": code,
        "signal": died,
        "stopped": stopped,
        "swept": swept,
        "left": left,
        "started": started,
        "ended": time.time(),
        "boot_id": procs.boot_id(),
        "max_rss": usage.ru_maxrss * 1024,
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 3),
    }
    if error:
        record["error"] = error
    write_exit(directory, record)


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


def watch(directory: str, main: int) -> Tuple[int, Any, bool]:
    """Reap until the main process ends; pass a request to stop on. (wait status, resource usage, stopped)."""
    tree_file = os.path.join(directory, "tree.json")
    seen: List[List[int]] = []
    stopped, kill_at = False, float("inf")
    look_at = time.monotonic() + 0.3
    while True:
        ended = reap(main)
        if ended is not None:
            return ended[0], ended[1], stopped
        now = time.monotonic()
        if now >= kill_at:
            os.killpg(main, signal.SIGKILL)
            kill_at = float("inf")
        if now >= look_at:
            tree = [
                [pid, entry.starttime] for pid in procs.descendants(os.getpid()) for entry in [procs.stat(pid)] if entry
            ]
            if tree != seen:
                seen = tree
                with contextlib.suppress(OSError):  # a full disk must not end the job
                    jobdir.write_json(tree_file, {"processes": tree})
            look_at = now + 2.0
        got = signal.sigtimedwait(SIGNALS, max(0.0, min(look_at, kill_at) - time.monotonic()))
        if got is not None and got.si_signo in (signal.SIGTERM, signal.SIGINT) and not stopped:
            stopped = True
            asked = jobdir.read_json(os.path.join(directory, "stop.json")) or {}
            kill_at = time.monotonic() + float(asked.get("grace", GRACE))
            # Not reaped yet, so neither the pid nor the group can belong to somebody else.
            os.killpg(main, signal.SIGTERM)


def reap(main: int) -> Optional[Tuple[int, Any]]:
    """Collect all children that have ended; the main process's status when it is among them."""
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


def sweep() -> Tuple[List[Dict[str, Any]], List[Dict[str, Any]]]:
    """End what the job left behind: TERM, then KILL, until two looks find nothing. (ended, what would not end)."""
    known: Dict[Tuple[int, int], Dict[str, Any]] = {}
    began = time.monotonic()
    empty, termed = 0, set()
    while True:
        reap(-1)
        living = []
        for pid in procs.descendants(os.getpid()):
            now = procs.stat(pid)
            if now is not None and procs.alive(pid, now.starttime):
                living.append((pid, now.starttime))
                known.setdefault(
                    (pid, now.starttime), {"pid": pid, "starttime": now.starttime, "command": procs.command(pid, 120)}
                )
        empty = 0 if living else empty + 1
        waited = time.monotonic() - began
        if empty >= 2 or (living and waited > SWEEP_LIMIT):
            left = [known.pop(identity) for identity in living]
            return list(known.values()), left
        for identity in living:
            if waited > SWEEP_GRACE:
                procs.send(identity[0], identity[1], signal.SIGKILL)
            elif identity not in termed:
                termed.add(identity)
                procs.send(identity[0], identity[1], signal.SIGTERM)
        signal.sigtimedwait({signal.SIGCHLD}, 0.05 if living else 0.005)


def reserve(directory: str) -> None:
    """Blocks for exit.json, taken while there is room. (On copy-on-write file systems this promises nothing.)"""
    with open(os.path.join(directory, "exit.slot"), "wb") as file:
        file.write(b" " * SLOT)
        file.flush()
        os.fsync(file.fileno())


def write_exit(directory: str, record: Dict[str, Any]) -> None:
    slot = os.path.join(directory, "exit.slot")
    text = json.dumps(record).encode()
    while len(text) > SLOT and (record["swept"] or record["left"]):
        record["swept" if record["swept"] else "left"].pop()
        record["cut"] = True
        text = json.dumps(record).encode()
    deadline = time.monotonic() + 600
    while True:
        try:
            try:
                with open(os.path.join(directory, "out.log"), "rb") as log:
                    os.fsync(log.fileno())  # the log is whole on disk before the end is
            except FileNotFoundError:
                pass
            with open(slot, "r+b") as file:
                file.write(text.ljust(SLOT))
                file.flush()
                os.fsync(file.fileno())
            os.rename(slot, os.path.join(directory, "exit.json"))
            jobdir.sync_directory(directory)
            return
        except OSError:
            # While we hold the lock the job counts as running, which is nearer the truth than "vanished".
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def stop(directory: str, grace: float) -> None:
    """Ask the job to end and wait until it has. Without a supervisor its processes are ended one by one."""
    now = jobdir.state(directory)
    if now["state"] != "running" or "pid" not in now:
        return
    if jobdir.lock_held(directory):
        jobdir.write_json(os.path.join(directory, "stop.json"), {"grace": grace, "asked": time.time()})
        supervisor = now["supervisor"]
        procs.send(supervisor["pid"], supervisor["starttime"], signal.SIGTERM)
        deadline = time.monotonic() + grace + SWEEP_LIMIT + 5
        while jobdir.state(directory)["state"] == "running" and time.monotonic() < deadline:
            time.sleep(0.02)
        return
    tree = jobdir.read_json(os.path.join(directory, "tree.json")) or {"processes": []}
    members = [(now["pid"], now["starttime"])] + [(pid, begun) for pid, begun in tree["processes"]]
    for pid, begun in members:
        procs.send(pid, begun, signal.SIGTERM)
    for pid, begun in procs.wait_gone(members, grace):
        procs.send(pid, begun, signal.SIGKILL)
    procs.wait_gone(members, SWEEP_GRACE)
