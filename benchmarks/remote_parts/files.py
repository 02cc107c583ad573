"""Copies beside tar through ssh and scp, on the same loopback sshd, in turn.

    python -m benchmarks.remote_parts.files [--rounds 7]

Both sides make their connection anew each time, and both ends lie in memory (/dev/shm), so that the copy is measured
and not a disk: ours waits for the disk (fsync) and computes SHA-256 at both ends, the others do neither.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks import remote
from remote import files
from remote.connect import Link, Rig
from state.project import Project
from tests.lab import rigs

SMALL, SMALL_BYTES = 1000, 2000
LARGE_MB = 300


def main(rounds: int) -> list[dict[str, Any]]:
    """The rows for benchmarks.remote."""
    with rigs.sshd("Subsystem sftp internal-sftp\n") as server:
        user = "rbbash" if "rbbash" in server.users else next(iter(server.users))
        home = server.users[user]
        if os.geteuid() == 0:
            (home / ".bashrc").write_text("")  # tar through ssh cannot bear what it prints
        project = server.project(user)
        place = Path(tempfile.mkdtemp(prefix="rb-bench-", dir="/dev/shm"))
        place.chmod(0o777)
        try:
            return _measure(project, server.root / "ssh_config", place, rounds)
        finally:
            shutil.rmtree(place)


def _measure(project: Project, config: Path, place: Path, rounds: int) -> list[dict[str, Any]]:
    tree, large = place / "tree", place / "large"
    tree.mkdir()
    for number in range(SMALL):
        (tree / f"{number:04}").write_bytes(os.urandom(SMALL_BYTES))
    with large.open("wb") as file:
        for _ in range(LARGE_MB):
            file.write(os.urandom(1_000_000))
    ssh = f"ssh -F {config} box"
    scp = f"scp -q -F {config}"
    there, back = place / "there", place / "back"

    def ours(work: Callable[[Link], Awaitable[object]]) -> Callable[[], None]:
        async def run() -> None:
            async with Rig(project) as rig:
                await work(await rig.link("box"))

        return lambda: asyncio.run(run())

    def plain(command: str) -> Callable[[], None]:
        return lambda: subprocess.run(["bash", "-o", "pipefail", "-c", command], check=True) and None

    pairs = [
        (
            f"{SMALL} files of {SMALL_BYTES} B, there",
            ours(lambda link: files.put_tree(link, tree, os.fspath(there))),
            plain(f"tar -C {tree} -cf - . | {ssh} 'mkdir {there} && tar -C {there} -xf -'"),
            "tar | ssh tar",
            None,
        ),
        (
            f"{SMALL} files of {SMALL_BYTES} B, back",
            ours(lambda link: files.get_tree(link, os.fspath(tree), back)),
            plain(f"mkdir {back} && {ssh} 'tar -C {tree} -cf - .' | tar -C {back} -xf -"),
            "ssh tar | tar",
            None,
        ),
        (
            f"one file of {LARGE_MB} MB, there",
            ours(lambda link: files.put(link, large, os.fspath(there))),
            plain(f"{scp} {large} box:{there}"),
            "scp",
            LARGE_MB,
        ),
        (
            f"one file of {LARGE_MB} MB, back",
            ours(lambda link: files.get(link, os.fspath(large), back)),
            plain(f"{scp} box:{large} {back}"),
            "scp",
            LARGE_MB,
        ),
    ]
    rows = []
    for what, mine, other, against, megabytes in pairs:
        times = _in_turn(mine, other, [there, back], rounds)
        if megabytes is None:
            ratios = sorted(a / b for a, b in times)
            values = [statistics.median(pair[i] for pair in times) * 1e3 for i in (0, 1)]
            unit, wanted = "ms", "<= 2"
        else:
            ratios = sorted(b / a for a, b in times)
            values = [megabytes / statistics.median(pair[i] for pair in times) for i in (0, 1)]
            unit, wanted = "MB/s", ">= 0.8"
        row = {"what": what, "ours": values[0], "other": values[1], "unit": unit, "against": against, "wanted": wanted}
        rows.append({**row, "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1]})
    return rows


def _in_turn(
    mine: Callable[[], None], other: Callable[[], None], made: list[Path], rounds: int
) -> list[tuple[float, float]]:
    """Seconds of ours and of the other, pair by pair; who is first changes."""
    pairs = []
    for number in range(rounds + 1):
        found = {}
        for which in (mine, other) if number % 2 else (other, mine):
            for path in made:
                shutil.rmtree(path, ignore_errors=True)
                path.unlink(missing_ok=True)
            began = time.perf_counter()
            which()
            found[which] = time.perf_counter() - began
        if number:  # the first warms caches
            pairs.append((found[mine], found[other]))
    return pairs


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    for each in main(parser.parse_args().rounds):
        print(remote.line(each))
