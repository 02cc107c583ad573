"""Containers and VMs through their Proxmox host: every form of its lists, and a change that is proved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from remote.guests import columns
from state import events
from state.book import open_book
from state.journal import Journal
from state.outline import journal_path
from tests.lab.proxmox import ProxmoxRig, proxmox_rig
from tests.test_rig_commands import rigbook

PCT = "%-10s %-10s %-12s %-20s\n"  # pve-container src/PVE/CLI/pct.pm
QM_HEAD = "%10s %-20s %-10s %-10s %12s %-10s\n"
QM = "%10s %-20s %-10s %-10s %12.2f %-10s\n"  # qemu-server src/PVE/CLI/qm.pm


def test_the_columns_of_pct_list() -> None:
    text = PCT % ("VMID", "Status", "Lock", "Name")
    text += PCT % (101, "running", "", "llm") + PCT % (1234567, "stopped", "backup", "a" * 21)
    text += PCT % (102, "stopped", "", "")
    assert columns("lxc", text) == [
        {"vmid": "101", "status": "running", "lock": "", "name": "llm"},
        {"vmid": "1234567", "status": "stopped", "lock": "backup", "name": "a" * 21},
        {"vmid": "102", "status": "stopped", "lock": "", "name": ""},
    ]
    assert columns("lxc", "") == [], "with no guests there is not even a header"


def test_the_columns_of_qm_list() -> None:
    text = QM_HEAD % ("VMID", "NAME", "STATUS", "MEM(MB)", "BOOTDISK(GB)", "PID")
    text += QM % (200, "vm", "running", "4096", 32.0, 4242) + QM % (201, "b" * 21, "stopped", "512.5", 0.0, 0)
    text += QM % (202, "VM 202", "prelaunch", "8192", 1.5, 7)
    assert [(row["vmid"], row["name"], row["status"], row["maxmem"]) for row in columns("qemu", text)] == [
        ("200", "vm", "running", 4096 << 20),
        ("201", "b" * 21, "stopped", int(512.5 * (1 << 20))),
        ("202", "VM 202", "prelaunch", 8192 << 20),
    ]
    assert columns("qemu", "") == []


@pytest.fixture(scope="module")
def rig() -> Iterator[ProxmoxRig]:
    with proxmox_rig() as made:
        yield made


@pytest.fixture
def root(rig: ProxmoxRig) -> Iterator[Path]:
    """A project in the lab's folder, and the node as it was after each test."""
    before = rig.state.read_text()
    rig.project()
    root = rig.far.sshd.root
    hosts = '[hosts.pve]\nkind = "proxmox"\nssh = "box"\n[hosts.ct]\nkind = "lxc"\non = "pve"\nvmid = 101\n'
    hosts += '[hosts.vm]\nkind = "vm"\non = "pve"\nvmid = 200\n'
    (root / "rigbook.toml").write_text(f'[project]\nname = "lab"\nssh_config = "ssh_config"\n{hosts}')
    yield root
    rig.state.write_text(before)
    for guest in (rig.container, rig.vm):
        if not guest.running:
            guest.start()


def listed(root: Path) -> list[tuple[int, str, str, str, str | None]]:
    done = rigbook(root, "--json", "guests")
    assert done.returncode == 0, done.stderr
    return [(row["vmid"], row["kind"], row["name"], row["status"], row["declared"]) for row in json.loads(done.stdout)]


def test_guests_are_listed_by_pvesh_or_by_columns(rig: ProxmoxRig, root: Path) -> None:
    both = [(101, "lxc", "ct101", "running", "ct"), (200, "qemu", "vm200", "running", "vm")]
    assert listed(root) == both
    assert b"ct101" in rigbook(root, "guests", "list").stdout
    rig.change(101, name="c" * 21, lock="backup")
    rig.change(200, name="v" * 21)
    pvesh = rig.program("pvesh")
    text = pvesh.read_text()
    long = [(101, "lxc", "c" * 21, "running", "ct"), (200, "qemu", "v" * 21, "running", "vm")]
    try:
        for broken in (None, "#!/bin/sh\necho 'ipcc_send_rec[1] failed: Unknown error -1' >&2\nexit 255\n"):
            pvesh.write_text(broken or text)
            assert listed(root) == long, broken
        rig.node(guests={})
        assert listed(root) == []
        pvesh.write_text(text)
        assert listed(root) == []
    finally:
        pvesh.write_text(text)
    plain = rigbook(root, "guests", "start", "nobody")
    assert plain.returncode == 2 and b"guest.absent" in plain.stderr


def test_stop_and_start_are_planned_proved_and_recorded(rig: ProxmoxRig, root: Path) -> None:
    book = Journal.open(journal_path(root))
    book.append(events.RunStarted(run="train-1", what="stage", name="train", host="ct"))
    book.close()
    assert rigbook(root, "guests", "stop", "ct").returncode == 3, "nobody is here to agree"
    dry = rigbook(root, "--dry-run", "--json", "guests", "stop", "101", "--timeout", "5")
    assert dry.returncode == 0 and rig.container.running and b"stage train (train-1) runs in it" in dry.stderr
    assert json.loads(dry.stdout)[0]["needed"]
    done = rigbook(root, "--yes", "--json", "guests", "stop", "ct", "--timeout", "1", "--force")
    (outcome,) = json.loads(done.stdout)
    assert (done.returncode, outcome["verified"], outcome["status"]) == (0, True, "stopped"), done.stderr
    assert not rig.container.running
    assert rigbook(root, "exec", "ct", "--", "true").returncode == 255
    again = rigbook(root, "--yes", "guests", "stop", "ct")
    assert again.returncode == 0 and b"is stopped already" in again.stderr
    started = rigbook(root, "--yes", "guests", "start", "ct101")
    assert started.returncode == 0 and rig.container.running, started.stderr
    plans = [(plan.action, plan.verified) for plan in open_book(root).plans.values()]
    assert plans == [("guest.stop", True), ("guest.start", True)]


def test_a_guest_that_does_not_shut_down_is_not_called_stopped(rig: ProxmoxRig, root: Path) -> None:
    pct = rig.program("pct")
    text = pct.read_text()
    try:
        refuse = '[ "$1" != shutdown ]||{ echo "CT 101 shutdown timed out" >&2;exit 255;}\n'
        pct.write_text(text.replace("#!/bin/sh\n", f"#!/bin/sh\n{refuse}"))
        done = rigbook(root, "--yes", "--json", "guests", "stop", "ct", "--timeout", "1")
        (outcome,) = json.loads(done.stdout)
        assert (done.returncode, outcome["verified"], outcome["forced"]) == (5, False, False)
        assert outcome["status"] == "running" and "timed out" in outcome["said"] and rig.container.running
        done = rigbook(root, "--yes", "--json", "guests", "stop", "ct", "--timeout", "1", "--force")
        (outcome,) = json.loads(done.stdout)
        assert (done.returncode, outcome["verified"], outcome["forced"]) == (0, True, True)
    finally:
        pct.write_text(text)


def test_what_proxmox_is_at_work_on_is_left_alone(rig: ProxmoxRig, root: Path) -> None:
    rig.change(101, lock="backup")
    done = rigbook(root, "--yes", "guests", "stop", "ct")
    assert done.returncode == 3 and b"guest.locked" in done.stderr and rig.container.running
    rig.change(101, lock="")
    rig.vm.stop()
    rig.change(200, config={"hostpci0": "0000:01:00,pcie=1", "name": "vm200"})
    dry = rigbook(root, "--dry-run", "guests", "start", "vm")
    assert b"takes the PCI device 0000:01:00 from this host" in dry.stderr


def test_a_host_without_proxmox_is_told(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text('[project]\nname = "lab"\n[hosts.here]\nkind = "local"\n')
    done = rigbook(tmp_path, "guests")
    assert done.returncode == 2 and b"guest.no-host" in done.stderr
