"""What a screen draws, as plain data: lines of styled parts, some with the identity of the thing that they show.

Screens are functions from a snapshot and a width to lines; they know nothing of Textual, can be tested without a
terminal, and two versions can be compared to repaint only what changed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from tui.look import STATE_STYLES, Look

Part = tuple[str, str]  # text, style name of tui.look.STYLES


class Line(NamedTuple):
    """One line. `key` is what it stands for ("host:llm", "run:train-1a2b-1"); None: nothing to select."""

    parts: tuple[Part, ...] = ()
    key: str | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


BLANK = Line()


def line(*parts: Part | str, key: str | None = None) -> Line:
    return Line(tuple((part, "") if isinstance(part, str) else part for part in parts), key)


def heading(text: str, note: str = "") -> Line:
    return line((text, "head"), (f"  {note}" if note else "", "dim"))


def state(look: Look, word: str, shown: str | None = None) -> Part:
    """A state: its glyph and its word, in its colour."""
    return f"{look.mark(word)} {shown or word}", STATE_STYLES.get(word, "")


def fit(text: str, width: int, look: Look, *, right: bool = False) -> str:
    """Exactly `width` cells: cut with a mark, or padded."""
    length = cell_len(text)
    if length > width:
        dots = look.dots
        return dots[:width] if width <= len(dots) else set_cell_size(text, width - len(dots)) + dots
    return " " * (width - length) + text if right else text + " " * (width - length)


def cut(parts: Iterable[Part], width: int, look: Look) -> tuple[Part, ...]:
    """Parts that together take at most `width` cells."""
    out: list[Part] = []
    left = width
    for text, style in parts:
        length = cell_len(text)
        if length > left:
            if left > 0:
                out.append((fit(text, left, look), style))
            break
        out.append((text, style))
        left -= length
    return tuple(out)


class Column(NamedTuple):
    """How one column of a table behaves: which side it hangs on, and whether it gives way when space is short."""

    name: str = ""
    right: bool = False
    flex: bool = False
    least: int = 4  # cells that a flexible column keeps


def table(
    columns: Sequence[Column],
    rows: Sequence[tuple[str | None, Sequence[Part]]],
    width: int,
    look: Look,
    *,
    gap: int = 2,
    header: bool = True,
) -> list[Line]:
    """Aligned rows of (key, cells). Flexible columns share what space the others leave; what does not fit is cut."""
    if not rows:
        return []
    widths = [
        max([cell_len(column.name) if header else 0, *(cell_len(cells[i][0]) for _, cells in rows)])
        for i, column in enumerate(columns)
    ]
    over = sum(widths) + gap * (len(columns) - 1) - width
    for i in sorted((i for i, c in enumerate(columns) if c.flex), key=lambda i: -widths[i]):
        if over <= 0:
            break
        give = min(over, max(0, widths[i] - columns[i].least))
        widths[i] -= give
        over -= give
    lines: list[Line] = []
    if header:
        names = [(fit(c.name, w, look, right=c.right), "dim") for c, w in zip(columns, widths, strict=True)]
        lines.append(Line(cut(_spaced(names, gap), width, look)))
    for key, cells in rows:
        fitted = [
            (fit(text, w, look, right=column.right), style)
            for (text, style), column, w in zip(cells, columns, widths, strict=True)
        ]
        lines.append(Line(cut(_spaced(fitted, gap), width, look), key))
    return lines


def _spaced(cells: Sequence[Part], gap: int) -> list[Part]:
    out: list[Part] = []
    for i, cell in enumerate(cells):
        if i:
            out.append((" " * gap, ""))
        out.append(cell)
    return out


def wrap(text: str, width: int, style: str = "", indent: str = "", key: str | None = None) -> list[Line]:
    """Prose, broken at words; the first line carries the key."""
    out: list[Line] = []
    for paragraph in text.splitlines() or [""]:
        for piece in textwrap.wrap(paragraph, max(8, width - len(indent))) or [""]:
            out.append(line((indent + piece, style), key=key if not out else None))
    return out


def clean(text: str) -> str:
    """Text from a machine made harmless: no control character reaches the terminal."""
    return "".join(c if c.isprintable() else " " for c in text)
