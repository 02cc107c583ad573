"""`rigbook gpus --since`: what the GPUs did, out of our own ring."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from state.errors import USAGE, RigbookError
from tui.cli.common import emit

WIDTH = 40  # bars; a line is 80 columns


def past(root: Path, hosts: list[str], since: str) -> None:
    from remote.gpu_history import History, seconds

    try:
        span = seconds(since)
    except ValueError:
        raise RigbookError("gpu.bad-time", f"--since {since} is no time", hint="15m", exit_code=USAGE) from None
    end = time.time()
    history = History(root)
    rows = {host: history.since(host, end - span) for host in hosts}
    text = [line for host in hosts for line in lines(host, rows[host], end, span)]
    emit({"since": end - span, "hosts": rows}, "\n".join(text))


def lines(host: str, rows: list[dict[str, Any]], end: float, span: float) -> list[str]:
    """Three curves a GPU: memory, load, temperature."""
    from remote.gpu_history import curve, spread

    if not rows:
        return [f"{host}: nobody looked in that time (rigbook gpus --watch does)"]
    out = [f"{host}: {len(rows)} looks in {span / 60:.0f} min; least, mean and most of each"]
    for uuid in dict.fromkeys(uuid for row in rows for uuid in row["gpus"]):
        out.append(f"  {uuid}")
        for figure, word, unit in (
            ("used", "MiB", 1 << 20),
            ("load", "%", 1),
            ("power", "W", 1),
            ("temperature", "C", 1),
        ):
            found = spread(rows, uuid, figure)
            if found is None:
                out.append(f"    {word:>3}  not told")
                continue
            drawn = curve(rows, uuid, figure, found[2], WIDTH, end, span)
            least, mean, most = (f"{value / unit:.0f}" for value in found)
            out.append(f"    {word:>3} |{drawn}| {least} {mean} {most}")
    return out
