"""The lab's systemd: what the job backends must cope with happens in it as on a real machine."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from remote.connect import Link, Rig
from tests.lab import netns, rigs, systemd
from tests.lab.systemd import SystemdHost, systemd_host


@pytest.fixture(scope="module")
def host() -> Iterator[SystemdHost]:
    with systemd_host() as made:
        yield made


async def told(link: Link, script: str) -> str:
    return (await link.run(script=script)).check(script).text()


async def test_it_is_systemd_and_sessions_are_known_to_it(host: SystemdHost) -> None:
    async with Rig(host.project("root")) as rig:
        link = await rig.link("box")
        assert (await told(link, "cat /proc/1/comm; id -un")).split() == ["systemd", "root"]
        assert "session-" in await told(link, "cat /proc/self/cgroup")
        assert (await told(link, "systemctl --failed --no-legend")).strip() == ""


async def test_the_end_of_a_unit_is_told_to_its_stop_command(host: SystemdHost) -> None:
    async with Rig(host.project("root")) as rig:
        link = await rig.link("box")
        post = "ExecStopPost=/bin/sh -c 'echo $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS >/root/post'"
        start = ["systemd-run", "--unit=lab-1", "--collect", "-p", "Type=exec", "-p", post, "--"]
        # It waits for us: with Type=exec, systemd-run fails when the program is dead before systemd looked at it.
        dies = "until [ -e /root/go ];do sleep 0.02;done;kill -KILL $$$$"  # systemd makes one $ of two
        (await link.run([*start, "/bin/sh", "-c", dies])).check("systemd-run")
        await told(link, "touch /root/go")
        ended = await told(link, "until [ -s /root/post ];do sleep 0.02;done;cat /root/post")
        assert ended.split() == ["signal", "killed", "KILL"]
        twice = [await link.run(["systemd-run", "--unit=lab-2", "sleep", "100"]) for _ in range(2)]
        assert [result.exit for result in twice] == [0, 1], "a name is taken while its unit runs"


async def test_user_units_end_with_the_last_session_unless_they_linger(host: SystemdHost) -> None:
    for linger in (False, True):
        host.linger(linger)
        mark = f"1000{linger:d}"
        async with Rig(host.project("plain")) as rig:
            link = await rig.link("box")
            (await link.run(["systemd-run", "--user", "-p", "Type=exec", "sleep", mark])).check("systemd-run")
        found = host.processes(b"sleep\0" + mark.encode())
        if linger:
            rigs.until(lambda: "plain" not in host.run("loginctl", "list-sessions", "--no-legend"))
            assert host.processes(b"sleep\0" + mark.encode()) == found
        else:
            rigs.until(lambda: not host.processes(b"sleep\0" + mark.encode()), 30)  # noqa: B023
    host.linger(False)


async def test_kill_user_processes_takes_what_a_session_left(host: SystemdHost) -> None:
    for on in (False, True):
        host.kill_user_processes(on)
        mark = f"2000{on:d}"
        async with Rig(host.project("plain")) as rig:
            link = await rig.link("box")
            await told(link, f"setsid -f sleep {mark} </dev/null >/dev/null 2>&1")
        if on:
            rigs.until(lambda: not host.processes(b"sleep\0" + mark.encode()), 30)  # noqa: B023
        else:
            rigs.until(lambda: "closing" in host.run("loginctl", "show-user", "plain", "-p", "State"))
            assert host.processes(b"sleep\0" + mark.encode())
    host.kill_user_processes(False)


def test_nothing_of_it_is_left() -> None:
    before = set(systemd.cgroup2().glob("rb-systemd-*"))
    with systemd_host() as made:
        mine = set(systemd.cgroup2().glob(f"rb-systemd-*-{os.getpid()}")) - before
        cable = f"rb{made.space.process.pid}"
        assert cable in netns.run("ip", "-br", "link")
    assert cable not in netns.run("ip", "-br", "link")
    assert mine and not any(group.exists() for group in mine)
    assert systemd.PLAIN not in netns.run("getent", "passwd")
