"""The keymap: what works everywhere. What works on one screen stands in that screen's module."""

from __future__ import annotations

from textual.binding import Binding

# (keys, action, words for the help)
GLOBAL: tuple[tuple[str, str, str], ...] = (
    ("right_square_bracket", "next_screen(1)", "] next screen"),
    ("left_square_bracket", "next_screen(-1)", "[ previous screen"),
    ("question_mark,f1", "help", "? help for where you are"),
    ("colon", "command_palette", ": or ctrl+p every command that is possible now"),
    ("x", "menu", "x what can be done with what is under the cursor"),
    ("l", "log", "l the log of what is under the cursor"),
    ("R", "toggle_write", "R unlock or lock: what changes something needs it unlocked"),
    ("r", "refresh", "r look again now"),
    ("escape", "back", "Esc back"),
    ("q", "quit", "q quit; what runs on the rig goes on"),
)


def bindings() -> list[Binding]:
    return [Binding(keys, action, words, show=False) for keys, action, words in GLOBAL]


def help_lines() -> list[tuple[str, str]]:
    """(key, what it does) for the help window."""
    out = [("1 … 9", "the screens, by their digits")]
    for _, _, words in GLOBAL:
        key, _, text = words.partition(" ")
        if text.startswith("or ctrl+p "):
            key, text = f"{key} ctrl+p", text[len("or ctrl+p ") :]
        out.append((key, text))
    return out
