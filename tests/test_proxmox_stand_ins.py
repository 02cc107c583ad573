"""The stand-ins print what Proxmox prints. Format strings and messages are quoted from its source:

pve-container src/PVE/CLI/pct.pm, qemu-server src/PVE/CLI/qm.pm and src/PVE/QemuServer/Agent.pm, pve-common
src/PVE/CLIFormatter.pm.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.proxmox import GIB, ProxmoxRig, proxmox_rig

PCT_LINE = "%-10s %-10s %-12s %-20s\n"  # my $format = …; printf($format, 'VMID', 'Status', 'Lock', 'Name')
QM_HEAD = "%10s %-20s %-10s %-10s %12s %-10s\n"  # qw(VMID NAME STATUS MEM(MB) BOOTDISK(GB) PID)
QM_LINE = "%10s %-20s %-10s %-10s %12.2f %-10s\n"


@pytest.fixture(scope="module")
def whole() -> Iterator[ProxmoxRig]:
    with proxmox_rig() as made:
        yield made


@pytest.fixture
def rig(whole: ProxmoxRig) -> Iterator[ProxmoxRig]:
    """The node as it was at the beginning, for each test."""
    before = whole.state.read_text()
    whole.node(agent_poll_s=0.05)  # what it says is tested here, not that it takes a second
    yield whole
    whole.state.write_text(before)
    if not whole.container.running:
        whole.container.start()


def call(
    rig: ProxmoxRig, program: str, *argv: str, data: bytes = b"", **env: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a stand-in on the host, with exactly this environment."""
    words = [f"{name}={value}" for name, value in env.items()]
    inside = ["nsenter", "-t", str(rig.far.space.pid), "-a", "--", "env", "-i", "PATH=/usr/bin", *words]
    return subprocess.run([*inside, str(rig.program(program)), *argv], input=data, capture_output=True)


def said(rig: ProxmoxRig, program: str, *argv: str, **more: Any) -> str:
    done = call(rig, program, *argv, **more)
    assert done.returncode == 0 and done.stderr == b"", done
    return done.stdout.decode()


def guest(rig: ProxmoxRig, vmid: int, **keys: Any) -> dict[str, Any]:
    """A guest that is not running, like one that is."""
    kind = json.loads(rig.state.read_text())["guests"][str(vmid)]
    return {**kind, "lxc": "nobody", **keys}


def test_an_empty_list_prints_nothing_at_all(rig: ProxmoxRig) -> None:
    rig.node(guests={})
    assert said(rig, "pct", "list") == ""
    assert said(rig, "qm", "list") == ""
    assert said(rig, "pvesh", "get", "/nodes/pve/lxc", "--output-format", "json") == "[]\n"


def test_pct_list(rig: ProxmoxRig) -> None:
    long = "a-name-of-21-letters!"
    assert len(long) == 21
    stopped = {
        "103": guest(rig, 101, name=long),
        "1000": guest(rig, 101, name="spa ced", lock="backup"),
        "102": guest(rig, 101, name=""),
    }
    rig.node(guests=json.loads(rig.state.read_text())["guests"] | stopped)
    lines = [
        PCT_LINE % ("VMID", "Status", "Lock", "Name"),
        PCT_LINE % (101, "running", "", "ct101"),
        PCT_LINE % (102, "stopped", "", "CT102"),
        PCT_LINE % (103, "stopped", "", long),
        PCT_LINE % (1000, "stopped", "backup", "spaced"),
    ]
    assert said(rig, "pct", "list") == "".join(lines)
    assert lines[1] == "101        running                 ct101               \n", "split() would take Name for Lock"


def test_qm_list(rig: ProxmoxRig) -> None:
    long = "a-name-of-21-letters!"
    pid = int(rig.vm.lxc("info", "-pH"))
    others = {"201": guest(rig, 200, name=long, memory=2 * GIB, disk=int(7.5 * GIB))}
    rig.node(guests=json.loads(rig.state.read_text())["guests"] | others)
    lines = [
        QM_HEAD % ("VMID", "NAME", "STATUS", "MEM(MB)", "BOOTDISK(GB)", "PID"),
        QM_LINE % (200, "vm200", "running", 4096, 32, pid),
        QM_LINE % (201, long, "stopped", 2048, 7.5, 0),
    ]
    assert said(rig, "qm", "list") == "".join(lines)
    assert lines[2].index("stopped") == lines[1].index("running") + 1, "a long name pushes the columns after it"


def test_status_and_config(rig: ProxmoxRig) -> None:
    assert said(rig, "pct", "status", "101") == "status: running\n"
    assert said(rig, "qm", "status", "200") == "status: running\n"
    verbose = said(rig, "pct", "status", "101", "--verbose").splitlines()
    assert verbose == sorted(verbose) and f"pid: {rig.container.lxc('info', '-pH').strip()}" in verbose
    config = {"hostname": "ct101", "description": "100% é: two\nlines", "dev0": "/dev/nvidia0,gid=44"}
    raw = [["lxc.mount.entry", "/dev/nvidia1 dev/nvidia1 none bind"], ["lxc.cgroup2.devices.allow", "c 195:* rwm"]]
    rig.change(101, config=config, raw=raw)
    assert said(rig, "pct", "config", "101") == (
        "description: 100%25 %C3%A9%3A two%0Alines\n"
        "dev0: /dev/nvidia0,gid=44\n"
        "hostname: ct101\n"
        "lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind\n"
        "lxc.cgroup2.devices.allow: c 195:* rwm\n"
    )


def test_pct_exec_is_lxc_attach(rig: ProxmoxRig) -> None:
    odd = ["a b", "", "*", "$HOME", "it's", "-n", "é\n"]
    assert said(rig, "pct", "exec", "101", "--", "printf", "[%s]", *odd) == "".join(f"[{word}]" for word in odd)
    assert call(rig, "pct", "exec", "101", "--", "sh", "-c", "echo no >&2; exit 7").returncode == 7
    assert said(rig, "pct", "exec", "101", "--", "cat", data=b"in\n") == "in\n"
    ours = Path("/proc/sys/kernel/random/boot_id").read_text()
    assert said(rig, "pct", "exec", "101", "--", "cat", "/proc/sys/kernel/random/boot_id") != ours


def test_pct_exec_keeps_the_environment_unless_told(rig: ProxmoxRig) -> None:
    env = {"SECRET": "of the host", "SSL_CERT_FILE": "/x", "LANG": "de_DE.UTF-8", "HOME": "/root/host"}
    kept = said(rig, "pct", "exec", "101", "--", "env", **env).splitlines()
    assert {"SECRET=of the host", "LANG=de_DE.UTF-8", "HOME=/root/host", "PATH=/sbin:/bin:/usr/sbin:/usr/bin"} <= {
        *kept
    }
    assert not any(line.startswith("SSL_CERT") for line in kept), "sub clean_environment"
    assert kept == said(rig, "pct", "exec", "101", "--keep-env", "1", "--", "env", **env).splitlines()
    for spelling in (["--keep-env", "0"], ["--keep-env=0"], ["-keep-env", "0"]):
        clean = said(rig, "pct", "exec", "101", *spelling, "--", "env", **env)
        assert "SECRET" not in clean and "HOME=" not in clean and "LANG=" not in clean


def test_an_old_pct_knows_no_keep_env(rig: ProxmoxRig) -> None:
    rig.node(keep_env_option=False)
    refused = call(rig, "pct", "exec", "101", "--keep-env", "0", "--", "true")
    assert refused.returncode == 255 and refused.stderr.startswith(b"Unknown option: keep-env\n400 unable to parse")
    assert call(rig, "pct", "exec", "101", "--", "true").returncode == 0


def test_what_pct_says_about_guests_that_do_not_run(rig: ProxmoxRig) -> None:
    assert call(rig, "pct", "start", "101").stderr == b"CT 101 already running\n"
    assert said(rig, "pct", "stop", "101") == ""
    refused = call(rig, "pct", "exec", "101", "--", "true")
    assert (refused.returncode, refused.stderr) == (255, b"container '101' not running!\n")
    assert call(rig, "pct", "stop", "101").stderr == b"CT 101 not running\n"
    assert said(rig, "pct", "status", "101") == "status: stopped\n"
    absent = call(rig, "pct", "exec", "999", "--", "true")
    assert absent.stderr == b"Configuration file 'nodes/pve/lxc/999.conf' does not exist\n" and absent.returncode
    rig.change(101, lock="backup")
    assert call(rig, "pct", "start", "101").stderr == b"CT is locked (backup)\n"
    rig.change(101, lock="")
    assert said(rig, "pct", "start", "101") == ""
    before = rig.container.run("cat", "/proc/sys/kernel/random/boot_id")
    assert said(rig, "pct", "shutdown", "101", "--timeout", "10") == ""
    assert said(rig, "pct", "start", "101") == ""
    assert rig.container.run("cat", "/proc/sys/kernel/random/boot_id") != before


def test_guest_exec_prints_pretty_canonical_json(rig: ProxmoxRig) -> None:
    """print to_json($result, { pretty => 1, canonical => 1, utf8 => 1 })"""
    exec_ = ("qm", "guest", "exec", "200")
    assert said(rig, *exec_, "--", "sh", "-c", "echo out; echo err >&2; exit 3") == (
        '{\n   "err-data" : "err\\n",\n   "exitcode" : 3,\n   "exited" : 1,\n   "out-data" : "out\\n"\n}\n'
    ), "qm's own exit status is 0"
    assert said(rig, *exec_, "--", "true") == '{\n   "exitcode" : 0,\n   "exited" : 1\n}\n', (
        "data only where there is any"
    )
    raw = json.loads(said(rig, *exec_, "--", "printf", "\\377é"))
    assert raw["out-data"].encode("latin-1") == b"\xff" + "é".encode()
    environment = json.loads(said(rig, *exec_, "--", "env"))["out-data"]
    assert "HOME=" not in environment
    assert json.loads(said(rig, *exec_, "--", "sh", "-c", "kill -9 $$")) == {"exited": 1, "signal": 9}
    no_shell = json.loads(said(rig, *exec_, "--", "echo", "$HOME", "~", "*"))
    assert no_shell["out-data"] == "$HOME ~ *\n"


def test_guest_exec_waits_as_long_as_told(rig: ProxmoxRig) -> None:
    done = call(rig, "qm", "guest", "exec", "200", "--timeout", "1", "--", "sh", "-c", "sleep 2; echo late")
    pid = json.loads(done.stdout)["pid"]
    assert done.returncode == 0 and done.stderr == b"timeout reached, returning pid\n"
    assert done.stdout == b'{\n   "pid" : %d\n}\n' % pid
    assert json.loads(said(rig, "qm", "guest", "exec-status", "200", str(pid))) == {"exited": 0}
    while not (told := json.loads(said(rig, "qm", "guest", "exec-status", "200", str(pid))))["exited"]:
        pass
    assert told == {"exited": 1, "exitcode": 0, "out-data": "late\n"}, "it was not stopped"
    again = call(rig, "qm", "guest", "exec-status", "200", str(pid))
    assert (again.returncode, again.stderr) == (255, b"Agent error: Invalid parameter 'pid'\n"), "an end is told once"
    at_once = call(rig, "qm", "guest", "exec", "200", "--synchronous", "0", "--", "true")
    assert set(json.loads(at_once.stdout)) == {"pid"} and at_once.stderr == b""


def test_guest_exec_takes_one_mebibyte(rig: ProxmoxRig) -> None:
    exec_ = ("qm", "guest", "exec", "200", "--pass-stdin", "1", "--", "wc", "-c")
    assert json.loads(said(rig, *exec_, data=b"x" * 1024 * 1024))["out-data"] == f"{1024 * 1024}\n"
    refused = call(rig, *exec_, data=b"x" * (1024 * 1024 + 1))
    assert refused.returncode and refused.stderr == b"'input-data' (STDIN) is limited to 1 MiB, aborting\n"
    rig.node(agent_output_limit=10)
    cut = json.loads(said(rig, "qm", "guest", "exec", "200", "--", "seq", "100"))
    assert cut["out-data"] == "1\n2\n3\n4\n5\n" and cut["out-truncated"] == 1


@pytest.mark.parametrize(
    ("agent", "message"),
    [("none", b"No QEMU guest agent configured\n"), ("silent", b"QEMU guest agent is not running\n")],
)
def test_guest_exec_without_an_agent(rig: ProxmoxRig, agent: str, message: bytes) -> None:
    rig.change(200, agent=agent)
    refused = call(rig, "qm", "guest", "exec", "200", "--", "true")
    assert refused.returncode and refused.stderr == message
    missing = call(rig, "qm", "guest", "exec", "999", "--", "true")
    assert missing.stderr == b"Configuration file 'nodes/pve/qemu-server/999.conf' does not exist\n"


def test_pvesh_prints_canonical_json(rig: ProxmoxRig) -> None:
    rig.change(101, name="ct-é", lock="backup")
    line = said(rig, "pvesh", "get", "/nodes/pve/lxc", "--output-format", "json")
    (told,) = json.loads(line)
    assert line == json.dumps([told], sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
    assert (told["vmid"], told["name"], told["lock"], told["status"]) == ("101", "ct-é", "backup", "running")
    pretty = said(rig, "pvesh", "get", "/nodes/localhost/qemu/200/status/current", "--output-format", "json-pretty")
    assert pretty.startswith('{\n   "cpus" : 2,\n') and pretty.endswith("\n}\n")


async def test_a_login_on_the_host_finds_them(rig: ProxmoxRig) -> None:
    from remote.connect import Rig

    async with Rig(rig.project()) as hosts:
        host = await hosts.link("pve")
        result = await host.run(["pct", "exec", "101", "--keep-env", "0", "--", "uname", "-n"])
        assert result.text().strip() == "ct101"
        assert (await host.run(script="pwd; ls")).text().split() == ["/root"], "a home of its own, empty"


async def test_guests_have_an_sshd_with_keys_of_their_own(rig: ProxmoxRig) -> None:
    """Reached through the host; what `pct exec … cat` tells is what the sshd shows."""
    import asyncssh

    for made, tell in (
        (rig.container, ["pct", "exec", "101", "--"]),
        (rig.vm, ["qm", "guest", "exec", "200", "--"]),
    ):
        shown = await asyncssh.get_server_host_key(made.address, 22)
        assert shown is not None
        public = shown.export_public_key().decode().split()[1]
        assert public in said(rig, *tell, "sh", "-c", "cat /etc/ssh/ssh_host_*_key.pub")
    assert rig.container.host_keys() != rig.vm.host_keys()
