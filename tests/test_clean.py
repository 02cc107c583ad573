"""What dead work holds is found by provenance, given back, and proved; nobody else's process is touched."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import pytest_asyncio

from remote import cleanup, jobs
from remote.connect import Link, Rig
from remote.probe import procs, reclaim
from state.errors import RigbookError
from state.project import Project
from tests.lab import rigs

# A launcher that starts a worker, which holds a port and 64 MiB, in a session of its own; both then wait.
WORKER = """
import os, socket, sys, time
held = bytearray(os.urandom(1 << 20) * 64)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
if "deaf" in sys.argv:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", os.getpid(), flush=True)
time.sleep(1000)
"""
LAUNCHER = (
    "import subprocess, sys, time; "
    "subprocess.Popen([sys.executable, 'worker.py', *sys.argv[1:]], start_new_session=True); time.sleep(1000)"
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with rigs.played(tmp_path_factory.mktemp("rig")) as project:
        yield project


@pytest_asyncio.fixture
async def link(project: Project) -> AsyncIterator[Link]:
    async with Rig(project) as rig:
        yield await rig.link("llm")


def sleeper(**env: str) -> subprocess.Popen[bytes]:
    """Somebody else's process, with whatever it says about itself."""
    return subprocess.Popen(["sleep", "1000"], env={**os.environ, **env})


async def serve(link: Link, id: str, *more: str) -> tuple[jobs.JobStatus, int, int]:
    """(status, worker's pid, port) of a job whose worker is up."""
    port = rigs.free_port()
    argv = [sys.executable, "-c", LAUNCHER, str(port), *more]
    status = await jobs.submit(link, jobs.JobSpec(id, id, argv, files={"worker.py": WORKER.encode()}))
    text = b""
    async for _, data in jobs.follow(link, id):
        text += data
        if b"\n" in text:
            break
    return status, int(text.split()[1]), port


async def crash(link: Link, status: jobs.JobStatus) -> None:
    """Kill the supervisor and the launcher, as the kernel does when memory runs out."""
    assert status.supervisor and status.pid
    os.kill(status.supervisor, signal.SIGKILL)
    os.kill(status.pid, signal.SIGKILL)
    async with asyncio.timeout(20):
        while (await jobs.status(link, status.id)).state != "vanished":
            pass


@pytest.mark.parametrize("deaf", [False, True])
@pytest.mark.training_report(36)
@pytest.mark.training_report(37)
async def test_an_orphan_gives_back_port_and_memory(link: Link, deaf: bool) -> None:
    live_status, live_worker, live_port = await serve(link, f"live-{deaf}")
    status, worker, port = await serve(link, f"dead-{deaf}", *(["deaf"] if deaf else []))
    stranger = sleeper(RIGBOOK_JOB=status.id, RIGBOOK_JOB_DIR="/somewhere/else")
    try:
        assert (await cleanup.plan(link)).items == ()
        await crash(link, status)
        plan = await cleanup.plan(link)
        (item,) = plan.items
        assert (item.pid, item.ports, item.job, item.job_state) == (worker, (port,), status.id, "vanished")
        assert item.rss is not None and item.rss > 60 << 20
        assert any(f"pid {live_worker} (live" in line for line in plan.kept)
        assert any(f"pid {stranger.pid} (foreign" in line for line in plan.kept)

        again = cleanup.plan_from(json.loads(json.dumps(plan.to_dict())))
        assert again == plan
        outcome = await cleanup.apply(link, again, grace=1.0)
        assert outcome.verified, outcome.describe()
        assert outcome.ports_free == (port,) and outcome.rss_after == 0 and outcome.left == ()
        assert outcome.processes[0]["outcome"] == ("ended by KILL" if deaf else "ended by TERM")
        assert not procs.alive(worker, item.starttime)
        with socket.create_server(("127.0.0.1", port)):
            pass  # really free
        assert (procs.stat(live_worker) or procs.Stat("", "Z", 0, 0, 0, 0)).state != "Z" and stranger.poll() is None
        assert (await cleanup.plan(link)).items == ()
        # Once more is harmless, and says so.
        assert (await cleanup.apply(link, plan)).processes[0]["outcome"] == "gone"
    finally:
        stranger.kill()
        stranger.wait()
        await jobs.stop(link, live_status.id, grace=2)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", live_port))


async def test_without_its_environment_the_supervisor_still_knew_it(link: Link) -> None:
    # setproctitle overwrites the environment of a process; here it never had one.
    script = "env -i setsid sleep 1000 & while ! grep -q . tree.json 2>/dev/null; do sleep 0.05; done; sleep 1000"
    status = await jobs.submit(link, jobs.JobSpec("renamed", "", ["sh", "-c", script]))
    where = f"{status.dir}/tree.json"
    async with asyncio.timeout(20):
        while True:
            tree = json.loads((await link.run(["cat", where])).stdout or b"{}").get("processes", [])
            found = [pid for pid, _ in tree if procs.command(pid) == "sleep 1000" and not procs.markers(pid)]
            if found:
                break
            await asyncio.sleep(0.05)
    await crash(link, status)
    plan = await cleanup.plan(link)
    assert {(item.pid, item.provenance) for item in plan.items if item.provenance == "tree"} == {(found[0], "tree")}
    assert (await cleanup.apply(link, plan)).verified


async def test_a_reused_pid_and_a_revived_job_are_refused(link: Link) -> None:
    status, worker, _ = await serve(link, "reused")
    await crash(link, status)
    plan = await cleanup.plan(link)
    (item,) = plan.items
    jobs_dir = await jobs.jobs_dir(link)

    def outcome(**changed: object) -> dict[str, object]:
        entry = {**plan.to_dict()["items"][0], **changed}
        return reclaim.apply(jobs_dir, [entry], 0.1)[0]

    assert outcome(starttime=item.starttime - 1)["reason"] == "the pid belongs to another process now"
    assert outcome(boot_id="0")["outcome"] == "gone"
    assert outcome(pid_namespace="pid:[1]")["outcome"] == "refused"
    assert outcome(job="another-job")["outcome"] == "refused"
    bystander = sleeper()
    identity = procs.stat(bystander.pid)
    assert identity is not None
    # A process that never was the job's, under a plan that says so.
    assert outcome(pid=bystander.pid, starttime=identity.starttime)["outcome"] == "refused"
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()
    assert procs.alive(worker, item.starttime), "nothing above may have touched it"
    with pytest.raises(RigbookError) as caught:
        await cleanup.apply(link, replace(plan, host="pve"))
    assert caught.value.exit_code == 3
    assert (await cleanup.apply(link, plan)).verified


def test_a_signal_reaches_only_the_process_that_was_meant() -> None:
    process = sleeper()
    identity = procs.stat(process.pid)
    assert identity is not None
    assert procs.send(process.pid, identity.starttime + 1, signal.SIGKILL) is False
    assert process.poll() is None
    assert procs.send(process.pid, identity.starttime, signal.SIGKILL) is True
    assert process.wait() == -signal.SIGKILL
    assert procs.send(process.pid, identity.starttime, signal.SIGKILL) is False


ITEM = cleanup.Item(7, 9, "boot", None, "orphan", "job", "run", "name", "vanished", "marker", "sleep", 1, (80,), ())


def test_only_the_plan_that_was_made_is_read_back() -> None:
    made = cleanup.Plan(cleanup._id("a", (ITEM,), ()), "a", "2026-01-01T00:00:00+00:00", (ITEM,), ("pid 1",))
    data = json.loads(json.dumps(made.to_dict()))
    assert cleanup.plan_from(data) == made
    changed = [{**data["items"][0], key: value} for key, value in (("pid", 8), ("starttime", 1), ("job", "x"))]
    illtyped = [{**data["items"][0], key: value} for key, value in (("pid", "8"), ("rss", "a"), ("ports", 5))]
    for broken in (
        *({**data, "items": [item]} for item in (*changed, *illtyped, 5)),
        *({**data, key: None} for key in data),
        {**data, "host": "b"},
        {**data, "items": [*data["items"], *data["items"]]},
        {},
        [],
        None,
    ):
        with pytest.raises(RigbookError) as raised:
            cleanup.plan_from(broken)
        assert (raised.value.id, raised.value.exit_code) == ("clean.bad-plan", 2)
