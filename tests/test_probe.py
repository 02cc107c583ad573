"""The probe tells what is, says when it cannot, and leaves nothing behind."""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from importlib import resources

import pytest
import pytest_asyncio
import vermin

from remote.connect import Link, Rig
from remote.inventory import probe_host
from remote.probe import host, procs, ship
from state.errors import RigbookError
from state.events import FactObserved, ProbeFailed
from state.project import Project
from tests.lab import rigs


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    with rigs.played(tmp_path_factory.mktemp("rig")) as project:
        yield project


@pytest_asyncio.fixture
async def link(project: Project) -> AsyncIterator[Link]:
    async with Rig(project) as rig:
        yield await rig.link("llm")


@pytest.mark.parametrize("module", ship.MODULES)
def test_it_keeps_to_python_39_and_its_standard_library(module: str) -> None:
    tree = ast.parse(ship.source(module), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names or name == "remote.probe", name
    # What the standard library had then, and what annotations are evaluated to.
    (_, newest) = vermin.detect(ship.source(module))
    assert newest <= (3, 9), newest
    # Everything that is imported from the package is shipped.
    assert {path.name for path in resources.files("remote.probe").iterdir()} >= {f"{m}.py" for m in ship.MODULES}


async def test_system_tells_of_this_machine(link: Link) -> None:
    seen = await (await link.probe()).call("system")
    assert seen["boot_id"] == procs.boot_id() and seen["kernel"] == os.uname().release
    assert seen["cores"] == os.cpu_count()
    assert seen["memory_total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert any(disk["mount"] == "/" and disk["total"] > disk["free"] > 0 for disk in seen["disks"])


async def test_listeners_name_their_process(link: Link) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = await (await link.probe()).call("listeners")
        assert [entry["pids"] for entry in found if entry["port"] == port] == [[os.getpid()]]
        assert next(entry["address"] for entry in found if entry["port"] == port) == "127.0.0.1"
    found = await (await link.probe()).call("listeners")
    assert port not in [entry["port"] for entry in found]


async def test_environments_and_what_is_none(link: Link) -> None:
    probe = await link.probe()
    env = await probe.call("env", python=sys.executable)
    assert env["state"] == "ok" and env["version"] == sys.version.split()[0]
    assert (await probe.call("env", python="/no/such/python"))["state"] == "missing"
    assert (await probe.call("env", python="/bin/false"))["state"] == "failed"
    assert {**(await probe.call("gpus")), "reason": ""} == {"state": "none", "gpus": [], "reason": ""}


def test_gpu_values_that_the_driver_does_not_tell_are_unknown() -> None:
    rows = host.parse_gpus(
        "0, GPU-1, NVIDIA H200, 00000000:01:00.0, 570.1, 143771, [N/A], [Not Supported]\n"
        "Unable to determine the device handle, reboot\n"
    )
    assert len(rows) == 1
    assert rows[0]["memory_total"] == 143771 << 20 and rows[0]["memory_used"] is None
    assert rows[0]["utilization_gpu"] is None


async def test_a_bad_question_is_answered_and_the_next_one_too(link: Link) -> None:
    probe = await link.probe()
    with pytest.raises(RigbookError) as caught:
        await probe.call("no-such-call")
    assert caught.value.id == "probe.failed"
    answers = await asyncio.gather(*(probe.call("clock") for _ in range(20)))
    assert len({answer["boot_id"] for answer in answers}) == 1


async def test_it_ends_with_its_connection_and_a_new_one_comes(link: Link) -> None:
    probe = await link.open_probe()
    pid = (await probe.ready)["pid"]
    assert procs.stat(pid) is not None
    await probe.close()
    rigs.until(lambda: procs.stat(pid) is None)
    shared = await link.probe()
    link.break_lanes()  # type: ignore[attr-defined]
    with pytest.raises(RigbookError) as caught:
        while True:
            await shared.call("clock")
    assert (caught.value.id, caught.value.exit_code) == ("probe.lost", 4)
    assert (await (await link.probe()).call("clock"))["boot_id"] == procs.boot_id()


async def test_it_comes_through_a_noisy_login() -> None:
    with rigs.sshd() as server:
        for user in server.users:
            async with Rig(server.project(user)) as rig:
                probe = await (await rig.link("box")).probe()
                assert (await probe.call("system"))["user"]["home"] == str(server.users[user])


async def test_what_goes_into_the_book_has_its_source(link: Link, project: Project) -> None:
    toml = f'[envs.good]\nhost = "llm"\npython = "{sys.executable}"\n[envs.bad]\nhost = "llm"\npython = "/no/python"\n'
    found = await probe_host(link, rigs.project(project.root, rigs.host("llm") + toml))
    facts = {event.key: event for event in found if isinstance(event, FactObserved)}
    assert facts["hosts.llm.hw.cores"].value == os.cpu_count()
    assert facts["hosts.llm.hw.gpus"].value == "none"
    assert facts["envs.good.python"].value == sys.version.split()[0]
    assert "envs.good.packages.safetensors" in facts
    assert facts["hosts.llm.access.host_key"].value.startswith("SHA256:")
    for event in facts.values():
        assert event.source.host == "llm" and event.source.command and event.observed_at
        assert "played" in (event.source.note or "")
    assert [event.what for event in found if isinstance(event, ProbeFailed)] == ["envs.bad"]
