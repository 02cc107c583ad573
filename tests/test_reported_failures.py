"""What users of other tools reported: each of the 30 has a test here, or elsewhere under `@pytest.mark.report(number)`.

The table says where it was reported, what was seen, and what is right. A number without a test is a failure.
"""

from __future__ import annotations

import ast
import asyncio
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path

import pytest

from remote import files, jobs
from remote.connect import Link, Rig
from remote.jobs import JobSpec
from state.errors import RigbookError
from state.project import Project
from tests.lab import rigs
from tests.lab.proxmox import ProxmoxRig, proxmox_rig

REPORTS: dict[int, tuple[str, str, str]] = {
    1: ("tardis#367", "success on a lost link", "an end that nobody told is unknown"),
    2: ("skypilot#6787, dstack#2531", "a job torn down after a blip", "unreachable is not dead"),
    3: ("skypilot#2122, #4599", "exit 0 on a failure", "the code is carried; a signal is 128+n and a name"),
    4: ("dstack#4285, ray#46413", "the log's tail is lost", "finished is looked at before the last read"),
    5: ("dstack#81", "an OOM kill shows nothing", "it is told as one"),
    6: ("SuperScalar#275, azurelinux#3179", "a job dead on logout", "a system unit; KillUserProcesses is looked at"),
    7: ("systemd#8486, #3382", "a user unit dies", "no linger: refused, or a system unit"),
    8: ("systemd#40604, lxc#2168", "no bus to connect to", "XDG_RUNTIME_DIR is set"),
    9: ("fabric#1158, pyinfra#947", "starting hangs", "a job has its own 0, 1 and 2"),
    10: ("skypilot#3742, sglang#31645", "GPU in use after a cancel", "the whole tree ends, and that is proved"),
    11: ("EgoVerse#682", "7 GPUs held by orphans", "the same for workers that were forked away"),
    12: ("TensorRT-LLM#16404", "the tool killed its own host", "what is not the job's is not touched"),
    13: ("nydus#789, bmad-loop#12", "the wrong process killed", "pid, start time and boot id together"),
    14: ("wazuh#38733", "a daemon in a container kills itself", "the same, where pids are low and come again"),
    15: ("rsync-time-machine.py#225, hapistrano#84, ansible#64971", "empty, or no matches", "the script is not zsh's"),
    16: ("ansible#2268, backend.ai#11772, uniterm#585", "start-up noise breaks it", "output begins at the marker"),
    17: ("OpenShell#149, guildai#264, SN27#228", "uv, conda, nvcc not found", "PATH is explicit, and doctor tells it"),
    18: ("deploy-rs#78, capistrano#2087", "sudo hangs", "sudo -n fails at once and says why"),
    19: ("tteck/Proxmox#3405, pharos-cluster#511", "locale warnings", "the locale is ours"),
    20: ("scaleway#139, cubic#539", "the host key changed", "a hard stop with both fingerprints"),
    21: ("pyinfra#1959, #671", "a stall on an unknown host", "no question where nobody can answer"),
    22: ("asyncssh#244", "open failed", "no more sessions than the server allows"),
    23: (
        "ansible#24594, skypilot#5323",
        "connection reset at the start",
        "few logins at once, tried again with jitter",
    ),
    24: ("algo#236, Bastillion#116", "subsystem request failed", "files without sftp"),
    25: ("mitogen#632, #575, ansible#22203", "permission denied in /tmp", "nothing has to be executable"),
    26: ("ansible#73179, #25401", "unreachable, on a full disk", "full, read-only and forbidden are told apart"),
    27: ("snakemake#3261, sisyphus#103", "failures from a clock that is off", "clocks of two hosts are not compared"),
    28: ("ansible#35778, #74184", "could not find job, runs for ever", "a stable place, and a state that is derived"),
    29: ("pyinfra#1095, #1339", "a key trusted wrongly", "known_hosts as OpenSSH reads it, CAs and all"),
    30: ("asyncssh#374", "half the speed behind a jump", "bulk may go by ProxyCommand; what is used is told"),
}


@cache
def marked() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.report":
                    (number,) = mark.args
                    assert isinstance(number, ast.Constant) and number.value in REPORTS, f"{path}: {ast.unparse(mark)}"
                    found.setdefault(number.value, []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("number", REPORTS)
def test_each_report_has_a_test(number: int) -> None:
    source, seen, right = REPORTS[number]
    assert marked().get(number), f"report {number} ({source}: {seen}) has no test that holds: {right}"


@pytest.fixture(scope="module")
def box() -> Iterator[rigs.Sshd]:
    with rigs.sshd() as server:
        yield server


@pytest.fixture(scope="module")
def proxmox() -> Iterator[ProxmoxRig]:
    with proxmox_rig() as made:
        yield made


@pytest.fixture
async def link(box: rigs.Sshd) -> AsyncIterator[Link]:
    async with Rig(box.project(next(iter(box.users)))) as rig:
        yield await rig.link("box")


async def bystander(link: Link, *words: str) -> int:
    """A process of the same user that has nothing to do with any job; its command line holds `words`."""
    script = 'setsid sh -c "while :;do sleep 1;done" "$@" </dev/null >/dev/null 2>&1 & echo $!'
    return int((await link.run(["sh", "-c", script, "sh", *words])).check("a bystander").text())


async def lives(link: Link, pid: int) -> bool:
    return (await link.run(["kill", "-0", str(pid)])).ok


async def log_of(link: Link, id: str) -> bytes:
    async for _, data in jobs.follow(link, id):
        return data
    return b""


@pytest.mark.report(12)
async def test_stop_touches_nothing_that_only_looks_like_the_job(link: Link) -> None:
    where = await jobs.jobs_dir(link)
    begun = await jobs.submit(link, JobSpec("narrow", "serve", ["sh", "-c", "echo up; while :; do sleep 1; done"]))
    other = await jobs.submit(link, JobSpec("narrow-2", "serve", ["sh", "-c", "echo up; while :; do sleep 1; done"]))
    # One that names the job, and one in the very session that asks for the stop.
    named = await bystander(link, "narrow", f"{where}/narrow", "supervisor.pyz", str(begun.pid))
    mine = asyncio.ensure_future(link.run(script="echo $$; exec sleep 1000"))
    assert (await jobs.stop(link, "narrow", grace=5)).over
    assert await lives(link, named)
    assert (await jobs.status(link, "narrow-2")).state == "running" and other.pid
    assert not mine.done(), "a command on the same connection goes on"
    mine.cancel()
    await link.run(["kill", "-KILL", str(named)])
    await jobs.stop(link, "narrow-2", grace=0.2)


@pytest.mark.report(13)
async def test_a_pid_that_belongs_to_somebody_else_now_is_not_the_job(link: Link) -> None:
    begun = await jobs.submit(link, JobSpec("reused", "", ["sleep", "1000"]))
    for pid in (begun.supervisor, begun.pid):
        assert pid
        os.kill(pid, signal.SIGKILL)
    while (await jobs.status(link, "reused")).state == "running":
        await asyncio.sleep(0.05)
    # As if the kernel had come round to these numbers again.
    innocent = await bystander(link)
    path = f"{begun.dir}/start.json"
    start = json.loads(await link.read(path))
    start["pid"] = start["supervisor"]["pid"] = innocent
    await link.write(path, json.dumps(start).encode())
    assert (await jobs.status(link, "reused")).state == "vanished"
    assert (await jobs.stop(link, "reused", grace=0.2)).state == "vanished"
    assert await lives(link, innocent)
    await link.run(["kill", "-KILL", str(innocent)])


@pytest.mark.report(14)
@pytest.mark.report(2)
async def test_after_a_restart_of_the_container_its_low_pids_are_not_the_job(proxmox: ProxmoxRig) -> None:
    """A container's pids begin again at 1: here the same number does come again."""
    async with Rig(proxmox.project()) as rig:
        link = await rig.link("ct")
        begun = await jobs.submit(link, JobSpec("low", "", ["sleep", "1000"]))
        assert begun.pid and begun.pid < 1000
        proxmox.container.stop()
        proxmox.container.start()
        link = await rig.link("ct")
        script = 'while :;do sleep 1000 </dev/null >/dev/null 2>&1 & p=$!;[ $p -lt "$1" ]||break;kill $p;done;echo $p'
        innocent = int((await link.run(["sh", "-c", script, "sh", str(begun.pid)])).text())
        assert innocent == begun.pid
        assert (await jobs.status(link, "low")).state == "lost_reboot"
        assert (await jobs.stop(link, "low", grace=0.2)).state == "lost_reboot"
        assert await lives(link, innocent)


@pytest.mark.report(19)
async def test_a_locale_that_is_not_there_is_nobodys_output(tmp_path: Path) -> None:
    """Whatever the login says about it, and in which language: stderr is the command's, errors are told apart."""
    with rigs.sshd("SetEnv LC_ALL=xx_XX.UTF-8 LANG=xx_XX.UTF-8 LANGUAGE=xx\n") as server:
        for user in server.users:
            async with Rig(server.project(user)) as rig:
                link = await rig.link("box")
                quiet = await link.run(["true"])
                assert (quiet.exit, quiet.stderr) == (0, b""), user
                with pytest.raises(RigbookError) as caught:
                    await link.write("/proc/nothing-can-be-made-here", b"x")
                assert caught.value.id in ("file.not-found", "file.denied"), caught.value
                with pytest.raises(RigbookError) as caught:
                    await link.read("/no/such/file")
                assert caught.value.id == "file.not-found"


@pytest.mark.report(28)
async def test_a_job_is_found_from_everywhere_and_its_end_too(link: Link, box: rigs.Sshd) -> None:
    """Its place does not depend on who asks from where, and a directory that is gone ends the wait for it."""
    await jobs.submit(link, JobSpec("found", "", ["sh", "-c", "until [ -e go ]; do sleep 0.05; done; exit 7"]))
    await jobs.submit(link, JobSpec("gone", "", ["sleep", "1000"]))
    user = next(iter(box.users))
    home = box.users[user]
    # Another controller, which reaches the same directory by another name.
    os.symlink(home / ".local/state/rigbook", home / "by-another-name")
    project: Project = box.project(user)
    toml = f'state_dir = "{home}/by-another-name"\n'
    other = rigs.project(box.root, f'[hosts.box]\nkind = "linux"\nssh = "box"\n{toml}')
    async with Rig(project) as first, Rig(other) as second:
        one, two = await first.link("box"), await second.link("box")
        waiting = asyncio.ensure_future(jobs.wait(one, "found"))
        assert (await jobs.status(two, "found")).state == "running"
        assert (await jobs.submit(two, JobSpec("found", "", ["false"]))).pid == (await jobs.status(one, "found")).pid
        await two.write(f"{await jobs.jobs_dir(two)}/found/go", b"")
        assert (await asyncio.wait_for(waiting, 20)).exit == 7
        endless = asyncio.ensure_future(jobs.wait(one, "gone"))
        running = await jobs.status(one, "gone")
        await one.run(["rm", "-rf", running.dir])
        assert (await asyncio.wait_for(endless, 20)).state == "absent"
        await one.run(["kill", "-KILL", str(running.supervisor), str(running.pid)])


@pytest.mark.report(30)
@pytest.mark.parametrize("way", ["ProxyJump box", "ProxyCommand ssh -F {config} -W %h:%p box"])
async def test_bulk_through_a_jump_by_either_way(proxmox: ProxmoxRig, tmp_path: Path, way: str) -> None:
    root = proxmox.far.sshd.root
    hosts = '[hosts.inner]\nkind = "linux"\nssh = "inner"\n'
    keys = "".join(f"inner {key}\n" for key in proxmox.container.host_keys())
    (tmp_path / "known").write_text(keys + (root / "known_hosts").read_text())
    proxmox.far.project("root")  # writes the config for `box`
    config = root / "ssh_config"
    inner = (
        f"Host inner\n  HostName {proxmox.container.address}\n  User root\n  HostKeyAlias inner\n"
        f"  {way.format(config=config)}\n  IdentityFile {root}/key\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {tmp_path}/known\n"
    )
    config.write_text(inner + config.read_text())
    data = os.urandom(16 << 20)
    (tmp_path / "bulk").write_bytes(data)
    async with Rig(rigs.project(root, hosts)) as rig:
        link = await rig.link("inner")
        assert (await link.run(["uname", "-n"])).text().strip() == "ct101"
        assert "box" in link.route()["via"]
        sent = await files.put(link, tmp_path / "bulk", "/root/bulk")
        assert sent.checked and sent.sha256 == hashlib.sha256(data).hexdigest()
        await files.get(link, "/root/bulk", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == data
