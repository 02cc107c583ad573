"""A job runs once, outlives whoever started it, and its host always knows how it ended, or that nobody does."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from remote import jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec, JobStatus
from remote.probe import procs
from state.errors import RigbookError
from state.project import Project, loads
from tests.lab import rigs


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with rigs.played(tmp_path_factory.mktemp("rig")) as project:
        yield project


@pytest_asyncio.fixture
async def link(project: Project) -> AsyncIterator[Link]:
    async with Rig(project) as rig:
        yield await rig.link("llm")


def sh(id: str, script: str, **more: object) -> JobSpec:
    return JobSpec(id=id, name=id, argv=["/bin/sh", "-c", script], **more)  # type: ignore[arg-type]


async def log(link: Link, id: str) -> bytes:
    return await link.read(f"{await jobs.jobs_dir(link)}/{id}/out.log")


async def until_state(link: Link, id: str, state: str) -> JobStatus:
    async with asyncio.timeout(20):
        while True:
            now = await jobs.status(link, id)
            if now.state == state:
                return now
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("script", "exit", "died"), [("exit 0", 0, None), ("exit 42", 42, None), ("kill -KILL $$", None, "KILL")]
)
async def test_the_end_is_told_exactly(link: Link, script: str, exit: int | None, died: str | None) -> None:
    id = f"end-{exit}-{died}"
    assert (await jobs.submit(link, sh(id, script))).state in ("running", "finished")
    end = await jobs.wait(link, id)
    assert (end.state, end.exit, end.signal, end.ok) == ("finished", exit, died, exit == 0)


async def test_what_a_job_is_given(link: Link, tmp_path: Path) -> None:
    package = tmp_path / "greeting"
    package.mkdir()
    (package / "__init__.py").write_text("WORD = 'hello'\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_bytes(b"")
    spec = JobSpec(
        id="given",
        name="n",
        argv=[
            sys.executable,
            "-c",
            "import os,sys,greeting,remote.probe.procs; print(greeting.WORD, *sys.argv[1:]); print(os.getcwd());"
            "print(open('conf.json').read(), os.environ['X'], os.environ['RIGBOOK_JOB'], os.environ['RIGBOOK_RUN'])",
            "{job}/out",
        ],
        env={"X": "{job}/x"},
        files={"conf.json": b'{"a": 1}'},
        packages=[str(package), "remote/__init__.py", "remote/probe"],
        run="run-7",
    )
    where = f"{await jobs.jobs_dir(link)}/given"
    await jobs.submit(link, spec)
    assert (await jobs.wait(link, "given")).ok
    assert (await log(link, "given")).decode().splitlines() == [
        f"hello {where}/out",
        where,
        f'{{"a": 1}} {where}/x given run-7',
    ]
    assert not (await link.run(["ls", f"{where}/src/greeting/__pycache__/x.pyc"])).ok
    assert (await link.run(["stat", "-c", "%a", where])).stdout == b"700\n"


async def test_a_missing_program_is_a_failure_with_its_reason(link: Link) -> None:
    await jobs.submit(link, JobSpec(id="missing", name="", argv=["no-such-program"]))
    end = await jobs.wait(link, "missing")
    assert (end.state, end.exit) == ("finished", 127) and "no-such-program" in end.reason
    assert (await jobs.status(link, "never-heard-of")).state == "absent"
    with pytest.raises(RigbookError, match="not a job's id"):
        await jobs.status(link, "../escape")


CONTROLLER = """
import asyncio, os, pathlib, sys
from remote import jobs
from remote.connect import Rig
from tests.lab import rigs

async def main():
    async with Rig(rigs.project(pathlib.Path(sys.argv[1]), rigs.host("llm"))) as rig:
        link = await rig.link("llm")
        wait = "while [ ! -e go ]; do sleep 0.05; done; exit 9"
        await jobs.submit(link, jobs.JobSpec("lives", "", ["sh", "-c", wait]))
        os.kill(os.getpid(), 9)

asyncio.run(main())
"""


async def test_it_outlives_the_connection_and_us(project: Project) -> None:
    controller = await asyncio.create_subprocess_exec(sys.executable, "-c", CONTROLLER, str(project.root))
    assert await controller.wait() == -signal.SIGKILL
    async with Rig(project) as rig:
        link = await rig.link("llm")
        assert (await jobs.status(link, "lives")).state == "running"
        await link.write(f"{await jobs.jobs_dir(link)}/lives/go", b"")
        assert (await jobs.wait(link, "lives")).exit == 9


async def test_one_start_whoever_asks_how_often(link: Link) -> None:
    spec = sh("once", "echo started; sleep 0.3")
    statuses = await asyncio.gather(*(jobs.submit(link, spec) for _ in range(20)))
    assert {status.id for status in statuses} == {"once"} and len({status.pid for status in statuses}) == 1
    await jobs.wait(link, "once")
    assert (await jobs.submit(link, spec)).state == "finished"
    assert await log(link, "once") == b"started\n"
    where = await jobs.jobs_dir(link)
    left = await link.run(script=f"ls -A {where} | grep stage")
    assert left.stdout == b"", "staging directories are gone"
    # Those of submissions that were cut go with a later one.
    await link.run(
        script=f"mkdir {where}/.stage-old-1 {where}/.stage-new-1; touch -d '2 hours ago' {where}/.stage-old-1"
    )
    await jobs.submit(link, sh("later", "true"))
    assert (await link.run(script=f"ls -A {where} | grep stage")).stdout == b".stage-new-1\n"
    await link.run(["rmdir", f"{where}/.stage-new-1"])


async def test_what_it_leaves_behind_is_ended_and_said(link: Link) -> None:
    # Forked twice, in a session of its own, deaf to TERM, with an environment that tells nothing.
    escape = "env -i setsid sh -c 'trap \"\" TERM; echo $$ > {}/pid; while :; do sleep 1; done' &"
    where = f"{await jobs.jobs_dir(link)}/leaves"
    await jobs.submit(link, sh("leaves", f"({escape.format(where)}) ; while [ ! -e pid ]; do sleep 0.02; done; exit 5"))
    end = await jobs.wait(link, "leaves")
    pid = int(await link.read(f"{where}/pid"))
    assert end.exit == 5 and procs.stat(pid) is None
    assert any("trap" in command for command in end.swept) and end.left == ()


async def test_stop_asks_first_and_insists_later(link: Link) -> None:
    await jobs.submit(link, sh("polite", "trap 'echo flushed; exit 143' TERM; echo up; while :; do sleep 0.05; done"))
    await jobs.submit(link, sh("stubborn", "trap '' TERM; echo up; while :; do sleep 0.05; done"))
    for id in ("polite", "stubborn"):
        async for _ in jobs.follow(link, id):
            break
    polite = await jobs.stop(link, "polite", grace=20)
    assert (polite.state, polite.exit, polite.stopped) == ("finished", 143, True)
    assert b"flushed" in await log(link, "polite")
    stubborn = await jobs.stop(link, "stubborn", grace=0.3)
    assert (stubborn.state, stubborn.signal, stubborn.stopped) == ("finished", "KILL", True)
    assert (await jobs.stop(link, "polite")) == polite
    assert (await jobs.stop(link, "nothing")).state == "absent"


async def test_killed_with_its_supervisor_it_has_vanished(link: Link) -> None:
    begun = await jobs.submit(link, sh("crash", "exec sleep 1000"))
    assert begun.pid and begun.supervisor
    os.kill(begun.supervisor, signal.SIGKILL)
    alone = await until_state(link, "crash", "running")
    assert alone.exit is None
    os.kill(begun.pid, signal.SIGKILL)
    assert (await until_state(link, "crash", "vanished")).exit is None
    assert (await jobs.submit(link, sh("crash", "exec sleep 1000"))).state == "vanished", "it is not started again"


async def test_without_a_supervisor_stop_still_works(link: Link) -> None:
    begun = await jobs.submit(link, sh("headless", "exec sleep 1000"))
    assert begun.pid and begun.supervisor
    os.kill(begun.supervisor, signal.SIGKILL)
    rigs.until(lambda: (procs.stat(begun.supervisor or 0) or procs.Stat("", "Z", 0, 0, 0, 0)).state == "Z")
    await jobs.stop(link, "headless", grace=5)
    assert (await jobs.status(link, "headless")).state == "vanished"


async def test_another_boot_id_means_lost_in_a_reboot(link: Link) -> None:
    begun = await jobs.submit(link, sh("reboot", "exec sleep 1000"))
    assert begun.pid and begun.supervisor
    os.kill(begun.supervisor, signal.SIGKILL)
    os.kill(begun.pid, signal.SIGKILL)
    await until_state(link, "reboot", "vanished")
    file = f"{begun.dir}/start.json"
    start = json.loads(await link.read(file))
    await link.write(file, json.dumps({**start, "boot_id": "0000"}).encode())
    assert (await jobs.status(link, "reboot")).state == "lost_reboot"


async def test_a_damaged_record_is_unknown_not_success(link: Link) -> None:
    await jobs.submit(link, sh("damaged", "true"))
    end = await jobs.wait(link, "damaged")
    await link.write(f"{end.dir}/exit.json", b'{"exit": 0')
    assert (await jobs.status(link, "damaged")).state == "unknown"
    assert (await asyncio.wait_for(jobs.wait(link, "damaged"), 60)).state == "unknown", "nobody waits for ever"


async def test_an_unreachable_host_says_nothing_about_its_jobs(tmp_path: Path) -> None:
    with rigs.played(tmp_path) as project:
        async with Rig(project) as rig:
            link = await rig.link("llm")
            await jobs.submit(link, sh("far", "true"))
            await jobs.wait(link, "far")
            await jobs.status(link, "far")
            from remote import demo_rig

            demo_rig.stop(tmp_path)
            assert (await jobs.status(link, "far")).state == "unknown"
            demo_rig.start(tmp_path, {"llm": "lxc"})
            assert (await jobs.status(link, "far")).ok


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


async def test_an_end_on_a_full_disk_is_recorded(small_disk: Path) -> None:
    toml = f'[project]\nname = "lab"\n[hosts.here]\nkind = "local"\nstate_dir = "{small_disk}/state"\n'
    async with Rig(loads(toml, small_disk.parent)) as rig:
        link = await rig.link("here")
        await jobs.submit(link, sh("full", f"cat /dev/zero > {small_disk}/fill; echo written; exit 3"))
        end = await jobs.wait(link, "full")
        assert (end.state, end.exit) == ("finished", 3)
        await link.run(script=f"cat /dev/zero >> {small_disk}/fill")
        with pytest.raises(RigbookError) as caught:
            await jobs.submit(link, sh("more", "true"))
        assert caught.value.id == "file.no-space"


async def test_list_has_them_in_order_of_their_start(project: Project) -> None:
    async with Rig(project) as rig:
        link = await rig.link("llm")
        for id in ("zz-first", "aa-second"):
            await jobs.submit(link, sh(id, "true"))
            await jobs.wait(link, id)
        ids = [job.id for job in await jobs.list_jobs(link)]
    assert ids.index("zz-first") < ids.index("aa-second")
