"""GPUs: what a look a second costs a host with eight of them and 500 processes, in the probe.

    python -m benchmarks.remote_parts.gpus [--rounds 30]

On the stand-in of the tests: real processes, the real probe and pynvml, a library in NVML's place. What the real
library takes comes on top; tests/gpu measures that on a real card.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
from typing import Any

from benchmarks.remote_parts.probe import bound
from remote import gpus
from tests.lab.gpu_machine import Machine, fake_gpu, gpu_machine, holder_program

PROCESSES = 500
Row = dict[str, Any]


async def looks(machine: Machine, rounds: int) -> tuple[list[float], list[float]]:
    """(percent of a core at a look a second, of a whole scan alone)."""
    project, link = machine.project(), machine.link()
    try:
        for _ in range(3):
            await gpus.look(link, project)
        costs = []
        for _ in range(rounds):
            costs.append((await gpus.look(link, project, max_age=gpus.HOLDERS_S)).cost["cpu_seconds"])
            await asyncio.sleep(1)
        deep = [(await gpus.look(link, project, deep=True)).cost["cpu_seconds"] for _ in range(5)]
        return costs, deep
    finally:
        await link.aclose()


def main(rounds: int = 30) -> list[Row]:
    with gpu_machine([fake_gpu(at) for at in range(8)]) as machine:
        machine.head["still"] = 1
        for at in range(8):
            pid = machine.hold(f"/dev/nvidia{at}", "/dev/nvidiactl")
            machine.gpus[at].more = [f"proc {pid} {40 << 30}"]
        machine.write()
        # One shell starts them all: an nsenter each would take longer than the measurement.
        script = f"for n in $(seq {PROCESSES}); do {holder_program()} & done; sleep 1000"
        machine.popen(["sh", "-c", script], stdout=subprocess.DEVNULL)
        while int(machine.run(["sh", "-c", "ls -d /proc/[0-9]* | wc -l"]).stdout) < PROCESSES:
            pass
        costs, deep = asyncio.run(looks(machine, rounds))
    mean = sum(costs) / len(costs)
    what = f"8 GPUs, {PROCESSES} processes: a look a second"
    return [
        bound(what, [100 * mean], "% of a core", "<= 1 % of a core"),
        bound(f"{what}, the dearest one", [1000 * max(costs)], "ms of processor", ""),
        bound("the same: every process looked into", [1000 * value for value in deep], "ms of processor", ""),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    for row in main(parser.parse_args().rounds):
        print(row)
