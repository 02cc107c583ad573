"""Connections killed at random, controllers killed at random, two controllers with one idea: a job and its log survive.

A short form runs always; `make soak` runs RIGBOOK_JOBS_KILLS (200) kills over RIGBOOK_JOBS_LINES (1,000,000) lines and
RIGBOOK_JOBS_RACES (100) races, under systemd and under our own supervisor. RIGBOOK_SOAK_SEED chooses other moments.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from remote import jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec
from state.errors import UNREACHABLE, RigbookError
from state.project import Project
from tests.lab import rigs
from tests.lab.systemd import systemd_host

KILLS = int(os.environ.get("RIGBOOK_JOBS_KILLS", "200"))
LINES = int(os.environ.get("RIGBOOK_JOBS_LINES", "1000000"))
RACES = int(os.environ.get("RIGBOOK_JOBS_RACES", "100"))
SEED = int(os.environ.get("RIGBOOK_SOAK_SEED", "1"))
short_and_long = pytest.mark.parametrize(
    ("kills", "lines"), [(5, 40_000), pytest.param(KILLS, LINES, marks=pytest.mark.slow)], ids=["short", "soak"]
)

# Writes for about so many seconds, in bursts, bytes that are no text, progress bars, lines of every length, and waits
# near the end until there have been kills enough. Its own digest is the truth; its code is 7.
WRITER = """
import hashlib, os, sys, time
lines, seconds, digest = int(sys.argv[1]), float(sys.argv[2]), hashlib.sha256()
odd = b"\\rhalf", b"\\xff\\x00", b"", b"x"
for first in range(0, lines, 500):
    numbers = range(first, min(first + 500, lines))
    text = b"".join(b"line %d %s\\n" % (n, odd[n % 4] * (n % 53)) for n in numbers)
    while first > lines * 0.9 and not os.path.exists("go"):
        time.sleep(0.02)
    at = 0
    while at < len(text):  # in pieces that end amid a line
        at += os.write(1, text[at : at + 4999])
    digest.update(text)
    time.sleep(seconds * 500 / lines)
os.write(1, b"the end, without a newline")
digest.update(b"the end, without a newline")
with open("sum", "w") as file:
    file.write(digest.hexdigest())
sys.exit(7)
"""


@dataclass
class Far:
    """A host, a way to cut all its connections, and how many probes run on it."""

    backend: str
    project: Project
    cut: Callable[[], None]
    probes: Callable[[], int]


@pytest.fixture(scope="module", params=["supervisor", "systemd"])
def far(request: pytest.FixtureRequest) -> Iterator[Far]:
    if request.param == "systemd":
        with systemd_host() as host:
            sessions, probes = b"sshd: root", b"zlib.decompress"
            yield Far(
                "systemd",
                host.project("root"),
                lambda: _kill(host.processes(sessions)),
                lambda: len(host.processes(probes)),
            )
    else:
        with rigs.sshd() as server:
            user = next(iter(server.users))
            uid = server.users[user].stat().st_uid
            yield Far("supervisor", server.project(user), server.cut, lambda: _probes(uid))


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _probes(uid: int) -> int:
    found = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            mine = os.stat(f"/proc/{pid}").st_uid == uid
            found += mine and b"zlib.decompress" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


async def begin(link: Link, id: str, lines: int, seconds: float) -> str:
    """The job's directory."""
    spec = JobSpec(
        id, id, ["python3", "{job}/writer.py", str(lines), str(seconds)], files={"writer.py": WRITER.encode()}
    )
    return (await jobs.submit(link, spec)).dir


async def patiently(work: Callable[[], object]) -> object:
    """Until it works: the link may be cut at any moment."""
    while True:
        try:
            return await work()  # type: ignore[misc]
        except RigbookError as error:
            if error.exit_code != UNREACHABLE:
                raise
            await asyncio.sleep(0.05)


async def judged(far: Far, id: str, copy: Path) -> str:
    """The end and the local copy against what the job itself says; a sentence about it."""
    async with Rig(far.project) as rig:
        link = await rig.link("box")
        end = await jobs.wait(link, id)
        assert (end.state, end.exit, end.backend, end.left) == ("finished", 7, far.backend, ())
        assert await jobs.mirror(link, id, copy.parent)
        truth = (await link.read(f"{end.dir}/sum")).decode()
    data = copy.read_bytes()
    assert hashlib.sha256(data).hexdigest() == truth
    numbers = [int(line.split(b" ", 2)[1]) for line in data.split(b"\n")[:-1]]
    assert numbers == list(range(len(numbers))), "each line once, in order"
    assert not list(copy.parent.glob("*.gen*"))
    rigs.until(lambda: far.probes() == 0)
    return f"{len(numbers):,} lines, {len(data):,} bytes, sha256 equal, exit code 7, no probe left behind"


@short_and_long
async def test_connections_killed_at_random(far: Far, tmp_path: Path, kills: int, lines: int) -> None:
    chance, id, done = random.Random(SEED), f"cut-{kills}", 0
    began = time.monotonic()
    async with Rig(far.project) as rig:
        where = await begin(await rig.link("box"), id, lines, kills * 0.2)

        async def follow() -> None:
            while not await patiently(mirror):
                pass

        async def mirror() -> bool:
            return await jobs.mirror(await rig.link("box"), id, tmp_path, live=True)

        async def let_go() -> None:
            await (await rig.link("box")).write(f"{where}/go", b"")

        following = asyncio.ensure_future(follow())
        while done < kills:
            await asyncio.sleep(chance.uniform(0.01, 0.35))
            assert not following.done(), following.result()
            await asyncio.to_thread(far.cut)
            done += 1
        await patiently(let_go)
        await following
    told = await judged(far, id, tmp_path / "out.log")
    print(f"\n{far.backend}: {done} connections killed in {time.monotonic() - began:.0f} s: {told}")


CONTROLLER = """
import asyncio, json, pathlib, sys
from remote import jobs
from remote.connect import Rig
from state.project import loads

async def main():
    root, toml, id, folder = json.loads(sys.argv[1])
    async with Rig(loads(toml, pathlib.Path(root))) as rig:
        link = await rig.link("box")
        print("up", flush=True)
        await jobs.mirror(link, id, pathlib.Path(folder), live=True)

asyncio.run(main())
"""


@short_and_long
async def test_controllers_killed_at_random(far: Far, tmp_path: Path, kills: int, lines: int) -> None:
    """kill -9 at any moment, amid a write too; the next one goes on from the size of the local file."""
    chance, id = random.Random(SEED), f"controller-{kills}"
    began, grew = time.monotonic(), 0
    toml = '[project]\nname = "lab"\nssh_config = "ssh_config"\n[hosts.box]\nkind = "linux"\nssh = "box"\n'
    words = json.dumps([str(far.project.root), toml, id, str(tmp_path)])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    async with Rig(far.project) as rig:
        link = await rig.link("box")
        where = await begin(link, id, lines, kills * 0.9)
        for number in range(kills):
            argv = [sys.executable, "-c", CONTROLLER, words]
            one = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=subprocess.PIPE)
            assert one.stdout and await one.stdout.readline() == b"up\n"
            size = _size(tmp_path)
            await asyncio.sleep(chance.uniform(0.0, 0.8))
            if number == kills - 1:
                await link.write(f"{where}/go", b"")
            one.kill()
            await one.wait()
            grew += _size(tmp_path) > size
    assert grew > 0, "none of them had time to bring anything"
    told = await judged(far, id, tmp_path / "out.log")
    took = time.monotonic() - began
    print(f"\n{far.backend}: {kills} controllers killed in {took:.0f} s, {grew} amid the copying: {told}")


def _size(folder: Path) -> int:
    return (folder / "out.log").stat().st_size if (folder / "out.log").exists() else 0


@pytest.mark.parametrize("races", [5, pytest.param(RACES, marks=pytest.mark.slow)], ids=["short", "soak"])
async def test_two_controllers_with_one_job(far: Far, races: int) -> None:
    """Each over a connection of its own, at the same moment: one job, which ran once."""
    chance = random.Random(SEED)
    async with Rig(far.project) as one, Rig(far.project) as other:
        links = [await one.link("box"), await other.link("box")]

        async def submit(link: Link, id: str) -> jobs.JobStatus:
            await asyncio.sleep(chance.uniform(0, 0.02))
            return await jobs.submit(link, JobSpec(id, "", ["sh", "-c", "echo ran $$; exit 5"]))

        for number in range(races):
            id = f"race-{races}-{number}"
            begun = await asyncio.gather(*(submit(link, id) for link in links))
            ends = await asyncio.gather(*(jobs.wait(link, id) for link in links))
            assert begun[0].pid == begun[1].pid and ends[0] == ends[1]
            assert (ends[0].exit, ends[0].backend) == (5, far.backend)
            assert (await links[0].read(f"{ends[0].dir}/out.log")) == b"ran %d\n" % (ends[0].pid or 0)
    print(f"\n{far.backend}: {races} races of two controllers: one job each time")


@pytest.mark.parametrize("tries", [4, pytest.param(KILLS, marks=pytest.mark.slow)], ids=["short", "soak"])
async def test_submissions_cut_at_random(far: Far, tries: int) -> None:
    """Cut anywhere between the first byte and the answer, and repeated until somebody answers: it runs once."""
    chance = random.Random(SEED)
    loop = asyncio.get_running_loop()
    async with Rig(far.project) as rig:
        for number in range(tries):
            id = f"submit-{tries}-{number}"
            spec = JobSpec(id, "", ["sh", "-c", "echo ran; exit 5"], files={"filling": os.urandom(200_000)})

            async def submit(spec: JobSpec = spec) -> jobs.JobStatus:
                return await jobs.submit(await rig.link("box"), spec)

            cutting = loop.run_in_executor(None, _cut_later, far, chance.uniform(0, 0.3))
            await patiently(submit)
            await cutting
            end = await jobs.wait(await rig.link("box"), id)
            assert (end.exit, end.backend) == (5, far.backend)
            log = await patiently(lambda end=end: read(rig, f"{end.dir}/out.log"))  # type: ignore[misc]
            assert log == b"ran\n"
        left = await (await rig.link("box")).run(
            script=f"ls -A {await jobs.jobs_dir(await rig.link('box'))}|grep -c stage"
        )
        cut_short = int(left.text() or 0)
    print(f"\n{far.backend}: {tries} submissions cut: one job each time, {cut_short} stages left for the next sweep")


def _cut_later(far: Far, seconds: float) -> None:
    time.sleep(seconds)
    far.cut()


async def read(rig: Rig, path: str) -> bytes:
    return await (await rig.link("box")).read(path)
