"""Guests that share, take and mismatch GPUs: by a Proxmox host's own files, and by two looks joined."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remote import gpu_checks, gpu_history, gpu_map, gpus
from remote.probe import gpulook, holders, pve
from state.project import loads

CT = """#a description that says hostpci0: 0000:06:00.0
arch: amd64
dev0: /dev/nvidia0,gid=44
dev1: path=/dev/nvidiactl
hostname: llm
lxc.mount.entry: /dev/nvidia1 dev/nvidia1 none bind,optional,create=file
memory: 65536

[before-upgrade]
dev2: /dev/nvidia7
"""
VM = "name: win\nhostpci0: 06:00,pcie=1\nhostpci1: mapping=third,x-vga=1\nmemory: 8192\n"
MAPPING = "third\n\tmap id=10de:2335,iommugroup=14,node=pve,path=0000:08:00.0,subsystem-id=10de:18be\n"


def files(root: Path) -> dict[str, str]:
    for name, text in (
        ("pve/lxc/101.conf", CT),
        ("pve/lxc/102.conf", "hostname: other\ndev0: /dev/nvidia0\n"),
        ("pve/lxc/103.conf", "hostname: none\nmemory: 512\n"),
        ("pve/qemu-server/200.conf", VM),
        ("pve/mapping/pci.cfg", MAPPING),
        ("cgroup/lxc/101/cgroup.procs", ""),
        ("cgroup/lxc/101/ns/init.scope/cgroup.procs", "1\n"),
        ("cgroup/lxc/102/ns/cgroup.procs", "1\n"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return {"root": str(root / "pve"), "cgroups": str(root / "cgroup"), "run": str(root / "run")}


def test_a_hosts_files_say_who_is_given_what(tmp_path: Path) -> None:
    found = {guest["id"]: guest for guest in pve.guests(**files(tmp_path)) or []}
    assert set(found) == {"101", "102", "200"}
    assert found["101"]["nodes"] == ["/dev/nvidia0", "/dev/nvidia1"] and found["101"]["running"]
    assert found["200"]["pci"] == ["0000:06:00.0", "0000:08:00.0"] and not found["200"]["running"]
    assert pve.guests(str(tmp_path / "nothing")) is None


def test_userland_is_read_where_the_container_has_it(tmp_path: Path) -> None:
    (tmp_path / "7/usr/lib/x86_64-linux-gnu").mkdir(parents=True)
    (tmp_path / "7/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.86.15").touch()
    assert pve.userland(7, f"{tmp_path}/%d") == "570.86.15"
    (tmp_path / "8").mkdir()
    assert pve.userland(8, f"{tmp_path}/%d") is None


def process(pid: int, **more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "pid": pid, "starttime": 100 + pid, "boot_id": "b", "nspid": [pid], "guest": None, "class": "foreign",
        "why": "", "run": "", "job_id": "", "command": f"p{pid}", "state": "S", "threads": {"S": 1}, "stuck": [],
        "started": None, "nodes": {}, "gpus": [], "markers": {}, "pgrp": pid, "session": pid, "uid": 0, "guest_uid": 0,
    }  # fmt: skip
    return {**given, **more}


def seen(processes: list[dict[str, Any]], guests: list[dict[str, Any]] | None, listed: Any = ()) -> dict[str, Any]:
    def gpu(index: int) -> dict[str, Any]:
        memory = {"total": 100 << 20, "used": 0, "reserved": 0, "free": 0}
        own = [entry for entry in listed if entry[0] == index]
        memory["used"] = sum(size for _, _, size in own)
        return {
            "index": index, "uuid": f"GPU-{index}", "pci": f"0000:0{index + 6}:00.0", "minor": index, "state": "ok",
            "memory": memory, "processes": [{"pid": pid, "kind": "C", "used": size} for _, pid, size in own],
        }  # fmt: skip

    pci = [{"pci": f"0000:0{at + 6}:00.0", "driver": "nvidia", "iommu_group": str(12 + at // 2)} for at in range(2)]
    pci.append({"pci": "0000:08:00.0", "driver": "vfio-pci", "iommu_group": "14"})
    return {
        "nvml": {"state": "ok", "reason": "", "kernel_module": "580.159.03", "gpus": [gpu(0), gpu(1)]},
        "holders": {"processes": processes, "unreadable": 0},
        "pci": pci,
        "xid": [],
        "guests": guests,
        "services": {},
        "at": 1.0,
        "seconds": 0.0,
        "cpu_seconds": 0.0,
    }  # fmt: skip


def test_a_vm_that_would_take_a_gpu_and_its_group_is_told(tmp_path: Path) -> None:
    guests = pve.guests(**files(tmp_path)) or []
    for guest in guests:
        guest["driver"] = "570.86.15" if guest["id"] == "101" else "580.159.03" if guest["kind"] == "lxc" else None
    look = gpus.read("pve", seen([], guests))
    told = {(check, message) for check, message in look.warnings}
    assert ("gpu.vm-takes", "starting VM 200 takes GPU 0 (0000:06:00.0) from CT 101, CT 102") in told
    group = "starting VM 200 takes GPU 1 (0000:07:00.0) from CT 101 (it is in the same IOMMU group)"
    assert ("gpu.vm-takes", group) in told
    assert ("gpu.shared", "GPU 0 (0000:06:00.0) is given to CT 101, CT 102") in told
    mismatch = "CT 101 has the libraries of driver 570.86.15, the host runs 580.159.03"
    assert ("gpu.driver-mismatch", mismatch) in told
    assert len(told) == 4
    # A running VM takes nothing more; the card that is given to it is its own.
    for guest in guests:
        guest["running"] = True
    look = gpus.read("pve", seen([], guests))
    assert not [check for check, _ in look.warnings if check == "gpu.vm-takes"]
    assert [(gpu.state, gpu.owner) for gpu in look.gpus if gpu.driver == "vfio-pci"] == [("passed-through", "vm:200")]


def test_the_vm_that_holds_a_card_is_found_by_its_process() -> None:
    qemu = process(9, guest={"kind": "vm", "id": "300"}, nodes={"/dev/vfio/14": 1})
    look = gpus.read("pve", seen([qemu], None))
    assert [gpu.owner for gpu in look.gpus if gpu.driver == "vfio-pci"] == ["vm:300"]


def test_the_container_says_what_its_host_cannot_know() -> None:
    project = loads(
        '[project]\nname = "x"\n[hosts.pve]\nkind = "proxmox"\nssh = "pve"\n'
        '[hosts.llm]\nkind = "lxc"\non = "pve"\nvmid = 101\nssh = "llm"\n',
        Path("/nowhere"),
    )
    guest = {"kind": "lxc", "id": "101"}
    outside = [
        process(4000, nspid=[4000, 81], guest=guest, gpus=[0], nodes={"/dev/nvidia0": 1}),
        process(4001, nspid=[4001, 82], guest=guest, gpus=[0], nodes={"/dev/nvidia0": 1}, starttime=1),
        process(81, gpus=[0], nodes={"/dev/nvidia0": 1}),  # of the host, with the container's number
    ]
    inside = [
        process(81, starttime=4100, run="run-7", job_id="j7", **{"class": "live", "why": "its job is running"}),
        process(82, starttime=2, **{"class": "orphan"}),  # its number, and another start time: somebody else
    ]
    host = gpus.read("pve", seen(outside, None, [(0, 4000, 5 << 20)]))
    own = gpus.read("llm", seen([dict(p, gpus=[0]) for p in inside], None))
    joined, _ = gpu_map.join([host, own], project.hosts)
    by_pid = {holder.pid.pid: holder for holder in joined.gpus[0].holders}
    assert (by_pid[4000].kind, by_pid[4000].run, by_pid[4000].inner) == ("live", "run-7", gpus.GuestPid("lxc:101", 81))
    assert by_pid[4001].kind == "foreign" and by_pid[81].kind == "foreign"
    assert gpus.HostPid("lxc:101", 81) != gpus.GuestPid("lxc:101", 81)
    assert joined.gpus[0].owner == "several"


def test_cgroup_paths_name_their_guests() -> None:
    docker = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    assert holders.guest("/lxc/101/ns/system.slice/ssh.service") == {"kind": "lxc", "id": "101"}
    nested = holders.guest(f"/lxc/101/ns/system.slice/docker-{docker}.scope")
    assert nested == {"kind": "lxc", "id": "101", "nested": f"docker:{docker[:12]}"}
    assert holders.guest("/lxc.payload.ct7/init.scope") == {"kind": "lxc", "id": "ct7"}
    assert holders.guest("/lxc.monitor/101") == {"kind": "lxc-monitor", "id": "101"}
    assert holders.guest("/qemu.slice/200.scope") == {"kind": "vm", "id": "200"}
    assert holders.guest(f"/system.slice/docker-{docker}.scope") == {"kind": "docker", "id": docker[:12]}
    assert holders.guest(f"/docker/{docker}") == {"kind": "docker", "id": docker[:12]}
    assert holders.guest("/user.slice/user-0.slice/session-3.scope") is None
    assert holders.unit("/lxc/101/ns/system.slice/train.service") == "train.service"
    assert holders.unit("/user.slice/user-0.slice/user@0.service/app.slice/x.service") == "x.service"
    assert holders.unit("/system.slice/ssh.service") is None and holders.unit("/lxc/101/ns") is None


def test_xid_lines_are_read_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,1000000,-;Linux version 6\n"
        "3,812,5000000,-;NVRM: Xid (PCI:0000:06:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "3,813,6000000,-;NVRM: Xid (0000:07:00): 13, Graphics Exception\n"
    )
    monkeypatch.setattr(gpulook, "_kmsg", -1)
    monkeypatch.setattr(gpulook, "_lines", [])
    # The kernel gives a record a read; of a file one read gives all of it.
    reads = [line.encode() for line in log.read_text().splitlines()]
    monkeypatch.setattr(gpulook.os, "read", lambda *_: reads.pop(0) if reads else b"")
    for _ in range(2):
        found = gpulook.xid(str(log)) or []
        assert [(entry["pci"], entry["xid"], entry["uptime"]) for entry in found] == [
            ("0000:06:00.0", 79, 5.0),
            ("0000:07:00.0", 13, 6.0),
        ]
    monkeypatch.setattr(gpulook, "_kmsg", -1)
    assert gpulook.xid(str(tmp_path / "none")) is None
    look = gpus.read("pve", {**seen([], None), "xid": found})
    history = gpu_history.History(tmp_path)
    begun = history.begun("pve", gpu_checks.findings(look))
    assert [finding.check.id for finding in begun] == ["gpu.xid", "gpu.xid"]
    assert not history.begun("pve", gpu_checks.findings(gpus.read("pve", seen([], None))))
    assert not history.begun("pve", gpu_checks.findings(look)), "what the log still says is no news"


def test_the_ring_drops_its_older_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_history, "LIMIT", 4000)
    history = gpu_history.History(tmp_path)
    for at in range(100):
        history.add(replace(gpus.read("pve", seen([], None)), at=float(at)))
    rows = history.since("pve", 0.0)
    assert (tmp_path / ".rigbook/gpus/pve.jsonl").stat().st_size <= 4400
    assert rows[-1]["at"] == 99.0 and [row["at"] for row in rows] == [float(at) for at in range(100 - len(rows), 100)]
    with (tmp_path / ".rigbook/gpus/pve.jsonl").open("ab") as file:
        file.write(b'{"at": 100, "sta')  # as a crash leaves it
    history.add(replace(gpus.read("pve", seen([], None)), at=101.0))
    assert [row["at"] for row in history.since("pve", 98.0)] == [98.0, 99.0, 101.0]
