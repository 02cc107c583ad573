"""Every GPU, every byte, every holder: the real probe with the real pynvml on a library that answers as NVML does."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from remote import gpus
from tests.lab.gpu_machine import FakeGpu, Machine, fake_gpu, gpu_machine

MIB = 1 << 20


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    with gpu_machine([fake_gpu(at) for at in range(8)]) as machine:
        yield machine


def test_eight_gpus_fit_eighty_columns(machine: Machine) -> None:
    machine.project()
    machine.hold("/dev/nvidia0", "/dev/nvidiactl", env={"FAKE_VRAM": f"0:{44062 * MIB}"})
    done = machine.rigbook("gpus")
    assert done.returncode == 0, done.stderr.decode()
    text = done.stdout.decode()
    print(text)
    rows = [line for line in text.splitlines() if "H200" in line]
    assert len(rows) == 8 and max(map(len, text.splitlines())) <= 80
    assert "44062/143771" in rows[0] and "116/700" in rows[0] and "34C" in rows[0] and "5x16" in rows[0]


def test_json_gives_every_byte_to_somebody(machine: Machine) -> None:
    machine.project()
    pid = machine.hold("/dev/nvidia3", env={"FAKE_VRAM": f"3:{2566 * MIB}"})
    machine.gpus[3].values["base"] = 15 * MIB
    machine.write()
    done = machine.rigbook("gpus", "--json")
    (host,) = json.loads(done.stdout)["hosts"]
    gpu = host["gpus"][3]
    (holder,) = gpu["holders"]
    assert (holder["pid"], holder["used"]) == (pid, {gpu["uuid"]: 2566 * MIB})
    assert holder["class"] == "foreign" and holder["nodes"] == ["/dev/nvidia3"]
    assert gpu["unattributed"] == {"bytes": 15 * MIB, "reason": "the driver's own bookkeeping"}
    assert gpu["memory"]["used"] == sum(holder["used"].values()) + gpu["unattributed"]["bytes"]


async def test_what_the_driver_does_not_tell_is_no_zero() -> None:
    lame: FakeGpu = fake_gpu(0)
    lame.more = [f"error {call} 3" for call in ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTotalEccErrors")]
    lame.more.append("error nvmlDeviceGetComputeRunningProcesses_v3 4")
    with gpu_machine([lame, fake_gpu(1, lost=1)]) as machine:
        project = machine.project()
        link = machine.link()
        try:
            look = await gpus.look(link, project)
            assert look.state == "ok" and [gpu.state for gpu in look.gpus] == ["ok", "lost"]
            assert look.gpus[0].values["power"] == {"na": "not supported"}
            assert look.gpus[0].values["ecc_volatile"] == {"na": "not supported"}
            assert look.gpus[0].values["processes"] == {"na": "no permission"}
            assert look.gpus[0].values["load"] == 0  # this zero is one
            machine.head["init"] = 18
            machine.gpus = []
            machine.write()
            assert (await gpus.look(link, project)).state != "ok"
        finally:
            await link.aclose()


ORPHANS = """
[envs.train]
host = "here"
python = "{python}"
"""


def test_an_orphaned_pool_is_given_back_and_proved(machine: Machine) -> None:
    """The recording's case: a pool's two workers hold 2.5 GiB each, their parent was killed; a stranger beside."""
    python = machine.interpreter()
    machine.project(ORPHANS.format(python=python))
    assert machine.rigbook("clean").returncode == 0, "nothing is wrong yet"
    pool = machine.pool(2, "/dev/nvidia5", env={"FAKE_VRAM": f"5:{2566 * MIB}"}, program=python)
    stranger = machine.hold("/dev/nvidia5", env={"FAKE_VRAM": f"5:{7 * MIB}"})
    assert machine.rigbook("clean").returncode == 0, "a pool whose launcher lives is not given back"
    machine.kill(pool.launcher)
    done = machine.rigbook("clean", "--json")
    assert done.returncode == 6, done.stderr.decode()
    (plan,) = json.loads(done.stdout)
    assert sorted(item["pid"] for item in plan["items"]) == sorted(pool.workers)
    assert {item["kind"] for item in plan["items"]} == {"unclaimed"}
    (gpu,) = plan["gpus"]
    assert (gpu["used"], gpu["held"], gpu["others"]) == ((2 * 2566 + 7) * MIB, 2 * 2566 * MIB, 7 * MIB)
    refused = machine.rigbook("clean", "--apply", plan["id"])
    assert refused.returncode == 3 and b"believed to be nobody's" in refused.stderr
    assert all(machine.alive(pid) for pid in pool.workers)
    at_once = machine.rigbook("clean", "--yes")
    assert all(machine.alive(pid) for pid in pool.workers), at_once.stdout
    done = machine.rigbook("clean", "--apply", plan["id"], "--yes", "--json")
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
    (outcome,) = json.loads(done.stdout)
    assert outcome["verified"] and not any(machine.alive(pid) for pid in pool.workers)
    assert outcome["gpus"][0]["used_after"] == 7 * MIB and machine.alive(stranger)
    assert machine.rigbook("clean").returncode == 0


def test_what_is_wrong_is_told_once_and_what_was_is_kept(machine: Machine) -> None:
    machine.project()
    machine.gpus[6].values.update(temp=89, throttle=0x40 | 0x04)
    machine.write()
    for _ in range(2):
        assert machine.rigbook("gpus").returncode == 0
    machine.gpus[6].values.update(temp=34, throttle=0)
    machine.write()
    machine.rigbook("gpus")
    events = machine.rigbook("book", "log", "--json").stdout.decode()
    assert events.count('"check": "gpu.hot"') == 1 and events.count('"check": "gpu.throttled"') == 1
    told = machine.rigbook("gpus", "--since", "5m", "--json")
    rows = json.loads(told.stdout)["hosts"]["here"]
    uuid = f"GPU-{6:08x}-2222-3333-4444-555555555555"
    assert [row["gpus"][uuid]["temperature"] for row in rows][-3:] == [89, 89, 34]
    assert rows[-2]["gpus"][uuid]["throttle"] == ["power cap", "hw thermal"]
    text = machine.rigbook("gpus", "--since", "5m").stdout.decode()
    assert max(map(len, text.splitlines())) <= 80 and "34" in text
    assert machine.rigbook("gpus", "--since", "soon").returncode == 2


def test_a_reset_is_planned_and_never_done(machine: Machine) -> None:
    machine.project()
    pid = machine.hold("/dev/nvidia7")
    done = machine.rigbook("gpus", "--reset-plan", "7", "--json")
    plan = json.loads(done.stdout)
    assert done.returncode == 3 and f"pid {pid} has it open" in plan["against"][0]
    machine.kill(pid)
    done = machine.rigbook("gpus", "--reset-plan", "7", "--json")
    assert (done.returncode, json.loads(done.stdout)["against"]) == (0, [])
