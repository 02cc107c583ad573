"""Rigs to test against: the played hosts of the demo, and a real OpenSSH server with a bash and a zsh user."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from remote import demo_rig
from state.project import Project, loads

NOISE = "printf 'Welcome to the machine\\n\\377\\n'\nprintf 'and its complaints\\n' >&2\n"


def until(what: Callable[[], object], seconds: float = 15, every: float = 0.02) -> None:
    """Wait for a condition; fail the test when it does not come."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(every)


def project(root: Path, hosts: str, *, config: str = "ssh_config") -> Project:
    return loads(f'[project]\nname = "lab"\nssh_config = "{config}"\n{hosts}', root)


def host(name: str) -> str:
    return f'[hosts.{name}]\nkind = "linux"\nssh = "{name}"\nplayed = true\n'


@contextmanager
def played(root: Path, names: dict[str, str] | None = None) -> Iterator[Project]:
    """The demo's hosts, as a project in `root`."""
    hosts = names or {"llm": "lxc"}
    demo_rig.start(root, hosts)
    try:
        yield project(root, "".join(map(host, hosts)))
    finally:
        demo_rig.stop(root)


@dataclass
class Sshd:
    """A running OpenSSH server. `users` are those who may log in with `key`."""

    root: Path
    port: int
    process: subprocess.Popen[bytes]
    users: dict[str, Path]  # name -> home

    def project(self, user: str, extra: str = "") -> Project:
        (self.root / "ssh_config").write_text(
            f"Host box\n  HostName 127.0.0.1\n  Port {self.port}\n  User {user}\n  IdentityFile {self.root}/key\n"
            f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {self.root}/known_hosts\n{extra}"
        )
        return project(self.root, '[hosts.box]\nkind = "linux"\nssh = "box"\n')

    def cut(self) -> None:
        """Kill the processes that serve connections (the monitor and its child), not what they started."""
        level, found = {self.process.pid}, []
        while level:
            pids = map(int, filter(str.isdigit, os.listdir("/proc")))
            level = {pid for pid in pids if _parent(pid) in level and _comm(pid).startswith("sshd")}
            found += level
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def sshd(settings: str = "") -> Iterator[Sshd]:
    """OpenSSH on loopback. As root it has the users rbbash and rbzsh with noisy start-up files; else only ourselves."""
    binary = shutil.which("sshd") or "/usr/sbin/sshd"
    assert os.path.exists(binary), "install openssh-server (.ci/run does)"
    root = Path(tempfile.mkdtemp(prefix="rb-sshd-"))
    root.chmod(0o755)
    users: dict[str, Path] = {}
    process = None
    try:
        for name in ("key", "host_key"):
            key = asyncssh.generate_private_key("ssh-ed25519")
            key.write_private_key(str(root / name))
            key.write_public_key(str(root / f"{name}.pub"))
            (root / name).chmod(0o600)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
            for name, shell, rc in (("rbbash", "bash", ".bashrc"), ("rbzsh", "zsh", ".zshenv")):
                program = shutil.which(shell)
                assert program, f"install {shell} (.ci/run does)"
                users[name] = _add_user(root, name, program, rc)
        else:
            me = pwd.getpwuid(os.getuid())
            users[me.pw_name] = Path(me.pw_dir)
        port = free_port()
        shutil.copy(root / "key.pub", root / "authorized_keys")
        (root / "authorized_keys").chmod(0o644)
        (root / "known_hosts").write_text(f"[127.0.0.1]:{port} {(root / 'host_key.pub').read_text()}")
        (root / "sshd_config").write_text(
            f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {root}/host_key\nPidFile none\nStrictModes no\nUsePAM no\n"
            f"AuthorizedKeysFile {root}/authorized_keys\nPasswordAuthentication no\nPrintMotd no\n{settings}"
        )
        with (root / "sshd.log").open("wb") as log:
            process = subprocess.Popen([binary, "-D", "-e", "-f", root / "sshd_config"], stderr=log)
        until(lambda: _listening(port))
        yield Sshd(root, port, process, users)
    finally:
        if process:
            process.terminate()
            process.wait(10)
        if os.geteuid() == 0:
            for name in users:
                _drop_user(name)
        shutil.rmtree(root, ignore_errors=True)


def _add_user(root: Path, name: str, shell: str, rc: str) -> Path:
    home = root / name
    _drop_user(name)
    subprocess.run(["useradd", "-M", "-d", str(home), "-s", shell, "-p", "*", name], check=True)
    home.mkdir()
    (home / rc).write_text(NOISE)
    account = pwd.getpwnam(name)
    for path in (home, home / rc):
        os.chown(path, account.pw_uid, account.pw_gid)
    return home


def _drop_user(name: str) -> None:
    with suppress(KeyError):
        uid = pwd.getpwnam(name).pw_uid
        # Only processes of this user, who exists for these tests alone.
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{pid}").st_uid == uid:
                    os.kill(int(pid), 9)
        subprocess.run(["userdel", "-f", name], check=False, capture_output=True)


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
