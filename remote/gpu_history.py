"""A ring of what GPUs did, on our side: for `gpus --since`, the app's curves, and for telling an alert once.

One file a host under .rigbook/gpus/, one JSON line a look, the older half dropped when it has grown to `LIMIT`. Losing
a line loses a point of a curve and nothing else, so nothing is synced. Whoever looks appends: lines are whole by
O_APPEND, and a second writer only makes the curve denser.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from remote.gpus import Look, known
from state.checks import Finding

LIMIT = 4 << 20  # bytes; about three hours of eight GPUs at a look a second
FIGURES = ("load", "power", "temperature", "clock")


def row(look: Look) -> dict[str, Any]:
    """A look as a line of the ring. None: the driver did not tell."""
    gpus = {}
    for gpu in look.gpus:
        if gpu.uuid is None:
            continue
        memory = gpu.values.get("memory") or {}
        throttle = [word for word in known(gpu.values.get("throttle")) or [] if word != "idle"]
        figures = {name: known(gpu.values.get(name)) for name in FIGURES}
        gpus[gpu.uuid] = {"used": known(memory.get("used")), **figures, "throttle": throttle, "owner": gpu.owner}
    return {"at": round(look.at, 3), "state": look.state, "gpus": gpus}


class History:
    def __init__(self, root: Path) -> None:
        self._folder = root / ".rigbook" / "gpus"

    def _file(self, host: str) -> Path:
        return self._folder / f"{host}.jsonl"

    def add(self, look: Look) -> None:
        file = self._file(look.host)
        file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row(look), separators=(",", ":")).encode() + b"\n"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            end = os.fstat(descriptor).st_size
            # A line that a crash cut off must not take the next one with it.
            torn = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
            os.write(descriptor, b"\n" + line if torn else line)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > LIMIT:
            self._halve(file)

    def _halve(self, file: Path) -> None:
        data = file.read_bytes()
        kept = data[data.index(b"\n", len(data) // 2) + 1 :]
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(kept)
        temporary.replace(file)

    def since(self, host: str, at: float) -> list[dict[str, Any]]:
        """The looks since then (seconds since the epoch), oldest first."""
        found = []
        try:
            lines = self._file(host).read_bytes().splitlines()
        except FileNotFoundError:
            return []
        for line in reversed(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # a line that was cut off, or torn by a crash
            if entry["at"] < at:
                break
            found.append(entry)
        return found[::-1]

    # -- alerts: told when they begin --------------------------------------------------------------------------

    def begun(self, host: str, found: Iterable[Finding]) -> list[Finding]:
        """Those findings that the last look did not have. Remembers what is so now."""
        file = self._folder / f"{host}.alerts.json"
        try:
            before = set(json.loads(file.read_bytes()))
        except (FileNotFoundError, ValueError):
            before = set()
        now = {f"{finding.check.id} {finding.evidence or finding.message}": finding for finding in found}
        # A line of the kernel log stays there: it is told once, and not again when it has scrolled away and back.
        kept = {key for key in before if key.startswith("gpu.xid ")}
        after = kept | set(now)
        if after != before:
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_suffix(f".{os.getpid()}.tmp")
            with contextlib.suppress(OSError):
                temporary.write_text(json.dumps(sorted(after)))
                temporary.replace(file)
        return [finding for key, finding in now.items() if key not in before]


def spread(rows: list[dict[str, Any]], uuid: str, figure: str) -> tuple[float, float, float] | None:
    """(least, mean, most) of a figure; None when it was never told."""
    values = [entry["gpus"][uuid][figure] for entry in rows if uuid in entry["gpus"]]
    values = [value for value in values if value is not None]
    return (min(values), sum(values) / len(values), max(values)) if values else None


BARS = "▁▂▃▄▅▆▇█"


def curve(rows: list[dict[str, Any]], uuid: str, figure: str, top: float, width: int, end: float, span: float) -> str:
    """A line of bars over `span` seconds until `end`; a blank where nobody looked."""
    slots: list[list[float]] = [[] for _ in range(width)]
    for entry in rows:
        value: Mapping[str, Any] = entry["gpus"].get(uuid, {})
        at = int((entry["at"] - (end - span)) / span * width)
        if value.get(figure) is not None and 0 <= at < width:
            slots[at].append(value[figure])
    found = ""
    for slot in slots:
        share = max(slot) / top if slot and top else 0.0
        found += " " if not slot else BARS[min(len(BARS) - 1, int(share * len(BARS)))]
    return found


def seconds(text: str) -> float:
    """`90s`, `15m`, `2h`, `1d`; a bare number is minutes. ValueError when it is none of these."""
    unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(text[-1:], 0)
    return float(text[:-1]) * unit if unit else float(text) * 60


def now() -> float:
    return time.time()
