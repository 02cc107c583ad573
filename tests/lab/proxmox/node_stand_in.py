"""What the stand-ins for Proxmox's programs share: the guests of the node, kept in one JSON file, and how PVE fails.

The file's shape: {"node": NAME, "keep_env_option": bool, "agent_output_limit": bytes, "agent_poll_s": s between qm's
looks (Proxmox: 1), "guests": {VMID: guest}}, where a guest is {"type": "lxc" | "qemu", "lxc": its name for lxc-*,
"path": where that is, "name", "lock", "config": {...}, "raw": [[key, value], …], "memory": bytes, "disk": bytes,
"agent": "running" | "silent" | "none"}. A container plays the VM, too. Standard library only: it runs on the far side.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from typing import Any, NoReturn

Guest = dict[str, Any]


class Node:
    def __init__(self, path: str) -> None:
        self.path = path
        with open(path) as file:
            self.all: dict[str, Any] = json.load(file)
        self.name: str = self.all["node"]

    def of(self, kind: str) -> list[tuple[int, Guest]]:
        """Guests of one kind, by number."""
        found = [(int(vmid), guest) for vmid, guest in self.all["guests"].items() if guest["type"] == kind]
        return sorted(found, key=lambda pair: pair[0])

    def guest(self, kind: str, vmid: str) -> Guest:
        found: Guest | None = self.all["guests"].get(vmid)
        if found is None or found["type"] != kind:
            folder = "lxc" if kind == "lxc" else "qemu-server"
            # die() after a failed open: perl's exit status is errno, here ENOENT.
            die(f"Configuration file 'nodes/{self.name}/{folder}/{vmid}.conf' does not exist", 2)
        return found

    def change(self, vmid: str, **keys: Any) -> None:
        with open(self.path + ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with open(self.path) as file:
                whole = json.load(file)
            whole["guests"][vmid].update(keys)
            with open(self.path + ".new", "w") as file:
                json.dump(whole, file)
            os.replace(self.path + ".new", self.path)


def die(message: str, code: int = 255) -> NoReturn:
    sys.stderr.write(f"{message}\n")
    sys.exit(code)


def lxc(guest: Guest, program: str, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [f"lxc-{program}", "-P", guest["path"], "-n", guest["lxc"], *args]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def running(guest: Guest) -> bool:
    return lxc(guest, "info", "-sH").stdout.strip() == "RUNNING"


def pid(guest: Guest) -> int:
    """Its first process as the host numbers it; 0 when it is stopped."""
    said = lxc(guest, "info", "-pH").stdout.strip()
    return int(said) if said.isdigit() else 0


def start(guest: Guest) -> None:
    done = lxc(guest, "start", "-d", "-o", guest["path"] + "/start.log")
    if done.returncode:
        die(f"startup for container '{guest['lxc']}' failed: {done.stderr}")


def stop(guest: Guest, *, kill: bool, timeout: int = 60) -> None:
    args = ["-k"] if kill else ["--nokill", "-t", str(timeout)]
    if lxc(guest, "stop", *args).returncode:
        die("command 'lxc-stop' failed: exit code 1")


def options(argv: list[str], known: dict[str, type], usage: str) -> tuple[list[str], dict[str, Any]]:
    """(words, options), as Getopt::Long reads them: `--name value`, `--name=value`, `-name value`; after `--` all are
    words. PVE's booleans take a value, and mean 1 without one."""
    words: list[str] = []
    found: dict[str, Any] = {}
    i = 0
    while i < len(argv):
        word = argv[i]
        i += 1
        if word == "--":
            return words + argv[i:], found
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        if name not in known:
            die(f"Unknown option: {name}\n400 unable to parse option\n{usage}")
        if not equals:
            if known[name] is bool and (i >= len(argv) or argv[i] not in ("0", "1", "true", "false", "yes", "no")):
                value = "1"
            elif i >= len(argv):
                die(f"Option {name} requires an argument\n400 unable to parse option\n{usage}")
            else:
                value = argv[i]
                i += 1
        try:
            found[name] = value in ("1", "true", "yes") if known[name] is bool else known[name](value)
        except ValueError:
            die(f"400 Parameter verification failed.\n{name}: type check ('integer') failed - got '{value}'\n{usage}")
    return words, found


def encode_text(text: str) -> str:
    """PVE::Tools::encode_text: what a description looks like in a configuration."""
    return "".join(f"%{byte:02X}" if byte < 32 or byte in b":%" or byte > 126 else chr(byte) for byte in text.encode())


def print_config(guest: Guest) -> None:
    for key in sorted(guest["config"]):
        value = str(guest["config"][key])
        print(f"{key}: {encode_text(value) if key == 'description' else value}")
    for key, value in guest.get("raw", []):
        print(f"{key}: {value}")


def to_json(data: object, *, pretty: bool) -> str:
    """Perl's JSON with canonical and utf8; pretty indents by three and puts a space before the colon, and it ends with
    a line end, which the other form does not."""
    if pretty:
        return json.dumps(data, indent=3, separators=(",", " : "), sort_keys=True, ensure_ascii=False) + "\n"
    return json.dumps(data, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def write(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
