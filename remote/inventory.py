"""What a host is, as events for the book. Looking never fails as a whole: what could not be seen says so by itself."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from remote.connect import Link
from remote.probe.client import Probe
from state.errors import RigbookError
from state.events import Event, FactObserved, ProbeFailed, Source
from state.project import Project

PLAYED = "a played host: the machine is the one that plays it"


class _Facts:
    """Collects observations of one host that were made in one visit."""

    def __init__(self, link: Link) -> None:
        self.host = link.name
        self.note = PLAYED if link.host.played else None
        self.now = datetime.now(UTC)
        self.events: list[Event] = []

    def add(self, key: str, value: Any, command: str, unit: str | None = None, *, derived: bool = False) -> None:
        """One value with its source. None is dropped: what was not seen replaces nothing."""
        if value is None or value == "":
            return
        self.events.append(
            FactObserved(
                key=key,
                value=value,
                unit=unit,
                confidence="derived" if derived else "measured",
                source=Source(host=self.host, command=command, note=self.note),
                observed_at=self.now,
            )
        )

    def failed(self, what: str, reason: str) -> None:
        self.events.append(ProbeFailed(host=self.host, what=what, reason=reason))


async def probe_host(link: Link, project: Project) -> list[Event]:
    """Hardware, software, access and the environments of one host: FactObserved, and ProbeFailed for what failed."""
    facts = _Facts(link)
    try:
        probe = await link.probe()
        clock = asyncio.get_running_loop().time
        before, wall_before = clock(), datetime.now(UTC).timestamp()
        answer = await probe.call_timed("system")
        round_trip = clock() - before
        _access(facts, link, round_trip)
        _system(facts, answer["result"])
        # Half the round trip is the best guess for when the far clock was read; less than that is noise.
        skew = answer["wall"] - (wall_before + round_trip / 2)
        if abs(skew) > max(1.0, round_trip):
            facts.add(f"hosts.{link.name}.sw.clock_skew", round(skew, 1), "clock against ours", "s", derived=True)
        await _gpus(facts, probe)
        for name, env in project.envs.items():
            if env.host == link.name:
                await _env(facts, probe, name, env.python)
    except RigbookError as error:
        facts.failed("system", str(error))
    return facts.events


def _access(facts: _Facts, link: Link, round_trip: float) -> None:
    prefix = f"hosts.{facts.host}.access"
    route = link.route()
    for key, value in route.items():
        facts.add(f"{prefix}.{key}", value, "the connection itself")
    facts.add(f"{prefix}.round_trip", round(round_trip * 1000, 1), "one call of the probe", "ms")


def _system(facts: _Facts, seen: dict[str, Any]) -> None:
    hw, sw = f"hosts.{facts.host}.hw", f"hosts.{facts.host}.sw"
    facts.add(f"{hw}.cpu", seen["cpu"], "/proc/cpuinfo")
    facts.add(f"{hw}.arch", seen["arch"], "uname -m")
    facts.add(f"{hw}.cores", seen["cores"], "os.cpu_count()")
    if seen["cores_allowed"] != seen["cores"]:
        facts.add(f"{hw}.cores_allowed", seen["cores_allowed"], "sched_getaffinity")
    facts.add(f"{hw}.cpu_features", ", ".join(seen["cpu_features"]), "/proc/cpuinfo flags")
    facts.add(f"{hw}.memory", seen["memory_total"], "/proc/meminfo MemTotal", "bytes")
    facts.add(f"{hw}.memory_limit", seen["cgroup"]["memory"], "cgroup memory.max", "bytes")
    facts.add(f"{hw}.cpu_limit", seen["cgroup"]["cpus"], "cgroup cpu.max", "cores")
    for disk in seen["disks"]:
        name = disk["mount"].strip("/").replace("/", "-").replace(".", "_") or "root"
        facts.add(f"{hw}.disk.{name}.total", disk["total"], f"statvfs {disk['mount']}", "bytes")
        facts.add(f"{hw}.disk.{name}.free", disk["free"], f"statvfs {disk['mount']}", "bytes")
    facts.add(f"{sw}.os", seen["os"], "/etc/os-release")
    facts.add(f"{sw}.kernel", seen["kernel"], "uname -r")
    facts.add(f"{sw}.init", seen["init"], "/proc/1/stat")
    facts.add(f"{sw}.python", seen["python"]["version"], seen["python"]["path"])
    facts.add(f"{sw}.boot_id", seen["boot_id"], "/proc/sys/kernel/random/boot_id")


async def _gpus(facts: _Facts, probe: Probe) -> None:
    hw = f"hosts.{facts.host}.hw"
    seen = await probe.call("gpus")
    if seen["state"] == "failed":
        facts.failed("gpus", seen["reason"])
        return
    facts.add(f"{hw}.gpus", len(seen["gpus"]) or "none", "nvidia-smi" if seen["gpus"] else seen["reason"])
    for gpu in seen["gpus"]:
        # By UUID: an index means another card in another container or after a reboot.
        where = f"{hw}.gpu.{gpu['uuid']}"
        facts.add(f"{where}.name", gpu["name"], "nvidia-smi")
        facts.add(f"{where}.address", gpu["pci_bus_id"], "nvidia-smi")
        facts.add(f"{where}.memory", gpu["memory_total"], "nvidia-smi", "bytes")
        facts.add(f"hosts.{facts.host}.sw.driver", gpu["driver_version"], "nvidia-smi")


async def _env(facts: _Facts, probe: Probe, name: str, python: str) -> None:
    seen = await probe.call("env", python=python)
    if seen["state"] != "ok":
        facts.failed(f"envs.{name}", f"{python}: {seen['reason']}")
        return
    facts.add(f"envs.{name}.python", seen["version"], f"{python} --version")
    facts.add(f"envs.{name}.prefix", seen["prefix"], f"{python}: sys.prefix")
    for package, version in sorted(seen["packages"].items()):
        facts.add(f"envs.{name}.packages.{package}", version, f"{python}: importlib.metadata")
