"""Which GPU belongs to whom: GPU -> driver -> host, container or machine -> process -> our run.

    GPU 3 (UUID, PCI address)          identity; an index means another card in another container
      driver nvidia | vfio-pci | none  vfio-pci: a virtual machine has it, and only its own inside can tell more
        owner host | lxc:101 | vm:200
          HostPid -> GuestPid          two types: a number of one namespace means somebody else in the other
            run                        proven by the mark that every launch carries

Values are what `remote/probe/nvml.py` gives: a number, or {"na": WHY}. Every byte that NVML calls used is given to a
process, or is *unattributed* with the likeliest reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remote.connect import Link
from remote.jobs import jobs_dir
from remote.probe import ship
from state.project import Project

OVERHEAD = 64 << 20  # bytes a GPU that the driver keeps for itself while somebody has it open (15 MiB seen on an H200)
HOLDERS_S = 5.0  # that the list of holders may be old where one looks every second; a pid new to NVML ends that
GHOST_LOAD = 50  # percent, with nobody there


@dataclass(frozen=True)
class HostPid:
    """A process number as the host has it."""

    host: str
    pid: int


@dataclass(frozen=True)
class GuestPid:
    """The same process as its container numbers it."""

    guest: str
    pid: int


@dataclass(frozen=True)
class Holder:
    """One process that holds a GPU, or several."""

    pid: HostPid
    inner: GuestPid | None
    starttime: int
    boot_id: str
    kind: str  # class: see remote/probe/classes.py
    why: str
    owner: str  # host | lxc:101 | docker:… | vm:200
    run: str
    job: str
    command: str
    state: str  # worst state of a thread
    used: Mapping[str, int | None]  # UUID -> bytes as NVML says; None: it lists the process, not its share
    nodes: tuple[str, ...]  # device files held open
    waits: tuple[str, ...]  # what its uninterruptible threads wait on
    started: float | None
    uid: int | None = None
    guest_uid: int | None = None  # inside an unprivileged container, whose root is 100000 outside

    def to_dict(self) -> dict[str, Any]:
        return {
            "pid": self.pid.pid,
            "guest_pid": self.inner.pid if self.inner else None,
            "starttime": self.starttime,
            "boot_id": self.boot_id,
            "class": self.kind,
            "why": self.why,
            "owner": self.owner,
            "run": self.run or None,
            "job": self.job or None,
            "command": self.command,
            "state": self.state,
            "used": dict(self.used),
            "nodes": list(self.nodes),
            "waits": list(self.waits),
            "started": self.started,
            "uid": self.uid,
            "guest_uid": self.guest_uid,
        }


@dataclass(frozen=True)
class Share:
    """A part of a GPU's used memory that no process accounts for."""

    size: int  # bytes
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"bytes": self.size, "reason": self.reason}


@dataclass(frozen=True)
class Gpu:
    host: str
    uuid: str | None
    pci: str | None
    driver: str | None  # nvidia | vfio-pci | another | None
    state: str  # ok | lost | reset-required | failed | passed-through | unbound
    owner: str  # host | lxc:101, docker:… (all its holders are there) | vm:200 | free | several
    values: Mapping[str, Any] = field(default_factory=dict)  # as NVML gave them
    holders: tuple[Holder, ...] = ()
    unattributed: Share | None = None
    ghost: str = ""  # load with nobody there: why we think so

    def to_dict(self) -> dict[str, Any]:
        values = {key: value for key, value in self.values.items() if key not in ("processes", "uuid", "pci", "state")}
        return {
            "host": self.host,
            "uuid": self.uuid,
            "pci": self.pci,
            "driver": self.driver,
            "state": self.state,
            "owner": self.owner,
            **values,
            "holders": [holder.to_dict() for holder in self.holders],
            "unattributed": self.unattributed.to_dict() if self.unattributed else None,
            "ghost": self.ghost or None,
        }


@dataclass(frozen=True)
class Look:
    """One host, looked at once."""

    host: str
    state: str  # nvml.py's
    reason: str
    at: float
    driver: str | None
    cuda: str | None
    gpus: tuple[Gpu, ...]
    warnings: tuple[tuple[str, str], ...] = ()  # (check id, message)
    xid: tuple[Mapping[str, Any], ...] | None = None
    services: Mapping[str, int | None] = field(default_factory=dict)  # persistenced, fabricmanager, mps -> pid
    cost: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "state": self.state,
            "reason": self.reason,
            "at": self.at,
            "driver": self.driver,
            "cuda": self.cuda,
            "gpus": [gpu.to_dict() for gpu in self.gpus],
            "warnings": [{"check": check, "message": message} for check, message in self.warnings],
            "xid": None if self.xid is None else [dict(entry) for entry in self.xid],
            "services": dict(self.services),
            "cost": dict(self.cost),
        }


def known(value: Any) -> Any:
    """A value, or None where the driver does not tell it."""
    return None if isinstance(value, Mapping) and "na" in value else value


def interpreters(project: Project, host: str) -> list[str]:
    """The Pythons that the project declares on this host."""
    return sorted({env.python for env in project.envs.values() if env.host == host and env.python.startswith("/")})


async def look(link: Link, project: Project, *, max_age: float = 0.0, deep: bool = False) -> Look:
    """Look at a host's GPUs once. The probe keeps NVML open from one look to the next."""
    probe = await link.probe()
    asked = {"jobs": await jobs_dir(link), "interpreters": interpreters(project, link.name)}
    seen = await probe.call("gpu_look", **asked, max_age=max_age, deep=deep)
    if seen["nvml"]["state"] == "no-module":
        await probe.call("nvml_load", source=ship.pynvml())
        seen = await probe.call("gpu_look", **asked, deep=deep)
    return read(link.name, seen)


def read(host: str, seen: Mapping[str, Any]) -> Look:
    """What the probe saw, as the map. Pure."""
    from remote import gpu_map

    holders = seen["holders"]
    nvml = {**seen["nvml"], "gpus": adopted(seen["nvml"]["gpus"], holders["processes"])}
    listed = [entry for gpu in nvml["gpus"] for entry in _listed(gpu)]
    # Our own probes have NVML open and hold nothing: they are no holders.
    found = [p for p in holders["processes"] if not _looks(p)]
    looking = {p["pid"] for p in holders["processes"]} - {p["pid"] for p in found}
    people = {p["pid"]: _holder(host, p, nvml["gpus"]) for p in found}
    for entry in listed:
        if entry["pid"] not in people and entry["pid"] not in looking:
            people[entry["pid"]] = _unseen(host, entry["pid"], nvml["gpus"])
    by_pci = {device["pci"]: device for device in seen["pci"]}
    minors = {p["pid"]: set(p["gpus"]) for p in found}
    gpus = []
    for gpu in nvml["gpus"]:
        device = by_pci.pop(known(gpu.get("pci")), None)
        gpus.append(_gpu(host, gpu, device, people, minors, _inside(holders)))
    gpus += [_without_nvml(host, device) for device in by_pci.values()]
    gpus = gpu_map.machines(seen, gpus)
    return Look(
        host=host,
        state=nvml["state"],
        reason=nvml["reason"],
        at=seen["at"],
        driver=known(nvml.get("driver")) or nvml.get("kernel_module"),
        cuda=known(nvml.get("cuda")),
        gpus=tuple(gpus),
        warnings=tuple(gpu_map.warnings(seen, gpus)),
        xid=None if seen.get("xid") is None else tuple(seen["xid"]),
        services=seen["services"],
        cost={"seconds": seen["seconds"], "cpu_seconds": seen["cpu_seconds"], "nvml": nvml.get("seconds", 0.0)},
    )


def _listed(gpu: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = gpu.get("processes")
    return found if isinstance(found, list) else []


def adopted(gpus: list[dict[str, Any]], processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """NVML's lists with the dead replaced by their heirs. NVML goes on naming the process that opened a context when it
    is long gone (`[Not Found]`), while a forked child keeps its files, and with them the memory. The heir is a process
    that has the GPU open, is not listed itself, and whose group or session the dead one led; or the only such one."""
    there = {p["pid"] for p in processes}
    out = []
    for gpu in gpus:
        own = {entry["pid"] for entry in _listed(gpu)}
        if own <= there:
            out.append(gpu)
            continue
        minor = known(gpu.get("minor"))
        silent = [p for p in processes if minor in p["gpus"] and p["pid"] not in own and not _looks(p)]
        entries = []
        for entry in _listed(gpu):
            heirs = [p for p in silent if entry["pid"] in (p["pgrp"], p["session"])]
            heirs = heirs or (silent if len(silent) == 1 else [])
            if entry["pid"] not in there and heirs:
                heir = min(heirs, key=lambda p: p["starttime"])
                entry = {**entry, "pid": heir["pid"], "opener": entry["pid"]}
            entries.append(entry)
        out.append({**gpu, "processes": entries})
    return out


def _looks(p: Mapping[str, Any]) -> bool:
    """A probe of ours has NVML open, and holds nothing."""
    return "RIGBOOK_PROBE" in p["markers"]


def _owner(p: Mapping[str, Any]) -> str:
    guest = p["guest"]
    if not guest:
        return "host"
    return f"{guest['kind']}:{guest['id']}" + (f"/{guest['nested']}" if guest.get("nested") else "")


def _holder(host: str, p: Mapping[str, Any], gpus: list[dict[str, Any]]) -> Holder:
    owner = _owner(p)
    inner = GuestPid(owner, p["nspid"][-1]) if len(p["nspid"]) > 1 else None
    openers = sorted({entry["opener"] for gpu in gpus for entry in _listed(gpu) if _heir(entry, p["pid"])})
    inherited = f"; it keeps what pid {openers[0]} opened, which is gone" if openers else ""
    worst = next((state for state in "DRTtSIZ" if p["threads"].get(state)), p["state"])
    return Holder(
        pid=HostPid(host, p["pid"]),
        inner=inner,
        starttime=p["starttime"],
        boot_id=p["boot_id"],
        kind=p["class"],
        why=p["why"] + inherited,
        owner=owner,
        run=p["run"],
        job=p["job_id"],
        command=p["command"],
        state=worst,
        used=used_by(p["pid"], gpus),
        nodes=tuple(sorted(p["nodes"])),
        waits=tuple(f"{thread['wchan']} for {thread['seconds']:.0f} s" for thread in p["stuck"]),
        started=p["started"],
        uid=p["uid"],
        guest_uid=p["guest_uid"],
    )


def _heir(entry: Mapping[str, Any], pid: int) -> bool:
    return entry["pid"] == pid and "opener" in entry


def used_by(pid: int, gpus: list[dict[str, Any]]) -> dict[str, int | None]:
    """Per GPU. A process may be listed once for each MIG instance: its shares are added up."""
    found: dict[str, int | None] = {}
    for gpu in gpus:
        shares = [known(entry["used"]) for entry in _listed(gpu) if entry["pid"] == pid]
        if shares:
            found[_name(gpu)] = None if None in shares else sum(shares)
    return found


def _name(gpu: Mapping[str, Any]) -> str:
    return str(known(gpu.get("uuid")) or f"index {gpu['index']}")


def _unseen(host: str, pid: int, gpus: list[dict[str, Any]]) -> Holder:
    """NVML lists it, /proc has no such process: its opener died, and somebody who has its files lives on."""
    why = "NVML names it, and no such process is to be seen: what it opened is still held by another"
    used = used_by(pid, gpus)
    return Holder(HostPid(host, pid), None, 0, "", "unattributed", why, "?", "", "", "", "?", used, (), (), None)


def _inside(holders: Mapping[str, Any]) -> str:
    """Why this look may be partial; empty when it is not."""
    if holders["unreadable"]:
        return f"{holders['unreadable']} processes of others cannot be looked into without root"
    return ""


def _gpu(
    host: str,
    gpu: dict[str, Any],
    device: Mapping[str, Any] | None,
    people: Mapping[int, Holder],
    minors: Mapping[int, set[int]],
    partial: str,
) -> Gpu:
    minor = known(gpu.get("minor"))
    pids = {entry["pid"] for entry in _listed(gpu) if entry["pid"] in people} | {
        pid for pid, held in minors.items() if minor in held
    }
    holders = tuple(sorted((people[pid] for pid in pids), key=lambda h: (-(h.used.get(_name(gpu)) or 0), h.pid.pid)))
    owners = {holder.owner for holder in holders if holder.kind != "protected"} or {h.owner for h in holders}
    owner = "free" if not owners else owners.pop() if len(owners) == 1 else "several"
    return Gpu(
        host=host,
        uuid=known(gpu.get("uuid")),
        pci=known(gpu.get("pci")),
        driver=device["driver"] if device else "nvidia",
        state=gpu["state"],
        owner=owner,
        values=gpu,
        holders=holders,
        unattributed=unattributed(gpu, holders, partial),
        ghost=ghost(gpu, holders),
    )


def unattributed(gpu: Mapping[str, Any], holders: tuple[Holder, ...], partial: str = "") -> Share | None:
    """What NVML calls used and gives to no process, with the likeliest reason. None: nothing, or nothing is known."""
    memory = gpu.get("memory") or {}
    used = known(memory.get("used"))
    if used is None:
        return None
    if not isinstance(gpu.get("processes"), list):
        why = (gpu.get("processes") or {}).get("na", "not told")
        return Share(used, f"NVML tells no processes: {why}") if used else None
    shares = [holder.used[_name(gpu)] for holder in holders if _name(gpu) in holder.used]
    size = used - sum(share or 0 for share in shares)
    if size <= 0:
        return None
    return Share(size, _reason(gpu, holders, shares, size, partial))


def _reason(
    gpu: Mapping[str, Any], holders: tuple[Holder, ...], shares: list[int | None], size: int, partial: str
) -> str:
    if None in shares:
        return "the driver does not tell the share of every process"
    stuck = [holder for holder in holders if holder.waits]
    if stuck:
        return f"a thread of pid {stuck[0].pid.pid} is in uninterruptible sleep ({stuck[0].waits[0]})"
    reserved = known((gpu.get("memory") or {}).get("reserved"))
    if reserved is None and size <= OVERHEAD + (1 << 30):
        return "with this driver the used memory has the driver's own reserve in it"
    if size <= OVERHEAD:
        return "the driver's own bookkeeping"
    silent = [holder for holder in holders if _name(gpu) not in holder.used and holder.kind != "protected"]
    if silent:
        pids = ", ".join(str(holder.pid.pid) for holder in silent[:4])
        return f"held open by pid {pids}, which NVML does not list: inherited from a process that has ended"
    if partial:
        return partial
    if any("nvidia-cuda-mps" in holder.command for holder in holders):
        return "clients of MPS: the memory belongs to its server"
    return "a process that we cannot see: of another container, or seconds from its end"


def ghost(gpu: Mapping[str, Any], holders: tuple[Holder, ...]) -> str:
    """Load with nobody there: seen on Blackwell when a process dies in a kernel. Only the counter is wrong."""
    load = known(gpu.get("load"))
    if load is None or load < GHOST_LOAD or any(holder.kind != "protected" for holder in holders):
        return ""
    return (
        f"{load} % load and no process: a counter that stuck; opening and closing a context clears it, no reset needed"
    )


def _without_nvml(host: str, device: Mapping[str, Any]) -> Gpu:
    driver = device["driver"]
    if driver == "vfio-pci":
        return Gpu(host, None, device["pci"], driver, "passed-through", "vm:?")
    return Gpu(host, None, device["pci"], driver, "unbound" if driver is None else "unseen", "free")
