"""Giving back what dead work holds: plan, then exactly that plan, then the proof.

Who is an orphan, and why a name never decides it, is told in probe/reclaim.py. A plan is frozen: it names processes
by identity (boot id, pid namespace, pid, start time), and each is checked again on its host right before each signal.
A signal that was sent proves nothing, so we look again: at the processes, the ports and the memory.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from remote.connect import Link
from remote.jobs import jobs_dir
from state.errors import REFUSED, USAGE, RigbookError
from state.events import PlanApplied, PlanMade

GRACE = 10.0  # s between TERM and KILL
SETTLE_S = 10.0  # a port may stay bound for a moment after its process is gone


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
class Plan:
    id: str
    host: str
    made_at: str
    items: tuple[Item, ...]
    # What was seen and stays: other people's processes with GPUs, and work of ours that lives. For the reader only.
    kept: tuple[str, ...] = ()

    @property
    def ports(self) -> list[int]:
        return sorted({port for item in self.items for port in item.ports})

    @property
    def rss(self) -> int:
        """Resident bytes of all items; pages that they share count once each."""
        return sum(item.rss or 0 for item in self.items)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        if not self.items:
            return f"{self.host}: nothing is held by dead work"
        ports = f", port {', '.join(map(str, self.ports))}" if self.ports else ""
        return f"{self.host}: {len(self.items)} process(es) of dead work hold {_mib(self.rss)}{ports}"


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

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def describe(self) -> str:
        gone = sum(p["outcome"] in GONE for p in self.processes)
        parts = [
            f"{gone} of {len(self.processes)} processes gone",
            f"{_mib(self.rss_before - self.rss_after)} given back",
        ]
        if self.ports_free:
            parts.append(f"port {', '.join(map(str, self.ports_free))} free")
        if self.ports_held:
            parts.append(f"port {', '.join(map(str, self.ports_held))} STILL HELD")
        parts += [f"pid {p['pid']}: {p['outcome']} ({p['reason']})" for p in self.processes if p["outcome"] not in GONE]
        parts += [f"left: {text}" for text in self.left]
        return "; ".join([*parts, *self.notes, "verified" if self.verified else "NOT verified"])


GONE = frozenset({"gone", "ended by TERM", "ended by KILL"})


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def describe(item: Item) -> str:
    """One line for people."""
    holds = [_mib(item.rss) if item.rss is not None else "memory unknown"]
    holds += [f"port {port}" for port in item.ports] + [file.rpartition("/")[2] for file in item.gpu_files]
    return f"pid {item.pid} holds {', '.join(holds)}; job {item.job} is {item.job_state}: {item.command[:100]}"


async def plan(link: Link) -> Plan:
    """Look for processes of ended jobs on this host. Changes nothing."""
    seen = await (await link.probe()).call("holders", jobs=await jobs_dir(link))
    items = tuple(_item(entry, seen) for entry in seen["processes"] if entry["class"] == "orphan")
    kept = tuple(
        f"pid {e['pid']} ({e['class']}, {e['why']}): {e['command'][:100]}"
        for e in seen["processes"]
        if e["class"] != "orphan"
    )
    id = _id(link.name, items)
    return Plan(id, link.name, datetime.now(UTC).isoformat(timespec="seconds"), items, kept)


def _id(host: str, items: tuple[Item, ...]) -> str:
    """A plan's id stands for what it would do, so that a plan that was changed is no plan."""
    text = json.dumps(
        [host, [(i.boot_id, i.pid_namespace, i.pid, i.starttime, i.kind, i.job, i.cgroup, i.exe) for i in items]]
    )
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
    if what.id != _id(what.host, what.items):
        raise RigbookError("clean.bad-plan", f"plan {what.id} was changed since it was made", exit_code=USAGE)
    return what


async def apply(link: Link, what: Plan, *, grace: float = GRACE) -> Outcome:
    """Carry out exactly this plan, then look again. May be repeated after a lost link: what is gone is gone."""
    if what.host != link.name:
        raise RigbookError("clean.other-host", f"plan {what.id} is for {what.host}", host=link.name, exit_code=REFUSED)
    jobs = await jobs_dir(link)
    began = time.monotonic()
    async with await link.open_probe() as probe:
        before = await probe.call("holders", jobs=jobs)
        items = [asdict(item) for item in what.items]
        processes = await probe.call("reclaim", jobs=jobs, items=items, grace=grace)
        planned = {(item.pid, item.starttime) for item in what.items}
        deadline = time.monotonic() + SETTLE_S
        while True:
            after = await probe.call("holders", jobs=jobs)
            listening = await probe.call("listeners")
            remaining = [e for e in after["processes"] if (e["pid"], e["starttime"]) in planned]
            # A port that a *new* process took meanwhile was given back first.
            pids = {e["pid"] for e in remaining}
            held = {
                entry["port"]
                for entry in listening
                if entry["port"] in what.ports and (not entry["pids"] or pids & set(entry["pids"]))
            }
            if not held or remaining or time.monotonic() > deadline:
                break
    left = [e for e in after["processes"] if e["class"] == "orphan"]
    jobs_planned = {item.job for item in what.items}
    of_these_jobs = [e for e in left if e["job_id"] in jobs_planned]
    return Outcome(
        plan=what.id,
        host=link.name,
        verified=not remaining and not held and not of_these_jobs and all(p["outcome"] in GONE for p in processes),
        processes=tuple(processes),
        ports_free=tuple(port for port in what.ports if port not in held),
        ports_held=tuple(sorted(held)),
        rss_before=what.rss,
        rss_after=sum(e["rss"] or 0 for e in remaining),
        memory_available_before=before["memory_available"],
        memory_available_after=after["memory_available"],
        left=tuple(describe(_item(e, after)) for e in left),
        seconds=round(time.monotonic() - began, 2),
    )


def plan_event(what: Plan) -> PlanMade:
    return PlanMade(plan=what.id, action="clean", host=what.host, items=[asdict(item) for item in what.items])


def applied_event(what: Plan, outcome: Outcome) -> PlanApplied:
    return PlanApplied(plan=what.id, verified=outcome.verified, outcome=outcome.to_dict())
