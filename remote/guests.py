"""Containers and VMs of a Proxmox host: which there are, starting them, shutting them down.

`pvesh … --output-format json` is the host's own API and keeps to one form. Where it fails (no cluster file system, a
user who is not root), `pct list` and `qm list` are read by their columns: the Lock column is empty as a rule, and a
name of more than 20 characters pushes what follows.

Each of these programs starts a Perl with all of Proxmox in it, about a second: one round trip looks at everything.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from remote.connect import Link
from state.errors import REFUSED, UNREACHABLE, USAGE, RigbookError
from state.events import PlanApplied, PlanMade

Kind = Literal["lxc", "qemu"]
Action = Literal["start", "stop"]

PROGRAM: dict[str, str] = {"lxc": "pct", "qemu": "qm"}
SETTLE_S = 15.0  # a guest that was told to stop or start may take a moment to be seen so
LOOK_S = 60.0

# /etc/pve/local is a link to this node's directory; a node is asked for each time, since hosts get renamed and guests
# move. `localhost` is what pvesh itself calls the node it runs on.
_LOOK = """LC_ALL=C;export LC_ALL
n=$(readlink /etc/pve/local 2>/dev/null);n=${n##*/};n=${n:-localhost}
command -v pvesh >/dev/null||command -v pct >/dev/null||{ echo "no Proxmox here" >&2;exit 70;}
echo "$m node $n"
for k in lxc qemu;do echo "$m pvesh $k"
pvesh get /nodes/$n/$k --output-format json||{ case $k in lxc) p=pct;;*) p=qm;;esac
echo;echo "$m list $k";$p list||exit 71;}
echo;done
echo "$m end\""""


@dataclass(frozen=True)
class Guest:
    host: str  # the Proxmox host, by its name in the project
    node: str
    vmid: int
    kind: Kind
    name: str
    status: str  # "running", "stopped", or what Proxmox calls it
    lock: str = ""  # "backup", "migrate", …: Proxmox itself is at work on it
    memory: int | None = None  # bytes that it may use; None: not told
    declared: str | None = None  # its name in the project

    def describe(self) -> str:
        what = "container" if self.kind == "lxc" else "VM"
        return f"{what} {self.vmid} ({self.name}) on {self.host}"


async def list_guests(link: Link, declared: Mapping[tuple[str, int], str]) -> list[Guest]:
    """Every guest of one Proxmox host, by number. `declared` maps (host, vmid) to the project's own name."""
    mark = f"RB{time.monotonic_ns():x}"
    found = await link.run(script=f"m={mark};{_LOOK}", timeout=LOOK_S)
    if found.exit == 70:
        raise RigbookError(
            "guest.no-proxmox", "there is neither pvesh nor pct: this is no Proxmox host, or we are not root there",
            host=link.name, exit_code=USAGE,
        )  # fmt: skip
    text = found.check("listing guests").text()
    if not text.rstrip().endswith(f"{mark} end"):
        raise RigbookError("guest.list-failed", "the list of guests was cut", host=link.name, exit_code=UNREACHABLE)
    node, guests = link.name, {}
    for part in text.split(mark + " ")[1:]:
        head, _, body = part.partition("\n")
        what, _, rest = head.partition(" ")
        if what == "node":
            node = rest
        elif what == "pvesh" and body.strip():
            guests[rest] = _from_json(body, link.name)
        elif what == "list":
            guests[rest] = columns(rest, body)
    if len(guests) < 2:
        said = found.error_text().splitlines()[-1:] or ["it printed nothing"]
        raise RigbookError("guest.list-failed", f"Proxmox did not list its guests: {said[0]}", host=link.name)
    every = []
    for kind, rows in guests.items():
        for row in rows:
            vmid = int(row["vmid"])
            memory = row.get("maxmem")
            every.append(
                Guest(
                    link.name, node, vmid, "lxc" if kind == "lxc" else "qemu", str(row.get("name") or vmid),
                    str(row.get("status") or "unknown"), str(row.get("lock") or ""),
                    int(memory) if memory is not None else None, declared.get((link.name, vmid)),
                )
            )  # fmt: skip
    return sorted(every, key=lambda guest: guest.vmid)


def _from_json(body: str, host: str) -> list[dict[str, Any]]:
    try:
        return [dict(row) for row in json.loads(body)]
    except (ValueError, TypeError) as error:
        raise RigbookError("guest.list-failed", f"pvesh printed no JSON: {body[:100]!r}", host=host) from error


def columns(kind: str, text: str) -> list[dict[str, Any]]:
    """`pct list` (%-10s %-10s %-12s %-20s) or `qm list` (%10s %-20s %-10s %-10s %12.2f %-10s). With no guests there is
    not even a header."""
    lines = text.splitlines()
    rows: list[dict[str, Any]] = []
    if kind == "lxc":
        for line in lines:
            if re.match(r"\d+ ", line):
                # By place, not by word: the lock is empty as a rule.
                vmid, rest = line[:10], line[11:]
                rows.append({"vmid": vmid.strip(), "status": rest[:10].strip(), "lock": rest[11:23].strip(),
                             "name": rest[24:].strip()})  # fmt: skip
        return rows
    for line in lines:
        # From the right: only the name can be longer than its column, or hold a space.
        if match := re.match(r" *(\d+) (.+?) +(\S+) +([\d.]+) +([\d.]+) +(\d+) *$", line):
            memory = int(float(match[4]) * (1 << 20))
            rows.append({"vmid": match[1], "name": match[2].strip(), "status": match[3], "maxmem": memory})
    return rows


@dataclass(frozen=True)
class GuestPlan:
    """What will be done to one guest."""

    id: str
    action: Action
    guest: Guest
    timeout: int  # s that a shutdown may take
    force: bool  # stop it hard when it does not shut down in that time
    notes: tuple[str, ...] = ()

    @property
    def needed(self) -> bool:
        return (self.guest.status == "running") == (self.action == "stop")

    def describe(self) -> str:
        if not self.needed:
            return f"{self.guest.describe()} is {self.guest.status} already"
        if self.action == "start":
            return f"start {self.guest.describe()}"
        hard = f"; after {self.timeout} s stop it hard" if self.force else f"; give up after {self.timeout} s"
        return f"shut down {self.guest.describe()}{hard}"


@dataclass(frozen=True)
class GuestOutcome:
    plan: str
    guest: str
    verified: bool
    status: str
    forced: bool
    said: str  # what Proxmox complained about
    seconds: float

    def describe(self) -> str:
        how = ", stopped hard" if self.forced else ""
        if self.verified:
            return f"{self.guest}: {self.status}{how}, after {self.seconds:.1f} s"
        return f"{self.guest}: is {self.status}{how}: {self.said or 'no reason was given'}"


async def plan(link: Link, action: Action, guest: Guest, *, timeout: int, force: bool) -> GuestPlan:
    """Raises RigbookError (exit code 3) when Proxmox is at work on the guest itself."""
    if guest.lock:
        raise RigbookError(
            "guest.locked", f"{guest.describe()} is locked by Proxmox ({guest.lock})", host=guest.host,
            hint="Wait until that is over. After a crash: `pct unlock` or `qm unlock`.", exit_code=REFUSED,
        )  # fmt: skip
    notes = []
    if action == "start" and guest.kind == "qemu":
        # vfio takes a device from whoever uses it when the VM starts, for the whole IOMMU group.
        config = await link.run(["qm", "config", str(guest.vmid)], timeout=LOOK_S)
        notes = [
            f"takes the PCI device {line.partition(': ')[2].partition(',')[0]} from this host and its containers"
            for line in config.text().splitlines()
            if line.startswith("hostpci")
        ]
    text = json.dumps([action, asdict(guest), timeout, force, time.time_ns()], default=str)
    id = f"guest-{hashlib.sha256(text.encode()).hexdigest()[:10]}"
    return GuestPlan(id, action, guest, timeout, force, tuple(notes))


async def apply(link: Link, what: GuestPlan) -> GuestOutcome:
    """Do it, and look again: `pct shutdown` that returns is not a container that is gone."""
    began = time.monotonic()
    guest, forced, said = what.guest, False, ""
    program, vmid = PROGRAM[guest.kind], str(guest.vmid)
    if what.action == "start":
        done = await link.run([program, "start", vmid], timeout=what.timeout)
        status = await _settled(link, guest, "running", SETTLE_S if done.ok else 0)
    else:
        done = await link.run([program, "shutdown", vmid, "--timeout", str(what.timeout)], timeout=what.timeout + 30)
        status = await _settled(link, guest, "stopped", SETTLE_S if done.ok else 0)
        if status == "running" and what.force and done.state != "unknown":
            forced, said = True, done.error_text()
            done = await link.run([program, "stop", vmid], timeout=LOOK_S)
            status = await _settled(link, guest, "stopped", SETTLE_S)
    said = done.error_text() or said if done.state == "exited" else done.describe()
    verified = status == ("running" if what.action == "start" else "stopped")
    last = said.splitlines()[-1] if said else ""
    return GuestOutcome(what.id, guest.describe(), verified, status, forced, last, time.monotonic() - began)


async def _settled(link: Link, guest: Guest, wanted: str, seconds: float) -> str:
    """The status of a guest, asked for until it is the wanted one or time is up; `unknown` when it cannot be asked."""
    deadline = time.monotonic() + seconds
    while True:
        told = await link.run([PROGRAM[guest.kind], "status", str(guest.vmid)], timeout=LOOK_S)
        status = told.text().strip().removeprefix("status: ") if told.ok else "unknown"
        if status == wanted or time.monotonic() >= deadline or told.state == "unknown":
            return status
        await asyncio.sleep(0.5)


def plan_event(what: GuestPlan) -> PlanMade:
    item = {**asdict(what.guest), "timeout": what.timeout, "force": what.force, "notes": list(what.notes)}
    return PlanMade(plan=what.id, action=f"guest.{what.action}", host=what.guest.host, items=[item])


def applied_event(outcome: GuestOutcome) -> PlanApplied:
    return PlanApplied(plan=outcome.plan, verified=outcome.verified, outcome=asdict(outcome))


def pick(guests: list[Guest], word: str) -> Guest:
    """A guest by its name in the project, its number, or its name in Proxmox."""
    for fits in (
        [guest for guest in guests if guest.declared == word],
        [guest for guest in guests if str(guest.vmid) == word],
        [guest for guest in guests if guest.name == word],
    ):
        if len(fits) == 1:
            return fits[0]
        if fits:
            where = ", ".join(f"{guest.vmid} on {guest.host}" for guest in fits)
            raise RigbookError(
                "guest.several", f"{word!r} is {where}", hint="Give its name in rigbook.toml.", exit_code=USAGE
            )
    known = ", ".join(guest.declared or f"{guest.vmid} ({guest.name})" for guest in guests) or "none"
    raise RigbookError("guest.absent", f"there is no guest {word!r} (there are: {known})", exit_code=USAGE)
