"""The windows that open over a screen: a list to choose from, a plan to confirm, something to read, a line to type.

Each returns a value and knows nothing of what it is for. Esc always leaves without a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from tui.lines import Line
from tui.look import Look
from tui.widgets.board import Board


class Chooser(ModalScreen[str | None]):
    """A list; Enter takes the line under the cursor. Returns its key, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "leave", "Back", show=False)]

    def __init__(self, title: str, lines: Sequence[Line], look: Look, at: str | None = None) -> None:
        super().__init__()
        self.heading, self.lines, self.look, self.at = title, lines, look, at

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(self.heading, classes="title", markup=False)
            yield Board(look=self.look)
            yield Static("Enter choose   Esc back", classes="keys", markup=False)

    def on_mount(self) -> None:
        board = self.query_one(Board)
        board.styles.height = min(max(1, len(self.lines)), max(3, self.app.size.height - 6))
        board.show(self.lines)
        board.focus()
        if self.at is not None:
            board.select(self.at)

    def on_board_chosen(self, event: Board.Chosen) -> None:
        event.stop()
        self.dismiss(event.key)

    def action_leave(self) -> None:
        self.dismiss(None)


class Reader(ModalScreen[None]):
    """Something to read and scroll."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,question_mark", "leave", "Back", show=False)]

    def __init__(self, title: str, lines: Sequence[Line], look: Look) -> None:
        super().__init__()
        self.heading, self.lines, self.look = title, [each._replace(key=None) for each in lines], look

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(self.heading, classes="title", markup=False)
            yield Board(look=self.look)
            yield Static("up/down scroll   Esc back", classes="keys", markup=False)

    def on_mount(self) -> None:
        board = self.query_one(Board)
        board.styles.height = min(max(1, len(self.lines)), max(3, self.app.size.height - 6))
        board.show(self.lines)
        board.focus()

    def action_leave(self) -> None:
        self.dismiss(None)


class Confirm(ModalScreen[bool]):
    """A plan, and two buttons. The focus is on Cancel: Enter alone never does anything."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,q", "leave", "Cancel", show=False),
        Binding("left,right,h,l", "other", "Other button", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown", "scroll(10)", show=False),
    ]

    def __init__(self, title: str, lines: Sequence[Line], yes: str, look: Look) -> None:
        super().__init__()
        self.heading, self.lines, self.yes, self.look = title, lines, yes, look

    def compose(self) -> ComposeResult:
        with Vertical(classes="window"):
            yield Static(self.heading, classes="title", markup=False)
            yield Board(look=self.look)
            with Horizontal(classes="buttons"):
                yield Button("Cancel", id="cancel", compact=True)
                yield Button(self.yes, id="yes", compact=True)
            yield Static(
                "left/right or Tab choose a button   Enter press it   Esc cancel", classes="keys", markup=False
            )

    def on_mount(self) -> None:
        board = self.query_one(Board)
        board.can_focus = False
        board.styles.height = min(max(1, len(self.lines)), max(3, self.app.size.height - 8))
        board.show([each._replace(key=None) for each in self.lines])
        self.query_one("#cancel", Button).focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        self.dismiss(event.button.id == "yes")

    def action_leave(self) -> None:
        self.dismiss(False)

    def action_other(self) -> None:
        other = "#cancel" if self.query_one("#yes", Button).has_focus else "#yes"
        self.set_focus(self.query_one(other, Button))  # at once: Enter may come in the same packet

    def action_scroll(self, step: int) -> None:
        board = self.query_one(Board)
        board.scroll_to(y=board.scroll_offset.y + step, animate=False)
