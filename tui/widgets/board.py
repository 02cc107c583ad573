"""Board: lines with a cursor that follows identity, repainting only the lines that changed.

A refresh between looking and acting cannot move the cursor to another thing: it stands on a key, not on a row.
When the thing under it has gone, the cursor is on nothing until it is moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui.lines import Line
from tui.look import STYLES, UNICODE, Look

MARGIN = 1  # the first cell of each line is the cursor's


class Board(ScrollView, can_focus=True):
    """Shows `Line`s. Up and down move between lines that have a key, or scroll where none has."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "page(-1)", "Page up", show=False),
        Binding("pagedown", "page(1)", "Page down", show=False),
        Binding("home,g", "edge(-1)", "Top", show=False),
        Binding("end,G", "edge(1)", "Bottom", show=False),
        Binding("enter", "choose", "Details", show=False),
    ]

    class Chosen(Message):
        """Enter was pressed on the line of `key`."""

        def __init__(self, board: Board, key: str) -> None:
            super().__init__()
            self.board = board
            self.key = key

        @property
        def control(self) -> Board:
            return self.board

    class Resized(Message):
        """The room changed, by the window or by a scroll bar: lines made for another width are to be made again."""

    class Moved(Message):
        """The cursor came to stand on `key`."""

        def __init__(self, board: Board, key: str) -> None:
            super().__init__()
            self.board = board
            self.key = key

        @property
        def control(self) -> Board:
            return self.board

    def __init__(self, *, id: str | None = None, look: Look = UNICODE) -> None:
        super().__init__(id=id)
        self.look = look
        self.lines: tuple[Line, ...] = ()
        self.key: str | None = None  # identity under the cursor
        self._row: int | None = None  # where that was last seen
        self._strips: dict[int, Strip] = {}
        self.repainted = 0  # lines asked to be drawn again; tests watch it

    @property
    def room(self) -> int:
        """Cells of a line, the cursor's included; what a scroll bar takes is not ours."""
        return self.scrollable_content_region.width

    # -- content ---------------------------------------------------------------------------------------------

    def show(self, lines: Sequence[Line], start: str | None = None) -> None:
        """Draw these lines instead; only those that differ are painted. The cursor begins on `start`."""
        if self.key is None and self._row is None and start is not None:
            self.key = start
        new = tuple(lines)
        old = self.lines
        if new == old:
            return
        self.lines = new
        if len(new) != len(old):
            self.virtual_size = Size(0, len(new))
        changed = [y for y in range(min(len(new), len(old))) if new[y] != old[y]]
        changed += range(min(len(new), len(old)), max(len(new), len(old)))
        rows_before = self._row
        self._place_cursor()
        if rows_before != self._row:
            changed += [y for y in (rows_before, self._row) if y is not None]
        for y in set(changed):
            self._strips.pop(y, None)
            self._repaint(y)

    def _place_cursor(self) -> None:
        rows = [y for y, each in enumerate(self.lines) if each.key is not None]
        if self.key is None:
            # Nothing was ever chosen: start on the first thing there is.
            if rows and self._row is None:
                self._row, self.key = rows[0], self.lines[rows[0]].key
            return
        self._row = next((y for y in rows if self.lines[y].key == self.key), None)
        if self._row is None:
            self.key = None
            self._row = rows[0] if rows else None
            if self._row is not None:
                self._row = -1  # on nothing; the next move starts from the top

    def _repaint(self, y: int) -> None:
        self.repainted += 1
        self.refresh(Region(0, y - self.scroll_offset.y, self.room, 1))

    # -- cursor ----------------------------------------------------------------------------------------------

    def select(self, key: str) -> bool:
        """Put the cursor on a key. False when no line has it."""
        for y, each in enumerate(self.lines):
            if each.key == key:
                self._go(y)
                return True
        return False

    def _go(self, y: int) -> None:
        old, self._row = self._row, y
        self.key = self.lines[y].key
        for row in (old, y):
            if row is not None and row >= 0:
                self._strips.pop(row, None)
                self._repaint(row)
        top, height = self.scroll_offset.y, self.size.height
        if y < top:
            # The heading above the first thing is part of it.
            self.scroll_to(y=0 if y <= 2 else y, animate=False)
        elif y >= top + height:
            self.scroll_to(y=y - height + 1, animate=False)
        if self.key is not None:
            self.post_message(self.Moved(self, self.key))

    def _keyed(self) -> list[int]:
        return [y for y, each in enumerate(self.lines) if each.key is not None]

    def action_move(self, step: int) -> None:
        rows = self._keyed()
        if not rows:
            self.scroll_to(y=self.scroll_offset.y + step, animate=False)
            return
        if self._row is None or self._row < 0:
            self._go(rows[0])
            return
        onward = [y for y in rows if (y > self._row if step > 0 else y < self._row)]
        if onward:
            self._go(onward[0] if step > 0 else onward[-1])
        else:
            # Past the last thing there may be lines to read.
            self.scroll_to(y=self.scroll_offset.y + step, animate=False)

    def action_page(self, step: int) -> None:
        rows, height = self._keyed(), max(1, self.size.height - 1)
        if not rows or self._row is None:
            self.scroll_to(y=self.scroll_offset.y + step * height, animate=False)
            return
        aim = self._row + step * height
        self._go(min(rows, key=lambda y: abs(y - aim)))

    def action_edge(self, step: int) -> None:
        rows = self._keyed()
        if rows:
            self._go(rows[0] if step < 0 else rows[-1])
        self.scroll_to(y=0 if step < 0 else len(self.lines), animate=False)

    def action_choose(self) -> None:
        if self.key is not None:
            self.post_message(self.Chosen(self, self.key))

    async def on_click(self, event: object) -> None:
        y = getattr(event, "y", 0) + self.scroll_offset.y
        if 0 <= y < len(self.lines) and self.lines[y].key is not None:
            if self.key == self.lines[y].key:
                self.action_choose()
            else:
                self._go(y)

    # -- drawing ---------------------------------------------------------------------------------------------

    def on_resize(self) -> None:
        self._strips.clear()
        self.post_message(self.Resized())

    def on_focus(self) -> None:
        self._repaint_cursor()

    def on_blur(self) -> None:
        self._repaint_cursor()

    def _repaint_cursor(self) -> None:
        if self._row is not None and self._row >= 0:
            self._strips.pop(self._row, None)
            self._repaint(self._row)

    def render_line(self, y: int) -> Strip:
        at = y + self.scroll_offset.y
        width = self.room
        if at >= len(self.lines):
            return Strip.blank(width)
        strip = self._strips.get(at)
        if strip is None:
            strip = self._strips[at] = self._draw(at, width)
        return strip

    def _draw(self, at: int, width: int) -> Strip:
        shown = self.lines[at]
        here = at == self._row and shown.key is not None
        over = Style(reverse=True) if here and self.has_focus else Style()
        mark = self.look.cursor if here else " " * MARGIN
        segments = [Segment(mark, STYLES["key"] + over if here else over)]
        segments += [
            Segment(self.look.shown(text), STYLES.get(style, STYLES[""]) + over) for text, style in shown.parts if text
        ]
        return Strip(segments).adjust_cell_length(width, over)
