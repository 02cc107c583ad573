"""How far long work is: a line that renews itself on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from state.render.text import duration, size
from tui.cli.common import ctx, say

OFTEN = 0.1  # s between two looks on a terminal
SELDOM = 10.0  # s between two lines in a log
WINDOW = 5.0  # s over which the rate is taken


class Meter:
    """Bytes done, rate and time left. Call it with (done, total); a total of 0 is not known."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._terminal = sys.stderr.isatty() and not ctx.json
        self._began = self._last = time.monotonic()
        self._seen: list[tuple[float, int]] = []
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last < (OFTEN if self._terminal else SELDOM):
            return
        self._last = now
        self._seen = [(when, at) for when, at in self._seen if now - when < WINDOW] + [(now, done)]
        text = f"{self._what}: {told(done, total, self._rate(now, done))}"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._shown = True
        elif not ctx.json:
            say(text)

    def _rate(self, now: float, done: int) -> float:
        when, at = self._seen[0] if len(self._seen) > 1 else (self._began, 0)
        return (done - at) / max(now - when, 1e-3)


def told(done: int, total: int, rate: float) -> str:
    """`rate` in bytes a second."""
    pace = f"{size(rate)}/s"
    if not total:
        return f"{size(done)}, {pace}"
    left = duration((total - done) / rate) if rate > 0 else "unknown"
    return f"{100 * done // total} %, {size(done)} of {size(total)}, {pace}, {left} left"
