"""Every byte of a job's log arrives exactly once, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote import jobs
from remote.connect import Rig
from remote.jobs import JobSpec
from remote.ssh import SSHLink
from state.project import Project
from tests.lab import rigs

LINES = 60_000
WRITER = f"i=0; while [ $i -lt {LINES} ]; do echo line $i $i $i; i=$((i+1)); done; printf 'last\\377 without newline'"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with rigs.played(tmp_path_factory.mktemp("rig")) as project:
        yield project


async def test_cut_at_random_the_follower_has_it_all(project: Project) -> None:
    got, cuts = bytearray(), 0
    loop = asyncio.get_running_loop()
    async with Rig(project) as rig:
        link = await rig.link("llm")
        assert isinstance(link, SSHLink)
        await jobs.submit(link, JobSpec("writer", "", ["sh", "-c", WRITER]))
        async with asyncio.timeout(60):
            async for offset, data in jobs.follow(link, "writer"):
                assert offset == len(got)
                got += data
                if cuts < 3 or random.random() < 0.25:
                    # Somewhere between now and a few answers later.
                    loop.call_later(random.uniform(0, 0.005), link.break_lanes)
                    cuts += 1
        await asyncio.sleep(0.01)  # the last cut has come by then
        end = await jobs.wait(link, "writer")
        whole = await link.read(f"{end.dir}/out.log")
    assert hashlib.sha256(got).digest() == hashlib.sha256(whole).digest()
    assert whole.endswith(b"last\xff without newline") and cuts >= 3


async def test_mirror_goes_on_from_the_size_of_the_local_file(project: Project, tmp_path: Path) -> None:
    async with Rig(project) as rig:
        link = await rig.link("llm")
        script = "echo a; echo '{}' > events.jsonl; while [ ! -e go ]; do sleep 0.02; done; echo b"
        await jobs.submit(link, JobSpec("mirrored", "", ["sh", "-c", script]))
        while not (tmp_path / "out.log").exists() or not (tmp_path / "out.log").read_bytes():
            assert await jobs.mirror(link, "mirrored", tmp_path) is False
        await link.write(f"{await jobs.jobs_dir(link)}/mirrored/go", b"")
        async with asyncio.timeout(20):
            # Two at once may not double a line.
            while not all(await asyncio.gather(*(jobs.mirror(link, "mirrored", tmp_path) for _ in range(2)))):
                pass
        assert (tmp_path / "out.log").read_bytes() == b"a\nb\n"
        assert (tmp_path / "events.jsonl").read_bytes() == b"{}\n"
        with (tmp_path / "out.log").open("ab") as file:
            file.write(b"more than there is")
        assert await jobs.mirror(link, "mirrored", tmp_path)
        assert (tmp_path / "out.log").read_bytes() == b"a\nb\n"
        assert (tmp_path / "out.log.gen1").read_bytes() == b"a\nb\nmore than there is"


async def test_what_is_there_now(project: Project) -> None:
    async with Rig(project) as rig:
        link = await rig.link("llm")
        await jobs.submit(link, JobSpec("now", "", ["sh", "-c", "echo 0123456789; exec sleep 1000"]))
        async for _ in jobs.follow(link, "now"):
            break
        parts = [part async for part in jobs.follow(link, "now", offset=4, until_end=False)]
        assert parts == [(4, b"456789\n")]
        await jobs.stop(link, "now", grace=1)
