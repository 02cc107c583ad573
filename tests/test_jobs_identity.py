"""What is not the job is never taken for it, nor ended in its place: pids that come again, other groups and boots."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from remote import jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec
from remote.probe import cgroup, ending, jobdir, procs, unit
from state.project import loads
from tests.lab import rigs


@pytest_asyncio.fixture
async def link(tmp_path: Path) -> AsyncIterator[Link]:
    toml = f'[project]\nname = "lab"\n[hosts.here]\nkind = "local"\nstate_dir = "{tmp_path}/state"\n'
    async with Rig(loads(toml, tmp_path)) as rig:
        yield await rig.link("here")


def sh(id: str, script: str, **more: object) -> JobSpec:
    return JobSpec(id=id, name=id, argv=["/bin/sh", "-c", script], **more)  # type: ignore[arg-type]


# In a pid namespace of 400 pids: a process ends, others come and go until one of them has its pid.
REUSE = """
import json, os, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
from remote.probe import ending, jobdir, procs
with open("/proc/sys/kernel/pid_max", "w") as file:
    file.write("400")
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write("330")  # the first 300 are given out once only
first = subprocess.Popen(["sleep", "1000"])
pid, begun = first.pid, procs.stat(first.pid).starttime
assert procs.alive(pid, begun)
first.kill()
first.wait()
time.sleep(0.05)  # the kernel counts start times in hundredths of a second
tries = 0
while True:
    other = subprocess.Popen(["sleep", "1000"])
    tries += 1
    if other.pid == pid:
        break
    other.kill()
    other.wait()
directory = sys.argv[2]
start = {"pid": pid, "starttime": begun, "boot_id": procs.boot_id(), "started": time.time(), "boottime": 0.0,
         "supervisor": {"pid": pid, "starttime": begun}, "pid_namespace": procs.namespace(1),
         "init": procs.stat(1).starttime, "cgroup": None, "unit": None}
jobdir.write_json(directory + "/spec.json", {"name": "n"})
jobdir.write_json(directory + "/start.json", start)
jobdir.write_json(directory + "/tree.json", {"processes": [[pid, begun]]})
state = jobdir.state(directory)["state"]
ending.stop(directory, 0.1)
print(json.dumps({"tries": tries, "alive": procs.alive(pid, begun), "sent": procs.send(pid, begun, signal.SIGKILL),
                  "gone": procs.wait_gone([(pid, begun)], 1), "state": state, "remaining": ending.remaining(directory),
                  "stranger": other.poll()}))
"""


@pytest.mark.report(13)
@pytest.mark.report(14)
def test_a_pid_that_comes_again_is_somebody_else(tmp_path: Path) -> None:
    """A real wrap of pids, as a container with few of them sees it: who has the job's pid now is left alone."""
    if os.geteuid() != 0:
        pytest.skip("a pid namespace needs root")
    root = str(Path(__file__).parents[1])
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", REUSE, root]
    done = subprocess.run([*argv, str(tmp_path)], capture_output=True, text=True, timeout=60)
    if "pid_max" in done.stderr:
        pytest.skip("this kernel has one pid_max for all namespaces")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen.pop("tries") > 60, "the pids went all the way round"
    assert seen == {
        "alive": False, "sent": False, "gone": [], "state": "vanished", "remaining": [], "stranger": None,
    }  # fmt: skip


async def test_a_stop_in_a_group_of_its_own_ends_that_group_only(link: Link) -> None:
    own = cgroup.of("self")
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no control group can be made here")
    one = await jobs.submit(link, sh("one", "setsid sleep 1000 & sleep 1000"))
    two = await jobs.submit(link, sh("two", "exec sleep 1000"))
    groups = [cgroup.of(job.pid) for job in (one, two)]
    assert [os.path.basename(group or "") for group in groups] == [unit.name(job.dir) for job in (one, two)]
    rigs.until(lambda: len(cgroup.members(groups[0])) == 3)
    stopped = await jobs.stop(link, "one", grace=5)
    assert stopped.over and stopped.left == () and not cgroup.populated(groups[0])
    assert cgroup.populated(groups[1]) and (await jobs.status(link, "two")).state == "running"
    await jobs.stop(link, "two", grace=5)
    assert not [group for group in groups if os.path.exists(group or "")], "the groups are gone, too"


@pytest.fixture
def group() -> Iterator[str]:
    """A control group with a process in it."""
    own = cgroup.of("self")
    if own is None or not os.access(own, os.W_OK):
        pytest.skip("no control group can be made here")
    folder, _ = cgroup.make(f"{cgroup.PREFIX}lab-{os.getpid()}", None, None)
    assert folder
    sleeper = subprocess.Popen(["sleep", "1000"], preexec_fn=lambda: cgroup.put(folder, os.getpid()))
    yield folder
    sleeper.kill()
    sleeper.wait()
    rigs.until(lambda: not cgroup.populated(folder))
    cgroup.remove(folder)


@pytest.mark.report(12)
def test_what_must_never_be_ended_is_refused(group: str, tmp_path: Path) -> None:
    """The root, our own group, one above us, another job's, a plain directory, a path that leads elsewhere."""
    name, top, own = os.path.basename(group), cgroup.mount(), cgroup.of("self")
    assert top and own and cgroup.members(group)
    for folder in (top, own, os.path.dirname(group), "/", "", str(tmp_path), f"{group}/../{name}", "/sys/fs/cgroup"):
        assert cgroup.guard(folder, name), folder
        assert cgroup.kill(folder, name, 0.1), folder
    other = unit.name("/somewhere/jobs/other")
    assert cgroup.guard(group, other) and cgroup.kill(group, other, 0.1)
    assert cgroup.populated(group), "nobody was hurt"
    # From inside it: as a job that stops itself.
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r})\nfrom remote.probe import cgroup\n"
    code += f"import os; cgroup.put({group!r}, os.getpid()); print(cgroup.guard({group!r}, {name!r}))"
    inside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert inside.stdout == "we run in it\n"
    assert cgroup.guard(group, name) is None and cgroup.kill(group, name) is None
    assert not cgroup.populated(group)


async def test_a_job_that_stops_itself_comes_to_its_end(link: Link) -> None:
    begun = await jobs.submit(
        link, sh("self", "python3 -I -S $RIGBOOK_JOB_DIR/supervisor.pyz stop $RIGBOOK_JOB_DIR 0.2; sleep 1000")
    )
    end = await jobs.wait(link, "self")
    assert (end.stopped, end.left) == (True, ()) and begun.pid and procs.stat(begun.pid) is None


async def test_a_deaf_supervisor_does_not_save_the_job(link: Link) -> None:
    """Stopped by SIGSTOP or a debugger it passes nothing on; the job is ended all the same."""
    begun = await jobs.submit(link, sh("deaf", "sleep 1000 & exec sleep 1000"))
    assert begun.supervisor and begun.pid
    os.kill(begun.supervisor, signal.SIGSTOP)
    try:
        await jobs.stop(link, "deaf", grace=0.5)
        assert not procs.alive(begun.pid, procs.stat(begun.pid).starttime if procs.stat(begun.pid) else 0)  # type: ignore[union-attr]
    finally:
        os.kill(begun.supervisor, signal.SIGCONT)
    end = await jobs.wait(link, "deaf")
    assert end.state == "finished" and end.left == ()


@pytest.mark.report(2)
async def test_a_host_that_does_not_answer_leaves_the_state_unknown(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when its file system hangs: the link is fine, and nobody says anything."""
    assert jobs.ANSWER_S < 20
    await jobs.submit(link, sh("mute", "exec sleep 1000"))
    probe = await link.probe()
    pid = (await probe.ready)["pid"]
    monkeypatch.setattr(jobs, "ANSWER_S", 0.5)
    os.kill(pid, signal.SIGSTOP)
    try:
        now = await jobs.status(link, "mute")
        assert (now.state, now.over) == ("unknown", False) and "no answer" in now.reason
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.undo()
    assert (await jobs.status(link, "mute")).state == "running"
    await jobs.stop(link, "mute", grace=1)


@pytest.mark.report(27)
async def test_how_long_it_ran_is_not_told_by_two_clocks(link: Link) -> None:
    """The host's clock is set an hour back while the job runs, and is a day off from ours."""
    begun = await jobs.submit(link, sh("skewed", "while [ ! -e go ]; do sleep 0.02; done"))
    path = Path(begun.dir, "start.json")
    start = json.loads(path.read_text())
    path.write_text(json.dumps({**start, "started": start["started"] + 3600 + 86400}))
    now = await jobs.status(link, "skewed")
    assert now.state == "running" and now.seconds is not None and 0 <= now.seconds < 60
    Path(begun.dir, "go").touch()
    end = await jobs.wait(link, "skewed")
    assert end.ok and end.seconds is not None and 0 <= end.seconds < 60
    from pipeline.runs import _seconds

    assert _seconds(end) == end.seconds


@pytest.mark.report(28)
async def test_a_job_that_is_not_where_it_was_is_absent_and_waits_for_nobody(link: Link, tmp_path: Path) -> None:
    begun = await jobs.submit(link, sh("moved", "exec sleep 1000"))
    waiting = jobs.wait(link, "moved")
    shutil.move(begun.dir, tmp_path / "elsewhere")
    assert (await waiting).state == "absent"
    shutil.move(str(tmp_path / "elsewhere"), begun.dir)
    assert (await jobs.status(link, "moved")).state == "running"
    # A record of a run long gone, as a copied directory has it: its lock is free, its pid is another's.
    stale = Path(begun.dir).parent / "stale"
    shutil.copytree(begun.dir, stale)
    start = json.loads((stale / "start.json").read_text())
    (stale / "start.json").write_text(json.dumps({**start, "starttime": start["starttime"] + 1}))
    assert (await jobs.wait(link, "stale")).state == "vanished"
    await jobs.stop(link, "moved", grace=1)


async def test_a_supervisor_whose_directory_was_removed_ends_with_its_job(link: Link) -> None:
    begun = await jobs.submit(link, sh("removed", "sleep 0.5"))
    assert begun.supervisor
    shutil.rmtree(begun.dir)
    rigs.until(lambda: procs.stat(begun.supervisor or 0) is None or procs.stat(begun.supervisor or 0).state == "Z")  # type: ignore[union-attr]
    assert (await jobs.status(link, "removed")).state == "absent"


async def test_a_machine_or_container_that_was_started_anew_is_told(link: Link) -> None:
    begun = await jobs.submit(link, sh("reboot", "exec sleep 1000"))
    assert begun.supervisor and begun.pid
    path = Path(begun.dir, "start.json")
    start = json.loads(path.read_text())
    os.kill(begun.supervisor, signal.SIGKILL)
    os.kill(begun.pid, signal.SIGKILL)
    rigs.until(lambda: jobdir.state(begun.dir)["state"] == "vanished")
    for change in ({"boot_id": "0"}, {"init": start["init"] - 1}):
        path.write_text(json.dumps({**start, **change}))
        assert (await jobs.status(link, "reboot")).state == "lost_reboot", change
    # Seen from another pid namespace (a directory that host and container share) nothing can be said.
    path.write_text(json.dumps({**start, "pid_namespace": "pid:[1]"}))
    assert (await jobs.status(link, "reboot")).state == "unknown"


async def test_a_memory_cap_ends_the_job_and_says_so(link: Link) -> None:
    """Here kept by the supervisor: this machine's groups count no memory."""
    code = "import time; held = []\nwhile True: held.append(bytearray(b'x') * (8 << 20)); time.sleep(0.02)"
    spec = JobSpec("greedy", "", [sys.executable, "-c", code], memory_max=100 << 20)
    await jobs.submit(link, spec)
    end = await jobs.wait(link, "greedy")
    assert (end.state, end.signal, end.oom) == ("finished", "KILL", True)
    assert "cap of 100 MiB" in end.reason
    many = sh("many", "for i in 1 2 3 4 5 6 7 8 9; do sleep 1000 & done; wait", tasks_max=5)
    await jobs.submit(link, many)
    end = await jobs.wait(link, "many")
    assert (end.signal, end.oom) == ("KILL", False) and "more than its cap of 5" in end.reason


@pytest.mark.report(5)
async def test_the_kernel_killing_for_memory_is_told(tmp_path: Path) -> None:
    """The real thing, in a group of version 1 with a limit: the job goes, its supervisor tells."""
    around = Path("/sys/fs/cgroup/memory")
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    path = next((part[2] for part in own if "memory" in part[1].split(",")), None)
    if path is None or not os.access(around / path.lstrip("/"), os.W_OK):
        pytest.skip("no memory controller of version 1 can be used here")
    folder = around / path.lstrip("/") / f"rb-oom-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(96 << 20))
        state = tmp_path / "jobs" / "eats"
        state.mkdir(parents=True)
        for name, content in jobs._tree(
            JobSpec("eats", "", [sys.executable, "-c", "x = bytearray(b'x') * (1 << 30)"])
        ).items():
            (state / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
        script = f"echo $$ >{folder}/cgroup.procs && exec python3 -I -S {state}/supervisor.pyz start {state}"
        starting = await asyncio.create_subprocess_exec("sh", "-c", script, stdout=subprocess.DEVNULL)
        assert await asyncio.wait_for(starting.wait(), 60) == 0
        rigs.until(lambda: jobdir.state(str(state))["state"] == "finished", 60)
        end = jobdir.state(str(state))
        assert (end["signal"], end["exit"], end["oom"]) == ("KILL", None, True), end
        assert "want of memory" in end["reason"]
    finally:
        rigs.until(lambda: not (folder / "cgroup.procs").read_text())
        folder.rmdir()


def test_systemds_word_is_the_record_when_the_supervisor_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each result of a service as ExecStopPost gets it; a unit of the same name that ran nothing records nothing."""
    for result, how, expected in (("oom-kill", "KILL", (True, "KILL")), ("signal", "TERM", (False, "TERM"))):
        directory = tmp_path / result
        directory.mkdir()
        start = {
            "v": 2,
            "unit": {"name": "u", "invocation": "i1"},
            "started": time.time(),
            "boottime": 0.0,
            "cgroup": None,
        }
        jobdir.write_json(str(directory / "start.json"), start)
        monkeypatch.setenv("SERVICE_RESULT", result)
        monkeypatch.setenv("EXIT_STATUS", how)
        monkeypatch.setenv("INVOCATION_ID", "another")
        ending.post(str(directory))
        assert not (directory / "exit.json").exists()
        monkeypatch.setenv("INVOCATION_ID", "i1")
        ending.post(str(directory))
        end = json.loads((directory / "exit.json").read_text())
        assert (end["oom"], end["signal"]) == expected and end["exit"] is None and end["by"] == "systemd"
