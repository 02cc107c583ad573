"""Giving back what dead work holds: plan, then exactly that plan, then the proof.

Who is an orphan, and why a name never decides it, is told in probe/classes.py. A plan is frozen: it names processes
by identity (boot id, pid namespace, pid, start time, cgroup, program), and each is judged again on its host right
before each signal. A signal that was sent proves nothing, so we look again: at the processes, the ports, and the
memory, the machine's and the GPUs'.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from remote.connect import Link
from remote.gpus import OVERHEAD, adopted, known, used_by
from remote.jobs import jobs_dir
from remote.probe import ship
from remote.probe.client import Probe
from state.errors import REFUSED, USAGE, RigbookError
from state.events import PlanApplied, PlanMade

GRACE = 10.0  # s between TERM and KILL
SERVER_GRACE = 30.0  # s for what listens: SGLang and vLLM answer what they have begun, then end their workers
SETTLE_S = 10.0  # a port may stay bound for a moment after its process is gone
MEMORY_S = 60.0  # the driver gives memory back after the last file is closed; over 30 s were seen on a GB300
AGAIN_S = 0.3  # between the two looks that a proof needs


@dataclass(frozen=True)
class Item:
    """One process that is to go, with what it holds."""

    pid: int
    starttime: int  # clock ticks since boot
    boot_id: str
    pid_namespace: str | None
    kind: str  # orphan | unclaimed | foreign: see remote/probe/classes.py
    job: str
    run: str
    job_name: str
    job_state: str
    provenance: str  # marker: in its environment; tree: seen by the job's supervisor
    command: str
    rss: int | None  # bytes; None: not to be seen
    ports: tuple[int, ...]
    gpu_files: tuple[str, ...]
    cgroup: str | None = None
    exe: str | None = None
    seen_until: int = 0  # clock ticks since boot when it was planned: what is younger was not seen
    evidence: tuple[str, ...] = ()  # why one without a mark is believed to be nobody's
    gpu_bytes: dict[str, int | None] = field(default_factory=dict)  # GPU's UUID -> bytes; None: not told


@dataclass(frozen=True)
class GpuBefore:
    """A GPU that items hold, when the plan was made. Bytes."""

    uuid: str
    used: int | None
    held: int | None  # by the items together: what should come back
    others: int | None  # by everybody else that NVML names


@dataclass(frozen=True)
class Plan:
    id: str
    host: str
    made_at: str
    items: tuple[Item, ...]
    # What was seen and stays: other people's processes with GPUs, and work of ours that lives. For the reader only.
    kept: tuple[str, ...] = ()
    gpus: tuple[GpuBefore, ...] = ()
    interpreters: tuple[str, ...] = ()  # by which unclaimed orphans were found
    notes: tuple[str, ...] = ()

    @property
    def ports(self) -> list[int]:
        return sorted({port for item in self.items for port in item.ports})

    @property
    def rss(self) -> int:
        """Resident bytes of all items; pages that they share count once each."""
        return sum(item.rss or 0 for item in self.items)

    def of(self, kind: str) -> list[Item]:
        return [item for item in self.items if item.kind == kind]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        if not self.items:
            return f"{self.host}: nothing is held by dead work"
        parts = [f"{self.host}: {len(self.items)} process(es) of dead work hold {_mib(self.rss)}"]
        parts += [f"port {', '.join(map(str, self.ports))}"] if self.ports else []
        parts += [f"{_mib(gpu.held)} on {gpu.uuid}" for gpu in self.gpus]
        return ", ".join(parts)


@dataclass(frozen=True)
class Outcome:
    """What came of a plan. `verified`: every item is gone, and its ports and memory with it."""

    plan: str
    host: str
    verified: bool
    processes: tuple[dict[str, Any], ...]  # pid, outcome, reason, seconds
    ports_free: tuple[int, ...]
    ports_held: tuple[int, ...]
    rss_before: int  # bytes, as planned
    rss_after: int
    memory_available_before: int | None
    memory_available_after: int | None
    left: tuple[str, ...] = ()  # orphans that are there now, planned or not
    seconds: float = 0.0
    notes: tuple[str, ...] = field(default=())
    gpus: tuple[dict[str, Any], ...] = ()  # uuid, used_before, used_after, held, others_after, free, seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def refused(self) -> bool:
        return any(process["outcome"] == "refused" for process in self.processes)

    def describe(self) -> str:
        gone = sum(p["outcome"] in GONE for p in self.processes)
        parts = [
            f"{gone} of {len(self.processes)} processes gone",
            f"{_mib(self.rss_before - self.rss_after)} given back",
        ]
        parts += [
            f"{gpu['uuid']} {_mib(gpu['used_before'])} -> {_mib(gpu['used_after'])}"
            + ("" if gpu["free"] else " NOT FREE")
            for gpu in self.gpus
        ]
        if self.ports_free:
            parts.append(f"port {', '.join(map(str, self.ports_free))} free")
        if self.ports_held:
            parts.append(f"port {', '.join(map(str, self.ports_held))} STILL HELD")
        parts += [f"pid {p['pid']}: {p['outcome']} ({p['reason']})" for p in self.processes if p["outcome"] not in GONE]
        parts += [f"left: {text}" for text in self.left]
        return "; ".join([*parts, *self.notes, "verified" if self.verified else "NOT verified"])


GONE = frozenset({"gone", "ended by TERM", "ended by KILL"})


def _mib(size: int | None) -> str:
    return "an unknown amount" if size is None else f"{size / (1 << 20):,.0f} MiB"


def describe(item: Item) -> str:
    """One line for people."""
    holds = [_mib(item.rss) if item.rss is not None else "memory unknown"]
    holds += [f"{_mib(size)} of GPU memory" for size in item.gpu_bytes.values()]
    holds += [f"port {port}" for port in item.ports] + [file.rpartition("/")[2] for file in item.gpu_files]
    whose = {"unclaimed": "of nobody's", "foreign": "of others, named by you"}
    why = whose.get(item.kind, f"job {item.job} is {item.job_state}")
    return f"pid {item.pid} holds {', '.join(holds)}; {why}: {item.command[:100]}"


async def plan(
    link: Link, *, interpreters: Sequence[str] = (), unclaimed: bool = True, foreign: Iterable[int] = ()
) -> Plan:
    """Look for processes of ended jobs on this host. Changes nothing.

    `interpreters`: Pythons whose orphaned workers count as nobody's, though they carry no mark. `foreign`: pids of
    other people's work, each named by the user."""
    named = set(foreign)
    seen = await scan(await link.probe(), await jobs_dir(link), interpreters)
    wanted, notes = [], []
    for entry in seen["processes"]:
        kind = entry["class"]
        if kind == "orphan" or (kind == "unclaimed" and unclaimed):
            wanted.append(entry)
        elif entry["pid"] in named and kind in ("foreign", "unclaimed"):
            wanted.append({**entry, "class": "foreign"})
        elif entry["pid"] in named:
            notes.append(f"pid {entry['pid']} is {kind} ({entry['why']}) and is in no plan")
    there = {entry["pid"] for entry in seen["processes"]}
    notes += [f"pid {pid} holds no GPU and is no work of ours: it is in no plan" for pid in sorted(named - there)]
    pids = {entry["pid"] for entry in wanted}
    kept = tuple(
        f"pid {e['pid']} ({e['class']}, {e['why']}): {e['command'][:100]}"
        for e in seen["processes"]
        if e["pid"] not in pids and "RIGBOOK_PROBE" not in e["markers"]
    )
    items = tuple(_item(entry, seen) for entry in wanted)
    return Plan(
        _id(link.name, items, interpreters),
        link.name,
        datetime.now(UTC).isoformat(timespec="seconds"),
        items,
        kept,
        _before(items, seen),
        tuple(interpreters),
        tuple(notes),
    )


async def scan(probe: Probe, jobs: str, interpreters: Sequence[str]) -> dict[str, Any]:
    """The probe's `holders`, with NVML where the host has it."""
    seen: dict[str, Any] = await probe.call("holders", jobs=jobs, interpreters=list(interpreters))
    if seen["nvml"]["state"] == "no-module":
        await probe.call("nvml_load", source=ship.pynvml())
        seen = await probe.call("holders", jobs=jobs, interpreters=list(interpreters))
    seen["nvml"]["gpus"] = adopted(seen["nvml"]["gpus"], seen["processes"])
    return seen


def _before(items: tuple[Item, ...], seen: Mapping[str, Any]) -> tuple[GpuBefore, ...]:
    found = []
    for gpu in seen["nvml"]["gpus"]:
        uuid = known(gpu.get("uuid"))
        shares = [item.gpu_bytes[uuid] for item in items if uuid in item.gpu_bytes]
        if shares:
            held = sum(share or 0 for share in shares)
            whole = None if None in shares else held
            found.append(GpuBefore(uuid, known(gpu["memory"]["used"]), whole, _others(gpu, items, seen)))
    return tuple(found)


def _others(gpu: Mapping[str, Any], items: Iterable[Item], seen: Mapping[str, Any]) -> int | None:
    """Bytes of everybody else who is there; None when the driver does not tell. Whom only NVML knows is nobody."""
    pids = {entry["pid"] for entry in seen["processes"]} - {item.pid for item in items}
    if not isinstance(gpu.get("processes"), list):
        return None
    shares = [known(entry["used"]) for entry in gpu["processes"] if entry["pid"] in pids]
    return None if None in shares else sum(shares)


def _id(host: str, items: tuple[Item, ...], interpreters: Sequence[str]) -> str:
    """A plan's id stands for what it would do, so that a plan that was changed is no plan."""
    what = [(i.boot_id, i.pid_namespace, i.pid, i.starttime, i.kind, i.job, i.cgroup, i.exe) for i in items]
    text = json.dumps([host, what, list(interpreters)])
    return "clean-" + hashlib.sha256(text.encode()).hexdigest()[:10]


def _item(entry: Mapping[str, Any], seen: Mapping[str, Any]) -> Item:
    names = ("pid", "starttime", "boot_id", "pid_namespace", "run", "job_name", "provenance", "command", "rss")
    return Item(
        **{name: entry[name] for name in (*names, "cgroup", "exe")},
        kind=entry["class"],
        job=entry["job_id"],
        job_state=entry["job_state"] or "",
        ports=tuple(entry["ports"]),
        gpu_files=tuple(entry["gpu_files"]),
        evidence=tuple(entry["evidence"]),
        seen_until=seen["ticks"],
        gpu_bytes=used_by(entry["pid"], seen["nvml"]["gpus"]),
    )


def plan_from(data: Any) -> Plan:
    """The plan that `to_dict` gave, out of a file. Strict: what is not a plan, or was changed since, is an error."""
    from pydantic import TypeAdapter, ValidationError

    try:
        what = TypeAdapter(Plan).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RigbookError("clean.bad-plan", f"this is no plan: {where}: {first['msg']}", exit_code=USAGE) from error
    if what.id != _id(what.host, what.items, what.interpreters):
        raise RigbookError("clean.bad-plan", f"plan {what.id} was changed since it was made", exit_code=USAGE)
    return what


async def apply(
    link: Link, what: Plan, *, grace: float | None = None, foreign: Iterable[int] = (), memory_wait: float = MEMORY_S
) -> Outcome:
    """Carry out exactly this plan, then look again. May be repeated after a lost link: what is gone is gone.

    `foreign`: the pids of other people's work in the plan, named once more by who applies it."""
    if what.host != link.name:
        raise RigbookError("clean.other-host", f"plan {what.id} is for {what.host}", host=link.name, exit_code=REFUSED)
    strangers = {item.pid for item in what.of("foreign")}
    if strangers != set(foreign):
        raise RigbookError(
            "clean.foreign",
            f"plan {what.id} would end other people's work: pid {', '.join(map(str, sorted(strangers)))}"
            if strangers
            else f"plan {what.id} holds no work of others",
            host=link.name,
            hint="Name each: " + " ".join(f"--foreign {what.host}:{pid}" for pid in sorted(strangers)),
            exit_code=REFUSED,
        )
    if grace is None:
        grace = SERVER_GRACE if any(item.ports for item in what.items) else GRACE
    jobs = await jobs_dir(link)
    began = time.monotonic()
    async with await link.open_probe() as probe:
        before = await scan(probe, jobs, what.interpreters)
        items = [asdict(item) for item in what.items]
        asked = {"jobs": jobs, "items": items, "grace": grace, "interpreters": list(what.interpreters)}
        processes = await probe.call("reclaim", **asked)
        killed = time.monotonic()
        planned = {(item.pid, item.starttime) for item in what.items}
        gpus: dict[str, dict[str, Any]] = {}
        quiet = 0
        while True:
            after = await scan(probe, jobs, what.interpreters)
            listening = await probe.call("listeners")
            remaining = [e for e in after["processes"] if (e["pid"], e["starttime"]) in planned]
            # A port that a *new* process took meanwhile was given back first.
            pids = {e["pid"] for e in remaining}
            held = {
                entry["port"]
                for entry in listening
                if entry["port"] in what.ports and (not entry["pids"] or pids & set(entry["pids"]))
            }
            waited = time.monotonic() - killed
            _prove(gpus, what, after, waited)
            full = [gpu for gpu in gpus.values() if not gpu["free"]]
            # Twice in a row, since the driver counts down in steps.
            quiet = 0 if remaining or full or held else quiet + 1
            patience = memory_wait if full else SETTLE_S
            # What is still there still holds: to wait for its memory would be in vain.
            if quiet >= (2 if gpus else 1) or waited > patience or remaining:
                break
            await asyncio.sleep(AGAIN_S)
    left = [e for e in after["processes"] if e["class"] == "orphan"]
    jobs_planned = {item.job for item in what.items if item.job}
    of_these_jobs = [e for e in left if e["job_id"] in jobs_planned]
    gone = all(p["outcome"] in GONE for p in processes)
    free = all(gpu["free"] for gpu in gpus.values())
    return Outcome(
        plan=what.id,
        host=link.name,
        verified=not remaining and not held and not of_these_jobs and gone and free,
        processes=tuple(processes),
        ports_free=tuple(port for port in what.ports if port not in held),
        ports_held=tuple(sorted(held)),
        rss_before=what.rss,
        rss_after=sum(e["rss"] or 0 for e in remaining),
        memory_available_before=before["memory_available"],
        memory_available_after=after["memory_available"],
        left=tuple(describe(_item(e, after)) for e in left),
        seconds=round(time.monotonic() - began, 2),
        gpus=tuple(gpus.values()),
    )


def _prove(gpus: dict[str, dict[str, Any]], what: Plan, after: Mapping[str, Any], waited: float) -> None:
    """Whether the items' memory is back. Others may have grown meanwhile: what counts is that no item is listed, and
    that what nobody is named for has not become more."""
    now = {known(gpu.get("uuid")): gpu for gpu in after["nvml"]["gpus"]}
    # A pid that somebody else has by now is not the item's any more; one that only NVML knows still is.
    there = {e["pid"]: e["starttime"] for e in after["processes"]}
    still = [item for item in what.items if there.get(item.pid, item.starttime) == item.starttime]
    for before in what.gpus:
        gpu = now.get(before.uuid)
        record = gpus.setdefault(before.uuid, {"uuid": before.uuid, "free": False, "seconds": None})
        used = known(gpu["memory"]["used"]) if gpu and "memory" in gpu else None
        others = _others(gpu, still, after) if gpu else None
        listed = gpu is not None and any(used_by(item.pid, [gpu]) for item in still)
        record.update(used_before=before.used, used_after=used, held=before.held, others_after=others)
        if used is None or listed:
            free = False
        elif others is None or None in (before.used, before.held, before.others):
            free = before.used is not None and used < before.used
        else:
            assert before.used is not None and before.held is not None and before.others is not None
            spare = before.used - before.held - before.others
            free = used - others <= max(spare, 0) + OVERHEAD
        if free and not record["free"]:
            record["seconds"] = round(waited, 3)
        record["free"] = free


def plan_event(what: Plan) -> PlanMade:
    return PlanMade(plan=what.id, action="clean", host=what.host, items=[asdict(item) for item in what.items])


def applied_event(what: Plan, outcome: Outcome) -> PlanApplied:
    return PlanApplied(plan=what.id, verified=outcome.verified, outcome=outcome.to_dict())
