"""Jobs as transient systemd units, which logind does not take down with a session. Python 3.9 syntax, standard library.

As root a system unit. As somebody else a unit of the user's own manager, but only where that user *lingers*: without,
the manager ends with the last session, and the job with it. There a plain supervisor is better, unless logind kills
what a session leaves behind (KillUserProcesses): then no job can outlive the connection, and starting one is refused.
"""

import json
import os
import pwd
import re
import subprocess
import sys
import time
from typing import Any, Dict, List, Optional

from remote.probe import cgroup, jobdir

START_S = 30.0
OUR_TASKS = 8  # the supervisor's own, which count in its unit


def name(directory: str) -> str:
    """The job's unit and control group. With a digest, since two state directories may hold jobs of one id."""
    import hashlib

    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:8]
    return "%s%s-%s" % (cgroup.PREFIX, os.path.basename(directory), digest)


def scope() -> Optional[List[str]]:
    """What systemd-run and systemctl need to reach the manager that is to run our jobs; None where there is none."""
    if not os.path.isdir("/run/systemd/system") or program("systemd-run") is None:
        return None
    if os.geteuid() == 0:
        return ["--system"]
    if not os.path.exists("/var/lib/systemd/linger/" + pwd.getpwuid(os.geteuid()).pw_name):
        return None
    # Not set where we came in by sudo, lxc-attach or an sshd without PAM: "Failed to connect to bus".
    runtime = "/run/user/%d" % os.geteuid()
    if not (os.path.exists(runtime + "/bus") or os.path.exists(runtime + "/systemd/private")):
        return None
    os.environ["XDG_RUNTIME_DIR"] = runtime
    os.environ.setdefault("DBUS_SESSION_BUS_ADDRESS", "unix:path=%s/bus" % runtime)
    return ["--user"]


def program(word: str) -> Optional[str]:
    for folder in ("/usr/bin", "/bin", *os.environ.get("PATH", "").split(":")):
        if os.access(os.path.join(folder, word), os.X_OK):
            return os.path.join(folder, word)
    return None


def start(directory: str, spec: Dict[str, Any], how: List[str]) -> bool:
    """Start the job's supervisor as a unit; True when start.json is there. A unit of that name that exists already is
    the same job: the lock decides who runs it."""
    systemd = program("systemd-run")
    assert systemd is not None
    # The login environment goes by file: --setenv would show it in argv.
    jobdir.write_json(os.path.join(directory, "environment.json"), dict(os.environ))
    run = [sys.executable, "-I", "-S", os.path.join(directory, "supervisor.pyz")]
    settings = {
        "Type": "exec",
        "KillMode": "control-group",
        "TimeoutStopSec": "60",
        # One process of many may be killed for memory and the job go on: its exit code tells, and we see it.
        "OOMPolicy": "continue",
        "Delegate": "yes",
        "TasksMax": "infinity" if spec.get("tasks_max") is None else str(spec["tasks_max"] + OUR_TASKS),
        "ExecStopPost": " ".join(map(_word, [*run, "post", directory])),
    }
    if spec.get("memory_max") is not None:
        settings.update(MemoryMax=str(spec["memory_max"]), MemorySwapMax="0")
    words = [systemd, *how, "--quiet", "--collect", "--no-ask-password", "--unit=" + name(directory)]
    for key, value in settings.items():
        words += ["-p", key + "=" + value]
    # systemd puts variables into the arguments of a service ($$ is a dollar), whoever quoted them.
    words += ["--", *(word.replace("$", "$$") for word in [*run, "run", directory])]
    subprocess.run(words, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if os.path.exists(os.path.join(directory, "start.json")):
            return True
        if not jobdir.lock_held(directory) and active(directory, how) == "inactive":
            break
        time.sleep(0.02)
    return os.path.exists(os.path.join(directory, "start.json"))


def _word(text: str) -> str:
    """One word of a command in a unit's setting: quoted, with neither specifiers (%) nor variables ($) in it."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return '"%s"' % text


def active(directory: str, how: Optional[List[str]]) -> str:
    """What systemd says of the job's unit: active, activating, failed, inactive…; "" when it says nothing."""
    systemctl = program("systemctl")
    if how is None or systemctl is None:
        return ""
    asked = subprocess.run(
        [systemctl, *how, "is-active", name(directory) + ".service"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    return asked.stdout.decode("ascii", "replace").strip()


def stop(directory: str) -> None:
    """`systemctl stop`: TERM to all in the unit, KILL after its patience; returns when it is down."""
    how, systemctl = scope(), program("systemctl")
    if how is not None and systemctl is not None:
        words = [systemctl, *how, "stop", name(directory) + ".service"]
        subprocess.run(words, check=False, stdin=subprocess.DEVNULL, stdout=sys.stderr, timeout=120)


def session_bound() -> str:
    """Why no job that we start now can outlive this login; "" when it can."""
    if os.geteuid() == 0 or not os.path.isdir("/run/systemd/system"):
        return ""
    try:
        with open("/proc/self/cgroup") as file:
            if not re.search(r"/session-[^/]*\.scope", file.read()):
                return ""
    except OSError:
        return ""
    user = pwd.getpwuid(os.geteuid()).pw_name
    if not _login_setting("KillUserProcesses") or user in (_login_setting("KillExcludeUsers") or ["root"]):
        return ""
    only = _login_setting("KillOnlyUsers")
    return "" if only and user not in only else user


def _login_setting(key: str) -> Any:
    busctl = program("busctl")
    if busctl is None:
        return None
    where = ["org.freedesktop.login1", "/org/freedesktop/login1", "org.freedesktop.login1.Manager"]
    asked = subprocess.run(
        [busctl, "--json=short", "get-property", *where, key],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
        timeout=20,
    )
    try:
        return json.loads(asked.stdout)["data"]
    except (ValueError, KeyError, TypeError):
        return None
