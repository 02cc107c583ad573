"""A real LXC container on a host: whose its processes are, by the host's eyes, and giving back what they hold."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.probe import holders, procs, reclaim, whose
from tests.lab import lxc
from tests.lab.gpu_machine import holder_program


@pytest.fixture(scope="module")
def container() -> Iterator[lxc.Container]:
    with lxc.container() as ct:
        yield ct


def outer(ct: lxc.Container, inner: int) -> int:
    """The host's number of a container's process, found without the code under test."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            line = next(line for line in status.read_text().splitlines() if line.startswith("NSpid:"))
            group = (status.parent / "cgroup").read_text()
        except (OSError, StopIteration):
            continue
        if ct.name in group and line.split()[-1] == str(inner) and len(line.split()) > 2:
            return int(status.parent.name)
    raise AssertionError(f"no process {inner} in {ct.name}")


def test_a_containers_process_is_known_and_given_back_from_the_host(container: lxc.Container, tmp_path: Path) -> None:
    shutil.copy(holder_program(), container.file("/holder"))
    container.run("sh", "-c", "mknod -m 666 /dev/nvidia0 c 1 3 2>/dev/null || ln -s /dev/null /dev/nvidia0; ls -l /dev")
    jobs = tmp_path / "jobs"
    (jobs / "j1").mkdir(parents=True)
    mark = {"RIGBOOK_JOB": "j1", "RIGBOOK_JOB_DIR": f"{jobs}/j1"}
    argv = ["nsenter", "-t", str(container.host.pid), "-a", "--", "lxc-attach", "-P", str(container.path)]
    argv += ["-n", container.name, "--clear-env"]
    argv += [word for name, value in mark.items() for word in ("-v", f"{name}={value}")]
    argv += ["--", "/holder", "--setsid", "--fork", "/dev/nvidia0"]
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert process.stdout is not None
    _, inner = (int(process.stdout.readline().split()[1]) for _ in range(2))
    pid, here = outer(container, inner), procs.namespace(os.getpid())
    try:
        seen = {p["pid"]: p for p in holders.Scanner().scan(deep=True)["processes"]}
        assert pid in seen, "its device is found whatever namespace it was opened in"
        assert seen[pid]["nspid"][-1] == inner != pid
        assert seen[pid]["guest"] == {"kind": "lxc", "id": container.name}
        assert seen[pid]["pid_namespace"] != here
        found = {p["pid"]: p for p in whose.scan(str(jobs))["processes"]}
        assert found[pid]["class"] == "foreign", "its job is not known"
        dead = '{"v": 1, "boot_id": "%s", "pid": 999999, "starttime": 1, "supervisor": {}, "started": 1, %s}'
        space = f'"cgroup": "/", "pid_namespace": "{here}"'
        (jobs / "j1" / "start.json").write_text(dead % (procs.boot_id(), space))
        (jobs / "j1" / "lock").touch()
        found = {p["pid"]: p for p in whose.scan(str(jobs))["processes"]}
        assert found[pid]["class"] == "orphan", found[pid]["why"]
        first = found.get(outer(container, 1))
        assert first is None or first["class"] == "protected"
        keys = ("pid", "starttime", "boot_id", "pid_namespace", "cgroup", "exe")
        item = {**{key: found[pid][key] for key in keys}, "kind": "orphan", "job": "j1", "seen_until": 1 << 60}
        (outcome,) = reclaim.apply(str(jobs), [item], 5)
        assert outcome["outcome"] == "ended by TERM"
        assert container.running
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
