"""What the remote room costs beside the tools that do the same, in one run: medians of ratios, pair by pair.

    python -m benchmarks.remote [--rounds 7] [--only exec,probe,follow,files]

Each part starts its own OpenSSH server on loopback, runs ours and the other in turn, several rounds, and gives rows
{what, ours, other, unit, ratio, low, high, wanted, against}: `wanted` is the limit that the project set itself
("<= 1.3"), `against` names the other side. Absolute times on a small, noisy machine mean little; ratios do.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from typing import Any

PARTS = ("exec", "probe", "follow", "files", "gpus")


def line(row: dict[str, Any]) -> str:
    """One comparison on one line, with whether the limit was kept."""
    ours, other, unit = row["ours"], row.get("other"), row["unit"]
    text = f"{row['what']:44s} {ours:10.4g} {unit}"
    if other is not None:
        text += f"  {row['against']} {other:.4g} {unit}  ratio {row['ratio']:.2f} ({row['low']:.2f}–{row['high']:.2f})"
    wanted = row.get("wanted")
    if wanted:
        sign, limit = wanted.split()[:2]
        value = row["ratio"] if other is not None else ours
        kept = value <= float(limit) if sign == "<=" else value >= float(limit)
        text += f"  wanted {wanted}: {'kept' if kept else 'MISSED'}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, separated by commas")
    args = parser.parse_args()
    chosen = args.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    print(f"# {platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for name in chosen:
        part = importlib.import_module(f"benchmarks.remote_parts.{name}")
        for row in part.main(args.rounds):
            print(line(row), flush=True)


if __name__ == "__main__":
    main()
