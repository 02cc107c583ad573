"""Whose a process is: a pure function on plain data. Standard library and Python 3.9 syntax only.

    protected  never touched: system services, virtual machines, a container's first process, what we run below
    live       ours: it carries the mark of a job that runs
    orphan     ours: it carries the mark of a job that has ended
    unclaimed  carries no mark, but is a worker of an interpreter that the project declares, and its launcher is gone
    unkillable orphan or unclaimed, with a thread in uninterruptible sleep: no signal reaches it
    foreign    everybody else's

Each rule is one line of a table, so that a test can take out one at a time and see what it was good for. A process is
what `holders.describe` gives, and with it: `own` (we run below it), `job` ({id, state, ours} or None), `interpreter`
(the declared one that it belongs to, or None), `answers` (ports that accept a connection), `lived` (its job's state
could be seen).
"""

import re
from typing import Any, Callable, Dict, List, Optional, Tuple

from remote.probe import jobdir

Process = Dict[str, Any]
Rule = Tuple[str, Callable[[Process], bool], str]
STUCK_S = 2.0  # an uninterruptible sleep that is just a disk at work is over by then

SERVICES = re.compile(
    r"(nvidia-persistenced|nv-fabricmanager|nvidia-fabricmanager|nvidia-powerd|nvidia-cuda-mps-(control|server)"
    r"|nv-hostengine|dcgm-exporter|dcgmi|nvidia-smi|nvidia-imex|nvsm.*|Xorg|Xwayland|X|gdm.*|gnome-shell|kwin.*|sddm"
    r"|sshd.*|systemd.*|lxc-start|lxcfs|pve.*|pmxcfs|dockerd|containerd.*|conmon|kubelet)"
)
SYSTEM = re.compile(r"/(usr|bin|sbin|lib|lib64|opt/nvidia|opt/dcgm|snap)/")
MACHINES = re.compile(r"(qemu-.*|kvm)")


def _program(p: Process) -> str:
    return str(p["exe"] or "").replace(" (deleted)", "").rpartition("/")[2]


def _service(p: Process) -> bool:
    """By its program and the place of it, which a renamed process cannot fake; by name only where root hides it."""
    if p["exe"]:
        return bool(SERVICES.fullmatch(_program(p)) and SYSTEM.match(p["exe"]))
    return bool(SERVICES.fullmatch(p["comm"]) and p["uid"] == 0)


def _machine(p: Process) -> bool:
    inside = (p["guest"] or {}).get("kind") == "vm" or any(node.startswith("/dev/vfio/") for node in p["nodes"])
    return bool(MACHINES.fullmatch(_program(p)) or inside)


PROTECTED: List[Rule] = [
    ("own", lambda p: p["own"], "we run below it"),
    ("probe", lambda p: "RIGBOOK_PROBE" in p["markers"], "it is a probe of rigbook's, and looks"),
    ("init", lambda p: p["pid"] == 1 or p["nspid"][-1] == 1, "it is the first process of its machine or container"),
    ("monitor", lambda p: (p["guest"] or {}).get("kind") == "lxc-monitor", "it keeps a container"),
    ("machine", _machine, "it is a virtual machine"),
    ("service", _service, "it is a system service"),
]
# What must hold for a mark to make it ours: (name, holds, why not).
OURS: List[Rule] = [
    ("directory", lambda p: p["job"]["ours"], "its job is not one of this state directory"),
    ("known", lambda p: p["job"]["state"] not in (None, "absent"), "nothing is known of its job any more"),
]
DEAD: List[Rule] = [("ended", lambda p: p["job"]["state"] in jobdir.ENDED, "its job is not known to have ended")]
# What must hold for a process without a mark to be nobody's.
UNCLAIMED: List[Rule] = [
    ("interpreter", lambda p: p["interpreter"] is not None, "it carries no mark of ours"),
    ("readable", lambda p: p["readable"], "what it has open cannot be seen"),
    ("launcher", lambda p: p["reparented"], "its launcher lives"),
    ("worker", lambda p: not p["leads"], "it leads its own process group: started to run alone"),
    ("group", lambda p: not p["leader_alive"], "the leader of its process group lives"),
    ("session", lambda p: not p["session_alive"], "it is in somebody's session"),
    ("service", lambda p: p["unit"] is None, "it belongs to a system service"),
    ("port", lambda p: not p["answers"], "it serves a port that answers"),
    ("tree", lambda p: not p["live_children"], "work that is alive runs below it"),
]


def classify(p: Process) -> Tuple[str, str]:
    """(class, why)."""
    for _, holds, why in PROTECTED:
        if holds(p):
            return "protected", why
    job = p["job"]
    if job is not None:
        for _, holds, why in OURS:
            if not holds(p):
                return "foreign", why
        for _, holds, _why in DEAD:
            if not holds(p):
                return "live", "its job is %s" % job["state"]
        return _or_stuck(p, "orphan", "its job is %s" % job["state"])
    for _, holds, why in UNCLAIMED:
        if not holds(p):
            return "foreign", why
    return _or_stuck(p, "unclaimed", "a worker of %s, and its launcher is gone" % p["interpreter"])


def _or_stuck(p: Process, kind: str, why: str) -> Tuple[str, str]:
    stuck = waits(p)
    if stuck is None:
        return kind, why
    return "unkillable", "%s; it waits uninterruptibly on %s: %s" % (why, stuck, advice(stuck))


def waits(p: Process) -> Optional[str]:
    """What its stuck thread waits on; None when none is stuck."""
    for thread in p["stuck"]:
        if thread["seconds"] >= STUCK_S:
            return str(thread["wchan"])
    return None


def advice(wchan: str) -> str:
    """Signals do not help here; what may."""
    for words, what in (
        (("fuse",), "abort that FUSE mount (fusermount -u, or /sys/fs/fuse/connections/N/abort)"),
        (("nfs", "rpc"), "bring that NFS server back, or umount -f"),
        (("nv", "uvm", "os_acquire"), "the driver is stuck: look for Xid lines; only a reboot is sure to help"),
        (("vfork",), "it waits for the child that it is becoming: end that child"),
        (("io", "blk", "wait_on_page", "jbd2", "folio"), "a disk does not answer"),
    ):
        if any(word in wchan for word in words):
            return what
    return "only what it waits for, or a reboot, ends it"


def evidence(p: Process) -> List[str]:
    """Why an unclaimed orphan is believed to be nobody's, line by line, for who is asked to confirm."""
    return [
        "it runs %s" % p["interpreter"],
        "its parent is now pid %d (%s)" % (p["ppid"], (p["parent"] or {}).get("comm", "?")),
        "the leader of its process group, pid %d, is gone" % p["pgrp"],
        "its session's leader, pid %d, is gone" % p["session"],
        "it listens on no port" if not p["ports"] else "nothing answers on port %s" % ", ".join(map(str, p["ports"])),
        "it holds %s" % ", ".join(sorted(p["nodes"])),
    ]
