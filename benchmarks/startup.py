"""What a command costs before it does anything: ours and a bare import in turn, several rounds, ratios.

    python benchmarks/startup.py [--rounds 15] [--project DIR]

Compared with `python -c 'import typer, pydantic, apsw'`: the libraries that the command stands on, doing nothing. With
--project DIR (a demo rig that runs), also `book show`, and `exec` against the same with bare asyncssh.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

BARE = [sys.executable, "-c", "import typer, pydantic, apsw"]
RAW_SSH = """
import asyncio, sys, typer, pydantic, apsw, asyncssh
async def main():
    async with asyncssh.connect("llm", config=[sys.argv[1] + "/hosts/ssh_config"]) as c:
        print((await c.run("true", encoding=None)).exit_status)
asyncio.run(main())
"""


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def compare(name: str, ours: list[str], theirs: list[str], rounds: int) -> None:
    """Print the median over rounds of ours / theirs, each pair measured back to back."""
    seconds(ours), seconds(theirs)  # caches warm for both
    pairs = []
    for number in range(rounds):
        first, second = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        a, b = seconds(first), seconds(second)
        pairs.append((a, b) if number % 2 == 0 else (b, a))
    ratios = sorted(a / b for a, b in pairs)
    mine, other = (statistics.median(p[i] for p in pairs) * 1e3 for i in (0, 1))
    middle = statistics.median(ratios)
    print(
        f"{name:28s} {mine:7.1f} ms  baseline {other:7.1f} ms  ratio {middle:.2f}  ({ratios[0]:.2f}–{ratios[-1]:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--project", type=Path)
    args = parser.parse_args()
    rigbook = [sys.executable, "-m", "tui.cli.main"]
    compare("rigbook --help", [*rigbook, "--help"], BARE, args.rounds)
    if args.project:
        at = [*rigbook, "-C", str(args.project)]
        compare("rigbook book show", [*at, "book", "show"], BARE, args.rounds)
        raw = [sys.executable, "-c", RAW_SSH, str(args.project)]
        compare("rigbook exec llm -- true", [*at, "exec", "llm", "--", "true"], raw, args.rounds)


if __name__ == "__main__":
    main()
