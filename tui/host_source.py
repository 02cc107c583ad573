"""One host, looked at again and again: its link, its jobs, a few figures. Each host has a task of its own.

A host that hangs, refuses or is gone costs its own task only: it is tried again with growing patience, and what it
told last stays, with the time of telling.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from state.errors import RigbookError
from tui.snapshot import HostView, JobView

if TYPE_CHECKING:
    from remote.connect import Link, Rig
    from state.project import Host

CONNECT_SECONDS = 20.0
ANSWER_SECONDS = 15.0
FIRST_RETRY, LAST_RETRY = 1.0, 60.0

# POSIX sh and /proc only: nothing to install, nothing left behind, one round trip.
LOOK = r"""
read one rest </proc/loadavg && echo "load1 $one"
echo "cores $(getconf _NPROCESSORS_ONLN 2>/dev/null)"
while read name value unit; do
  case $name in MemTotal:) echo "mem_total_kb $value";; MemAvailable:) echo "mem_free_kb $value";; esac
done </proc/meminfo
df -Pk "$HOME" 2>/dev/null | { read line; read fs size used free rest; echo "disk_free_kb $free"; }
gpus=0
for entry in /proc/driver/nvidia/gpus/*; do [ -d "$entry" ] && gpus=$((gpus+1)); done
echo "gpus $gpus"
"""


class HostWatch:
    """Keeps `view` up to date. `changed` is called when there is something new to show."""

    def __init__(self, name: str, host: Host, rig: Rig, changed: Callable[[], None], every: float = 2.0) -> None:
        self.name, self.rig, self.changed, self.every = name, rig, changed, every
        self.view = HostView(
            name=name,
            kind=host.kind,
            route=host.ssh
            or ("this machine" if host.kind == "local" else f"{host.reached_by} {host.vmid or ''}".strip()),
            on=host.on,
            played=host.played,
        )
        self.link: Link | None = None  # set while it answers
        self._asked = asyncio.Event()

    def ask_now(self) -> None:
        """Somebody wants to know: do not wait for the next turn."""
        self._asked.set()

    async def run(self) -> None:
        """Look for ever. Ends only by being cancelled."""
        patience = FIRST_RETRY
        while True:
            if self.link is None:
                self._set(link="connecting" if self.view.link == "unknown" else self.view.link)
            try:
                await self._look()
                patience = FIRST_RETRY
                wait = self.every
            except (RigbookError, OSError, TimeoutError, ValueError) as error:
                self.link = None
                reason = str(error) or f"no answer within {ANSWER_SECONDS:.0f} s"
                self._set(link="down", reason=first_sentence(reason), retry_at=time.time() + patience)
                wait, patience = patience, min(patience * 2, LAST_RETRY)
            self._asked.clear()
            try:
                await asyncio.wait_for(self._asked.wait(), wait)
            except TimeoutError:
                continue

    async def _look(self) -> None:
        from remote import jobs

        link = await asyncio.wait_for(self.rig.link(self.name), CONNECT_SECONDS)
        started = time.monotonic()
        result = await asyncio.wait_for(link.run(script=LOOK, timeout=ANSWER_SECONDS), ANSWER_SECONDS + 5)
        figures = parse(result.check("looking at the host").stdout)
        now = time.time()
        self.link = link
        self._set(
            link="up", reason="", retry_at=None, answered=now, round_trip=time.monotonic() - started, figures=figures
        )
        found = await asyncio.wait_for(jobs.list_jobs(link), ANSWER_SECONDS)
        self._set(jobs=tuple(job_view(self.name, job) for job in found), jobs_at=time.time(), answered=time.time())

    def _set(self, **fields: Any) -> None:
        view = replace(self.view, **fields)
        if view != self.view:
            self.view = view
            self.changed()


def parse(said: bytes) -> Mapping[str, Any]:
    """The lines of LOOK as figures. A line that says nothing is left out: unknown is not zero."""
    raw: dict[str, float] = {}
    for each in said.decode("utf-8", "replace").splitlines():
        name, _, value = each.partition(" ")
        try:
            raw[name] = float(value)
        except ValueError:
            continue
    out: dict[str, Any] = {}
    if "load1" in raw:
        out["load1"] = raw["load1"]
    for name in ("cores", "gpus"):
        if name in raw:
            out[name] = int(raw[name])
    if "mem_total_kb" in raw:
        out["mem_total"] = raw["mem_total_kb"] * 1024
        if "mem_free_kb" in raw:
            out["mem_used"] = (raw["mem_total_kb"] - raw["mem_free_kb"]) * 1024
    if "disk_free_kb" in raw:
        out["disk_free"] = raw["disk_free_kb"] * 1024
    return out


def job_view(host: str, job: Any) -> JobView:
    return JobView(
        host=host,
        id=job.id,
        name=job.name,
        state=job.state,
        exit=job.exit,
        pid=job.pid,
        started=job.started,
        ended=job.ended,
    )


def first_sentence(text: str) -> str:
    return " ".join(text.split())[:200]
