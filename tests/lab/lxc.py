"""Real LXC containers: this machine's own file system with a writable layer on top, so that nothing is downloaded.

    with container() as ct:
        ct.run("uname", "-n")

A container has its own boot id, pids, mounts and network, runs an sshd with host keys of its own, and stands on a
`netns.Namespace` that plays its host: when that ends, the container is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.lab import netns, rigs
from tests.lab.netns import Namespace

PORT = 22

# Its init: an sshd, and somebody who takes in processes without a parent. `lxc-stop` asks with SIGPWR.
_INIT = """#!/bin/sh
trap 'exit 0' PWR TERM
rm -f /etc/ssh/ssh_host_*
cp /lab/ssh_host_* /etc/ssh/
mkdir -p /run/sshd
/usr/sbin/sshd -f /lab/sshd_config
while :; do sleep 1000000 & wait $!; done
"""
_SSHD = f"""Port {PORT}
HostKey /etc/ssh/ssh_host_ed25519_key
HostKey /etc/ssh/ssh_host_ecdsa_key
AuthorizedKeysFile /lab/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PrintMotd no
"""


@dataclass
class Container:
    """`host` may be left and entered again; the container's files stay in `root` until the fixture ends."""

    host: Namespace
    name: str  # what lxc-* call it: unique on this machine, since it names control groups
    root: Path
    address: str

    @property
    def path(self) -> Path:
        """What `-P` wants: the directory that holds all containers of this host."""
        return self.root.parent

    def lxc(self, program: str, *args: str, check: bool = True) -> str:
        return self.host.enter(f"lxc-{program}", "-P", self.path, "-n", self.name, *args, check=check)

    def start(self) -> None:
        self.lxc("start", "-d", "-o", str(self.root / "lxc.log"), "-l", "ERROR")
        rigs.until(lambda: rigs._listening(self.address, PORT))

    def stop(self) -> None:
        self.lxc("stop", "-k", check=False)

    @property
    def running(self) -> bool:
        return self.lxc("info", "-sH", check=False).strip() == "RUNNING"

    def run(self, *argv: str) -> str:
        """The output of a command in it, with a clean environment."""
        return self.lxc("attach", "--clear-env", "--", *argv)

    def file(self, inside: str) -> Path:
        """Where a file that the container wrote lies for us."""
        return self.root / "up" / inside.lstrip("/")

    def host_keys(self) -> list[str]:
        return [" ".join(path.read_text().split()[:2]) for path in sorted((self.root / "up/lab").glob("*_key.pub"))]


def require() -> None:
    netns.require("lxc-start", "lxc-attach", "lxc-info", "lxc-stop")
    if refused := _refused():
        pytest.skip(f"this machine runs no container: {refused}")


@cache
def _refused() -> str:
    """Why a container does not start here; "" where one does."""
    host, folder = netns.namespace(), new_folder()
    made = None
    try:
        host.start(["sleep", "1000"])
        made = make(host, "ctprobe", folder, "")
        made.lxc("start", "-d", "-o", str(made.root / "lxc.log"), "-l", "ERROR")
        return "" if made.run("echo", "up") == "up\n" else "a command in it says nothing"
    except (AssertionError, OSError) as error:
        log = made.root / "lxc.log" if made else None
        lines = log.read_text().splitlines() if log and log.exists() else str(error).splitlines()
        return lines[0] if lines else "lxc-start failed"
    finally:
        if made:
            made.stop()
        host.end()
        remove(folder)


def new_folder() -> Path:
    """For the layers on top of this machine's files: not on an overlay itself, which the kernel does not take."""
    base = Path(tempfile.gettempdir())
    kind = netns.run("stat", "-f", "-c", "%T", base).strip()
    return Path(tempfile.mkdtemp(prefix="rb-lxc-", dir="/dev/shm" if kind.startswith("overlay") else base))


def make(host: Namespace, hostname: str, folder: Path, public_key: str, index: int = 0) -> Container:
    """A stopped container on `host`. `folder` holds all containers of that host."""
    sweep()
    name = f"{hostname}-rb{next(rigs._COUNT)}-{os.getpid()}"
    gateway, address = host.guest_pair(index)
    root = folder / name
    lab = root / "up/lab"
    lab.mkdir(parents=True)
    (root / "up/root").mkdir(mode=0o700)
    os.setxattr(root / "up/root", "trusted.overlay.opaque", b"y")  # root's home there begins empty
    for kind in ("ed25519", "ecdsa"):
        rigs.make_key(lab / f"ssh_host_{kind}_key", "ecdsa-sha2-nistp256" if kind == "ecdsa" else "ssh-ed25519")
    (lab / "authorized_keys").write_text(public_key)
    (lab / "sshd_config").write_text(_SSHD)
    (lab / "init").write_text(_INIT)
    (root / "cable.sh").write_text(f"#!/bin/sh\nip addr add {gateway}/30 dev {hostname} && ip link set {hostname} up\n")
    for script in (lab / "init", root / "cable.sh"):
        script.chmod(0o755)
    (root / "config").write_text(
        f"lxc.uts.name = {hostname}\n"
        f"lxc.rootfs.path = overlay:/:{root}/up\n"
        "lxc.init.cmd = /lab/init\n"
        f"lxc.net.0.type = veth\nlxc.net.0.name = eth0\nlxc.net.0.veth.pair = {hostname}\nlxc.net.0.flags = up\n"
        f"lxc.net.0.ipv4.address = {address}/30\nlxc.net.0.ipv4.gateway = {gateway}\n"
        f"lxc.net.0.script.up = {root}/cable.sh\n"
        "lxc.mount.auto = proc:mixed sys:mixed cgroup:mixed\n"
        "lxc.mount.entry = tmpfs dev/shm tmpfs create=dir 0 0\n"
        "lxc.mount.entry = tmpfs run tmpfs create=dir,mode=755 0 0\n"
        "lxc.mount.entry = tmpfs tmp tmpfs create=dir,mode=1777 0 0\n"
        "lxc.apparmor.profile = unconfined\n"
    )
    return Container(host, name, root, address)


@contextmanager
def container(hostname: str = "ct101") -> Iterator[Container]:
    """One running container on a host that does nothing else."""
    require()
    host, folder = netns.namespace(), new_folder()
    try:
        host.start(["/bin/sh", "-c", "while :; do sleep 1000000 & wait $!; done"])
        host.forward()
        made = make(host, hostname, folder, "")
        made.start()
        try:
            yield made
        finally:
            made.stop()
    finally:
        host.end()
        remove(folder)


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    sweep(os.getpid())


def sweep(mine: int = 0) -> None:
    """Remove the empty control groups of containers whose makers (or, with `mine`, whose own) are gone."""
    found = [
        Path(base) for base, _, _ in os.walk("/sys/fs/cgroup") if re.search(r"/lxc\.[^/]*-rb\d+-\d+(-\d+)?(/|$)", base)
    ]
    for path in sorted(found, key=lambda path: -len(path.parts)):
        made = re.search(r"-rb\d+-(\d+)", str(path))
        if made and (int(made[1]) == mine or not os.path.exists(f"/proc/{made[1]}")):
            with contextlib.suppress(OSError):  # EBUSY: somebody is still in it
                path.rmdir()
