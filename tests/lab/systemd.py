"""A far host whose PID 1 is a real systemd, with logind, a system bus, user units and an sshd that goes through PAM.

    with systemd_host() as host:
        async with Rig(host.project("root")) as rig: …     # or "plain", an ordinary user
        host.linger(True)                  # plain's user units outlive plain's sessions
        host.kill_user_processes(True)     # what a session leaves behind is killed when it ends

Its root is this machine's file system under a layer in memory, so accounts and files of it exist nowhere else. It has a
control group of its own (version 2) to manage. Which controllers it has there depends on the machine: with none,
MemoryMax and TasksMax are accepted and do nothing (`host.controllers` tells).
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from state.project import Project
from tests.lab import netns, rigs
from tests.lab.netns import Namespace

PLAIN = "plain"
# Not a number that useradd would give to somebody on this machine: processes there are told apart by it.
PLAIN_UID = 47000
SYSTEMD = "/lib/systemd/systemd"

# What the machine under it would start by itself, and a lab has no use for.
MASKED = """
systemd-udevd.service systemd-udev-trigger.service systemd-udevd-control.socket systemd-udevd-kernel.socket
systemd-timesyncd.service systemd-networkd.service systemd-resolved.service systemd-binfmt.service
systemd-modules-load.service systemd-sysctl.service systemd-random-seed.service systemd-hwdb-update.service
systemd-journal-catalog-update.service systemd-firstboot.service systemd-sysusers.service systemd-update-utmp.service
systemd-pcrphase.service systemd-pcrphase-sysinit.service systemd-machine-id-commit.service systemd-remount-fs.service
dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount
sys-fs-fuse-connections.mount proc-sys-fs-binfmt_misc.automount tmp.mount e2scrub_reap.service
getty.target getty-static.service console-getty.service ssh.service cron.service lxc.service lxc-net.service
lxc-monitord.service networking.service rsync.service timers.target
"""

_MOUNTS = r"""
set -e
mount -t tmpfs -o mode=755 tmpfs "$1"
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$1/up,workdir=$1/work" "$1/root"
cd "$1/root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount --rbind /dev dev
mkdir -p run/systemd run/lab etc/systemd/system etc/systemd/logind.conf.d
printf '%s\n' "$2" >run/lab/boot_id
mount --bind run/lab/boot_id proc/sys/kernel/random/boot_id
: >etc/fstab
rm -rf etc/systemd/system/*.wants etc/systemd/user/*.wants
printf 'lab-%s\n' "$2" | tr -d - | cut -c1-32 >etc/machine-id
for unit in $3; do ln -sf /dev/null "etc/systemd/system/$unit"; done
"""
_SSHD_UNIT = """[Unit]
After=dbus.service systemd-logind.service systemd-user-sessions.service
[Service]
ExecStartPre=/bin/mkdir -p /run/sshd
ExecStart=/usr/sbin/sshd -D -f /etc/ssh/lab_config
KillMode=process
"""


@dataclass
class SystemdHost:
    space: Namespace
    folder: Path
    port: int = 22

    @property
    def address(self) -> str:
        return self.space.far

    @property
    def root(self) -> Path:
        """Its file system, seen from here."""
        return Path(f"/proc/{self.space.pid}/root")

    def project(self, user: str = "root", extra: str = "") -> Project:
        return rigs.write_project(self.folder, self.address, self.port, user, extra)

    def run(self, *argv: str, check: bool = True) -> str:
        """As root in it, not through ssh: in the control group of whoever calls."""
        inside = ("nsenter", "-t", str(self.space.pid), "-m", "-n", "-p", "-u", "-i", "-C", "-r", "-w", "--")
        return netns.run(*inside, *argv, check=check)

    def linger(self, on: bool) -> None:
        self.run("loginctl", "enable-linger" if on else "disable-linger", PLAIN)

    def kill_user_processes(self, on: bool) -> None:
        path = self.root / "etc/systemd/logind.conf.d/lab.conf"
        path.write_text(f"[Login]\nKillUserProcesses={'yes' if on else 'no'}\n")
        self.run("systemctl", "restart", "systemd-logind")

    @property
    def controllers(self) -> list[str]:
        return (self.root / "sys/fs/cgroup/cgroup.controllers").read_text().split()

    def processes(self, needle: bytes) -> list[int]:
        """Its living processes, by our numbers, whose command line holds these bytes."""
        found = []
        for pid in rigs.descendants(self.space.process.pid):
            with contextlib.suppress(OSError):
                if needle in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def cut(self) -> None:
        self.space.cut()

    def restore(self) -> None:
        self.space.restore()


def cgroup2() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, flags, *_ = line.split()
        if kind == "cgroup2" and "rw" in flags.split(","):
            return Path(where)
    pytest.skip("no writable cgroup2 is mounted here: systemd needs one")


def _remove(group: Path) -> bool:
    for base, _, _ in os.walk(group, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(base)
    return not group.exists()


def sweep() -> None:
    """Remove control groups whose makers are gone."""
    for group in cgroup2().glob("rb-systemd-*"):
        made = re.fullmatch(r"rb-systemd-\d+-(\d+)", group.name)
        if made and not os.path.exists(f"/proc/{made[1]}"):
            _remove(group)


@contextmanager
def systemd_host(settings: str = "") -> Iterator[SystemdHost]:
    """`settings` are lines of its sshd_config."""
    netns.require("loginctl", "dbus-daemon", "sshd")
    if not os.path.exists(SYSTEMD):
        pytest.skip("there is no systemd: .ci/run installs it")
    if not list(Path("/lib").glob("*/security/pam_systemd.so")):
        pytest.skip("there is no pam_systemd: .ci/run installs libpam-systemd")
    sweep()
    group = cgroup2() / f"rb-systemd-{next(rigs._COUNT)}-{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix="rb-systemd-"))
    space = None
    try:
        group.mkdir()
        space = netns.namespace(group)
        for name in ("key", "host_key"):
            rigs.make_key(folder / name)
        host = SystemdHost(space, folder)
        (folder / "known_hosts").write_text(f"{space.far} {(folder / 'host_key.pub').read_text()}")
        mount = folder / "mount"
        mount.mkdir()
        try:
            space.enter("sh", "-c", _MOUNTS, "sh", mount, str(uuid.uuid4()), MASKED)
        except AssertionError as error:
            pytest.skip(f"this machine lets us mount no root for systemd: {error}")
        _furnish(space, folder, mount / "root", settings)
        environment = ["env", "-i", "container=lxc", "PATH=/usr/sbin:/usr/bin:/sbin:/bin"]
        start = [SYSTEMD, "--system", "--unit=multi-user.target", "--log-target=null", "--show-status=0"]
        space.start([*environment, "chroot", str(mount / "root"), *start])
        rigs.until(lambda: rigs._listening(host.address, host.port), 60)
        yield host
    finally:
        if space:
            space.end()
        rigs.until(lambda: _remove(group))  # the kernel is still ending the last of them
        netns.run("rm", "-rf", folder)


def _furnish(space: Namespace, folder: Path, root: Path, settings: str) -> None:
    """Write into the file system that only the namespace sees."""
    key, public = (folder / "host_key").read_text(), (folder / "key.pub").read_text()
    config = (
        "Port 22\nHostKey /etc/ssh/lab_host_key\nPidFile none\nStrictModes no\nUsePAM yes\nPasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\nAuthorizedKeysFile /etc/ssh/lab_keys\nPrintMotd no\n"
        f"Subsystem sftp /usr/lib/openssh/sftp-server\n{settings}"
    )
    files = {
        "etc/ssh/lab_host_key": key,
        "etc/ssh/lab_keys": public,
        "etc/ssh/lab_config": config,
        "etc/systemd/system/lab-sshd.service": _SSHD_UNIT,
        "etc/systemd/logind.conf.d/lab.conf": "[Login]\nKillUserProcesses=no\n",
        "etc/systemd/logind.conf.d/delay.conf": "[Login]\nUserStopDelaySec=1\n",  # from 10 s: the same, sooner
        "etc/motd": "",
    }
    inside = Path(f"/proc/{space.pid}/root{root}")
    for name, text in files.items():
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_text(text)
    (inside / "etc/ssh/lab_host_key").chmod(0o600)
    wants = inside / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    for unit in ("/etc/systemd/system/lab-sshd.service", "/lib/systemd/system/dbus.service"):
        with contextlib.suppress(FileExistsError):
            (wants / Path(unit).name).symlink_to(unit)
    add = ["useradd", "-m", "-u", str(PLAIN_UID), "-s", "/bin/bash", "-p", "*", PLAIN]
    space.enter("chroot", root, *add)
