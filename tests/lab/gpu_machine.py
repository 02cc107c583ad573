"""A machine with GPUs for tests: namespaces of its own, the fake NVML where the linker finds it, /dev/nvidia* nodes.

    with gpu_machine([gpu(), gpu()]) as machine:
        holder = machine.hold(0, 2 << 30)          a real process with /dev/nvidia0 open and 2 GiB on GPU 0
        link = machine.link()                      what runs through it runs in there: the real probe, the real pynvml
        machine.rigbook("gpus", "--json")          the command itself, on the `local` route

The nodes are `c 1 3`: the real number cannot be opened without the driver. Everything is gone when it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from remote.connect import Channel, LocalLink
from state.project import Host, Project, loads
from tests.lab.rigs import until

HERE = Path(__file__).parent
REPO = HERE.parent.parent
GIB = 1 << 30
LIBRARIES = f"/usr/lib/{os.uname().machine}-linux-gnu"

# Runs as the first process of the machine: it mounts what is needed and then reaps, as an init does.
INIT = r"""
set -e
dir=$1; libs=$2; shift 2
mount -t proc proc /proc
mkdir -p $dir/cg
mount -t cgroup2 none $dir/cg
mkdir $dir/cg/$(basename $dir)
echo $$ >$dir/cg/$(basename $dir)/cgroup.procs
umount $dir/cg
mount -t tmpfs -o size=64m tmpfs $dir/box
mkdir -p $dir/box/up $dir/box/work $dir/box/dev/pts $dir/box/dev/shm
cp $dir/libnvidia-ml.so.1 $dir/box/up/
mount -t overlay -o lowerdir=$libs,upperdir=$dir/box/up,workdir=$dir/box/work overlay $libs
for node in null zero full random urandom tty kmsg; do
  touch $dir/box/dev/$node; mount --bind /dev/$node $dir/box/dev/$node
done
mount --bind /dev/pts $dir/box/dev/pts
ln -s /proc/self/fd $dir/box/dev/fd
for name in "$@"; do mknod -m 666 $dir/box/dev/$name c 1 3; done
mkdir -p $dir/box/dev/vfio $dir/box/opt $dir/box/optwork
mknod -m 666 $dir/box/dev/vfio/12 c 1 3
mount --rbind $dir/box/dev /dev
mount -t overlay -o lowerdir=/opt,upperdir=$dir/box/opt,workdir=$dir/box/optwork overlay /opt
exec unshare -C "$PYTHON" -S -c '
import os, signal, subprocess, sys
subprocess.run(["mount", "-t", "cgroup2", "none", sys.argv[1]], check=True)
print("up", flush=True)
def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
signal.signal(signal.SIGCHLD, reap)
while sys.stdin.buffer.read(1): pass
' $dir/cg
"""


@dataclass
class FakeGpu:
    """What NVML says of one GPU; `more` are further lines of the scenario."""

    values: dict[str, Any] = field(default_factory=dict)
    more: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = ["gpu", *(f"{key} {value}" for key, value in self.values.items()), *self.more]
        return "\n".join(lines) + "\n"


def fake_gpu(index: int = 0, **values: Any) -> FakeGpu:
    """An H200 as the recording has it; `values` override."""
    given = {
        "uuid": f"GPU-{index:08x}-2222-3333-4444-555555555555",
        "name": "NVIDIA H200",
        "pci": f"00000000:{index + 6:02X}:00.0",
        "minor": index,
        "total": 150754820096,
        "reserved": 644 << 20,
        "base": 0,
        "load": 0,
        "memload": 0,
        "power": 116000,
        "limit": 700000,
        "temp": 34,
        "templimit": 90,
        "clock": 1980,
        "memclock": 3201,
        "clockmax": 1980,
        "throttle": 0,
        "gen": 5,
        "genmax": 5,
        "width": 16,
        "widthmax": 16,
        "persistence": 1,
        **values,
    }
    return FakeGpu(given)


@cache
def built(name: str, *flags: str) -> Path:
    """A C program or library of tests/lab/fake_nvml, compiled once a run."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (.ci/run installs gcc)")
    folder = Path(tempfile.mkdtemp(prefix="rb-fake-nvml-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    out = folder / name
    source = HERE / "fake_nvml" / f"{name}.c"
    subprocess.run([compiler, "-O1", *flags, "-o", out, source, "-ldl"], check=True, capture_output=True)
    return out


def library() -> Path:
    return built("fake_nvml", "-shared", "-fPIC")


def holder_program() -> Path:
    return built("holder")


@dataclass
class Pool:
    launcher: int
    workers: list[int]


class Machine:
    """A running machine. `pid` is its first process, as we number it."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], gpus: list[FakeGpu]) -> None:
        self.folder = folder
        self.process = process
        self.gpus = gpus
        self.head: dict[str, Any] = {"driver": "580.159.03", "nvml": "13.580.159.03", "cuda": 13000}
        self.pid = 0
        self.children: list[subprocess.Popen[bytes]] = []

    def write(self) -> None:
        """Put the scenario in place; the running library reads it at its next call."""
        text = "".join(f"{key} {value}\n" for key, value in self.head.items())
        text += "".join(gpu.text() for gpu in self.gpus)
        root = Path(f"/proc/{self.pid}/root")
        target = root / LIBRARIES.lstrip("/") / "libnvidia-ml.so.1.scenario"
        temporary = target.with_suffix(".new")
        temporary.write_text(text)
        temporary.replace(target)

    def inside(self, argv: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "-C", "--", *argv]

    def popen(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[bytes]:
        """Run a program in there; nsenter forks, so the program's own pid is another one."""
        process = subprocess.Popen(self.inside(argv), env={**os.environ, **(env or {})}, **more)
        self.children.append(process)
        return process

    def run(self, argv: Sequence[str], **more: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(self.inside(argv), capture_output=True, timeout=120, **more)

    def rigbook(self, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[bytes]:
        """The command itself, in there."""
        env = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "80"}
        argv = [sys.executable, "-m", "tui.cli.main", "-C", str(folder or self.folder), *words]
        return subprocess.run(self.inside(argv), capture_output=True, timeout=120, env=env)

    def hold(self, *args: str, env: Mapping[str, str] | None = None) -> int:
        """Start the holder program (see holder.c) and give its pid in the machine once it holds."""
        process = self.popen(
            ["setsid", str(holder_program()), *args], env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        words = process.stdout.readline().split()
        assert words and words[0] == b"up", words
        return int(words[1])

    def interpreter(self) -> str:
        """A program of its own that a project can declare as its Python: the holder under another path."""
        target = self.folder / "env" / "bin" / "python3"
        if not target.exists():
            target.parent.mkdir(parents=True)
            shutil.copy(holder_program(), target)
        return str(target)

    def pool(self, workers: int, *args: str, program: str | None = None, env: Mapping[str, str] | None = None) -> Pool:
        """A launcher that leads a session of its own, and workers that hold."""
        argv = ["setsid", program or str(holder_program()), "--workers", str(workers), *args]
        process = self.popen(argv, env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        assert process.stdout is not None
        pids = [int(process.stdout.readline().split()[1]) for _ in range(workers)]
        stat = self.run(["cat", f"/proc/{pids[0]}/stat"]).stdout.decode()
        return Pool(int(stat.rpartition(")")[2].split()[1]), pids)

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """Signal a process of the machine and wait until it is gone."""
        self.run(["kill", f"-{int(number)}", str(pid)])
        until(lambda: not self.alive(pid))

    def alive(self, pid: int) -> bool:
        stat = self.run(["cat", f"/proc/{pid}/stat"]).stdout.decode("utf-8", "replace")
        return bool(stat) and stat.rpartition(")")[2].split()[0] not in "ZX"

    def project(self, extra: str = "") -> Project:
        text = f'[project]\nname = "lab"\n[hosts.here]\nkind = "local"\nstate_dir = "{self.folder}/state"\n{extra}'
        (self.folder / "rigbook.toml").write_text(text)
        return loads(text, self.folder)

    def link(self) -> MachineLink:
        return MachineLink("here", self.project().hosts["here"], self)


class MachineLink(LocalLink):
    """The local route, with everything that runs on it in the machine."""

    def __init__(self, name: str, host: Host, machine: Machine) -> None:
        super().__init__(name, host)
        self._machine = machine

    @contextlib.asynccontextmanager
    async def _open(self, command: str, *more: Any, **named: Any) -> AsyncIterator[Channel]:
        from remote import shell

        inside = f"exec {shell.join(self._machine.inside(['/bin/sh', '-c', command]))}"
        async with super()._open(inside, *more, **named) as channel:
            yield channel


def _drop_cgroup(name: str) -> None:
    script = f"mount -t cgroup2 none /mnt && find /mnt/{name} -depth -type d -exec rmdir {{}} +"
    subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True)


@contextmanager
def gpu_machine(gpus: Sequence[FakeGpu] = (), nodes: Sequence[str] | None = None) -> Iterator[Machine]:
    """A machine with these GPUs. Needs root: skips where it cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("namespaces with device nodes need root")
    folder = Path(tempfile.mkdtemp(prefix="rb-gpus-"))
    (folder / "box").mkdir()
    (folder / "state").mkdir(mode=0o700)
    shutil.copy(library(), folder / "libnvidia-ml.so.1")
    if nodes is None:
        nodes = ["nvidiactl", "nvidia-uvm", *(f"nvidia{gpu.values.get('minor', 0)}" for gpu in gpus)]
    argv = ["unshare", "-m", "-p", "--fork", "--kill-child", "sh", "-c", INIT, "init", str(folder), LIBRARIES, *nodes]
    env = {**os.environ, "PYTHON": sys.executable}
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    machine = Machine(folder, process, list(gpus))
    try:
        assert process.stdout and process.stderr
        if process.stdout.readline().strip() != b"up":
            pytest.skip(f"no namespaces here: {process.stderr.read().decode()[-300:]}")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        machine.pid = int(children[0])
        machine.write()
        yield machine
    finally:
        for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(pid), signal.SIGKILL)  # the first process of the namespace: all in there end with it
        process.kill()
        process.wait()
        for child in machine.children:
            child.wait()
            if child.stdout:
                child.stdout.close()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe:
                pipe.close()
        _drop_cgroup(folder.name)
        shutil.rmtree(folder, ignore_errors=True)
