"""What runs say of themselves: their mirrored event lines under .rigbook/runs/RUN/, read on as they grow."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tui.snapshot import JobView, LogSource, Progress, RunView

KEPT = 4000  # values of one metric that the app holds; older ones are in the file
METRICS = 12  # of one run
WARNINGS = 20


class RunReader:
    """The event lines of one run, taken in once each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._metrics: dict[str, deque[float]] = {}
        self._warnings: deque[str] = deque(maxlen=WARNINGS)
        self._progress: dict[str, Any] = {}
        self._error = ""
        self._result: dict[str, Any] = {}
        self._lines = 0
        self.progress = Progress()

    def poll(self) -> bool:
        """Read on. True when something new was said."""
        from pipeline.runs import event_lines

        try:
            stat = self.path.stat()
        except OSError:
            return False
        identity = (stat.st_dev, stat.st_ino)
        if stat.st_size < self._offset or self._identity not in (None, identity):
            self.__init__(self.path)  # type: ignore[misc]  # another file: everything is said afresh
        self._identity = identity
        if stat.st_size == self._offset:
            return False
        before = self._lines
        for offset, event in event_lines(self.path, self._offset):
            self._offset = offset
            self._lines += 1
            self._take(event)
        if self._lines == before:
            return False
        self.progress = Progress(
            done=number(self._progress.get("done")),
            total=number(self._progress.get("total")),
            unit=str(self._progress.get("unit") or ""),
            rate=number(self._progress.get("rate")),
            eta=number(self._progress.get("eta")),
            at=number(self._progress.get("t")),
            metrics=MappingProxyType({name: tuple(values) for name, values in self._metrics.items()}),
            warnings=tuple(self._warnings),
            error=self._error,
            result=MappingProxyType(self._result),
            lines=self._lines,
        )
        return True

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "progress":
            self._progress = event
        elif kind == "metric":
            for name, value in series_of(event):
                if name in self._metrics or len(self._metrics) < METRICS:
                    self._metrics.setdefault(name, deque(maxlen=KEPT)).append(math.nan if value is None else value)
        elif kind == "warning":
            self._warnings.append(str(event.get("message")))
        elif kind == "error":
            self._error = str(event.get("message"))
        elif kind == "result" and isinstance(event.get("result"), dict):
            self._result = event["result"]


def series_of(event: dict[str, Any]) -> list[tuple[str, float | None]]:
    """The curves that a metric event adds a point to: its own, and the accept length told beside a loss."""
    name = str(event.get("name"))
    found = [(name, number(event.get("value")))]
    if "accept_length" in event:
        found.append((f"{name.rpartition('.')[0]}.accept_length".lstrip("."), number(event["accept_length"])))
    return found


def number(value: Any) -> float | None:
    """A number, or None. The stages write NaN and infinities as {"special": …}."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, dict) and "special" in value:
        try:
            return float(value["special"])
        except (TypeError, ValueError):
            return None
    return None


class RunSource:
    """Readers for the runs that somebody may look at."""

    def __init__(self, root: Path) -> None:
        self.folder = root / ".rigbook" / "runs"
        self.actions = root / ".rigbook" / "actions"
        self._readers: dict[str, RunReader] = {}

    def poll(self, runs: Iterable[str]) -> bool:
        """Read on in these runs. True when any said something new."""
        wanted = list(runs)
        for run in set(self._readers) - set(wanted):
            del self._readers[run]
        said = [self._reader(run).poll() for run in wanted]
        return any(said)

    def _reader(self, run: str) -> RunReader:
        if run not in self._readers:
            self._readers[run] = RunReader(self.folder / run / "events.jsonl")
        return self._readers[run]

    def progress(self, run: str) -> Progress:
        reader = self._readers.get(run)
        return reader.progress if reader else Progress()

    def logs(self, runs: tuple[RunView, ...], jobs: Mapping[str, JobView]) -> tuple[LogSource, ...]:
        """Every log that lies on this machine: what runs first, then the newest."""
        by_run = {run.run: run for run in runs}
        found = []
        for path in [*_files(self.folder, "*/out.log"), *_files(self.actions, "*.log")]:
            try:
                at = path.stat().st_mtime
            except OSError:
                continue
            if path.parent == self.actions:
                stamp, _, name = path.stem[9:].partition("-")
                when = f"{stamp[:2]}:{stamp[2:4]}"
                found.append(LogSource(f"action:{path.stem}", f"action {name} {when}", str(path), "done", at))
                continue
            run = by_run.get(path.parent.name)
            job = jobs.get(path.parent.name)
            state = run.status if run else job.state if job else "unknown"
            title = f"{run.what} {run.name}" if run else f"job {path.parent.name}"
            found.append(LogSource(f"run:{path.parent.name}", title, str(path), state, at))
        # A server runs for days; what runs and ends is what somebody wants to see first.
        found.sort(key=lambda s: (s.state == "running", not s.title.startswith("server "), s.at or 0.0), reverse=True)
        return tuple(found)


def _files(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern)) if folder.is_dir() else []
