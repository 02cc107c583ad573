"""Markdown as lines for a terminal: headings, paragraphs, lists, quotes, code, tables whose cells wrap.

Only the terminal's own styles are used, nothing is cut off, and each heading knows its line, so that a reader can jump.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.cells import cell_len

from tui.lines import BLANK, Line, Part, clean
from tui.look import Look

GAP = 2


@dataclass(frozen=True)
class Rendered:
    lines: tuple[Line, ...]
    headings: tuple[tuple[int, int, str], ...]  # line number, level, text


def render(text: str, width: int, look: Look) -> Rendered:
    """The document at this width."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    writer = _Writer(max(20, width), look)
    writer.blocks(tokens)
    while writer.out and not writer.out[-1].parts:
        writer.out.pop()
    return Rendered(tuple(writer.out), tuple(writer.headings))


class _Writer:
    def __init__(self, width: int, look: Look) -> None:
        self.width, self.look = width, look
        self.out: list[Line] = []
        self.headings: list[tuple[int, int, str]] = []
        self.indent: list[str] = []  # what each following line of the open blocks begins with
        self.bullet = ""  # what the next line begins with instead
        self.lists: list[int | None] = []

    def blocks(self, tokens: Sequence[Token]) -> None:
        at = 0
        while at < len(tokens):
            token = tokens[at]
            kind = token.type
            if kind == "heading_open":
                self._heading(int(token.tag[1:]), tokens[at + 1])
                at += 2
            elif kind == "table_open":
                end = next(i for i in range(at, len(tokens)) if tokens[i].type == "table_close")
                self._table(tokens[at:end])
                at = end
            elif kind == "inline":
                self._prose(inline(token))
            elif kind == "paragraph_close":
                if not token.hidden:
                    self.blank()
            elif kind in {"fence", "code_block"}:
                for each in token.content.rstrip("\n").split("\n"):
                    self._put([(clean(each), "run")])
                self.blank()
            elif kind == "hr":
                self._put([(self.look.rule * (self.width - self._used()), "dim")])
            elif kind in {"bullet_list_open", "ordered_list_open"}:
                self.lists.append(int(token.attrGet("start") or 1) if kind[0] == "o" else None)
            elif kind in {"bullet_list_close", "ordered_list_close"}:
                self.lists.pop()
                if not self.lists:
                    self.blank()
            elif kind == "list_item_open":
                number = self.lists[-1]
                self.bullet = "- " if number is None else f"{number}. "
                if number is not None:
                    self.lists[-1] = number + 1
                self.indent.append(" " * len(self.bullet))
            elif kind == "list_item_close":
                self.indent.pop()
                self.bullet = ""
            elif kind == "blockquote_open":
                self.indent.append("| " if self.look.ascii else "│ ")
            elif kind == "blockquote_close":
                self.indent.pop()
            elif kind == "html_block" and not token.content.lstrip().startswith("<!--"):
                for each in token.content.rstrip("\n").split("\n"):
                    self._put([(clean(each), "dim")])
            at += 1

    def blank(self) -> None:
        if self.out and self.out[-1].parts:
            self.out.append(BLANK)

    def _used(self) -> int:
        return sum(len(each) for each in self.indent)

    def _put(self, parts: Sequence[Part]) -> None:
        start = "".join(self.indent)
        if self.bullet:
            start = start[: len(start) - len(self.bullet)] + self.bullet
            self.bullet = ""
        self.out.append(Line(((start, "dim"), *parts) if start else tuple(parts)))

    def _heading(self, level: int, token: Token) -> None:
        text = "".join(part for part, _ in inline(token))
        self.blank()
        self.headings.append((len(self.out), level, text))
        self._put([(text.upper() if level == 1 else text, "key" if level <= 2 else "head")])
        if level <= 2:
            self._put([(self.look.rule * min(self.width, max(len(text), 12)), "dim")])

    def _prose(self, parts: list[Part]) -> None:
        for piece in wrap_parts(parts, self.width - self._used()):
            self._put(piece)

    def _table(self, tokens: Sequence[Token]) -> None:
        rows: list[list[list[Part]]] = []
        for token in tokens:
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                rows[-1].append(inline(token))
        if not rows:
            return
        count = max(len(row) for row in rows)
        for row in rows:
            row += [[] for _ in range(count - len(row))]
        room, gap = self.width - self._used(), GAP
        widths = column_widths(rows, room - gap * (count - 1))
        if any(w < least for w, least in zip(widths, least_widths(rows), strict=True)):
            gap = 1  # better narrow gaps than broken words
            widths = column_widths(rows, room - gap * (count - 1))
        for number, row in enumerate(rows):
            cells = [wrap_parts(cell, w) or [[]] for cell, w in zip(row, widths, strict=True)]
            for depth in range(max(len(cell) for cell in cells)):
                parts: list[Part] = []
                for i, (cell, w) in enumerate(zip(cells, widths, strict=True)):
                    piece = cell[depth] if depth < len(cell) else []
                    parts += [(text, "head" if number == 0 else style) for text, style in piece]
                    if i < count - 1:
                        parts.append((" " * (w - sum(cell_len(text) for text, _ in piece) + gap), ""))
                self._put(parts)
            if number == 0:
                self._put([((" " * gap).join(self.look.rule * w for w in widths), "dim")])
        self.blank()


def column_widths(rows: Sequence[Sequence[Sequence[Part]]], room: int) -> list[int]:
    """Widths that fit: the widest columns give way first, and words are broken only when nothing else is left."""
    count = len(rows[0])
    widths = [max(1, *(cell_len(_text(row[i])) for row in rows)) for i in range(count)]
    least = least_widths(rows)
    while sum(widths) > room:
        i = max(range(count), key=lambda i: widths[i] - least[i])
        if widths[i] <= least[i]:
            i = max(range(count), key=lambda i: widths[i])
            if widths[i] <= 3:
                break
        widths[i] -= 1
    return widths


def least_widths(rows: Sequence[Sequence[Sequence[Part]]]) -> list[int]:
    """What each column needs for its longest word, within reason."""
    words = [[word for row in rows for word in _text(row[i]).split()] for i in range(len(rows[0]))]
    return [max((min(12, cell_len(word)) for word in column), default=1) for column in words]


def _text(parts: Sequence[Part]) -> str:
    return "".join(text for text, _ in parts)


def inline(token: Token) -> list[Part]:
    """The runs of text inside a block, each with its style."""
    out: list[Part] = []
    style: list[str] = []
    for child in token.children or []:
        kind = child.type
        if kind == "html_inline" and child.content == "<br>":
            out.append(("\n", ""))  # how a table cell holds several lines
        elif kind in {"text", "html_inline"}:
            out.append((clean(child.content), style[-1] if style else ""))
        elif kind == "code_inline":
            out.append((clean(child.content), "run"))
        elif kind in {"softbreak", "hardbreak"}:
            out.append((" " if kind == "softbreak" else "\n", ""))
        elif kind == "strong_open":
            style.append("bold")
        elif kind == "em_open":
            style.append("dim")
        elif kind in {"link_open", "s_open"}:
            style.append("run")
        elif kind.endswith("_close") and style:
            style.pop()
    return out


def wrap_parts(parts: Sequence[Part], width: int) -> list[list[Part]]:
    """Styled text broken at words; a word longer than the line is broken where it must."""
    width = max(1, width)
    lines: list[list[Part]] = [[]]
    used = 0
    for text, style in parts:
        for i, row in enumerate(text.split("\n")):
            if i:
                lines.append([])
                used = 0
            for word in _words(row):
                length = cell_len(word)
                if used + length > width and used and word.strip():
                    lines.append([])
                    used = 0
                if not word.strip() and (not used or used + length > width):
                    if used:
                        lines.append([])
                        used = 0
                    continue  # no space at either end of a line, however long it is
                while cell_len(word) > width:
                    head = word[:width] if word.isascii() else fit_head(word, width)
                    lines[-1].append((head, style))
                    lines.append([])
                    word = word[len(head) :]
                    length, used = cell_len(word), 0
                if word:
                    lines[-1].append((word, style))
                    used += length
    return [_joined(each) for each in lines if each]


def fit_head(word: str, width: int) -> str:
    for end in range(len(word), 0, -1):
        if cell_len(word[:end]) <= width:
            return word[:end]
    return word[:1]


def _words(text: str) -> list[str]:
    out: list[str] = []
    for char in text:
        if out and (out[-1][-1] == " ") == (char == " "):
            out[-1] += char
        else:
            out.append(char)
    return out


def _joined(parts: Sequence[Part]) -> list[Part]:
    out: list[Part] = []
    for text, style in parts:
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    if out:
        out[-1] = (out[-1][0].rstrip() or "", out[-1][1])
    return out
