"""The link goes away while everything is going on at once. What cannot be known is called unknown within 20 s; what can
be gone on with is gone on with; 5 s after the link is back all works; nothing is lost, nothing happens twice.

The rig: a Proxmox host behind a cable, and a container that is reached through it by `pct exec`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from remote import files, jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec
from remote.ssh import SSHLink
from state.errors import RigbookError
from tests.lab.proxmox import ProxmoxRig, proxmox_rig

KNOWN_S, BACK_S = 20.0, 5.0  # what the product promises
SIZE = 24 << 20
RATE = 4 << 20  # B/s: the copies take many times as long as it takes to begin them

# Writes numbered lines until it is told that it is enough, and then says so.
WRITER = (
    'i=0;while [ ! -e "$1" ];do echo "line $i of the log";i=$((i+1));[ $((i%40)) = 0 ]&&sleep 0.05;done;echo enough'
)
# Writes down that it ran: twice would show.
ONCE = 'echo ran >>"$1/ran";until [ -e "$1/go" ];do sleep 0.1;done'
STUBBORN = "trap '' TERM;while :;do sleep 1;done"


@dataclass
class Action:
    """Something that is in progress when the link goes."""

    name: str
    task: asyncio.Task[Any]
    ended: float | None = None  # s after the link went

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome()}" + (f" after {self.ended:.1f} s" if self.ended else "")

    def outcome(self) -> str:
        if not self.task.done():
            return "in progress"
        error = self.task.exception()
        if error is None:
            return str(getattr(self.task.result(), "state", "done"))
        return f"unreachable ({error.id})" if is_unreachable(error) else repr(error)


def is_unreachable(error: BaseException) -> bool:
    return isinstance(error, RigbookError) and error.exit_code == 4


@dataclass
class Scene:
    """One rig, and all that goes on on it."""

    rig: ProxmoxRig
    host: Link
    guest: Link
    folder: Path
    told: list[float] = field(default_factory=list)  # when the follower said that it lost the link
    got: bytearray = field(default_factory=bytearray)
    seen: dict[str, int] = field(default_factory=dict)
    actions: dict[str, Action] = field(default_factory=dict)
    began: float = 0.0

    def begin(self, name: str, work: Awaitable[Any]) -> None:
        action = self.actions[name] = Action(name, asyncio.ensure_future(work))

        def ended(_: object) -> None:
            action.ended = time.monotonic() - self.began

        action.task.add_done_callback(ended)

    def progress(self, name: str) -> Callable[[int, int], None]:
        return lambda done, total: self.seen.__setitem__(name, done)

    def sink(self, name: str) -> Callable[[bytes], None]:
        return lambda data: self.seen.__setitem__(name, self.seen.get(name, 0) + len(data))


async def until(what: Callable[[], Any], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not what():
            await asyncio.sleep(0.02)


async def follow(scene: Scene) -> None:
    note = lambda error: scene.told.append(time.monotonic())  # noqa: E731
    async with contextlib.aclosing(jobs.pieces(scene.host, "writer", lost=note)) as found:
        async for piece in found:
            assert piece.offset == len(scene.got) and not piece.reset and not piece.skipped
            scene.got += piece.data


async def mirror(scene: Scene) -> None:
    """As an app does: again and again, whatever happened the last time."""
    complete = False
    while not complete:
        with contextlib.suppress(RigbookError):
            complete = await jobs.mirror(scene.host, "writer", scene.folder / "mirror")
        await asyncio.sleep(0.1)


async def terminal(scene: Scene) -> str:
    assert isinstance(scene.host, SSHLink)
    with contextlib.suppress(OSError, asyncssh.Error):  # as remote.terminal has it
        async with scene.host.terminal("xterm", (80, 24)) as process:
            process.stdin.write(b"echo $((6 * 7))\n")
            while data := await process.stdout.read(4096):
                scene.seen["terminal"] = scene.seen.get("terminal", 0) + data.count(b"42")
            assert process.exit_status is None
    raise RigbookError("shell.lost", "the terminal is gone", exit_code=4)


async def calls(scene: Scene) -> None:
    """Calls of the shared probe, one after the other, until one fails."""
    while True:
        await (await scene.host.probe()).call("processes")
        scene.seen["call"] = scene.seen.get("call", 0) + 1
        await asyncio.sleep(0.05)


def plant(folder: Path, content: bytes) -> Path:
    """A directory of 32 files that together hold `content`."""
    folder.mkdir()
    piece = len(content) // 32
    for n in range(32):
        (folder / f"part{n:02}").write_bytes(content[n * piece : (n + 1) * piece])
    return folder


async def start_everything(scene: Scene, local: Path, content: bytes) -> None:
    host, guest = scene.host, scene.guest
    talk = "while :;do echo still here;sleep 0.1;done"
    enough = f"{await jobs.jobs_dir(host)}/writer.enough"
    await host.write("there.bin", content)
    await host.put_tree(plant(scene.folder / "tree", content), "full")
    await guest.run(["mkdir", "-p", "/root/kept"])
    await jobs.submit(host, JobSpec("writer", "", ["sh", "-c", WRITER, "sh", enough]))
    await jobs.submit(host, JobSpec("stubborn", "", ["sh", "-c", STUBBORN]))
    scene.rig.far.throttle(RATE)
    scene.begin("exec", host.stream(script=talk, out=scene.sink("exec"), err=scene.sink("noise")))
    scene.begin("exec in the guest", guest.stream(script=talk, out=scene.sink("guest"), err=scene.sink("noise")))
    scene.begin("terminal", terminal(scene))
    scene.begin("calls", calls(scene))
    scene.begin("follow", follow(scene))
    scene.begin("mirror", mirror(scene))
    scene.begin("wait", jobs.wait(host, "writer"))
    await until(lambda: {"exec", "guest", "terminal", "call"} <= {*scene.seen} and scene.got)
    home = Path(f"/proc/{scene.rig.far.space.pid}/root/root")

    def arrived(pattern: str) -> int:
        return sum(path.stat().st_size for path in home.glob(pattern))

    scene.begin("put", files.put(host, local, "here.bin", progress=scene.progress("put")))
    scene.begin("get", files.get(host, "there.bin", scene.folder / "got.bin", progress=scene.progress("get")))
    await until(lambda: arrived(".here.bin.*.part") > 1 << 20 and scene.seen.get("get", 0) > 1 << 20)
    big = JobSpec("once", "", ["sh", "-c", ONCE, "sh", "{job}"], files={"data": content})
    scene.begin("put_tree", host.put_tree(scene.folder / "tree", "tree"))
    scene.begin("get_tree", host.get_tree("full", scene.folder / "back"))
    scene.begin("put to the guest", guest.put(local, "/root/kept/here.bin"))
    scene.begin("submit", jobs.submit(host, big))
    scene.begin("stop", jobs.stop(host, "stubborn", grace=25))
    staged = ".local/state/rigbook/jobs/.stage-once-*/data"
    await until(lambda: arrived(".rigbook-*.part/part00") and arrived(staged))


ENDS = (
    "exec",
    "exec in the guest",
    "terminal",
    "calls",
    "put",
    "get",
    "put_tree",
    "get_tree",
    "put to the guest",
    "submit",
    "stop",
)
GOES_ON = ("follow", "mirror", "wait")


async def link_goes(scene: Scene, fault: str, hold: float) -> None:
    """`hold`: s that it is away; until everybody has noticed when that takes longer."""
    assert not any(action.task.done() for action in scene.actions.values()), "; ".join(map(str, scene.actions.values()))
    scene.began = time.monotonic()
    away = scene.rig.far.cut if fault == "cut" else scene.rig.far.freeze
    await asyncio.to_thread(away)
    with contextlib.suppress(TimeoutError):
        await until(lambda: all(scene.actions[name].task.done() for name in ENDS) and scene.told, 40)
    ends = [scene.actions[name] for name in ENDS]
    late = [action for action in ends if action.ended is None or action.ended > KNOWN_S]
    wrong = [action for action in ends if not action.outcome().startswith(("unknown", "unreachable"))]
    assert not late and not wrong, "; ".join(map(str, ends))
    assert scene.told and scene.told[0] - scene.began <= KNOWN_S
    print(f"{fault}: all ended after {time.monotonic() - scene.began:.1f} s")
    # What begins now, nobody answering, is told in time as well.
    fresh = time.monotonic()
    tried, status = await asyncio.gather(
        scene.host.run(["true"]), jobs.status(scene.host, "writer"), return_exceptions=True
    )
    assert isinstance(tried, RigbookError) and is_unreachable(tried), tried
    assert isinstance(status, jobs.JobStatus) and status.state == "unknown", status
    assert time.monotonic() - fresh <= KNOWN_S
    print(f"{fault}: a new command was refused after {time.monotonic() - fresh:.1f} s")
    for name in GOES_ON:
        assert not scene.actions[name].task.done(), str(scene.actions[name])
    await asyncio.sleep(max(0.0, scene.began + hold - time.monotonic()))


async def link_returns(scene: Scene, fault: str) -> None:
    before = len(scene.got)
    back = scene.rig.far.restore if fault == "cut" else scene.rig.far.thaw
    await asyncio.to_thread(back)
    await asyncio.to_thread(scene.rig.far.throttle, None)
    async with asyncio.timeout(BACK_S):

        async def works(work: Callable[[], Awaitable[Any]]) -> None:
            while True:  # somebody tries again, as people and apps do
                try:
                    found = await work()
                except RigbookError as error:
                    assert is_unreachable(error), error
                    await asyncio.sleep(0.1)
                    continue
                if getattr(found, "state", "") != "unknown":
                    return

        async def call() -> Any:
            return await (await scene.host.probe()).call("system")

        await asyncio.gather(
            works(lambda: scene.host.run(["true"])),
            works(lambda: scene.guest.run(["true"])),
            works(call),
            works(lambda: jobs.status(scene.host, "writer")),
            until(lambda: len(scene.got) > before),
        )


async def nothing_is_lost_or_doubled(scene: Scene, local: Path, content: bytes) -> None:
    host, guest = scene.host, scene.guest
    digest = hashlib.sha256(content).hexdigest()

    async def sha(link: Link, path: str) -> str:
        return (await link.run(["sha256sum", path])).check(path).text().split()[0]

    # The copies: their names held nothing of the cut ones, and the large one goes on where it was.
    for link, path in ((host, "here.bin"), (guest, "/root/kept/here.bin")):
        assert (await link.run(["test", "-e", path])).exit == 1, f"{path} is there, though its copy was cut"
    assert not (scene.folder / "got.bin").exists()
    again = await files.put(host, local, "here.bin")
    assert again.resumed > 0, "it began from nothing"
    await guest.put(local, "/root/kept/here.bin")
    back = await files.get(host, "there.bin", scene.folder / "got.bin")
    assert back.resumed > 0, "it began from nothing"
    assert await sha(host, "here.bin") == await sha(guest, "/root/kept/here.bin") == digest
    assert hashlib.sha256((scene.folder / "got.bin").read_bytes()).hexdigest() == digest
    await host.put_tree(scene.folder / "tree", "tree")
    assert (await host.run(script="cat tree/part* | sha256sum")).text().split()[0] == digest
    await host.get_tree("full", scene.folder / "back")
    parts = sorted((scene.folder / "back").iterdir())
    assert hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest() == digest

    # The jobs: asked for twice, run once; stopped once, and gone.
    where = await jobs.jobs_dir(host)
    big = JobSpec("once", "", ["sh", "-c", ONCE, "sh", "{job}"], files={"data": content})
    assert (await jobs.submit(host, big)).state == "running"
    await host.write(f"{where}/once/go", b"")
    assert (await jobs.wait(host, "once")).exit == 0
    assert await host.read(f"{where}/once/ran") == b"ran\n"
    stopped = await jobs.stop(host, "stubborn", grace=1)
    assert stopped.over and stopped.stopped and stopped.signal == "KILL", stopped
    ours = sorted(status.id for status in await jobs.list_jobs(host))
    assert ours == ["once", "stubborn", "writer"]

    # The log: every byte once, in both copies.
    await host.write(f"{where}/writer.enough", b"")
    async with asyncio.timeout(30):
        for name in GOES_ON:
            await scene.actions[name].task
    assert scene.actions["wait"].task.result().exit == 0
    lines = bytes(scene.got).splitlines()
    assert lines == [b"line %d of the log" % n for n in range(len(lines) - 1)] + [b"enough"]
    assert (scene.folder / "mirror/out.log").read_bytes() == scene.got
    assert await sha(host, f"{where}/writer/out.log") == hashlib.sha256(scene.got).hexdigest()


async def ordeal(rig: ProxmoxRig, folder: Path, fault: str, hold: float) -> Scene:
    content = os.urandom(SIZE)
    local = folder / "local.bin"
    folder.mkdir()
    local.write_bytes(content)
    began = time.monotonic()
    async with Rig(rig.project()) as hosts:
        scene = Scene(rig, await hosts.link("pve"), await hosts.link("ct"), folder)
        try:
            await start_everything(scene, local, content)
            print(f"{fault}: all in progress after {time.monotonic() - began:.1f} s")
            await link_goes(scene, fault, hold)
            print(f"{fault}: noticed, {time.monotonic() - began:.1f} s")
            await link_returns(scene, fault)
            print(f"{fault}: back {time.monotonic() - began:.1f} s")
            await nothing_is_lost_or_doubled(scene, local, content)
            print(f"{fault}: whole {time.monotonic() - began:.1f} s")
        finally:
            rig.far.thaw()
            rig.far.restore()
            for action in scene.actions.values():
                action.task.cancel()
            await asyncio.gather(*(action.task for action in scene.actions.values()), return_exceptions=True)
    return scene


@pytest.mark.report(1)
@pytest.mark.report(2)
@pytest.mark.report(4)
async def test_a_cable_that_is_pulled_and_an_sshd_that_stands_still(tmp_path: Path) -> None:
    """Until everybody has noticed. Two rigs, at the same time, since most of it is waiting."""
    with proxmox_rig() as pulled, proxmox_rig() as still:
        await asyncio.gather(
            ordeal(pulled, tmp_path / "pulled", "cut", 0), ordeal(still, tmp_path / "still", "freeze", 0)
        )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["cut", "freeze"])
async def test_a_minute_without_a_link(tmp_path: Path, fault: str) -> None:
    with proxmox_rig() as rig:
        scene = await ordeal(rig, tmp_path / "here", fault, 60)
    for action in scene.actions.values():
        print(f"{fault}: {action}")
