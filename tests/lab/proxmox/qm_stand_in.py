"""Stand-in for Proxmox's `qm`; a container plays the VM, and this plays QEMU's guest agent in it.

Formats and messages: qemu-server, src/PVE/CLI/qm.pm and src/PVE/QemuServer/Agent.pm.

usage: qm_stand_in.py STATE COMMAND …
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import node_stand_in as node

HEAD = "%10s %-20s %-10s %-10s %12s %-10s\n"
LINE = "%10s %-20s %-10s %-10s %12.2f %-10s\n"
EXEC = "qm guest exec <vmid> [<extra-args>] [OPTIONS]"
STDIN_LIMIT = 1024 * 1024
FOLLOW = "--follow"  # our own second life: the agent's process, which outlives the qm that asked for it


def list_(state: node.Node) -> None:
    guests = state.of("qemu")
    if not guests:
        return
    node.write(HEAD % ("VMID", "NAME", "STATUS", "MEM(MB)", "BOOTDISK(GB)", "PID"))
    for vmid, guest in guests:
        pid = node.pid(guest)
        name = guest["name"] or f"VM {vmid}"
        # perl prints a whole number of MiB without a point
        memory = f"{guest['memory'] / 1024**2:.15g}"
        node.write(LINE % (vmid, name, "running" if pid else "stopped", memory, guest["disk"] / 1024**3, pid))


def agent(state: node.Node, vmid: str) -> node.Guest:
    guest = state.guest("qemu", vmid)
    if guest["agent"] == "none":
        node.die("No QEMU guest agent configured")
    if not node.running(guest):
        node.die(f"VM {vmid} is not running")
    if guest["agent"] == "silent":
        node.die("QEMU guest agent is not running")
    return guest


def record(guest: node.Guest, pid: int) -> str:
    return os.path.join(guest["path"], f"{guest['lxc']}.exec-{pid}.json")


def spawn(state: node.Node, guest: node.Guest, command: list[str], data: bytes | None) -> int:
    """The agent starts it with an environment of its own: no HOME, and no shell that would make sense of `~`."""
    if os.path.sep not in command[0] and node.lxc(guest, "attach", "--clear-env", "--", "which", command[0]).returncode:
        node.die(
            "Agent error: Guest agent command failed, error was "
            f"'Failed to execute child process “{command[0]}” (No such file or directory)'"
        )
    limit = str(state.all["agent_output_limit"])
    follower = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, FOLLOW, json.dumps(guest), limit, *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    assert follower.stdin and follower.stdout
    pid = int(follower.stdout.readline())
    follower.stdin.write(data or b"")
    follower.stdin.close()
    return pid


def follow(guest: node.Guest, limit: int, command: list[str]) -> None:
    pipe = subprocess.PIPE
    # Not lxc-attach: that tells a signal as exit code 128+n, the agent tells it as a signal.
    enter = ["nsenter", "-t", str(node.pid(guest)), "-a", "-r", "-w", "--", *command]
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    child = subprocess.Popen(enter, stdin=pipe, stdout=pipe, stderr=pipe, env={"PATH": path})
    kept = record(guest, child.pid)
    keep(kept, {"exited": 0})  # before the pid is told: the agent knows it from then on, also while it ends
    print(child.pid, flush=True)
    os.close(1)
    out, err = child.communicate(sys.stdin.buffer.read())
    told: dict[str, Any] = {"exited": 1}
    told |= {"exitcode": child.returncode} if child.returncode >= 0 else {"signal": -child.returncode}
    for name, data in (("out", out), ("err", err)):
        if data:
            told[f"{name}-data"] = base64.b64encode(data[:limit]).decode()
        if len(data) > limit:
            told[f"{name}-truncated"] = 1
    keep(kept, told)


def keep(path: str, told: dict[str, Any]) -> None:
    with open(path + ".new", "w") as file:
        json.dump(told, file)
    os.replace(path + ".new", path)


def exec_status(guest: node.Guest, pid: int) -> dict[str, Any]:
    try:
        with open(record(guest, pid)) as file:
            told: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        node.die("Agent error: Invalid parameter 'pid'")
    if told["exited"]:
        os.unlink(record(guest, pid))  # told once, as the agent does (qga/commands.c): then the pid is free for another
    for name in ("out-data", "err-data"):
        if name in told:
            # Perl writes each byte as the character of that number: latin-1 brings the bytes back.
            told[name] = base64.b64decode(told[name]).decode("latin-1")
    return told


def exec_(state: node.Node, argv: list[str]) -> None:
    words, given = node.options(argv, {"synchronous": bool, "timeout": int, "pass-stdin": bool}, EXEC)
    vmid, *command = words or node.die(f"400 not enough arguments\n{EXEC}")
    waits = given.get("synchronous", True)
    if "timeout" in given and not waits:
        node.die(f"400 Parameter verification failed.\nsynchronous: needs to be set for 'timeout'\n{EXEC}")
    data = None
    if given.get("pass-stdin"):
        data = sys.stdin.buffer.read(STDIN_LIMIT + 1)
        if len(data) > STDIN_LIMIT:
            node.die("'input-data' (STDIN) is limited to 1 MiB, aborting")
    guest = agent(state, vmid)
    if not command:
        node.die("command or input-data (or both) required")
    pid = spawn(state, guest, command, data)
    result: dict[str, Any] = {"pid": pid}
    if waits:
        timeout = given.get("timeout", 30)
        started = int(time.time())
        while timeout == 0 or int(time.time()) - started < timeout:
            told = exec_status(guest, pid)
            if told["exited"]:
                result = told
                break
            time.sleep(state.all["agent_poll_s"])
        if not result.get("exited"):
            sys.stderr.write("timeout reached, returning pid\n")
    node.write(node.to_json(result, pretty=True))


def guest_command(state: node.Node, argv: list[str]) -> None:
    command = argv[0] if argv else ""
    if command == "exec":
        exec_(state, argv[1:])
    elif command == "exec-status":
        node.write(node.to_json(exec_status(agent(state, argv[1]), int(argv[2])), pretty=True))
    elif command == "cmd" and argv[2:] == ["ping"]:
        agent(state, argv[1])  # an empty answer prints nothing
    else:
        node.die(f"ERROR: unknown command 'qm guest {command}'")


def change(state: node.Node, command: str, argv: list[str]) -> None:
    known: dict[str, type] = {"skiplock": bool, "timeout": int, "forceStop": bool}
    words, given = node.options(argv, known, f"qm {command} <vmid> [OPTIONS]")
    (vmid,) = words or node.die(f"400 not enough arguments\nqm {command} <vmid> [OPTIONS]")
    guest = state.guest("qemu", vmid)
    if guest["lock"] and not given.get("skiplock"):
        node.die(f"VM is locked ({guest['lock']})")
    is_running = node.running(guest)
    if command == "start":
        if is_running:
            node.die(f"VM {vmid} already running")
        node.start(guest)
    elif is_running:
        node.stop(guest, kill=command == "stop", timeout=given.get("timeout", 60))
        if command == "reboot":
            node.start(guest)
    elif command != "stop":  # stopping a stopped VM is no error
        node.die(f"VM {vmid} not running")


def main() -> None:
    os.environ["PATH"] = "/sbin:/bin:/usr/sbin:/usr/bin"
    if sys.argv[1] == FOLLOW:
        follow(json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
        return
    state = node.Node(sys.argv[1])
    command, argv = (sys.argv[2:3] or [""])[0], sys.argv[3:]
    if command == "list":
        list_(state)
    elif command == "status":
        words, _ = node.options(argv, {"verbose": bool}, "qm status <vmid> [OPTIONS]")
        node.write(f"status: {'running' if node.running(state.guest('qemu', words[0])) else 'stopped'}\n")
    elif command == "config":
        node.print_config(state.guest("qemu", argv[0]))
    elif command == "guest":
        guest_command(state, argv)
    elif command == "agent":  # the older spelling of `guest cmd`
        guest_command(state, ["cmd", *argv])
    elif command in ("start", "stop", "shutdown", "reboot"):
        change(state, command, argv)
    else:
        node.die(f"ERROR: unknown command 'qm {command}'" if command else "ERROR: no command specified")


if __name__ == "__main__":
    main()
