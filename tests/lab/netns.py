"""A far machine: real sshd in namespaces of its own, behind a cable (a veth pair) that can be pulled out.

    with far_host() as far:
        async with Rig(far.project("rbbash")) as rig: …
        far.cut()       # no packet passes, nobody is told: what a closed laptop lid or a dead switch looks like
        far.restore()
        far.freeze()    # the machine answers pings, but sshd does not answer
        far.thaw()
        far.power_off() # all its processes are gone at once, and nobody says goodbye
        far.power_on()  # the same disk and address, another boot id

Its processes are in a pid namespace too. When its first process dies, because the test ended or was killed, the kernel
ends all of them and takes the cable away: nothing is left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from state.project import Project
from tests.lab import rigs

# Reserved for tests of network equipment (RFC 2544): no real machine has an address in it.
NETWORK = IPv4Network("198.18.0.0/15")


def run(*argv: str | Path, check: bool = True) -> str:
    done = subprocess.run([str(word) for word in argv], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0 or not check, f"{argv}: {done.stderr or done.stdout}"
    return done.stdout


def require(*programs: str) -> None:
    """Skip, with the reason, where this machine cannot give namespaces."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for name in ("ip", "unshare", "nsenter", "setpriv", *programs):
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}: .ci/run installs it")
    if refused := _refused():
        pytest.skip(f"this machine gives us no namespaces: {refused}")


@cache
def _refused() -> str:
    """Why not; "" where there are namespaces and cables."""
    script = "ip link add rb0 type veth peer name rb1 && mount -t tmpfs tmpfs /tmp"
    flags = ["--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "--mount-proc"]
    done = subprocess.run(["unshare", *flags, "sh", "-c", script], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


@dataclass
class Namespace:
    """Processes that see only each other: own network, pids and mounts."""

    process: subprocess.Popen[bytes]
    near: str = ""  # our end's address
    far: str = ""  # its address
    boot_id: str = ""

    @property
    def pid(self) -> int:
        """Its first process, by our numbers."""
        return rigs.descendants(self.process.pid)[0]

    def start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """Its first process becomes this program."""
        assert self.process.stdin
        self.process.stdin.write(shlex.join(argv).encode() + b"\n")
        self.process.stdin.close()
        return self.process

    def enter(self, *argv: str | Path, check: bool = True) -> str:
        """Run something inside."""
        return run("nsenter", "-t", str(self.pid), "-a", "--", *argv, check=check)

    def forward(self) -> None:
        """Be a router for guests: each has a pair of addresses, ours and its own, behind this host."""
        run("nsenter", "-t", str(self.process.pid), "-n", "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        run("ip", "route", "add", _block(self.near), "via", self.far)

    def guest_pair(self, index: int) -> tuple[str, str]:
        """The addresses of guest 0, 1 or 2: the host's end, and the guest's."""
        assert index in (0, 1, 2)
        first = IPv4Address(self.far) + 3 + 4 * index
        return str(first), str(first + 1)

    def cut(self) -> None:
        run("nsenter", "-t", str(self.process.pid), "-n", "ip", "link", "set", "eth0", "down")

    def restore(self) -> None:
        run("nsenter", "-t", str(self.process.pid), "-n", "ip", "link", "set", "eth0", "up")

    def throttle(self, rate: int | None) -> None:
        """Let at most `rate` bytes a second through, each way; None: as many as there are."""
        ends = (("nsenter", "-t", str(self.process.pid), "-n", "tc"), "eth0"), (("tc",), f"rb{self.process.pid}")
        for tc, device in ends:
            run(*tc, "qdisc", "del", "dev", device, "root", check=False)
            if rate is not None:
                shape = ("tbf", "rate", f"{rate}bps", "burst", "64kb", "latency", "100ms")  # tc's bps are bytes
                run(*tc, "qdisc", "add", "dev", device, "root", *shape)

    def end(self, *, give_back: bool = True) -> None:
        """`give_back` its addresses, too."""
        for pid in rigs.descendants(self.process.pid)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # pid 1 of the namespace: the kernel ends the others
        self.process.kill()
        self.process.wait(10)
        run("ip", "link", "del", f"rb{self.process.pid}", check=False)  # the kernel would, but some time later
        if give_back and self.near:
            run("ip", "route", "del", "unreachable", _block(self.near), check=False)
        if self.process.stdin:
            self.process.stdin.close()


def namespace(cgroup: Path | None = None, addresses: tuple[str, str] | None = None) -> Namespace:
    """New namespaces whose first process waits for `start`. The caller ends them. They have a boot id of their own.

    `cgroup` is an empty control group (version 2) to put them in, and all that they see of control groups. `addresses`
    are those of an earlier one that has kept them.
    """
    require()
    command = ["setpriv", "--pdeathsig", "KILL"]
    if cgroup:
        command += ["/bin/sh", "-c", 'echo $$ >"$0/cgroup.procs" && exec "$@"', str(cgroup)]
    command += ["unshare", "--net", "--mount", "--pid", "--ipc", "--uts", *(["--cgroup"] if cgroup else [])]
    command += ["--fork", "--kill-child", "--mount-proc", "--", "/bin/sh", "-c", 'read -r line && eval "exec $line"']
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    made = Namespace(process)
    try:
        rigs.until(lambda: _inside(process))
        made.near, made.far = _plug(process.pid, addresses)
        made.boot_id = str(uuid.uuid4())
        with tempfile.NamedTemporaryFile("w") as file:  # the mount keeps what the name loses
            file.write(made.boot_id + "\n")
            file.flush()
            os.chmod(file.name, 0o444)
            made.enter("mount", "--bind", file.name, "/proc/sys/kernel/random/boot_id")
        return made
    except BaseException:
        made.end()
        raise


def _inside(process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "unshare failed: its message is above"
    for pid in rigs.descendants(process.pid)[:1]:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/comm").read_text() == "sh\n"
    return False


def _plug(pid: int, addresses: tuple[str, str] | None) -> tuple[str, str]:
    """A cable from here into the network namespace of `pid`: the addresses of our end and of the far one."""
    name = f"rb{pid}"
    near, far = addresses or _reserve()
    run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "addr", "add", f"{near}/30", "dev", name)
    run("ip", "link", "set", name, "up")
    inside = ("nsenter", "-t", str(pid), "-n", "ip")
    run(*inside, "link", "set", "lo", "up")
    run(*inside, "addr", "add", f"{far}/30", "dev", "eth0")
    run(*inside, "link", "set", "eth0", "up")
    # As over a router: a cut loses packets in silence, nobody is told after a second that there is no such neighbour.
    run("ip", "neigh", "replace", far, "lladdr", run(*inside, "-br", "link", "show", "eth0").split()[2], "dev", name)
    return near, far


def _block(near: str) -> str:
    return f"{IPv4Address(near) - 1}/28"


def _reserve() -> tuple[str, str]:
    """One pair for the cable, and room for three of guests. A route of last resort marks the block as taken, so that
    nothing for it goes anywhere else while there is no cable; its metric is the pid of who took it."""
    with open("/run/lock/rigbook-lab-net", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        addresses = {word.partition("/")[0] for word in run("ip", "-4", "-o", "addr").split()}
        taken = set()
        for line in run("ip", "-4", "route", "show", "type", "unreachable", "root", str(NETWORK)).splitlines():
            words = line.split()
            block, owner = words[words.index("unreachable") + 1], words[words.index("metric") + 1]
            if os.path.exists(f"/proc/{owner}"):
                taken.add(block)
            else:
                run("ip", "route", "del", "unreachable", block, check=False)
        for start in range(int(NETWORK[0]), int(NETWORK[-1]), 16):
            near, far = str(IPv4Address(start + 1)), str(IPv4Address(start + 2))
            if _block(near) not in taken and near not in addresses:
                run("ip", "route", "add", "unreachable", _block(near), "metric", str(os.getpid()))
                return near, far
    raise AssertionError("no free address")


@dataclass
class Far:
    """A host on the other end of a cable. What it has of `rigs.Sshd` means the same."""

    sshd: rigs.Sshd
    space: Namespace
    prepare: Callable[[Namespace], None]

    @property
    def address(self) -> str:
        return self.sshd.address

    @property
    def users(self) -> dict[str, Path]:
        return self.sshd.users

    def project(self, user: str, extra: str = "") -> Project:
        return self.sshd.project(user, extra)

    def cut(self) -> None:
        """Pull the cable: what is sent is lost, and neither side hears of it."""
        self.space.cut()

    def restore(self) -> None:
        self.space.restore()

    def throttle(self, rate: int | None) -> None:
        """A thin cable: at most `rate` bytes a second each way."""
        self.space.throttle(rate)

    def freeze(self) -> None:
        self.sshd.freeze()

    def thaw(self) -> None:
        self.sshd.thaw()

    @property
    def home(self) -> Path:
        """Root's home there, seen from here."""
        return self.sshd.root / "root"

    def power_off(self) -> None:
        """Its processes and connections are gone without a word; its disk is not."""
        self.space.cut()
        self.space.end(give_back=False)

    def power_on(self) -> None:
        self.space = namespace(addresses=(self.space.near, self.space.far))
        self.prepare(self.space)
        self.sshd.start(self.space.start)


@contextmanager
def far_host(settings: str = "", prepare: Callable[[Namespace], None] = lambda space: None) -> Iterator[Far]:
    """`prepare` may change mounts and the like in the namespace before sshd starts. Root's home there is its own."""
    home: list[Path] = []

    def ready(space: Namespace) -> None:
        space.enter("mount", "--bind", home[0], "/root")
        prepare(space)

    first = namespace()
    far = None

    def launch(argv: Sequence[str]) -> subprocess.Popen[bytes]:
        home.append(Path(argv[-1]).parent / "root")
        home[0].mkdir(mode=0o700)
        ready(first)
        return first.start(argv)

    try:
        with rigs.sshd(settings, address=first.far, launch=launch) as server:
            far = Far(server, first, ready)
            try:
                yield far
            finally:
                far.space.restore()
    finally:
        (far.space if far else first).end()
