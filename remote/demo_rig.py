"""The three played hosts of the demo: start them, find them again, stop them.

Under `root`: one directory a host (home, keys, log), a client key, and the `ssh_config` and `known_hosts` that
rigbook.toml points to. Everything is found again by those files, so the demo can be killed anywhere and go on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import asyncssh

from remote import hostkeys
from remote.demo_host import host_key, start_time
from state.errors import RigbookError

KINDS = {"pve": "proxmox", "llm": "lxc", "vm": "vm"}
START_S = 20.0  # a Python start and an Ed25519 key on a loaded two-core machine


def start(root: Path, names: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """Start the hosts that do not run (`names` maps name to kind), write ssh_config. Safe to call at any time."""
    root = root.resolve()
    names = dict(names or KINDS)
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o700)
    public = _client_key(root)
    alive = running(root)
    waiting = {}
    for name, kind in names.items():
        place = root / name
        (place / "home").mkdir(parents=True, exist_ok=True)
        (place / "authorized_keys").write_text(public)
        host_key(place)
        if name not in alive:
            waiting[name] = _spawn(place, name, kind, _last_port(place))
    deadline = time.monotonic() + START_S
    while waiting:
        for name, process in list(waiting.items()):
            if _ready(root / name):
                del waiting[name]
            elif process.poll() is not None or time.monotonic() > deadline:
                log = (root / name / "host.log").read_text("utf-8", "replace").strip()[-400:]
                raise RigbookError("demo.host-not-started", f"the played host {name} did not start: {log}", host=name)
        time.sleep(0.02)
    alive = running(root)
    _write_config(root, alive)
    return alive


def running(root: Path) -> dict[str, dict[str, Any]]:
    """name -> what its ready.json says, for each host whose process (pid and start time) lives."""
    found = {}
    for file in sorted(root.resolve().glob("*/ready.json")):
        ready = _ready(file.parent)
        if ready:
            found[file.parent.name] = ready
    return found


def stop(root: Path) -> list[str]:
    """Stop the hosts (their jobs go on: they are detached); the names of those that were running."""
    alive = running(root)
    for ready in alive.values():
        _signal(ready, signal.SIGTERM)
    deadline = time.monotonic() + 5
    while running(root) and time.monotonic() < deadline:
        time.sleep(0.02)
    for ready in running(root).values():
        _signal(ready, signal.SIGKILL)
    return list(alive)


def _signal(ready: dict[str, Any], number: signal.Signals) -> None:
    try:
        descriptor = os.pidfd_open(ready["pid"])
    except ProcessLookupError:
        return
    try:
        # Looked at again through the held pidfd: the number may belong to somebody else by now.
        if start_time(ready["pid"]) == ready["start_time"]:
            signal.pidfd_send_signal(descriptor, number)
    except (ProcessLookupError, FileNotFoundError):
        pass
    finally:
        os.close(descriptor)


def _ready(place: Path) -> dict[str, Any] | None:
    try:
        ready: dict[str, Any] = json.loads((place / "ready.json").read_text())
        if start_time(ready["pid"]) == ready["start_time"] and _state(ready["pid"]) != "Z":
            return ready
    except (OSError, ValueError, KeyError):
        pass
    return None


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _last_port(place: Path) -> int:
    try:
        return int((place / "port").read_text())
    except (OSError, ValueError):
        return 0


def _spawn(place: Path, name: str, kind: str, port: int) -> subprocess.Popen[bytes]:
    env = dict(os.environ)
    # We may run from a checkout that is not installed: the child must find the same packages.
    env["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[1]), *filter(None, [env.get("PYTHONPATH", "")])]
    )
    with (place / "host.log").open("wb") as log:
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "remote.demo_host",
                f"--root={place}",
                f"--name={name}",
                f"--kind={kind}",
                f"--port={port}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=env,
            cwd=place,
            start_new_session=True,
        )


def _client_key(root: Path) -> str:
    file = root / "client_key"
    if not file.exists():
        key = asyncssh.generate_private_key("ssh-ed25519", comment="rigbook demo")
        key.write_private_key(str(file))
        file.chmod(0o600)
        key.write_public_key(f"{file}.pub")
    return Path(f"{file}.pub").read_text()


def _quoted(path: Path) -> str:
    """A path as one word of an ssh config."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _write_config(root: Path, alive: dict[str, dict[str, Any]]) -> None:
    known = root / "known_hosts"
    lines = ["# Written by `rigbook demo`: the played hosts, and nothing else."]
    for name, ready in alive.items():
        (root / name / "port").write_text(f"{ready['port']}\n")
        # The key is pinned from the file that the server reads, so nothing is taken on trust.
        hostkeys.pin(known, name, 22, (root / name / "host_key.pub").read_text())
        lines += [
            f"Host {name}",
            "  HostName 127.0.0.1",
            f"  Port {ready['port']}",
            "  User demo",
            # `%` begins a token in file names.
            f"  IdentityFile {_quoted(root / 'client_key').replace('%', '%%')}",
            "  IdentitiesOnly yes",
            "  IdentityAgent none",
            f"  HostKeyAlias {name}",
            f"  UserKnownHostsFile {_quoted(known).replace('%', '%%')}",
            "  ForwardAgent no",
        ]
    temporary = root / "ssh_config.tmp"
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(root / "ssh_config")
