"""The lab's cable: what is cut is lost in silence, what is restored works, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from remote.connect import Rig
from tests.lab import netns, rigs


def test_a_far_host_is_a_machine_of_its_own() -> None:
    with netns.far_host() as far:
        first = far.space.enter("cat", "/proc/1/comm")
        assert first == "sshd\n"
        assert far.address in far.space.enter("ip", "-br", "addr", "show", "eth0")
        far.cut()
        with socket.socket() as silent:
            silent.settimeout(0.5)
            with pytest.raises(TimeoutError):  # not refused, not "no route": nobody says anything
                silent.connect((far.address, far.sshd.port))
        far.restore()
        rigs.until(lambda: rigs._listening(far.address, far.sshd.port))
    assert not Path(f"/proc/{far.space.process.pid}").exists()
    assert f"rb{far.space.process.pid}" not in netns.run("ip", "-br", "link")


@pytest.mark.parametrize("user", [*rigs.SHELLS, "root"])
async def test_every_user_of_it_can_work(user: str) -> None:
    with netns.far_host() as far:
        async with Rig(far.project(user)) as rig:
            result = await (await rig.link("box")).run(["id", "-un"])
    assert result.text().strip() == far.sshd.accounts.get(user, user) and result.stderr == b""


def test_a_killed_run_leaves_nothing_that_stays() -> None:
    netns.require()
    script = (
        "import os, sys\nfrom tests.lab.netns import far_host\n"
        "with far_host() as far:\n print(far.space.near, far.sshd.root, flush=True)\n sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    killed = subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True)
    assert killed.stdout and killed.stdin
    first, root = killed.stdout.readline().split()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdin.close()
    killed.stdout.close()
    rigs.until(lambda: f"rb{first}" not in netns.run("ip", "-br", "link"))
    with rigs.sshd():  # the next run clears up what only it can: users, files
        assert not os.path.exists(root)
        assert f"-{killed.pid}:" not in netns.run("getent", "passwd")


async def test_a_machine_that_loses_its_power(tmp_path: Path) -> None:
    """It comes back with its disk, its address and its keys, and with another boot id; who was connected hears
    nothing."""
    with netns.far_host() as far:
        user = next(iter(far.users))
        script = "cat /proc/sys/kernel/random/boot_id; echo kept >>kept; cat kept"
        async with Rig(far.project(user)) as rig:
            before = (await (await rig.link("box")).run(script=script)).text().split()
        with socket.create_connection((far.address, far.sshd.port)) as silent:
            silent.settimeout(0.5)
            assert silent.recv(100).startswith(b"SSH-")
            far.power_off()
            with pytest.raises(TimeoutError):
                silent.recv(1)
        with socket.socket() as refused, pytest.raises(OSError):
            refused.settimeout(1)
            refused.connect((far.address, far.sshd.port))
        far.power_on()
        async with Rig(far.project(user)) as rig:
            after = (await (await rig.link("box")).run(script=script)).text().split()
    assert before[1:] == ["kept"] and after[1:] == ["kept", "kept"] and before[0] != after[0]
    assert before[0] != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
