"""How things look: glyphs with an ASCII twin, styles by meaning, and the wording of ages, durations and amounts.

Colour never carries meaning alone: every state has a word and a glyph of its own. Styles use the terminal's own
sixteen colours, so they follow the user's theme, cost few bytes, and vanish cleanly under NO_COLOR.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style

STYLES: dict[str, Style] = {
    "": Style(),
    "dim": Style(dim=True),
    "head": Style(bold=True),
    "bold": Style(bold=True),
    "ok": Style(color="green"),
    "run": Style(color="cyan"),
    "warn": Style(color="yellow", bold=True),
    "bad": Style(color="red", bold=True),
    "key": Style(color="cyan", bold=True),
    "bar": Style(color="cyan"),
    "add": Style(color="green"),
    "remove": Style(color="red"),
    "hit": Style(reverse=True, bold=True),
}


@dataclass(frozen=True)
class Look:
    """One set of glyphs. Everything that a screen draws beyond letters comes from here."""

    ascii: bool
    dash: str
    dots: str
    cursor: str
    rule: str
    sep: str
    times: str
    full: str
    empty: str
    spark: str
    marks: dict[str, str]  # state -> glyph

    def shown(self, text: str) -> str:
        """Text of whatever origin as this terminal can show it."""
        return text.encode("ascii", "replace").decode() if self.ascii and not text.isascii() else text

    def mark(self, state: str) -> str:
        return self.marks.get(state, self.marks["unknown"])

    def bar(self, fraction: float | None, width: int) -> str:
        """A bar of `width` cells; an unknown fraction is empty, not zero: it is drawn with dashes."""
        if fraction is None or not math.isfinite(fraction):
            return self.dash[:1] * width
        filled = round(max(0.0, min(1.0, fraction)) * width)
        return self.full * filled + self.empty * (width - filled)

    def sparkline(self, values: Sequence[float], width: int) -> str:
        """The last values, squeezed into `width` cells by averaging; what is not finite is left blank."""
        if not values or width <= 0:
            return ""
        per_cell = max(1, math.ceil(len(values) / width))
        cells: list[float | None] = []
        for at in range(0, len(values), per_cell):
            block = [v for v in values[at : at + per_cell] if math.isfinite(v)]
            cells.append(sum(block) / len(block) if block else None)
        known = [v for v in cells if v is not None]
        if not known:
            return ""
        low, high = min(known), max(known)
        top = len(self.spark) - 1
        span = (high - low) or 1.0
        return "".join(" " if v is None else self.spark[round((v - low) / span * top)] for v in cells)


UNICODE = Look(
    ascii=False,
    dash="—",
    dots="…",
    cursor="›",
    rule="─",
    sep="·",
    times="×",
    full="█",
    empty="░",
    spark="▁▂▃▄▅▆▇█",
    marks={
        "up": "●", "ready": "●", "done": "✓", "skipped": "✓", "running": "▶", "starting": "▷", "loading": "▷",
        "connecting": "◌", "stale": "◌", "down": "○", "stopped": "■", "failed": "✗", "vanished": "✗", "lost": "✗",
        "lost_reboot": "✗", "not started": "·", "unknown": "?", "warning": "!", "refused": "⊘", "finished": "✓",
        "next": "→", "holds": "✓", "absent": "·",
    },
)  # fmt: skip
ASCII = Look(
    ascii=True,
    dash="--",
    dots="~",
    cursor=">",
    rule="-",
    sep="|",
    times="x",
    full="#",
    empty=".",
    spark="_.-~=+*#",
    marks={
        "up": "*", "ready": "*", "done": "+", "skipped": "+", "running": ">", "starting": "^", "loading": "^",
        "connecting": "o", "stale": "o", "down": "o", "stopped": "=", "failed": "x", "vanished": "x", "lost": "x",
        "lost_reboot": "x", "not started": ".", "unknown": "?", "warning": "!", "refused": "/", "finished": "+",
        "next": "-", "holds": "+", "absent": ".",
    },
)  # fmt: skip

# Which style a state is told in, beside its word and glyph.
STATE_STYLES = {
    "up": "ok", "ready": "ok", "done": "ok", "finished": "ok", "skipped": "dim", "running": "run", "starting": "run",
    "loading": "run", "connecting": "dim", "stale": "dim", "down": "bad", "stopped": "dim", "failed": "bad",
    "vanished": "bad", "lost": "bad", "lost_reboot": "bad", "not started": "dim", "unknown": "warn", "refused": "warn",
}  # fmt: skip


def choose(ascii_only: bool = False) -> Look:
    """The glyphs for this terminal: ASCII when asked for, or when its encoding is not UTF-8."""
    encoding = (getattr(sys.__stdout__, "encoding", None) or "utf-8").lower().replace("-", "")
    return ASCII if ascii_only or os.environ.get("RIGBOOK_ASCII") or encoding != "utf8" else UNICODE


def age(seconds: float | None) -> str:
    """How long ago, coarse on purpose: a figure that changes each second would repaint its line each second."""
    if seconds is None:
        return "never"
    seconds = max(0.0, seconds)
    if seconds < 10:
        return "now"
    if seconds < 60:
        return f"{int(seconds // 10) * 10} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min"
    if seconds < 48 * 3600:
        return f"{int(seconds // 3600)} h"
    return f"{int(seconds // 86400)} d"


def duration(seconds: float | None, unknown: str = "—") -> str:
    """A length of time: 8 s, 4:05, 1:02:03."""
    if seconds is None or not math.isfinite(seconds):
        return unknown
    whole = int(max(0.0, seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def amount(value: float | None, unknown: str = "—") -> str:
    """A number in at most six characters or so; thousands apart; never a long tail of digits."""
    if value is None:
        return unknown
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def data_size(count: float | None, unknown: str = "—") -> str:
    """Bytes in binary units."""
    if count is None:
        return unknown
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or abs(count) >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
