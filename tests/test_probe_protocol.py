"""The probe's wire: many at once on one channel, nothing left behind, and a host that cannot run it is told why."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from remote import jobs, pythons, shell
from remote.connect import Link, Rig
from remote.jobs import JobSpec
from remote.probe import client, procs, program, ship
from remote.probe.client import Frames
from state.errors import RigbookError
from state.project import loads
from tests.lab import rigs


@pytest_asyncio.fixture
async def link(tmp_path: Path) -> AsyncIterator[Link]:
    toml = f'[project]\nname = "lab"\n[hosts.here]\nkind = "local"\nstate_dir = "{tmp_path}/state"\n'
    async with Rig(loads(toml, tmp_path)) as rig:
        yield await rig.link("here")


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 1000])
def test_frames_survive_any_cutting(cut: int) -> None:
    """Raw bytes may look like lines, and lines may come in pieces."""
    sent: list[tuple[dict[str, Any], bytes]] = [
        ({"id": 1, "ok": True}, b""),
        ({"id": 2, "bytes": 9}, b'{"a":1}\n\n'),
        ({"id": 2, "bytes": 0}, b""),
        ({"id": 3, "text": "x" * 50}, b""),
        ({"id": 2, "bytes": 3}, b"\xff\x00\n"),
    ]
    wire = b"".join(json.dumps(header).encode() + b"\n" + data for header, data in sent)
    frames = Frames()
    found = [frame for at in range(0, len(wire), cut) for frame in frames.feed(wire[at : at + cut])]
    assert [(frame.header, frame.data) for frame in found] == sent


async def test_one_that_waits_holds_up_nobody(link: Link) -> None:
    """Twenty followers wait on one channel for jobs that say nothing; calls are answered, and a line still arrives."""
    spec = JobSpec("quiet", "", ["sh", "-c", "until [ -e go ];do sleep 0.02;done; echo now"])
    directory = Path((await jobs.submit(link, spec)).dir)

    async def read() -> bytes:
        return b"".join([data async for _, data in jobs.follow(link, "quiet")])

    readers = [asyncio.ensure_future(read()) for _ in range(20)]
    probe = await link.probe()
    for _ in range(50):
        assert (await asyncio.wait_for(probe.call("clock"), 5))["boot_id"] == procs.boot_id()
    (directory / "go").touch()
    assert await asyncio.wait_for(asyncio.gather(*readers), 20) == [b"now\n"] * 20
    assert await link.probe() is probe


async def test_a_slow_reader_of_a_stream_holds_up_nobody(link: Link, tmp_path: Path) -> None:
    """It has so many bytes under way and no more, until it takes some."""
    size = 12 << 20
    await jobs.submit(link, JobSpec("big", "", ["sh", "-c", f"yes 0123456789 | head -c {size}"]))
    await jobs.wait(link, "big")
    probe = await link.open_probe()
    asked = [{"name": "out.log", "offset": 0}]
    stream = probe.stream("follow", jobs=await jobs.jobs_dir(link), id="big", files=asked, wait=True)
    got = (await anext(stream)).data
    for _ in range(100):
        await asyncio.wait_for(probe.call("clock"), 5)
    waiting = sum(len(frame.data) for queue in probe._streams.values() for frame in list(queue._queue))  # type: ignore
    assert waiting <= program.WINDOW + (1 << 20)
    async with contextlib.aclosing(stream):
        async for frame in stream:
            got += frame.data
    assert len(got) == size and got == (b"0123456789\n" * (size // 11 + 1))[:size]
    await probe.close()


async def test_a_stream_that_is_left_ends_over_there(link: Link) -> None:
    probe = await link.open_probe()
    pid = (await probe.ready)["pid"]
    threads = len(os.listdir(f"/proc/{pid}/task"))
    async with contextlib.aclosing(probe.stream("live", every=0.05)) as live:
        first, second = await anext(live), await anext(live)
    assert any(entry["pid"] == os.getpid() for entry in first.header["changed"])
    assert second.header["cpu"] is None or 0 <= second.header["cpu"] <= 1
    assert len(second.header["changed"]) < len(first.header["changed"])
    # Its thread is free for the next call: many streams one after the other need no more of them.
    for _ in range(20):
        async with contextlib.aclosing(probe.stream("live", every=0.01)) as live:
            await anext(live)
    assert len(os.listdir(f"/proc/{pid}/task")) <= threads + 3
    await probe.close()


async def test_the_process_table_follows_what_happens(link: Link) -> None:
    async with await link.open_probe() as probe:
        async with contextlib.aclosing(probe.stream("live", every=0.05)) as live:
            await anext(live)
            child = await asyncio.create_subprocess_exec("sh", "-c", "read x; exec sleep 1000", stdin=subprocess.PIPE)

            async def until(found: Any) -> dict[str, Any]:
                async with asyncio.timeout(20):
                    async for frame in live:
                        for entry in frame.header["changed"]:
                            if entry["pid"] == child.pid and found(entry):
                                return dict(entry)
                raise AssertionError

            born = await until(lambda entry: True)
            assert born["ppid"] == os.getpid() and born["uid"] == os.getuid() and born["rss"] > 0
            assert child.stdin
            child.stdin.write(b"\n")
            became = await until(lambda entry: entry["name"] == "sleep")
            assert became["command"] == "sleep 1000" and became["starttime"] == born["starttime"]
            child.kill()
            async with asyncio.timeout(20):
                async for frame in live:
                    if child.pid in frame.header["gone"]:
                        break
        await child.wait()


async def test_a_command_line_is_one_line(link: Link) -> None:
    child = await asyncio.create_subprocess_exec("sh", "-c", "sleep 1000 &\nwait\n\n")
    try:
        found = await (await link.probe()).call("processes")
        assert next(e["command"] for e in found if e["pid"] == child.pid) == "sh -c sleep 1000 & wait"
        assert procs.command(child.pid) == "sh -c sleep 1000 & wait"
    finally:
        for pid in procs.descendants(child.pid):
            os.kill(pid, signal.SIGKILL)
        await child.wait()


async def test_a_probe_that_goes_silent_is_lost_within_20_s(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped, as behind a link that was cut without a word. Counted in beats, here quick ones."""
    assert client.MISSED * program.BEAT_S <= 15
    monkeypatch.setattr(client.program, "BEAT_S", 0.2)
    monkeypatch.setattr(client.ship, "source", _quick)
    ship.payload.cache_clear()
    try:
        probe = await link.open_probe()
        pid = (await probe.ready)["pid"]
        await asyncio.sleep(1.0)
        assert not probe.closed, "beats are enough"
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RigbookError) as caught:
            await asyncio.wait_for(probe.call("clock"), 10)
        assert (caught.value.id, caught.value.exit_code) == ("probe.lost", 4)
        os.kill(pid, signal.SIGCONT)
        rigs.until(lambda: procs.stat(pid) is None or procs.stat(pid).state == "Z")  # type: ignore[union-attr]
    finally:
        ship.payload.cache_clear()


_SOURCE = ship.source


def _quick(module: str) -> str:
    return _SOURCE(module).replace("BEAT_S = 5.0", "BEAT_S = 0.2").replace("SILENCE_S = 60.0", "SILENCE_S = 1.5")


async def test_a_controller_that_goes_silent_ends_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """No end of stdin comes while a dead link lingers in the far kernel; the missing beats tell."""
    monkeypatch.setattr(ship, "source", _quick)
    ship.payload.cache_clear()
    packed = ship.payload()
    ship.payload.cache_clear()
    argv = [sys.executable, "-I", "-S", "-u", "-c", ship.BOOT, str(len(packed)), "nonce"]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    assert process.stdin and process.stdout
    process.stdin.write(packed)
    assert b"nonce" in await process.stdout.readline()
    for _ in range(10):
        process.stdin.write(b'{"beat":1}\n')
        await asyncio.sleep(0.3)
        assert process.returncode is None
    assert await asyncio.wait_for(process.wait(), 20) == 0


async def test_only_what_is_needed_travels(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(ship.payload()) < 8000
    sent: list[str] = []
    packed = ship.packed
    monkeypatch.setattr(ship, "packed", lambda module: sent.append(module) or packed(module))  # type: ignore[func-returns-value]
    async with await link.open_probe() as probe:
        await probe.call("clock")
        assert sent == []
        await probe.call("system")
        first = list(sent)
        await probe.call("system")
        assert "host" in first and "sampling" not in first and sent == first
        await probe.call("processes")
        assert "sampling" in sent


async def test_it_limits_itself_but_not_what_it_starts(link: Link, tmp_path: Path) -> None:
    async with await link.open_probe() as probe:
        pid = (await probe.ready)["pid"]
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert str(program.MEMORY) in next(line for line in limits.splitlines() if line.startswith("Max data size"))
        assert os.getpriority(os.PRIO_PROCESS, pid) >= program.NICE
        shown = tmp_path / "python"
        shown.write_text(f'#!/bin/sh\nulimit -S -d >{tmp_path}/limit\nexec {sys.executable} "$@"\n')
        shown.chmod(0o755)
        assert (await probe.call("env", python=str(shown)))["state"] == "ok"
        assert (tmp_path / "limit").read_text() == "unlimited\n"


async def test_a_program_that_it_waits_for_ends_with_it(link: Link, tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 1000\n")
    hangs.chmod(0o755)
    probe = await link.open_probe()
    asking = asyncio.ensure_future(probe.call("env", python=str(hangs)))
    async with asyncio.timeout(20):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.02)
    await probe.close()
    with pytest.raises(RigbookError):
        await asking
    pid = int((tmp_path / "pid").read_text())
    rigs.until(lambda: procs.stat(pid) is None or procs.stat(pid).state == "Z")  # type: ignore[union-attr]


REPORTS = {
    "mark\npython /usr/bin/python3 Python 3.6.8\nos rocky 8.9 rhel\ncan dnf\ncan yum": (
        "/usr/bin/python3 is Python 3.6.8",
        "dnf install python3.11",
    ),
    "mark\nos alpine 3.20 \ncan apk": ("none at all", "apk add python3"),
    "mark\npython /usr/bin/python3 Python 3.8.10\nos ubuntu 20.04 debian\ncan apt-get": ("3.8.10", "python3.9"),
    "mark\npython /usr/bin/python2 Python 2.7.16\nos debian 10 \ncan apt-get": ("2.7.16", "uv python install"),
    "mark": ("none at all", "~/.local/bin/python3"),
}


@pytest.mark.parametrize("report", REPORTS)
def test_what_to_install_is_told_in_the_hosts_own_terms(report: str) -> None:
    error = pythons.missing(report, "far")
    said, hint = REPORTS[report]
    assert said in error.message and hint in str(error.hint)


async def test_a_host_without_a_python_is_told_what_it_has(link: Link, tmp_path: Path) -> None:
    """A real /bin/sh in a root of its own where there is only an old Python: the probe, and a job, say so."""
    old = tmp_path / "bin"
    old.mkdir()
    (old / "python3").write_text('#!/bin/sh\n[ "$1" = -V ]&&echo Python 3.6.8\nexit 1\n')
    (old / "python3").chmod(0o755)
    find = shell.FIND_PYTHON.replace("/usr/bin/", f"{old}/").replace("/usr/local/bin/", f"{old}/")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "FIND_PYTHON", find.replace("$(command -v python3)", "").replace('"$HOME"', str(tmp_path)))
        patch.setattr(pythons, "REPORT", pythons.REPORT.replace("/usr/bin/", f"{old}/"))
        for work in (link.open_probe, lambda: jobs.submit(link, JobSpec("none", "", ["true"]))):
            with pytest.raises(RigbookError) as caught:
                await work()  # type: ignore[operator]
            assert caught.value.id == "host.no-python" and "Python 3.6.8" in caught.value.message
            assert caught.value.hint


def test_the_report_is_plain_sh(tmp_path: Path) -> None:
    for program_ in ("dash", "bash", "busybox"):
        found = shutil.which(program_)
        if found is None:
            continue
        words = [found, "sh"] if program_ == "busybox" else [found]
        done = subprocess.run([*words, "-c", pythons.REPORT], capture_output=True, text=True)
        lines = done.stderr.splitlines()
        assert lines[0] == pythons.MARK and any(line.startswith("python /usr/bin/python3 Python 3") for line in lines)
        assert any(line.startswith("os ") for line in lines) and not done.stdout
