"""A Proxmox host that is none: real sshd, real LXC containers, and stand-ins for `pct`, `qm` and `pvesh`.

    with proxmox_rig() as rig:
        async with Rig(rig.project()) as hosts:   # pve (proxmox), ct (lxc 101), vm (vm 200)
            …
        rig.change(101, lock="backup")
        rig.far.cut()

`pve` is a `netns.far_host` whose logins find the stand-ins first in PATH. Container 101
is a real container. A second one plays VM 200, whose guest agent the `qm` stand-in plays. Both run an sshd with host
keys of their own, at `rig.container.address` and `rig.vm.address`, reached through the host.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from state.project import Project
from tests.lab import lxc, netns, rigs
from tests.lab.netns import Far

HERE = Path(__file__).parent
PROGRAMS = ("pct", "qm", "pvesh")
GIB = 1024**3
# Not one of a home directory: on the host, root's home is another.
PYTHON = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), sys.executable)


@dataclass
class ProxmoxRig:
    far: Far
    container: lxc.Container
    vm: lxc.Container
    folder: Path

    @property
    def state(self) -> Path:
        return self.folder / "node.json"

    def project(self, extra: str = "", ssh: str = "", *, vm: bool = False) -> Project:
        """Hosts pve and ct, on request vm; the guests have no ssh of their own. `ssh` adds lines to the ssh config,
        `extra` to the project file."""
        self.far.project("root", ssh)
        hosts = '[hosts.pve]\nkind = "proxmox"\nssh = "box"\n[hosts.ct]\nkind = "lxc"\non = "pve"\nvmid = 101\n'
        if vm:
            hosts += '[hosts.vm]\nkind = "vm"\non = "pve"\nvmid = 200\n'
        return rigs.project(self.far.sshd.root, hosts + extra)

    def change(self, vmid: int, **keys: Any) -> None:
        """Change what the node says of a guest: name, lock, config, raw, agent ("running", "silent", "none")."""
        whole = json.loads(self.state.read_text())
        whole["guests"][str(vmid)].update(keys)
        self.write(whole)

    def node(self, **keys: Any) -> None:
        """Change the node itself: keep_env_option, agent_output_limit, agent_poll_s, guests."""
        self.write(json.loads(self.state.read_text()) | keys)

    def write(self, whole: dict[str, Any]) -> None:
        new = self.state.with_suffix(".new")
        new.write_text(json.dumps(whole))
        os.replace(new, self.state)

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name


def install(folder: Path, guests: dict[str, Any]) -> None:
    """The stand-ins under Proxmox's names in `folder`/bin, and the node that they speak for."""
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        words = [PYTHON, "-I", "-S", str(HERE / f"{name}_stand_in.py"), str(folder / "node.json")]
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    node = {"node": "pve", "keep_env_option": True, "guests": guests}
    node |= {"agent_output_limit": 16 * 1024**2, "agent_poll_s": 1}
    (folder / "node.json").write_text(json.dumps(node))


def guest(kind: str, made: lxc.Container, name: str, config: dict[str, Any]) -> dict[str, Any]:
    at = {"lxc": made.name, "path": str(made.path)}
    size = {"memory": 4 * GIB, "disk": 32 * GIB}
    return {"type": kind, "name": name, "lock": "", "config": config, "raw": [], "agent": "running"} | at | size


@contextmanager
def proxmox_rig(settings: str = "") -> Iterator[ProxmoxRig]:
    lxc.require()
    folder = lxc.new_folder()
    path = f"{folder}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    try:
        # The guests' cables hang on the host, so that they can be cut off with it.
        with netns.far_host(f"SetEnv PATH={path}\n{settings}") as far:
            far.space.forward()
            key = (far.sshd.root / "key.pub").read_text()
            (folder / "guests").mkdir()
            container, vm = (
                lxc.make(far.space, name, folder / "guests", key, index)
                for index, name in enumerate(("ct101", "vm200"))
            )
            install(
                folder,
                {
                    "101": guest("lxc", container, "ct101", {"arch": "amd64", "hostname": "ct101", "memory": 4096}),
                    "200": guest("qemu", vm, "vm200", {"agent": "1", "name": "vm200", "memory": 4096}),
                },
            )
            container.start()
            vm.start()
            try:
                yield ProxmoxRig(far, container, vm, folder)
            finally:
                container.stop()
                vm.stop()
    finally:
        lxc.remove(folder)
