"""A machine goes down in the middle of things and comes back: what ran is lost in a reboot, not running, not done."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from pathlib import Path

import pytest

from remote import files, jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec
from state.errors import RigbookError
from tests.lab.netns import Far, far_host
from tests.lab.proxmox import proxmox_rig

SIZE = 24 << 20
TALK = "i=0;while :;do echo line $i;i=$((i+1));sleep 0.02;done"


async def until_there(link: Link) -> None:
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(RigbookError):
                if (await link.run(["true"])).ok:
                    return
            await asyncio.sleep(0.1)


async def followed(link: Link, id: str) -> bytes:
    got = bytearray()
    async for offset, data in jobs.follow(link, id):
        assert offset == len(got)
        got += data
    return bytes(got)


async def arrived(far: Far, user: str, size: int) -> None:
    async with asyncio.timeout(30):
        while sum(part.stat().st_size for part in far.users[user].glob(".big.*.part")) < size:
            await asyncio.sleep(0.02)


@pytest.mark.report(2)
@pytest.mark.report(28)
async def test_a_host_that_loses_its_power(tmp_path: Path) -> None:
    content = os.urandom(SIZE)
    (tmp_path / "big").write_bytes(content)
    with far_host() as far:
        user = next(iter(far.users))
        async with Rig(far.project(user)) as rig:
            link = await rig.link("box")
            await jobs.submit(link, JobSpec("talker", "", ["sh", "-c", TALK]))
            await jobs.submit(link, JobSpec("done", "", ["sh", "-c", "exit 3"]))
            assert (await jobs.wait(link, "done")).exit == 3
            far.throttle(6 << 20)
            following = asyncio.ensure_future(followed(link, "talker"))
            waiting = asyncio.ensure_future(jobs.wait(link, "talker"))
            running = asyncio.ensure_future(link.run(["sleep", "1000"]))
            sending = asyncio.ensure_future(files.put(link, tmp_path / "big", "big"))
            await arrived(far, user, 2 << 20)
            far.power_off()
            began = time.monotonic()
            result, sent = await asyncio.gather(running, sending, return_exceptions=True)
            assert time.monotonic() - began <= 20
            assert getattr(result, "state", "") == "unknown", result
            assert isinstance(sent, RigbookError) and sent.exit_code == 4, sent
            assert not following.done() and not waiting.done()
            far.power_on()
            await until_there(link)
            lost = await asyncio.wait_for(waiting, 20)
            assert (lost.state, lost.exit, lost.signal) == ("lost_reboot", None, None)
            again = await jobs.submit(link, JobSpec("talker", "", ["sh", "-c", TALK]))
            assert again.state == "lost_reboot", "it is not begun again behind anybody's back"
            log = await asyncio.wait_for(following, 20)
            assert log == await link.read(f"{lost.dir}/out.log") and log.startswith(b"line 0\nline 1\n")
            finished = await jobs.status(link, "done")
            assert (finished.state, finished.exit) == ("finished", 3)
            copied = await files.put(link, tmp_path / "big", "big")
            assert copied.resumed > 0 and copied.sha256 == hashlib.sha256(content).hexdigest()
            assert (await jobs.stop(link, "talker")).state == "lost_reboot"
            fresh = await jobs.submit(link, JobSpec("fresh", "", ["true"]))
            assert (await jobs.wait(link, fresh.id)).ok


async def test_a_container_that_is_stopped_under_us() -> None:
    """By somebody on the host: a command in it was not a success, and what to do next is told."""
    with proxmox_rig() as rig:
        async with Rig(rig.project()) as hosts:
            host, guest = await hosts.link("pve"), await hosts.link("ct")
            await jobs.submit(guest, JobSpec("talker", "", ["sh", "-c", TALK]))
            begun = asyncio.Event()
            running = asyncio.ensure_future(
                guest.stream(script="echo up; sleep 1000", out=lambda _: begun.set(), err=lambda _: None)
            )
            following = asyncio.ensure_future(followed(guest, "talker"))
            await asyncio.wait_for(begun.wait(), 20)
            (await host.run(["pct", "stop", "101"])).check("pct stop")
            result = await asyncio.wait_for(running, 20)
            assert not result.ok and result.code in (137, 255), result
            with pytest.raises(RigbookError) as caught:
                await asyncio.wait_for(guest.run(["true"]), 20)
            assert (caught.value.id, caught.value.exit_code) == ("guest.not-running", 4)
            assert caught.value.hint and "guests start ct" in caught.value.hint
            assert (await asyncio.wait_for(jobs.status(guest, "talker"), 20)).state == "unknown"
            assert not following.done(), "stopped is not ended: it may come back"
            (await host.run(["pct", "start", "101"])).check("pct start")
            lost = await asyncio.wait_for(jobs.wait(guest, "talker"), 20)
            assert lost.state == "lost_reboot"
            log = await asyncio.wait_for(following, 20)
            assert log == await guest.read(f"{lost.dir}/out.log")
