"""Stand-in for Proxmox's `pct`, over real LXC containers. Formats and messages: pve-container, src/PVE/CLI/pct.pm.

usage: pct_stand_in.py STATE COMMAND …
"""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import node_stand_in as node

LINE = "%-10s %-10s %-12s %-20s\n"
EXEC = "pct exec <vmid> [<extra-args>] [OPTIONS]"


def list_(state: node.Node) -> None:
    guests = state.of("lxc")
    if not guests:
        return  # not even the header
    node.write(LINE % ("VMID", "Status", "Lock", "Name"))
    for vmid, guest in guests:
        status = "running" if node.running(guest) else "stopped"
        name = "".join(str(guest["name"] or f"CT{vmid}").split())
        node.write(LINE % (vmid, status, guest["lock"], name))


def status(state: node.Node, vmid: str, verbose: bool) -> None:
    guest = state.guest("lxc", vmid)
    pid = node.pid(guest)
    if not verbose:
        node.write(f"status: {'running' if pid else 'stopped'}\n")
        return
    told = {"name": guest["name"] or f"CT{vmid}", "vmid": vmid, "type": "lxc", "status": "stopped"}
    told |= {"lock": guest["lock"], "maxmem": guest["memory"], "maxdisk": guest["disk"]}
    if pid:
        told |= {"status": "running", "pid": pid}
    node.write("".join(f"{key}: {told[key]}\n" for key in sorted(told)))


def exec_(state: node.Node, argv: list[str]) -> None:
    known: dict[str, type] = {"keep-env": bool} if state.all["keep_env_option"] else {}
    words, given = node.options(argv, known, EXEC)
    vmid, *command = words or node.die(f"400 not enough arguments\n{EXEC}")
    guest = state.guest("lxc", vmid)
    if not node.running(guest):
        node.die(f"container '{vmid}' not running!")
    if not command:
        node.die("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 248.")
    with open("/proc/self/environ", "rb") as file:
        if b"LC_CTYPE=" not in file.read():
            os.environ.pop("LC_CTYPE", None)  # perl sets none, as this Python has done
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        os.environ.pop(name, None)
    # Its default keeps the host's environment, with the PATH that every PVE program sets for itself.
    keep = "--keep-env" if given.get("keep-env", True) else "--clear-env"
    os.execvp("lxc-attach", ["lxc-attach", "-P", guest["path"], "-n", guest["lxc"], keep, "--", *command])


def change(state: node.Node, command: str, argv: list[str]) -> None:
    known: dict[str, type] = {"skiplock": bool, "timeout": int, "forceStop": bool, "debug": bool}
    words, given = node.options(argv, known, f"pct {command} <vmid> [OPTIONS]")
    (vmid,) = words or node.die(f"400 not enough arguments\npct {command} <vmid> [OPTIONS]")
    guest = state.guest("lxc", vmid)
    if guest["lock"] and not given.get("skiplock"):
        node.die(f"CT is locked ({guest['lock']})")
    is_running = node.running(guest)
    if command == "start":
        if is_running:
            node.die(f"CT {vmid} already running")
        node.start(guest)
        return
    if not is_running:
        node.die(f"CT {vmid} not running")
    node.stop(guest, kill=command == "stop", timeout=given.get("timeout", 60))
    if command == "reboot":
        node.start(guest)


def main() -> None:
    os.environ["PATH"] = "/sbin:/bin:/usr/sbin:/usr/bin"
    state = node.Node(sys.argv[1])
    command, argv = (sys.argv[2:3] or [""])[0], sys.argv[3:]
    if command == "list":
        list_(state)
    elif command == "status":
        words, given = node.options(argv, {"verbose": bool}, "pct status <vmid> [OPTIONS]")
        status(state, words[0], given.get("verbose", False))
    elif command == "config":
        node.print_config(state.guest("lxc", argv[0]))
    elif command == "exec":
        exec_(state, argv)
    elif command == "enter":
        words, given = node.options(argv, {"keep-env": bool}, "pct enter <vmid> [OPTIONS]")
        guest = state.guest("lxc", words[0])
        if not node.running(guest):
            node.die(f"container '{words[0]}' not running!")
        keep = "--keep-env" if given.get("keep-env", True) else "--clear-env"
        os.execvp("lxc-attach", ["lxc-attach", "-P", guest["path"], "-n", guest["lxc"], keep])
    elif command in ("start", "stop", "shutdown", "reboot"):
        change(state, command, argv)
    else:
        node.die(f"ERROR: unknown command 'pct {command}'" if command else "ERROR: no command specified")


if __name__ == "__main__":
    main()
