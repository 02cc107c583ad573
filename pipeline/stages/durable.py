"""Rows appended to a JSONL file in groups: one fsync for all that came in a moment, and nobody is told before it.

A row is acknowledged when it is on the disk. At 50,000 tokens a second an fsync a row would be the slowest part of the
whole; a group of 0.2 s costs nothing, and a kill loses at most the answers of that moment, which are asked for again.
The file may be cut at any byte: the torn last line was never acknowledged, and is taken off on opening.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.stages.protocol import Refused, parse_object

GROUP = 0.2  # seconds that rows are gathered for


class Appended:
    """The file, open for appending. Memory: the ids of its rows, and no row of them."""

    def __init__(self, path: Path, seen: Callable[[dict[str, Any]], None]) -> None:
        """`seen` is told every row: those that are there already now, later ones when they are durable.

        Raises Refused `stage.damaged` for a line in the middle that is not ours, or an id that is there twice.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.seen = path, seen
        self.done: set[str] = set()
        self._waiting: list[dict[str, Any]] = []
        self._group: tuple[list[dict[str, Any]], Future[None]] | None = None  # being written, nobody told yet
        self._thread = ThreadPoolExecutor(1)
        self._news = asyncio.Event()
        self._read()
        self._file = path.open("ab", buffering=0)

    def _read(self) -> None:
        if not self.path.exists():
            return
        whole = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                if line.strip():
                    row = parse_object(line, f"line {number} of {self.path}")
                    if "id" not in row or row["id"] in self.done:
                        raise Refused(
                            "stage.damaged",
                            f"line {number} of {self.path} is damaged (its id is missing, or there twice); "
                            "move its folder away and it is made anew",
                        )
                    self.done.add(row["id"])
                    self.seen(row)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)

    def put(self, row: dict[str, Any]) -> None:
        """Hand a row over. It is durable when `seen` is told of it."""
        self._waiting.append(row)
        self._news.set()

    async def keep(self) -> None:
        """Write groups for as long as it is not cancelled. An error of the disk ends it, and is raised."""
        while True:
            await self._news.wait()
            await asyncio.sleep(GROUP)
            self._news.clear()
            rows, self._waiting = self._waiting, []
            # In a thread, so that answers are read while the disk works; shielded, so that a group is whole.
            self._group = rows, self._thread.submit(self._write, rows)
            await asyncio.shield(asyncio.wrap_future(self._group[1]))
            self._group = None
            self._told(rows)

    def close(self) -> None:
        """Write what still waits, and tell of what was written when `keep` was cancelled. Raises as the disk does."""
        group, self._group = self._group, None
        rows, self._waiting = self._waiting, []
        try:
            if group is not None:
                group[1].result()
                self._told(group[0])
            if rows:
                self._write(rows)
                self._told(rows)
        finally:
            self._thread.shutdown()
            self._file.close()

    def _write(self, rows: list[dict[str, Any]]) -> None:
        data = memoryview("".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode())
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())

    def _told(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.done.add(row["id"])
            self.seen(row)
