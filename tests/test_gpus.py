"""Every GPU, every byte, every holder: the real probe with the real pynvml on a library that answers as NVML does."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from remote import cleanup, gpu_checks, gpu_history, gpus
from tests.lab.gpu_machine import LIBRARIES, REPO, FakeGpu, Machine, fake_gpu, gpu_machine, holder_program

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


async def look_at(machine: Machine, **more: object) -> gpus.Look:
    project = machine.project()
    link = machine.link()
    try:
        return await gpus.look(link, project, **more)  # type: ignore[arg-type]
    finally:
        await link.aclose()


@pytest.mark.parametrize(("code", "state"), [(18, "mismatch"), (9, "no-driver"), (999, "failed")])
async def test_an_nvml_that_does_not_come_up_is_a_state(code: int, state: str) -> None:
    with gpu_machine([fake_gpu(0)]) as machine:
        machine.head["init"] = code
        machine.write()
        look = await look_at(machine)
        assert (look.state, look.gpus) == (state, ()) and look.reason
        done = machine.rigbook("gpus")
        assert (done.returncode == 0 and b"GPU" in done.stdout) or b"NVML" in done.stdout


async def test_no_gpu_and_no_library_are_two_states() -> None:
    with gpu_machine([], nodes=["nothing"]) as machine:
        machine.run(["sh", "-c", f"rm {LIBRARIES}/libnvidia-ml.so.1"])
        assert (await look_at(machine)).state == "none"
    with gpu_machine([fake_gpu(0)]) as machine:
        machine.run(["sh", "-c", f"rm {LIBRARIES}/libnvidia-ml.so.1"])
        look = await look_at(machine)
        assert look.state == "no-library" and "libnvidia-ml.so.1" in look.reason


async def test_a_driver_that_does_not_return_costs_five_seconds_once() -> None:
    with gpu_machine([fake_gpu(0)]) as machine:
        machine.head["hang"] = 1000
        machine.write()
        project, link = machine.project(), machine.link()
        try:
            assert (await gpus.look(link, project)).state == "hung"
            async with asyncio.timeout(4):  # and from then on it is said at once
                look = await gpus.look(link, project)
            assert look.state == "hung" and "not returned" in look.reason
            await (await link.probe()).call("clock")  # the probe itself goes on
        finally:
            await link.aclose()


async def test_mig_instances_are_told_and_the_whole_load_is_not() -> None:
    gpu = fake_gpu(0, mig=1)
    gpu.more = ["slice MIG-aaaaaaaa-1111-2222-3333-444444444444 7 21474836480"]
    gpu.more.append("error nvmlDeviceGetUtilizationRates 3")
    with gpu_machine([gpu]) as machine:
        look = await look_at(machine)
        (found,) = look.gpus
        assert found.values["mig"] is True and found.values["load"] == {"na": "not supported"}
        (instance,) = found.values["instances"]
        assert (instance["gi"], instance["memory"]["total"]) == (7, 20 << 30)


async def test_a_gpu_that_falls_off_the_bus_keeps_its_name() -> None:
    with gpu_machine([fake_gpu(0), fake_gpu(1)]) as machine:
        project, link = machine.project(), machine.link()
        try:
            before = await gpus.look(link, project)
            machine.gpus[1].values["lost"] = 1
            machine.write()
            lost = (await gpus.look(link, project)).gpus[1]
            assert (lost.state, lost.uuid) == ("lost", before.gpus[1].uuid)
            machine.gpus[1].values["lost"] = 0
            machine.write()
            assert (await gpus.look(link, project)).gpus[1].state == "ok"
        finally:
            await link.aclose()


async def test_memory_with_no_process_is_unattributed_and_load_is_a_ghost() -> None:
    with gpu_machine([fake_gpu(0, base=5 << 30), fake_gpu(1, load=100)]) as machine:
        look = await look_at(machine)
        share = look.gpus[0].unattributed
        assert share is not None and share.size == 5 << 30 and "cannot see" in share.reason
        assert look.gpus[1].ghost and not look.gpus[0].ghost
        found = {(finding.check.id, finding.evidence) for finding in gpu_checks.findings(look)}
        assert {("gpu.held", look.gpus[0].uuid), ("gpu.ghost", look.gpus[1].uuid)} <= found


async def test_a_forked_child_that_keeps_the_files_is_named() -> None:
    """The opener died; NVML lists nobody, and the memory stays."""
    with gpu_machine([fake_gpu(0)]) as machine:
        env = {"FAKE_VRAM": f"0:{700 * MIB}", "FAKE_VRAM_SILENT": "1"}
        child = machine.hold("/dev/nvidia0", env=env)
        look = await look_at(machine)
        (holder,) = look.gpus[0].holders
        assert holder.pid.pid == child and not holder.used
        share = look.gpus[0].unattributed
        assert (
            share is not None and share.size == 700 * MIB and f"pid {child}, which NVML does not list" in share.reason
        )


async def test_a_mapping_alone_holds_and_so_does_another_name() -> None:
    with gpu_machine([fake_gpu(0)]) as machine:
        # /dev/null cannot be mapped; /dev/zero can.
        machine.run(["sh", "-c", "rm /dev/nvidia0 && mknod -m 666 /dev/nvidia0 c 1 5"])
        mapped = machine.hold("--map", "/dev/nvidia0")
        look = await look_at(machine, deep=True)
        assert [holder.pid.pid for holder in look.gpus[0].holders] == [mapped]
        # The same device under another name: found by its number, as the kernel has it registered.
        machine.run(
            ["sh", "-c", "mknod -m 666 /dev/renamed c 10 229 && sed 's/^ 10 .*/ 10 nvidia/' /proc/devices >/dev/d"]
        )
        machine.run(["mount", "--bind", "/dev/d", "/proc/devices"])
        renamed = machine.hold("/dev/renamed")
        link = machine.link()
        try:
            seen = await (await link.probe()).call("gpu_look", jobs="/nowhere", deep=True)
            nodes = {p["pid"]: p["nodes"] for p in seen["holders"]["processes"]}
            assert nodes[renamed] == {"/dev/renamed": 1}
        finally:
            await link.aclose()


async def test_uninterruptible_work_is_said_to_be_so() -> None:
    """The parent of a vfork that does not come back is in D for real: nobody offers to kill it."""
    with gpu_machine([fake_gpu(0)]) as machine:
        python = machine.interpreter()
        project = machine.project(ORPHANS.format(python=python))
        env = {"FAKE_VRAM": f"0:{64 * MIB}"}
        pool = machine.pool(1, "/dev/nvidia0", "--vfork", program=python, env=env)
        machine.kill(pool.launcher)
        link = machine.link()
        try:
            plan = await cleanup.plan(link, interpreters=gpus.interpreters(project, "here"))
            (stuck,) = [line for line in plan.kept if f"pid {pool.workers[0]} " in line]
            assert not [item for item in plan.items if item.pid == pool.workers[0]]
            assert "(unkillable" in stuck and "vfork" in stuck
        finally:
            await link.aclose()


async def test_a_container_and_its_host_number_one_process_twice() -> None:
    with gpu_machine([fake_gpu(0)]) as machine:
        argv = ["unshare", "-p", "-m", "--mount-proc", "--fork", "--kill-child", str(holder_program()), "--fork"]
        process = machine.popen([*argv, "/dev/nvidia0"], {"FAKE_VRAM": f"0:{64 * MIB}"}, stdout=subprocess.PIPE)
        assert process.stdout is not None
        inner = [int(process.stdout.readline().split()[1]) for _ in range(2)][1]
        look = await look_at(machine)
        (holder,) = look.gpus[0].holders
        assert holder.inner is not None and holder.inner.pid == inner != holder.pid.pid
        assert holder.used == {look.gpus[0].uuid: 64 * MIB}
        row = holder.to_dict()
        assert (row["pid"], row["guest_pid"]) == (holder.pid.pid, inner)


def test_who_cannot_be_looked_into_is_nobodys_orphan() -> None:
    """What it has open is not to be seen without root: it may serve. On plain data, since root sees everything."""
    from remote.probe import classes

    worker = {
        "own": False,
        "pid": 7,
        "nspid": [7],
        "guest": None,
        "exe": "/x/python3",
        "comm": "python3",
        "uid": 1000,
        "nodes": {},
        "job": None,
        "interpreter": "/x/python3",
        "readable": True,
        "reparented": True,
        "leads": False,
        "leader_alive": False,
        "session_alive": False,
        "unit": None,
        "answers": [],
        "live_children": False,
        "markers": {},
        "stuck": [],
    }
    assert classes.classify(worker)[0] == "unclaimed"
    assert classes.classify({**worker, "readable": False})[0] == "foreign"


def test_the_json_is_what_the_page_says(machine: Machine) -> None:
    machine.project()
    machine.hold("/dev/nvidia1", env={"FAKE_VRAM": f"1:{MIB}"})
    document = json.loads(machine.rigbook("gpus", "--json").stdout)
    sections = (REPO / "docs/gpus.md").read_text().split("\n## ")
    told = {
        part.split("\n")[0]: {
            name
            for line in part.splitlines()
            if line.startswith("| `")
            for name in re.findall(r"`(\w+)`", line.split("|")[1])
        }
        for part in sections[1:]
    }
    host = document["hosts"][0]
    gpu = host["gpus"][1]
    assert set(document) == {"hosts", "unreachable"}
    assert (told["HOST"], told["GPU"]) == (set(host), set(gpu))
    assert told["HOLDER"] == set(gpu["holders"][0])


async def test_the_heir_of_a_dead_opener_gets_its_memory() -> None:
    """Seen on an H200: NVML goes on naming the dead opener ([Not Found]), the forked child keeps 1,542 MiB."""
    with gpu_machine([fake_gpu(0, base=9 * MIB)]) as machine:
        python = machine.interpreter()
        project = machine.project(ORPHANS.format(python=python))
        opener = 4000
        env = {"FAKE_VRAM": f"0:{1542 * MIB}", "FAKE_VRAM_OPENER": str(opener)}
        pool = machine.pool(1, "/dev/nvidia0", program=python, env=env)
        machine.kill(pool.launcher)
        (child,) = pool.workers
        bystander = machine.hold("/dev/nvidia0", env={"FAKE_VRAM": f"0:{3 * MIB}"})
        look = await look_at(machine)
        holders = {holder.pid.pid: holder for holder in look.gpus[0].holders}
        assert set(holders) == {child, bystander}
        assert holders[child].used == {look.gpus[0].uuid: 1542 * MIB} and f"pid {opener} opened" in holders[child].why
        link = machine.link()
        try:
            plan = await cleanup.plan(link, interpreters=gpus.interpreters(project, "here"))
            assert [item.pid for item in plan.items] == [child]
            (gpu,) = plan.gpus
            assert (gpu.held, gpu.others) == (1542 * MIB, 3 * MIB)
            outcome = await cleanup.apply(link, plan, grace=2)
            assert outcome.verified and outcome.gpus[0]["used_after"] == 12 * MIB
        finally:
            await link.aclose()


async def test_the_app_shows_and_keeps_what_the_gpus_do() -> None:
    from tui.detail import host_detail
    from tui.gpu_source import GpuWatch
    from tui.host_source import HostWatch
    from tui.look import UNICODE
    from tui.screens.rig import host_says
    from tui.snapshot import Snapshot

    with gpu_machine([fake_gpu(0, load=40), fake_gpu(1, load=60)]) as machine:
        machine.hold("/dev/nvidia0", env={"FAKE_VRAM": f"0:{14 << 30}"})
        project, link = machine.project(), machine.link()
        changes: list[int] = []
        host = HostWatch("here", project.hosts["here"], None, lambda: None)  # type: ignore[arg-type]
        watch = GpuWatch(host, project, machine.folder, lambda: changes.append(1))
        try:
            await watch.look()
            assert not changes, "a host that does not answer is not asked"
            host.link = link
            await watch.look()
        finally:
            await link.aclose()
        assert changes and watch.view.words == "2 GPUs 50% 14/281 GiB"
        view = replace(host.view, gpus=watch.view, link="up", answered=watch.view.at)
        snapshot = Snapshot(at=watch.view.at or 0.0)
        assert "2 GPUs 50%" in host_says(view, "up", snapshot, UNICODE)
        text = "\n".join(line.text for line in host_detail(view, snapshot, 100, UNICODE))
        assert "14336/143771" in text
        assert gpu_history.History(machine.folder).since("here", 0.0)[-1]["gpus"]


async def test_memory_that_does_not_come_back_is_not_verified() -> None:
    with gpu_machine([fake_gpu(0)]) as machine:
        machine.head["lag"] = 3600_000
        machine.write()
        python = machine.interpreter()
        machine.project()
        pool = machine.pool(1, "/dev/nvidia0", program=python, env={"FAKE_VRAM": f"0:{900 * MIB}"})
        machine.kill(pool.launcher)
        link = machine.link()
        try:
            plan = await cleanup.plan(link, interpreters=[python])
            outcome = await cleanup.apply(link, plan, grace=2, memory_wait=1.0)
        finally:
            await link.aclose()
        assert not outcome.verified and "NOT FREE" in outcome.describe() and not outcome.refused
        assert outcome.processes[0]["outcome"] == "ended by TERM"


def test_other_peoples_work_is_named_twice(machine: Machine) -> None:
    machine.project()
    pid = machine.hold("/dev/nvidia2", env={"FAKE_VRAM": f"2:{70 * MIB}"})
    bystander = machine.hold("/dev/nvidia2")
    assert machine.rigbook("clean", "--foreign", f"here:{pid}", "--yes").returncode == 2, "never at once"
    done = machine.rigbook("clean", "--foreign", f"here:{pid}", "--json")
    (plan,) = json.loads(done.stdout)
    assert done.returncode == 6 and [(item["pid"], item["kind"]) for item in plan["items"]] == [(pid, "foreign")]
    for words in ([], ["--foreign", f"here:{bystander}"], ["--foreign", f"here:{pid}", "--foreign", "here:1"]):
        refused = machine.rigbook("clean", "--apply", plan["id"], "--yes", *words)
        assert refused.returncode == 3 and b"clean.foreign" in refused.stderr
    assert machine.alive(pid)
    assert machine.rigbook("clean", "--apply", plan["id"], "--foreign", f"here:{pid}").returncode == 0
    assert not machine.alive(pid) and machine.alive(bystander)
    # What is protected is in no plan, whoever asks.
    note = json.loads(machine.rigbook("clean", "--foreign", "here:1", "--json").stdout)[0]
    assert not note["items"] and note["notes"]


def test_doctor_looks_at_the_gpus_too() -> None:
    with gpu_machine([fake_gpu(0)]) as machine:
        machine.project()
        rows = {row["check"]: row for row in json.loads(machine.rigbook("doctor", "--json").stdout)}
        assert rows["gpu.held"]["state"] == "ok" and rows["gpu.held"]["host"] == "here"
        machine.gpus[0].values["temp"] = 95
        machine.gpus[0].values["base"] = 5 << 30
        machine.write()
        done = machine.rigbook("doctor", "--json")
        rows = {row["check"]: row for row in json.loads(done.stdout)}
        assert done.returncode == 6 and {"gpu.held", "gpu.hot"} <= {
            id for id, row in rows.items() if row["state"] != "ok"
        }
        assert rows["gpu.held"]["evidence"] == machine.gpus[0].values["uuid"]
