"""A curve in a terminal: braille dots (two by four to a cell) in UTF-8, stars elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tui.look import Look, amount

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a braille cell


def chart(points: Sequence[tuple[float, float]], look: Look, width: int = 64, height: int = 8) -> list[str]:
    """Lines of a curve over (x, y) points in order of x, with both axes' ends told; none where nothing is finite.

    `width` and `height` are cells of the drawing itself. Neighbours are joined, so that a jump is seen as one.
    """
    known = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not known:
        return []
    across, down = (1, 1) if look.ascii else (2, 4)
    columns, rows = width * across, height * down
    (x0, x1), (y0, y1) = _span(x for x, _ in known), _span(y for _, y in known)
    marks: set[tuple[int, int]] = set()
    last: tuple[int, int] | None = None
    for x, y in known:
        # Halves: the difference of two floats may be more than a float holds.
        right, low = (x / 2 - x0 / 2) / (x1 / 2 - x0 / 2), (y1 / 2 - y / 2) / (y1 / 2 - y0 / 2)
        at = round(right * (columns - 1)), round(low * (rows - 1))
        marks |= set(_line(last or at, at))
        last = at
    labels = [_label(y1), *[""] * (height - 2), _label(y0)] if height > 1 else [_label(y1)]
    margin = max(map(len, labels))
    lines = []
    for row in range(height):
        cells = "".join(_cell(marks, column, row, look) for column in range(width)).rstrip()
        lines.append(f"{labels[row]:>{margin}} {cells}".rstrip())
    ends = _label(x0), _label(x1)
    lines.append(" " * (margin + 1) + ends[0] + ends[1].rjust(max(len(ends[1]) + 1, width - len(ends[0]))))
    return lines


def _label(value: float) -> str:
    return amount(value) if abs(value) < 1e9 else f"{value:.3g}"


def _span(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    low, high = min(found), max(found)
    half = max(0.5, abs(low) / 10)
    return (low, high) if high > low else (low - half, low + half)


def _line(a: tuple[int, int], b: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(b[0] - a[0]), abs(b[1] - a[1])) or 1
    return [
        (round(a[0] + (b[0] - a[0]) * i / steps), round(a[1] + (b[1] - a[1]) * i / steps)) for i in range(steps + 1)
    ]


def _cell(marks: set[tuple[int, int]], column: int, row: int, look: Look) -> str:
    if look.ascii:
        return "*" if (column, row) in marks else " "
    bits = sum(
        bit for dy, pair in enumerate(DOTS) for dx, bit in enumerate(pair) if (2 * column + dx, 4 * row + dy) in marks
    )
    return chr(0x2800 + bits) if bits else " "
