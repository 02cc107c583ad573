"""A file that is not what it was (replaced, cut, rewritten, or with its middle dropped) is told, never glossed over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from remote import jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec
from state.errors import RigbookError
from state.project import loads
from tests.lab import mounts


@pytest_asyncio.fixture
async def link(tmp_path: Path) -> AsyncIterator[Link]:
    toml = f'[project]\nname = "lab"\n[hosts.here]\nkind = "local"\nstate_dir = "{tmp_path}/state"\n'
    async with Rig(loads(toml, tmp_path)) as rig:
        yield await rig.link("here")


async def begin(link: Link, id: str, script: str, **more: object) -> Path:
    """The job's directory, once it has said `up`."""
    spec = JobSpec(id, "", ["sh", "-c", f"echo up; {script}"], **more)  # type: ignore[arg-type]
    directory = Path((await jobs.submit(link, spec)).dir)
    async with asyncio.timeout(20):
        async for _ in jobs.follow(link, id):
            break
    return directory


def notes(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "mirror.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("how", ["replaced", "cut", "rewritten"])
async def test_what_we_had_is_kept_and_a_new_copy_begins(link: Link, tmp_path: Path, how: str) -> None:
    directory = await begin(link, "odd", "exec sleep 1000")
    log, folder = directory / "out.log", tmp_path / "copy"
    with log.open("ab") as file:
        file.write(b"first\n")
    assert not await jobs.mirror(link, "odd", folder)
    if how == "replaced":
        # Lines that were written to the old file after we had looked last come first: it lies there as out.log.1.
        with log.open("ab") as file:
            file.write(b"late\n")
        log.rename(directory / "out.log.1")
        log.write_bytes(b"second\n")
    else:
        log.write_bytes(b"2\n" if how == "cut" else b"no\nworse\nand more\n")
    now = log.read_bytes()
    assert not await jobs.mirror(link, "odd", folder)
    assert (folder / "out.log").read_bytes() == now
    kept = b"up\nfirst\nlate\n" if how == "replaced" else b"up\nfirst\n"
    assert (folder / "out.log.gen1").read_bytes() == kept
    (note,) = notes(folder)
    assert (note["kind"], note["why"], note["kept"], note["had"]) == ("log_reset", how, "out.log.gen1", len(kept))
    assert not await jobs.mirror(link, "odd", folder)
    assert (folder / "out.log").read_bytes() == now and len(notes(folder)) == 1, "it is told once"
    await jobs.stop(link, "odd", grace=1)


async def test_a_live_mirror_sees_a_rotation_while_it_follows(link: Link, tmp_path: Path) -> None:
    directory = await begin(link, "turning", "while [ ! -e go ];do sleep 0.02;done")
    log, folder = directory / "out.log", tmp_path / "copy"
    live = asyncio.ensure_future(jobs.mirror(link, "turning", folder, live=True))
    try:
        async with asyncio.timeout(20):
            while not (folder / "out.log").exists() or not (folder / "out.log").stat().st_size:
                await asyncio.sleep(0.02)
        for number in range(5):
            with log.open("ab") as file:
                file.write(b"line %d\n" % number)
            log.rename(directory / f"out.log.{number}")
            log.write_bytes(b"next %d\n" % number)
            async with asyncio.timeout(20):
                while not (folder / f"out.log.gen{number + 1}").exists():
                    await asyncio.sleep(0.02)
        (directory / "go").touch()
        assert await asyncio.wait_for(live, 20)
    finally:
        live.cancel()
    parts = [(folder / f"out.log.gen{n + 1}").read_bytes() for n in range(5)]
    assert parts == [b"up\nline 0\n", *(b"next %d\nline %d\n" % (n - 1, n) for n in range(1, 5))]
    assert (folder / "out.log").read_bytes() == b"next 4\n"


async def test_a_reader_of_the_stream_is_told_that_it_begins_again(link: Link) -> None:
    directory = await begin(link, "restarted", "exec sleep 1000")
    seen = jobs.pieces(link, "restarted")
    first = await anext(seen)
    assert (first.offset, first.data) == (0, b"up\n")
    (directory / "out.log").write_bytes(b"")
    reset = await asyncio.wait_for(anext(seen), 20)
    assert (reset.offset, reset.data, reset.reset) == (0, b"", "cut")
    await seen.aclose()
    strict = jobs.follow(link, "restarted", offset=3)
    with pytest.raises(RigbookError) as caught:
        await asyncio.wait_for(anext(strict), 20)
    assert caught.value.id == "job.file-reset"
    await jobs.stop(link, "restarted", grace=1)


async def test_past_its_quota_a_log_loses_its_middle_and_says_so(link: Link, tmp_path: Path) -> None:
    """Who followed from the start has more than who came late; both have the same offsets, and no invented byte."""
    lines = "i=0; while [ $i -lt 60000 ]; do echo line $i $i $i $i; i=$((i+1)); done; touch full"
    script = f"{lines}; while [ ! -e go ]; do sleep 0.02; done; echo the end"
    directory = await begin(link, "chatty", script, log_quota=400_000)
    live = asyncio.ensure_future(jobs.mirror(link, "chatty", tmp_path / "early", live=True))
    async with asyncio.timeout(60):
        while not (directory / "full").exists() or not (directory / "holes.json").exists():
            await asyncio.sleep(0.05)
    (directory / "go").touch()
    end = await jobs.wait(link, "chatty")
    assert await asyncio.wait_for(live, 20)
    assert await jobs.mirror(link, "chatty", tmp_path / "late")
    assert end.exit == 0, "it went on"
    whole = b"up\n" + b"".join(b"line %d %d %d %d\n" % (n, n, n, n) for n in range(60000)) + b"the end\n"
    ((low, high),) = json.loads((directory / "holes.json").read_text())["out.log"]
    assert whole[low - 1 : low] == b"\n" == whole[high - 1 : high], "lines are dropped whole"
    assert (
        (directory / "out.log").stat().st_blocks * 512 < 450_000 < len(whole) == (directory / "out.log").stat().st_size
    )
    late = (tmp_path / "late" / "out.log").read_bytes()
    assert late == whole[:low] + bytes(high - low) + whole[high:]
    early = (tmp_path / "early" / "out.log").read_bytes()
    assert len(early) == len(whole)
    assert all(mine in (true, 0) for mine, true in zip(early, whole, strict=True)), "what it has is true"
    assert early.endswith(whole[high:]) and early.startswith(whole[:low])
    told = [json.loads(line) for line in (tmp_path / "late" / "events.jsonl").read_text().splitlines()]
    assert {event["kind"] for event in told} == {"log_quota"} and told[-1]["to"] == high
    parts = [piece async for piece in jobs.pieces(link, "chatty")]
    assert sum(piece.skipped for piece in parts) == high - low
    assert b"".join(piece.data for piece in parts) == whole[:low] + whole[high:]
    assert await jobs.mirror(link, "chatty", tmp_path / "early"), "what was dropped after we had it is not compared"
    assert not (tmp_path / "early" / "mirror.jsonl").exists()


async def test_our_own_full_disk_is_told_and_nothing_is_lost(link: Link) -> None:
    directory = await begin(link, "long", "yes 0123456789 | head -c 600000")
    await jobs.wait(link, "long")
    with mounts.small("512k") as here:
        (here / "ballast").write_bytes(bytes(300_000))
        for _ in range(2):
            with pytest.raises(RigbookError) as caught:
                await jobs.mirror(link, "long", here / "copy")
            assert caught.value.id == "job.copy-failed" and "No space left" in caught.value.message
        (here / "ballast").unlink()
        # What fits is there, and is true.
        with pytest.raises(RigbookError):
            await jobs.mirror(link, "long", here / "copy")
        whole, part = (directory / "out.log").read_bytes(), (here / "copy" / "out.log").read_bytes()
        assert 100_000 < len(part) < len(whole) and whole.startswith(part)
        grown = await asyncio.create_subprocess_exec("mount", "-o", "remount,size=2m", here)
        assert await grown.wait() == 0
        assert await jobs.mirror(link, "long", here / "copy")
        assert (here / "copy" / "out.log").read_bytes() == whole
        assert not list((here / "copy").glob("*.gen*"))


def test_a_progress_bar_is_shown_as_it_ended() -> None:
    log = b"start\r\n 10%\r 50%\r100%\nnext\xff\n\n 1%\r 2%\r"
    assert jobs.shown(log) == ["start", "100%", "next\ufffd", "", " 2%"]
    assert jobs.shown(b"") == [] and jobs.shown(b"\n") == [""]


@pytest.mark.report(4)
async def test_the_last_line_is_never_lost(link: Link) -> None:
    """A job that writes and ends at once, while somebody reads: thirty times."""

    async def last(number: int) -> bytes:
        id = f"brief-{number}"
        await jobs.submit(link, JobSpec(id, "", ["sh", "-c", f"sleep 0.{number % 5}; echo begun; echo last {number}"]))
        return b"".join([data async for _, data in jobs.follow(link, id)])

    for base in range(0, 30, 6):
        got = await asyncio.gather(*(last(base + n) for n in range(6)))
        assert got == [b"begun\nlast %d\n" % (base + n) for n in range(6)]
