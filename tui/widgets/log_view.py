"""LogView: a window on a LogFile. It draws what is visible, follows the end, and searches; it holds no lines itself."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.segment import Segment
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from tui.logfile import LogFile
from tui.look import STYLES, UNICODE, Look

SIDE = 20  # cells that one step sideways goes


class LogView(ScrollView, can_focus=True):
    """Follows a growing file. `f` follows the end; moving up stops following, going to the end takes it up again."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "by(-1)", show=False),
        Binding("down,j", "by(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home,g", "top", show=False),
        Binding("end,G", "end", show=False),
        Binding("left,h", "side(-1)", show=False),
        Binding("right", "side(1)", show=False),
        Binding("f", "follow", "Follow", show=False),
        Binding("n", "again(1)", "Next hit", show=False),
        Binding("N", "again(-1)", "Previous hit", show=False),
    ]

    def __init__(self, *, id: str | None = None, look: Look = UNICODE) -> None:
        super().__init__(id=id)
        self.look = look
        self.file: LogFile | None = None
        self.following = True
        self.needle = ""
        self.hit: int | None = None
        self.message = ""  # what the last search came to

    def open(self, path: Path | None) -> None:
        """Look at another file, from its end."""
        if path is None:
            self.file = None
        elif self.file is None or self.file.path != path:
            self.file = LogFile(path)
            self.following, self.hit, self.message = True, None, ""
            self.scroll_to(x=0, animate=False)
        self.grow()
        self.refresh()

    def grow(self) -> None:
        """Take in what was written since; stay at the end while following."""
        file = self.file
        if file is None:
            self.virtual_size = Size(0, 0)
            return
        before = (file.count, file.tail)
        file.grow()
        if (file.count, file.tail) == before:
            return
        rows = file.count + bool(file.tail)
        if self.virtual_size.height != rows:
            self.virtual_size = Size(0, rows)
        if self.following:
            self.scroll_to(y=rows, animate=False, force=True)
            self.refresh()
        elif file.count - before[0] and before[0] < self.scroll_offset.y + self.size.height:
            self.refresh()

    # -- moving ----------------------------------------------------------------------------------------------

    def _to(self, y: float) -> None:
        self.scroll_to(y=max(0, y), animate=False, force=True)
        self.following = self.scroll_offset.y >= self.max_scroll_y

    def action_by(self, step: int) -> None:
        self._to(self.scroll_offset.y + step)

    def action_page(self, step: int) -> None:
        self._to(self.scroll_offset.y + step * max(1, self.size.height - 1))

    def action_top(self) -> None:
        self._to(0)
        self.following = False

    def action_end(self) -> None:
        self._to(self.virtual_size.height)
        self.following = True

    def action_follow(self) -> None:
        if self.following:
            self.following = False
        else:
            self.action_end()

    def action_side(self, step: int) -> None:
        self._left = max(0, self._left + step * SIDE)
        self.refresh()

    _left = 0

    # -- searching -------------------------------------------------------------------------------------------

    def search(self, needle: str) -> None:
        """Look for the last line with `needle`: what is wanted in a log is nearly always near its end."""
        self.needle = needle
        self.hit = None
        self.message = ""
        if not needle:
            self.refresh()
            return
        self._seek(-1, None)

    def action_again(self, step: int) -> None:
        if self.needle:
            self._seek(step, self.hit)

    def _seek(self, step: int, start: int | None) -> None:
        if self.file is None:
            return
        last = self.file.count - 1
        begin = (last if step < 0 else 0) if start is None else start + step
        found = self.file.find(self.needle, begin, backwards=step < 0) if 0 <= begin <= last else None
        if found is None:
            where = "no more" if start is not None else "not found"
            self.message = f"{where}: {self.needle}"
        else:
            self.hit, self.message = found, f"line {found + 1:,} of {self.file.count:,}"
            self.following = False
            self.scroll_to(y=max(0, found - self.size.height // 2), animate=False, force=True)
        self.refresh()

    # -- drawing ---------------------------------------------------------------------------------------------

    def render_line(self, y: int) -> Strip:
        at, width = y + self.scroll_offset.y, self.scrollable_content_region.width
        file = self.file
        if file is None or at >= file.count + bool(file.tail):
            return Strip.blank(width)
        if at == file.count:
            from tui.logfile import harmless

            text = harmless(file.tail)
        else:
            text = file.line(at)
        text = self.look.shown(text)[self._left :]
        segments = _marked(text, self.needle, hit=at == self.hit)
        strip = Strip(segments)
        if strip.cell_length > width:
            strip = Strip([*strip.crop(0, width - 1), Segment(self.look.cursor, STYLES["dim"])])
        return strip.adjust_cell_length(width)


def _marked(text: str, needle: str, *, hit: bool) -> list[Segment]:
    base = STYLES["bold"] if hit else STYLES[""]
    if not needle:
        return [Segment(text, base)]
    hay, wanted = (text, needle) if needle != needle.lower() else (text.lower(), needle)
    out: list[Segment] = []
    at = 0
    while len(hay) == len(text) and (found := hay.find(wanted, at)) >= 0:
        out += [Segment(text[at:found], base), Segment(text[found : found + len(wanted)], STYLES["hit"])]
        at = found + len(wanted)
    out.append(Segment(text[at:], base))
    return [segment for segment in out if segment.text]
