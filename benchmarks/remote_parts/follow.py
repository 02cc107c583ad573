"""Following a job's log: how fast it arrives in the local mirror, and how soon a line that was written is there.

    python -m benchmarks.remote_parts.follow [--rounds 7] [--megabytes 200]

Over OpenSSH on loopback. Beside it: `ssh host cat LOG > file` by the ssh binary, which neither resumes nor checks.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import remote as report
from benchmarks.remote_parts.exec import Row, compared
from benchmarks.remote_parts.probe import bound
from remote import jobs
from remote.connect import Link, Rig
from tests.lab import rigs

LINES = 60


async def throughput(link: Link, server: rigs.Sshd, rounds: int, megabytes: int) -> list[Row]:
    line = "step 12345 loss 2.3456789 tokens/s 12345.6 and some more words to make it a usual line of a training log"
    script = f"yes '{line}' | head -c {megabytes}000000"
    await jobs.submit(link, jobs.JobSpec("long", "", ["sh", "-c", script]))
    end = await jobs.wait(link, "long")
    command = ["ssh", "-F", str(server.root / "ssh_config"), "box", f"cat {end.dir}/out.log"]
    ours, other = [], []
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=server.root) as folder:
            began = time.perf_counter()
            assert await jobs.mirror(link, "long", Path(folder), files=("out.log",))
            took = time.perf_counter() - began
            assert (Path(folder) / "out.log").stat().st_size == megabytes * 10**6
            other_took = await asyncio.to_thread(into, Path(folder) / "other", command)
        if number:
            ours.append(megabytes / took)
            other.append(megabytes / other_took)
    what = f"follow: {megabytes} MB of lines into the mirror"
    return [bound(what, ours, "MB/s", ">= 60 MB/s"), compared(what, "ssh cat", "MB/s", ours, other, "")]


def into(path: Path, command: list[str]) -> float:
    """Seconds that a command took to write its output there."""
    began = time.perf_counter()
    with path.open("wb") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


async def latency(link: Link) -> list[Row]:
    """A job writes the time, now and then; the same machine's clock tells when the line is in our file."""
    pause = "time.sleep(0.05 + n % 7 * 0.03)"
    code = f"import time\nfor n in range({LINES}): {pause}; print(repr(time.time()), flush=True)"
    await jobs.submit(link, jobs.JobSpec("stamps", "", ["python3", "-c", code]))
    with tempfile.TemporaryDirectory() as folder:
        log, seen, late = Path(folder) / "out.log", 0, []

        def grew() -> None:
            nonlocal seen
            now = time.time()
            lines = log.read_text().splitlines()
            late.extend((now - float(line)) * 1000 for line in lines[seen:])
            seen = len(lines)

        assert await jobs.mirror(link, "stamps", Path(folder), files=("out.log",), live=True, grew=grew)
    assert len(late) == LINES
    late.sort()
    return [
        bound("follow: a line is visible after (median)", [statistics.median(late)], "ms", "<= 150 ms"),
        bound("follow: a line is visible after (slowest)", [late[-1]], "ms", "<= 150 ms"),
    ]


async def measure(rounds: int, megabytes: int) -> list[Row]:
    with rigs.sshd() as server:
        async with Rig(server.project(next(iter(server.users)))) as rig:
            link = await rig.link("box")
            return [*await throughput(link, server, rounds, megabytes), *await latency(link)]


def main(rounds: int, megabytes: int = 200) -> list[dict[str, Any]]:
    return asyncio.run(measure(rounds, megabytes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, default=200)
    args = parser.parse_args()
    for row in main(args.rounds, args.megabytes):
        print(report.line(row), flush=True)
