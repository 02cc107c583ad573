"""The same promises about jobs whoever keeps them: systemd as root, a user's own systemd, or our own supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import pytest_asyncio

from remote import files, jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec
from state.errors import RigbookError
from tests.lab import rigs
from tests.lab.proxmox import ProxmoxRig, proxmox_rig
from tests.lab.systemd import PLAIN, PLAIN_UID, SystemdHost, systemd_host

# Forked twice, in a session of its own, deaf to TERM, with an environment that tells nothing.
ESCAPE = "(env -i setsid sh -c 'trap \"\" TERM; echo $$ > {}/pid; while :; do sleep 1; done' &) ;"


@pytest.fixture(scope="module")
def host() -> Iterator[SystemdHost]:
    with systemd_host() as made:
        made.linger(True)
        yield made


@pytest.fixture(scope="module")
def box() -> Iterator[rigs.Sshd]:
    with rigs.sshd() as server:
        yield server


@pytest.fixture(scope="module")
def proxmox() -> Iterator[ProxmoxRig]:
    with proxmox_rig() as rig:
        yield rig


@pytest_asyncio.fixture(params=["system", "user", "supervisor", "container"])
async def link(request: pytest.FixtureRequest) -> AsyncIterator[Link]:
    """The last is a real container without a systemd, reached by `pct exec` through its host."""
    name = "box"
    if request.param == "supervisor":
        server = request.getfixturevalue("box")
        project = server.project(next(iter(server.users)))
    elif request.param == "container":
        project, name = request.getfixturevalue("proxmox").project(), "ct"
    else:
        project = request.getfixturevalue("host").project("root" if request.param == "system" else PLAIN)
    async with Rig(project) as rig:
        yield await rig.link(name)


def sh(id: str, script: str, **more: object) -> JobSpec:
    return JobSpec(id=id, name=id, argv=["/bin/sh", "-c", script], **more)  # type: ignore[arg-type]


async def alive(link: Link, pid: int) -> bool:
    return (await link.run(["kill", "-0", str(pid)])).ok


@pytest.mark.report(3)
@pytest.mark.parametrize(
    ("script", "exit", "died"), [("exit 0", 0, None), ("exit 42", 42, None), ("kill -KILL $$", None, "KILL")]
)
async def test_the_end_is_told_exactly(link: Link, script: str, exit: int | None, died: str | None) -> None:
    begun = await jobs.submit(link, sh(f"end-{exit}-{died}", script))
    end = await jobs.wait(link, begun.id)
    assert (end.state, end.exit, end.signal, end.oom) == ("finished", exit, died, False)
    systemd = (await link.run(["test", "-d", "/run/systemd/system"])).ok
    assert end.backend == ("systemd" if systemd else "supervisor") and bool(end.unit) == systemd
    assert end.seconds is not None and 0 <= end.seconds < 60


@pytest.mark.report(10)
@pytest.mark.report(11)
async def test_stop_ends_the_whole_tree_and_nothing_else(link: Link) -> None:
    where = f"{await jobs.jobs_dir(link)}/tree"
    bystander = await jobs.submit(link, sh("bystander", "exec sleep 1000"))
    await jobs.submit(link, sh("tree", ESCAPE.format(where) + "trap 'exit 7' TERM; while :; do sleep 0.05; done"))
    await link.run(script=f"until [ -s {where}/pid ];do sleep 0.02;done", timeout=20)
    escaped = int(await link.read(f"{where}/pid"))
    assert await alive(link, escaped)
    end = await jobs.stop(link, "tree", grace=1)
    assert (end.state, end.exit, end.stopped, end.left) == ("finished", 7, True, ())
    assert any("trap" in command for command in end.swept)
    assert not await alive(link, escaped)
    assert (await jobs.status(link, "bystander")).state == "running" and bystander.pid
    stopped = await jobs.stop(link, "bystander", grace=5)
    assert stopped.signal == "TERM" and not await alive(link, bystander.pid)


@pytest.mark.report(9)
async def test_starting_a_job_does_not_wait_for_its_output(link: Link) -> None:
    begun = await jobs.submit(link, sh("holds", "sleep 1000 & echo up; wait"))
    assert (await jobs.status(link, "holds")).state == "running"
    shown = await link.run(script=f"ls -l /proc/{begun.pid}/fd /proc/{begun.supervisor}/fd")
    assert b"pipe:" not in shown.stdout and b"socket:" not in shown.stdout, shown.stdout
    await jobs.stop(link, "holds", grace=5)


async def test_two_starts_are_one(link: Link) -> None:
    spec = sh("once", "echo started; sleep 0.3")
    both = await asyncio.gather(*(jobs.submit(link, spec) for _ in range(8)))
    assert len({job.pid for job in both}) == 1
    end = await jobs.wait(link, "once")
    assert (await jobs.submit(link, spec)).state == "finished"
    assert await link.read(f"{end.dir}/out.log") == b"started\n"


async def test_caps_are_the_units(host: SystemdHost) -> None:
    async with Rig(host.project("root")) as rig:
        link = await rig.link("box")
        job = await jobs.submit(link, sh("capped", "exec sleep 1000", memory_max=123 << 20, tasks_max=50))
        shown = host.run("systemctl", "show", str(job.unit), "-p", "MemoryMax,TasksMax,KillMode,OOMPolicy,Delegate")
        assert f"MemoryMax={123 << 20}\n" in shown and "TasksMax=58\n" in shown and "Delegate=yes\n" in shown
        assert "KillMode=control-group\n" in shown and "OOMPolicy=continue\n" in shown
        await jobs.stop(link, "capped", grace=5)
        rigs.until(lambda: "rigbook-job-capped" not in host.run("systemctl", "list-units", "--all"))


async def test_a_directory_with_a_name_that_asks_for_trouble(host: SystemdHost) -> None:
    """Neither the shell nor systemd makes something else of it: `$`, `%` and quotes mean something to both."""
    async with Rig(host.project("root")) as rig:
        link = await rig.link("box")
        odd = '/root/a $HOME %h "q" \\x'
        link.host = msgspec.structs.replace(link.host, state_dir=odd)
        begun = await jobs.submit(link, JobSpec("odd", "", ["printf", "%s", "$HOME %h {job}"], env={"A": "$HOME %n"}))
        end = await jobs.wait(link, "odd")
        assert (end.backend, end.exit) == ("systemd", 0)
        assert (await link.read(f"{begun.dir}/out.log")).decode() == f"$HOME %h {odd}/jobs/odd"


@pytest.mark.report(5)
async def test_a_dead_supervisor_does_not_take_the_record_with_it(host: SystemdHost) -> None:
    """systemd ends what is left of the job and tells, by our own stop command, what happened."""
    for user in ("root", PLAIN):
        async with Rig(host.project(user)) as rig:
            link = await rig.link("box")
            where = f"{await jobs.jobs_dir(link)}/orphaned"
            begun = await jobs.submit(link, sh("orphaned", ESCAPE.format(where) + "echo up; sleep 1000"))
            await link.run(script=f"until [ -s {where}/pid ];do sleep 0.02;done", timeout=20)
            escaped = int(await link.read(f"{where}/pid"))
            # The escaped one is deaf to TERM: the unit waits for its patience to end. Do not.
            await link.run(["kill", "-KILL", str(escaped)])
            await link.run(["kill", "-KILL", str(begun.supervisor)])
            end = await jobs.wait(link, "orphaned")
            assert (end.state, end.exit, end.signal, end.ok) == ("finished", None, "KILL", False)
            assert "its supervisor was killed" in end.reason and not end.stopped
            assert begun.pid and not await alive(link, begun.pid)


@pytest.mark.report(6)
@pytest.mark.report(7)
async def test_a_login_whose_processes_are_killed_is_refused_unless_it_lingers(host: SystemdHost) -> None:
    host.kill_user_processes(True)
    try:
        host.linger(False)
        async with Rig(host.project(PLAIN)) as rig:
            link = await rig.link("box")
            with pytest.raises(RigbookError) as caught:
                await jobs.submit(link, sh("doomed", "exec sleep 1000"))
            assert caught.value.id == "job.session-bound" and "enable-linger plain" in str(caught.value.hint)
            assert (await jobs.status(link, "doomed")).state == "absent"
            left = await link.run(script=f"ls -A {await jobs.jobs_dir(link)} | grep stage")
            assert left.stdout == b""
        host.linger(True)
        async with Rig(host.project(PLAIN)) as rig:
            begun = await jobs.submit(await rig.link("box"), sh("kept", "exec sleep 1000"))
            assert begun.backend == "systemd"
        rigs.until(lambda: PLAIN not in host.run("loginctl", "list-sessions", "--no-legend"))
        async with Rig(host.project(PLAIN)) as rig:
            link = await rig.link("box")
            assert (await jobs.status(link, "kept")).state == "running"
            await jobs.stop(link, "kept", grace=5)
    finally:
        host.linger(True)
        host.kill_user_processes(False)


async def test_a_login_that_does_not_linger_has_a_supervisor_which_outlives_it(host: SystemdHost) -> None:
    """Where logind lets it: the session stays `closing` for as long as the job lives."""
    host.linger(False)
    try:
        async with Rig(host.project(PLAIN)) as rig:
            begun = await jobs.submit(await rig.link("box"), sh("supervised", "exec sleep 1000"))
            assert begun.backend == "supervisor"
        rigs.until(lambda: "closing" in host.run("loginctl", "user-status", PLAIN), 30)
        async with Rig(host.project(PLAIN)) as rig:
            link = await rig.link("box")
            assert (await jobs.status(link, "supervised")).state == "running"
            await jobs.stop(link, "supervised", grace=5)
    finally:
        host.linger(True)


@pytest.mark.report(8)
async def test_a_user_unit_starts_where_the_login_tells_of_no_bus(host: SystemdHost) -> None:
    """As after sudo or lxc-attach: XDG_RUNTIME_DIR is not set, and systemd-run alone fails."""
    bare = ["setpriv", f"--reuid={PLAIN_UID}", f"--regid={PLAIN_UID}", "--clear-groups", "env", "-i"]
    bare += [f"HOME=/home/{PLAIN}", "PATH=/usr/bin:/bin"]
    alone = "systemd-run --user true 2>&1 || echo refused"
    assert "refused" in host.run(*bare, "sh", "-c", alone)
    async with Rig(host.project(PLAIN)) as rig:
        link = await rig.link("box")
        spec = sh("busless", "echo $XDG_RUNTIME_DIR; exit 4")
        stage = f"{await jobs.jobs_dir(link)}/.stage-busless"
        script = f"umask 077;mkdir -p {stage}&&cd {stage}&&tar -xf -"
        (await link.run(script=script, stdin=files.pack(jobs._tree(spec)))).check("staging")
        supervisor = [*bare, "python3", "-I", "-S", f"{stage}/supervisor.pyz", "adopt"]
        host.run(*supervisor, f"{await jobs.jobs_dir(link)}/busless", stage)
        end = await jobs.wait(link, "busless")
        assert (end.backend, end.exit) == ("systemd", 4)


async def test_a_full_disk_of_systemds_host(host: SystemdHost) -> None:
    host.run("sh", "-c", "mkdir -p /root/small && mount -t tmpfs -o size=2m none /root/small")
    async with Rig(host.project("root")) as rig:
        link = await rig.link("box")
        link.host = msgspec.structs.replace(link.host, state_dir="/root/small/state")
        # The slot kept for the record is lost too: the ballast is given back for it.
        await jobs.submit(link, sh("full", "rm exit.slot; cat /dev/zero > /root/small/fill; exit 3"))
        end = await jobs.wait(link, "full")
        assert (end.state, end.exit, end.backend) == ("finished", 3, "systemd")
