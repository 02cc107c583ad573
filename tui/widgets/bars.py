"""The two bars: where we are (top) and what can be done here (bottom). Both are one line of parts."""

from __future__ import annotations

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip
from textual.widget import Widget

from tui.lines import Part, cut
from tui.look import STYLES, UNICODE, Look


class Bar(Widget):
    """One line: parts from the left, parts at the right end. Painted only when they change."""

    can_focus = False
    DEFAULT_CSS = "Bar { height: 1; width: 100%; }"

    def __init__(self, *, id: str | None = None, look: Look = UNICODE) -> None:
        super().__init__(id=id)
        self.look = look
        self.left: tuple[Part, ...] = ()
        self.right: tuple[Part, ...] = ()
        self.reverse = False

    def show(self, left: tuple[Part, ...], right: tuple[Part, ...] = (), *, reverse: bool = False) -> None:
        if (left, right, reverse) != (self.left, self.right, self.reverse):
            self.left, self.right, self.reverse = left, right, reverse
            self.refresh()

    @property
    def text(self) -> str:
        return "".join(text for text, _ in (*self.left, *self.right))

    def render_line(self, y: int) -> Strip:
        over = Style(reverse=True) if self.reverse else Style()
        width = self.size.width
        right = [Segment(self.look.shown(text), STYLES.get(style, STYLES[""]) + over) for text, style in self.right]
        room = max(0, width - sum(cell_len(text) for text, _ in self.right))
        shown = self.left
        if room and sum(cell_len(text) for text, _ in shown) > room:
            shown = cut(shown, room - 1, self.look)  # the two sides never touch, and what is cut says so
        left = Strip([Segment(self.look.shown(text), STYLES.get(style, STYLES[""]) + over) for text, style in shown])
        return Strip([*left.adjust_cell_length(room, over), *right]).adjust_cell_length(width, over)
