"""Screen 8: one log at a time, followed while it grows, searched with `/`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from tui.lines import Column, Line, clean, state, table
from tui.look import STATE_STYLES, Look, age, data_size
from tui.screens.modals import Chooser
from tui.screens.pane import Hint, Pane
from tui.snapshot import LogSource, Snapshot
from tui.widgets.bars import Bar
from tui.widgets.log_view import LogView

POLL_SECONDS = 0.25


class LogsPane(Pane):
    NAME, DIGIT, TITLE = "logs", "8", "Logs"
    HELP = """A log, followed to its end while it grows.

`s` chooses which (what runs comes first), `<` and `>` step through them. `/` searches (small letters match both
cases), `n` and `N` go on and back. `f` follows the end or stops; going up stops too. Left and right move sideways in
long lines. Colour codes, control characters and bytes that are no text are made harmless; the file never changes."""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", show=False),
        Binding("s,enter", "sources", "Sources", show=False),
        Binding("less_than_sign,comma", "step(-1)", show=False),
        Binding("greater_than_sign,full_stop", "step(1)", show=False),
    ]

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.wanted: str | None = None  # key of the source that was chosen
        self.bar = Bar(id="log-title", look=look)
        self.view = LogView(look=look)
        self.entry = Input(placeholder="search", id="log-search", compact=True)
        self.entry.display = False

    def compose(self) -> ComposeResult:
        yield self.bar
        yield self.view
        yield self.entry

    def on_mount(self) -> None:
        self.set_interval(POLL_SECONDS, self._poll)

    @property
    def source(self) -> LogSource | None:
        logs = self.snapshot.logs
        chosen = next((s for s in logs if s.key == self.wanted), None)
        if self.wanted is not None:
            return chosen
        return logs[0] if logs else None  # nobody has chosen: what runs now, else the newest

    @property
    def target(self) -> str | None:
        source = self.source
        return source.key if source else None

    @property
    def hints(self) -> tuple[Hint, ...]:
        if self.entry.display:
            return (("Enter", "search"), ("Esc", "back"))
        follow = "pause" if self.view.following else "follow"
        return (("/", "search"), ("n N", "hits"), ("f", follow), ("s", "sources"), ("< >", "other log"))

    def open(self, key: str) -> None:
        """Show this source from now on."""
        self.wanted = key
        self.show(self.snapshot)

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        source = self.source
        if source is not None and self.wanted is None:
            self.wanted = source.key  # stay with it: a new run must not take the log away from a reader
        self.view.open(Path(source.path) if source else None)
        self._title()

    def enter(self) -> None:
        self.view.focus()

    def _poll(self) -> None:
        if self.display and self.view.file is not None:
            self.view.grow()
            self._title()

    def _title(self) -> None:
        source, view = self.source, self.view
        bar = self.bar
        if source is None:
            words = f"log of {self.wanted} is not here yet" if self.wanted else "no logs on this machine yet"
            bar.show((("  " + words if self.snapshot.loaded else "  reading", "dim"),))
            return
        file = view.file
        size = (
            f"{file.count:,} line{'' if file.count == 1 else 's'} {self.look.sep} {data_size(file.size)}"
            if file
            else ""
        )
        how = "following" if view.following else "paused"
        right = f"{view.message}  " if view.message else ""
        mark = self.look.mark(source.state)
        bar.show(
            (
                (f" {mark} ", STATE_STYLES.get(source.state, "")),
                (clean(source.title), "head"),
                (f"  {source.state}", "dim"),
            ),
            ((right, "warn"), (f"{size} {self.look.sep} ", "dim"), (how + " ", "ok" if view.following else "warn")),
        )

    # -- choosing --------------------------------------------------------------------------------------------

    def action_sources(self) -> None:
        if self.entry.display:
            return
        lines = source_lines(self.snapshot, self.app.size.width - 10, self.look)
        if lines:
            self.app.push_screen(Chooser("Logs", lines, self.look, self.target), self._chosen)

    def _chosen(self, key: str | None) -> None:
        if key is not None:
            self.open(key)

    def action_step(self, step: int) -> None:
        keys = [s.key for s in self.snapshot.logs]
        if keys:
            at = keys.index(self.wanted) if self.wanted in keys else 0
            self.open(keys[(at + step) % len(keys)])

    # -- searching -------------------------------------------------------------------------------------------

    def action_search(self) -> None:
        self.entry.display = True
        self.entry.value = ""
        self.entry.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._close_search()
        self.view.search(event.value)
        self._title()

    def _close_search(self) -> None:
        self.entry.display = False
        self.view.focus()

    def back(self) -> bool:
        if self.entry.display:
            self._close_search()
            return True
        if self.view.needle:
            self.view.search("")
            self._title()
            return True
        return False


def source_lines(snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    rows = []
    for source in snapshot.logs:
        when = look.dash if source.at is None else age(snapshot.at - source.at)
        rows.append((source.key, [state(look, source.state), (clean(source.title), ""), (when, "dim")]))
    return table([Column(), Column(flex=True, least=12), Column(right=True)], rows, width, look, header=False)
