"""The probe: how soon it answers, how fast it goes on, and what it costs the machine that it runs on.

    python -m benchmarks.remote_parts.probe [--rounds 7] [--seconds 20]

On a warm connection to OpenSSH on loopback. Beside it: an interpreter that only starts, a line through `cat` there and
back (what the channel itself costs), and psutil asking the same of 500 processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import remote as report
from benchmarks.remote_parts.exec import Row, compared
from remote.connect import Link, Rig
from remote.probe.client import Probe
from tests.lab import rigs

CALLS = 200
PROCESSES = 500
TICK = os.sysconf("SC_CLK_TCK")

# What many a tool does: every process, once a second, by the usual library.
PSUTIL = """
import sys, time, psutil
names = ["pid", "ppid", "create_time", "uids", "status", "name", "cmdline", "memory_info", "num_threads", "cpu_times"]
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    list(psutil.process_iter(names))
    psutil.virtual_memory(), psutil.cpu_percent(), psutil.getloadavg()
    time.sleep(1)
"""


def bound(what: str, values: list[float], unit: str, wanted: str) -> Row:
    """A figure with a limit of its own, whatever others take."""
    return {"what": what, "ours": statistics.median(values), "other": None, "unit": unit, "wanted": wanted}


async def first_answer(link: Link, rounds: int) -> list[Row]:
    ours, other = [], []
    for number in range(rounds + 1):
        began = time.perf_counter()
        async with await link.open_probe() as probe:
            await probe.call("clock")
            asked = time.perf_counter() - began
        began = time.perf_counter()
        assert (await link.run(["/usr/bin/python3", "-I", "-S", "-c", "pass"])).ok
        if number:
            ours.append(asked * 1000)
            other.append((time.perf_counter() - began) * 1000)
    what = "probe: first answer on a new channel"
    return [bound(what, ours, "ms", "<= 150 ms"), compared(what, "python3 -c pass", "ms", ours, other, "")]


async def calls(link: Link, rounds: int) -> list[Row]:
    ours, other = [], []
    async with await link.open_probe() as probe, link.open(["cat"]) as (channel, marker):
        for number in range(rounds + 1):
            began = time.perf_counter()
            for _ in range(CALLS):
                await probe.call("clock")
            asked = (time.perf_counter() - began) * 1000 / CALLS
            began = time.perf_counter()
            for _ in range(CALLS):
                await channel.write(b'{"id":7,"call":"clock","args":{}}\n')
                while not marker.feed(await channel.read()):
                    pass
            if number:
                ours.append(asked)
                other.append((time.perf_counter() - began) * 1000 / CALLS)
    what = "probe: request and response"
    return [bound(what, ours, "ms", "<= 1 ms"), compared(what, "a line through cat", "ms", ours, other, "")]


def used(pid: int) -> float:
    """CPU seconds of a process."""
    with open(f"/proc/{pid}/stat") as file:
        part = file.read().rpartition(")")[2].split()
    return (int(part[11]) + int(part[12])) / TICK


def peak(pid: int) -> float:
    """The most that it had resident, MB."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 / 1e6 for line in file if line.startswith("VmHWM"))


async def sampling(link: Link, seconds: float) -> list[Row]:
    sleepers = [start(["sleep", "1000"]) for _ in range(PROCESSES)]
    beside = None
    try:
        async with await link.open_probe() as probe:
            pid = (await probe.ready)["pid"]
            count = len(await probe.call("processes"))
            assert count >= PROCESSES
            watching = asyncio.ensure_future(watch(probe))
            await asyncio.sleep(2)  # the first look reads everything
            beside = start([sys.executable, "-c", PSUTIL, str(seconds + 10)])
            await asyncio.sleep(3)
            began, before, other_before = time.monotonic(), used(pid), used(beside.pid)
            await asyncio.sleep(seconds)
            took = time.monotonic() - began
            ours, other = (used(pid) - before) / took * 100, (used(beside.pid) - other_before) / took * 100
            memory, other_memory = peak(pid), peak(beside.pid)
            watching.cancel()
    finally:
        for process in [*sleepers, *([beside] if beside else [])]:
            process.kill()
            process.wait()
    what = f"probe: {count} processes at 1 Hz"
    return [
        bound(f"{what}, of one core", [ours], "%", "<= 1 %"),
        compared(f"{what}, of one core", "psutil", "%", [ours], [other], ""),
        bound(f"{what}, memory", [memory], "MB", "<= 20 MB"),
        compared(f"{what}, memory", "psutil", "MB", [memory], [other_memory], ""),
    ]


def start(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv)


async def watch(probe: Probe) -> None:
    async for _ in probe.stream("live", every=1.0):
        pass


async def measure(rounds: int, seconds: float) -> list[Row]:
    with rigs.sshd() as server:
        async with Rig(server.project(next(iter(server.users)))) as rig:
            link = await rig.link("box")
            return [
                *await first_answer(link, rounds),
                *await calls(link, rounds),
                *await sampling(link, seconds),
            ]


def main(rounds: int, seconds: float = 20) -> list[dict[str, Any]]:
    return asyncio.run(measure(rounds, seconds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    for row in main(args.rounds, args.seconds):
        print(report.line(row), flush=True)
