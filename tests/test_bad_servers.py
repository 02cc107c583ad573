"""Servers and lines that misbehave: whatever they do, what we say about a command is true."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote import files, jobs
from remote.connect import Rig
from remote.jobs import JobSpec
from state.errors import RigbookError
from tests.lab import mounts, rigs
from tests.lab.faulty import FaultyServer
from tests.lab.proxy import Proxy


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FaultyServer]:
    with FaultyServer(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def box() -> Iterator[rigs.Sshd]:
    with rigs.sshd() as made:
        yield made


async def test_without_a_fault_it_is_an_ordinary_server(server: FaultyServer) -> None:
    async with Rig(server.project()) as rig:
        link = await rig.link("box")
        result = await link.run(script="cat; echo no >&2; exit 3", stdin=bytes(range(256)) * 1000)
        assert (result.exit, result.stdout, result.stderr) == (3, bytes(range(256)) * 1000, b"no\n")


@pytest.mark.report(1)
@pytest.mark.parametrize("fault", ["no-exit-status", "close-midway", "drop-midway"])
async def test_an_end_that_nobody_told_is_unknown(server: FaultyServer, fault: str) -> None:
    async with Rig(server.project()) as rig:
        link = await rig.link("box")
        server.fault = fault
        result = await asyncio.wait_for(link.run(script="yes | head -c 100000; exit 0"), 30)
        assert (result.state, result.exit, result.ok) == ("unknown", None, False), result.describe()
        server.fault = ""
        assert (await link.run(["echo", "back"])).stdout == b"back\n"


@pytest.mark.report(3)
async def test_a_signal_is_told_by_name(server: FaultyServer) -> None:
    async with Rig(server.project()) as rig:
        link = await rig.link("box")
        server.fault = "exit-signal"
        result = await link.run(["true"])
        assert (result.state, result.signal, result.code, result.ok) == ("signaled", "KILL", 137, False)


@pytest.mark.report(16)
async def test_noise_before_the_output_is_not_output(server: FaultyServer) -> None:
    async with Rig(server.project()) as rig:
        link = await rig.link("box")
        server.fault = "garbage"
        result = await asyncio.wait_for(link.run(["echo", "mine"]), 30)
        assert (result.exit, result.stdout) == (0, b"mine\n")


@pytest.mark.parametrize("fault", ["no-open", "no-reply", "refuse-exec", "refuse-open"])
async def test_a_session_that_does_not_begin_is_an_error_in_time(
    server: FaultyServer, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a hang; nothing can have run, and it works again when the server does."""
    monkeypatch.setattr("remote.ssh.SESSION_S", 1.0)  # from 15: the same, sooner
    async with Rig(server.project()) as rig:
        link = await rig.link("box")
        server.fault = fault
        try:
            result = await asyncio.wait_for(link.run(["true"]), 30)
        except RigbookError as error:
            assert error.exit_code == 4, error
        else:
            assert result.state == "unknown"
        server.fault = ""
        assert (await asyncio.wait_for(link.run(["echo", "back"]), 30)).stdout == b"back\n"


@pytest.mark.parametrize("how", ["given up", "given up before its deadline", "lost", "too late"])
async def test_an_end_in_the_middle_leaves_no_complaint_of_asyncio(box: rigs.Sshd, how: str) -> None:
    """What asyncio has to complain about would land on the user's screen as a traceback."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    async with Rig(box.project(next(iter(box.users)))) as rig:
        link = await rig.link("box")
        began = asyncio.Event()
        script, err = "echo up; exec sleep 1000", bytearray()
        limit = {"too late": 0.5, "given up before its deadline": 60.0}.get(how)
        run = link.stream(script=script, feed=b"x" * 100_000, out=lambda _: began.set(), err=err.extend, timeout=limit)
        work = asyncio.ensure_future(run)
        await asyncio.wait_for(began.wait(), 20)
        if how.startswith("given up"):
            work.cancel()
        elif how == "lost":
            box.cut()
        (ended,) = await asyncio.gather(work, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError) or ended.state in ("unknown", "timeout")
        del ended, work, run
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


@pytest.mark.report(23)
async def test_connections_that_drop_before_login_are_tried_again(server: FaultyServer) -> None:
    server.fault = "drop-login"
    async with Rig(server.project()) as rig:
        opening = asyncio.ensure_future(rig.link("box"))
        while server.connections < 2:
            await asyncio.sleep(0.01)
        server.fault = ""
        link = await asyncio.wait_for(opening, 30)
        assert (await link.run(["true"])).ok


async def test_a_login_that_is_refused_is_told_at_once(server: FaultyServer) -> None:
    server.fault = "refuse-login"
    async with Rig(server.project()) as rig:
        with pytest.raises(RigbookError) as caught:
            await asyncio.wait_for(rig.link("box"), 15)
    assert (caught.value.id, caught.value.exit_code) == ("host.login-refused", 4)


@pytest.mark.report(20)
async def test_a_reinstalled_machine_is_a_hard_stop(server: FaultyServer) -> None:
    server.new_host_key()
    async with Rig(server.project()) as rig:
        with pytest.raises(RigbookError) as caught:
            await asyncio.wait_for(rig.link("box"), 15)
    assert (caught.value.id, caught.value.exit_code) == ("host.key-changed", 3)


@pytest.mark.slow
async def test_a_server_that_stops_listening_is_noticed(server: FaultyServer) -> None:
    async with Rig(server.project()) as rig:
        link = await rig.link("box")
        working = asyncio.ensure_future(link.run(["sleep", "100"]))
        await link.run(["true"])
        server.fault = "deaf"
        began = time.monotonic()
        result = await asyncio.wait_for(working, 60)
        assert result.state == "unknown" and time.monotonic() - began <= 20
        server.fault = ""
        assert (await asyncio.wait_for(link.run(["echo", "back"]), 30)).stdout == b"back\n"


async def test_a_slow_and_late_line_changes_nothing(box: rigs.Sshd) -> None:
    with Proxy("127.0.0.1", box.port) as line:
        line.delay, line.rate = 0.05, 2_000_000
        async with Rig(line.project(box, next(iter(box.users)))) as rig:
            link = await rig.link("box")
            data = bytes(range(256)) * 2000
            result = await link.run(["cat"], stdin=data)
            assert result.exit == 0 and result.stdout == data


async def test_cut_at_any_byte_the_answer_is_unknown_or_right(box: rigs.Sshd) -> None:
    """Wherever in the stream the connection breaks: a result is whole, or it is unknown."""
    seen = set()
    with Proxy("127.0.0.1", box.port) as line:
        async with Rig(line.project(box, next(iter(box.users)))) as rig:
            link = await rig.link("box")
            for count in (1, 60, 100, 140, 180, 220, 260, 300, 340, 400, 1000, 5000, 60_000, 10_000_000):
                await link.run(["true"])
                line.reset_after(count)
                result = await asyncio.wait_for(link.run(script="yes | head -c 50000; exit 5"), 30)
                seen.add(result.state)
                if result.state == "exited":
                    assert (result.exit, len(result.stdout)) == (5, 50000)
                else:
                    assert (result.state, result.exit) == ("unknown", None)
    assert seen == {"exited", "unknown"}


@pytest.mark.report(4)
async def test_a_line_that_breaks_all_the_time(box: rigs.Sshd, tmp_path: Path) -> None:
    """Each connection lives for a moment: a log is whole all the same, a job is started once, a file gets through."""
    user = next(iter(box.users))
    content = os.urandom(24 << 20)
    (tmp_path / "big").write_bytes(content)
    script = "echo once >>started; for n in $(seq 0 29); do seq $((n * 1000)) $((n * 1000 + 999)); sleep 0.1; done"
    with Proxy("127.0.0.1", box.port) as line:
        line.rate = 8 << 20  # B/s: the file takes several lives of a connection
        async with Rig(line.project(box, user)) as rig:
            link = await rig.link("box")
            with line.flapping(1.5):
                async with asyncio.timeout(120):
                    begun = None
                    while begun is None:
                        with contextlib.suppress(RigbookError):
                            begun = await jobs.submit(link, JobSpec("flapped", "", ["sh", "-c", script]))
                    got = bytearray()
                    async for offset, data in jobs.follow(link, "flapped"):
                        assert offset == len(got)
                        got += data
                    tries, copied = 0, None
                    while copied is None:
                        tries += 1
                        with contextlib.suppress(RigbookError):
                            copied = await files.put(link, tmp_path / "big", "big")
            assert copied.resumed > 0 and tries > 1 and copied.sha256 == hashlib.sha256(content).hexdigest()
            assert got.splitlines() == [b"%d" % i for i in range(30000)]
            assert await link.read(f"{begun.dir}/started") == b"once\n"
    assert line.accepted > 3


def test_places_that_refuse() -> None:
    with mounts.full() as full, pytest.raises(OSError, match="No space"):
        (full / "more").write_bytes(b"x" * 8192)
    with mounts.read_only() as still, pytest.raises(OSError, match="Read-only"):
        (still / "more").write_bytes(b"x")
    with mounts.noexec() as inert:
        (inert / "program").write_text("#!/bin/sh\n")
        (inert / "program").chmod(0o755)
        import subprocess

        with pytest.raises(PermissionError):
            subprocess.run([inert / "program"], check=False)
    assert not full.exists() and not still.exists() and not inert.exists()
