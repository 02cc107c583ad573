"""Rigs to test against: the played hosts of the demo, and a real OpenSSH server with users of four login shells."""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from remote import demo_rig
from state.project import Project, loads

NOISE = "printf 'Welcome to the machine\\n\\377\\n'\nprintf 'and its complaints\\n' >&2\n"
BASH_NOISE = NOISE + "".join(  # as people have them: functions by the names of commands
    f'{name}() {{ echo {name} was called; builtin {name} "$@" 2>/dev/null || command {name} "$@"; }}\n'
    for name in ("cd", "timeout", "export")
)
CSH_NOISE = "printf 'Welcome to the machine\\n\\377\\n'\nsh -c \"printf 'and its complaints\\n' >&2\"\n"
# user -> (login shell, start-up file that is read for every command, what it holds)
SHELLS = {
    "rbbash": ("bash", ".bashrc", BASH_NOISE),
    "rbzsh": ("zsh", ".zshenv", NOISE),
    "rbfish": ("fish", ".config/fish/config.fish", NOISE),
    "rbcsh": ("tcsh", ".cshrc", CSH_NOISE),
}


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


def write_project(root: Path, address: str, port: int, user: str, extra: str = "") -> Project:
    """A project in `root` with one host, `box`: the sshd at that address, whose keys lie there. `extra` are lines for
    the ssh config."""
    (root / "ssh_config").write_text(
        f"Host box\n  HostName {address}\n  Port {port}\n  User {user}\n  IdentityFile {root}/key\n"
        f"  IdentitiesOnly yes\n  IdentityAgent none\n  UserKnownHostsFile {root}/known_hosts\n{extra}"
    )
    return project(root, '[hosts.box]\nkind = "linux"\nssh = "box"\n')


@dataclass
class Sshd:
    """A running OpenSSH server. `users` are those who may log in with `key`; as root, root may as well."""

    root: Path
    address: str
    port: int
    process: subprocess.Popen[bytes]
    users: dict[str, Path]  # name -> home
    accounts: dict[str, str]  # name -> name in the password file, which no other run of the tests has
    argv: list[str]

    def project(self, user: str, extra: str = "") -> Project:
        return write_project(self.root, self.address, self.port, self.accounts.get(user, user), extra)

    def start(self, launch: Callable[[Sequence[str]], subprocess.Popen[bytes]]) -> None:
        """Again, after it ended."""
        self.process = launch(self.argv)
        until(lambda: self.process.poll() is not None or _listening(self.address, self.port))
        assert self.process.poll() is None, (self.root / "sshd.log").read_text()

    def pids(self) -> list[int]:
        """sshd's processes: the listener first, then those that serve connections; not what they started."""
        return [pid for pid in [self.process.pid, *descendants(self.process.pid)] if _comm(pid).startswith("sshd")]

    def cut(self) -> None:
        """Kill the processes that serve connections (the monitor and its child), not what they started."""
        for pid in self.pids()[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self) -> None:
        """Stop sshd without a word: its connections stay open and nobody answers, new ones hang."""
        frozen: set[int] = set()
        while new := set(self.pids()) - frozen:  # it may have been about to fork
            for pid in new:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            frozen |= new

    def thaw(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def descendants(pid: int) -> list[int]:
    """All living descendants, parents before children."""
    parents = {int(name): _parent(int(name)) for name in filter(str.isdigit, os.listdir("/proc"))}
    found, level = [], [pid]
    while level:
        level = [child for child, parent in sorted(parents.items()) if parent in level]
        found += level
    return found


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
def sshd(
    settings: str = "",
    *,
    address: str = "127.0.0.1",
    launch: Callable[[Sequence[str]], subprocess.Popen[bytes]] | None = None,
) -> Iterator[Sshd]:
    """OpenSSH on `address`. As root it has a user for each shell, with noisy start-up files; else only ourselves.

    `launch` starts the server's argv in another way than as our child, such as in a namespace.
    """
    binary = shutil.which("sshd") or "/usr/sbin/sshd"
    assert os.path.exists(binary), "install openssh-server (.ci/run does)"
    root = Path(tempfile.mkdtemp(prefix="rb-sshd-"))
    root.chmod(0o755)
    users: dict[str, Path] = {}
    accounts: dict[str, str] = {}
    server: Sshd | None = None
    try:
        for name in ("key", "host_key"):
            make_key(root / name)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
            with _password_file():
                for name, (shell, rc, noise) in SHELLS.items():
                    program = shutil.which(shell)
                    assert program, f"install {shell} (.ci/run does)"
                    accounts[name] = _account_name(name)
                    users[name] = _add_user(root / name, accounts[name], program, rc, noise)
        else:
            me = pwd.getpwuid(os.getuid())
            users[me.pw_name] = Path(me.pw_dir)
        port = free_port()
        shutil.copy(root / "key.pub", root / "authorized_keys")
        (root / "authorized_keys").chmod(0o644)
        (root / "known_hosts").write_text(f"[{address}]:{port} {(root / 'host_key.pub').read_text()}")
        (root / "sshd_config").write_text(
            f"ListenAddress {address}\nPort {port}\nHostKey {root}/host_key\nPidFile none\nStrictModes no\nUsePAM no\n"
            f"AuthorizedKeysFile {root}/authorized_keys\nPasswordAuthentication no\nPrintMotd no\n{settings}"
        )
        argv = [binary, "-D", "-E", str(root / "sshd.log"), "-f", str(root / "sshd_config")]
        process = (launch or _child)(argv)
        server = Sshd(root, address, port, process, users, accounts, argv)
        until(lambda: process.poll() is not None or _listening(address, port))
        assert process.poll() is None, (root / "sshd.log").read_text()
        yield server
    finally:
        if server:
            server.thaw()  # a test may have left it frozen
            for pid in server.pids()[:1]:
                os.kill(pid, signal.SIGTERM)
            server.process.wait(10)
        with _password_file():
            for name in accounts.values():
                _drop_user(name)
        shutil.rmtree(root, ignore_errors=True)


def make_key(path: Path, kind: str = "ssh-ed25519") -> None:
    key = asyncssh.generate_private_key(kind)
    key.write_private_key(str(path))
    key.write_public_key(f"{path}.pub")
    path.chmod(0o600)


def _child(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv)


_COUNT = iter(range(10**6))


def _account_name(name: str) -> str:
    """Unique on this machine: several runs of the tests may go on at once. It ends with who made it."""
    return f"{name}{next(_COUNT)}-{os.getpid()}"


@contextmanager
def _password_file() -> Iterator[None]:
    """One at a time, and nobody's users are left behind who was killed."""
    if os.geteuid() != 0:
        yield
        return
    with open("/run/lock/rigbook-lab", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for account in pwd.getpwall():
            made = re.fullmatch(r"rb[a-z]+\d+-(\d+)", account.pw_name)
            if made and not os.path.exists(f"/proc/{made[1]}"):
                _drop_user(account.pw_name)
                shutil.rmtree(Path(account.pw_dir).parent, ignore_errors=True)
        yield


def _add_user(home: Path, name: str, shell: str, rc: str, noise: str) -> Path:
    subprocess.run(["useradd", "-M", "-d", str(home), "-s", shell, "-p", "*", name], check=True)
    (home / rc).parent.mkdir(parents=True)
    (home / rc).write_text(noise)
    account = pwd.getpwnam(name)
    for path in (home, *home.rglob("*")):
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


def _listening(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((address, port)) == 0
