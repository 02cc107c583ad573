"""Screen 9: the book, rendered, at any of its versions, and what changed between two of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from tui.lines import Column, Line, clean, line, table
from tui.look import Look, age
from tui.markdown import Rendered, render
from tui.screens.modals import Chooser
from tui.screens.pane import Hint, Pane
from tui.snapshot import Snapshot
from tui.widgets.bars import Bar
from tui.widgets.board import MARGIN, Board

# (version or None for now, version to compare with or None) -> Markdown. Runs in a thread of the collector.
Text = Callable[[int | None, int | None], Awaitable[str]]
MAX_VERSIONS = 2000  # that the list offers; older ones are reached by `rigbook book show`


class BookPane(Pane):
    NAME, DIGIT, TITLE = "book", "9", "Book"
    HELP = """The project-state document: what the events in the journal add up to, each number with its source.

`s` jumps to a section. `v` shows the versions (one an event); Enter shows the book as it was then. `d` shows what
changed from an earlier version to this one. `/` searches, `n` and `N` go on and back. Esc goes back to now.
The same text on the command line: `rigbook book show`, `rigbook book diff A B`."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sections", show=False),
        Binding("v", "versions", show=False),
        Binding("d", "diff", show=False),
        Binding("slash", "search", show=False),
        Binding("n", "again(1)", show=False),
        Binding("N", "again(-1)", show=False),
    ]

    def __init__(self, look: Look, text: Text) -> None:
        super().__init__(look)
        self._text = text
        self.version: int | None = None  # None: now
        self.base: int | None = None  # compared with this one; None: the document itself
        self._shown: tuple[int | None, int | None, int] | None = None  # what the text is of
        self._markdown = ""
        self._rendered = Rendered((), ())
        self._needle = ""
        self._message = ""
        self.bar = Bar(id="book-title", look=look)
        self.board = Board(look=look)
        self.entry = Input(placeholder="search", id="book-search", compact=True)
        self.entry.display = False

    def compose(self) -> ComposeResult:
        yield self.bar
        yield self.board
        yield self.entry

    @property
    def target(self) -> str | None:
        return "book"

    @property
    def hints(self) -> tuple[Hint, ...]:
        if self.entry.display:
            return (("Enter", "search"), ("Esc", "back"))
        here = (("s", "sections"), ("v", "versions"), ("d", "diff"), ("/", "search"))
        return (*here, ("Esc", "now")) if self.version is not None or self.base is not None else here

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self._title()
        seq = snapshot.seq
        if seq is None:
            self.board.show(
                [line(("the book is empty: nothing has been recorded yet" if snapshot.loaded else "reading", "dim"))]
            )
            return
        # The text of a past version never changes; that of now does with every event.
        wanted = (self.version, self.base, seq if self.version is None else 0)
        if wanted != self._shown:
            self._shown = wanted
            self.run_worker(self._load(), exclusive=True, group="book", exit_on_error=False)

    async def _load(self) -> None:
        try:
            self._markdown = await self._text(self.version, self.base)
            self.redraw()
        except Exception as error:
            self._shown = None
            self._markdown = f"The book could not be shown: {clean(str(error) or type(error).__name__)}"
            self.redraw()

    def redraw(self) -> None:
        width = self.board.room - MARGIN
        if width > 0 and self._markdown:
            self._rendered = render(self._markdown, width, self.look)
            self.board.show(self._lines())
        self._title()

    def _lines(self) -> list[Line]:
        if not self._needle:
            return list(self._rendered.lines)
        wanted = self._needle.lower()
        return [
            Line((*each.parts, (f" {self.look.cursor}", "hit"))) if wanted in each.text.lower() else each
            for each in self._rendered.lines
        ]

    def on_board_resized(self) -> None:
        self.redraw()

    def enter(self) -> None:
        self.board.focus()

    def _title(self) -> None:
        seq = self.snapshot.seq
        now = "the book" if seq is None else f"version {seq} (now)"
        which = now if self.version is None else f"version {self.version}"
        title = f" {which}" if self.base is None else f" what changed from version {self.base} to {which}"
        self.bar.show(((title, "head"),), ((f"{self._message} ", "warn"),))

    # -- jumping ---------------------------------------------------------------------------------------------

    def action_sections(self) -> None:
        headings = self._rendered.headings
        lines = [line("  " * (level - 1) + text, key=str(at)) for at, level, text in headings if level <= 3]
        if lines:
            here = next((str(at) for at, _, _ in reversed(headings) if at <= self.board.scroll_offset.y), None)
            self.app.push_screen(Chooser("Sections", lines, self.look, here), self._jump)

    def _jump(self, key: str | None) -> None:
        if key is not None:
            self.board.scroll_to(y=int(key), animate=False)

    def action_versions(self) -> None:
        lines = version_lines(self.snapshot, self.app.size.width - 10, self.look)
        if lines:
            at = str(self.version) if self.version is not None else None
            self.app.push_screen(Chooser("Show the book at version", lines, self.look, at), self._to_version)

    def _to_version(self, key: str | None) -> None:
        if key is not None:
            newest = self.snapshot.seq
            self.version, self.base = (None if int(key) == newest else int(key)), None
            self.board.scroll_to(y=0, animate=False)
            self.show(self.snapshot)

    def action_diff(self) -> None:
        top = self.version or self.snapshot.seq or 0
        lines = [
            each
            for each in version_lines(self.snapshot, self.app.size.width - 10, self.look)
            if int(each.key or 0) < top
        ]
        if lines:
            self.app.push_screen(Chooser("What changed since version", lines, self.look), self._to_diff)

    def _to_diff(self, key: str | None) -> None:
        if key is not None:
            self.base = int(key)
            self.board.scroll_to(y=0, animate=False)
            self.show(self.snapshot)

    # -- searching -------------------------------------------------------------------------------------------

    def action_search(self) -> None:
        self.entry.display = True
        self.entry.value = ""
        self.entry.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._needle = event.value
        self._close_search()
        self.board.show(self._lines())
        self.action_again(0)

    def action_again(self, step: int) -> None:
        if not self._needle:
            return
        here = self.board.scroll_offset.y
        hits = [y for y, each in enumerate(self._rendered.lines) if self._needle.lower() in each.text.lower()]
        onward = [y for y in hits if y > here] if step > 0 else [y for y in hits if y < here] if step < 0 else hits
        if onward:
            y = onward[-1] if step < 0 else onward[0]
            self.board.scroll_to(y=y, animate=False)
            self._message = f"{hits.index(y) + 1} of {len(hits)}: {self._needle}"
        else:
            self._message = f"no more: {self._needle}" if hits else f"not found: {self._needle}"
        self._title()

    def _close_search(self) -> None:
        self.entry.display = False
        self.board.focus()

    def back(self) -> bool:
        if self.entry.display:
            self._close_search()
        elif self._needle:
            self._needle = self._message = ""
            self.redraw()
        elif self.base is not None or self.version is not None:
            self.base = self.version = None
            self.show(self.snapshot)
        else:
            return False
        return True


def version_lines(snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    rows = []
    for version in snapshot.versions[:MAX_VERSIONS]:
        when = look.dash if version.at is None else age(snapshot.at - version.at)
        rows.append(
            (
                str(version.seq),
                [(str(version.seq), "key"), (when, "dim"), (clean(version.what), ""), (clean(version.actor), "dim")],
            )
        )
    columns = [Column(right=True), Column(right=True), Column(flex=True, least=16), Column()]
    return table(columns, rows, width, look, header=False)
