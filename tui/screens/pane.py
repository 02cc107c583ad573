"""A pane is one screen of the desk: a title, a digit, help in prose, and a way to draw a snapshot.

Panes live side by side and one is shown; a hidden pane draws nothing. They ask nobody: what they know is the snapshot
that the app hands them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Vertical

from tui.lines import Line
from tui.look import Look
from tui.snapshot import Snapshot
from tui.widgets.board import MARGIN, Board

Hint = tuple[str, str]  # key as the user reads it, what it does


class Pane(Vertical):
    """Base of all screens."""

    NAME: ClassVar[str] = ""  # id, and the word that `picture` and the palette use
    DIGIT: ClassVar[str] = ""
    TITLE: ClassVar[str] = ""
    HELP: ClassVar[str] = ""
    HINTS: ClassVar[tuple[Hint, ...]] = ()

    DEFAULT_CSS = "Pane { height: 1fr; }"

    def __init__(self, look: Look) -> None:
        super().__init__(id=self.NAME)
        self.look = look
        self.snapshot = Snapshot()

    def show(self, snapshot: Snapshot) -> None:
        """Draw this snapshot. Called only while the pane is shown."""
        self.snapshot = snapshot

    def enter(self) -> None:
        """The pane comes to the front: put the focus where the keys belong."""

    def back(self) -> bool:
        """Esc: leave what was opened inside the pane. False when there is nothing to leave."""
        return False

    @property
    def target(self) -> str | None:
        """Identity of the thing under the cursor."""
        return None

    @property
    def hints(self) -> tuple[Hint, ...]:
        return self.HINTS


class BoardPane(Pane):
    """A pane that is one board, drawn by a pure function of snapshot and width."""

    def __init__(self, look: Look) -> None:
        super().__init__(look)
        self.board = Board(look=look)

    def compose(self) -> ComposeResult:
        yield self.board

    def lines(self, snapshot: Snapshot, width: int) -> Sequence[Line]:
        raise NotImplementedError

    def start(self, snapshot: Snapshot) -> str | None:
        """Where the cursor begins; None: on the first thing."""
        return None

    def show(self, snapshot: Snapshot) -> None:
        super().show(snapshot)
        self.redraw()

    def redraw(self) -> None:
        width = self.board.room - MARGIN
        if width > 0:
            self.board.show(self.lines(self.snapshot, width), self.start(self.snapshot))

    def on_board_resized(self) -> None:
        self.redraw()

    def enter(self) -> None:
        self.board.focus()

    @property
    def target(self) -> str | None:
        return self.board.key
