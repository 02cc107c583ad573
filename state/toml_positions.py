"""On which line each key of a TOML text stands, so that an error can point at it.

tomllib gives values without positions. This scanner assumes text that tomllib has already accepted, so it only
needs to know where keys and values begin and end, not whether they are right.
"""

from __future__ import annotations

import re

Path = tuple[str | int, ...]

_KEY_PART = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")


def positions(text: str) -> dict[Path, int]:
    """Key path → 1-based line. Tables in arrays have their index in the path: ("rules", 0, "forbid")."""
    found: dict[Path, int] = {}
    counts: dict[Path, int] = {}  # array of tables → how many so far
    prefix: Path = ()
    at, line, size = 0, 1, len(text)
    while at < size:
        char = text[at]
        if char == "\n":
            line, at = line + 1, at + 1
        elif char in " \t\r":
            at += 1
        elif char == "#":
            at = _line_end(text, at)
        elif char == "[":
            is_array = text.startswith("[[", at)
            parts, at = _dotted_key(text, at + (2 if is_array else 1))
            prefix = _resolve(parts, counts)
            if is_array:
                index = counts.get(prefix, 0)
                counts[prefix] = index + 1
                found.setdefault(prefix, line)
                prefix = (*prefix, index)
            found.setdefault(prefix, line)
            at = _line_end(text, at)
        else:
            start = at
            parts, at = _dotted_key(text, at)
            if at == start:  # not a key: the text was not valid TOML; skip the line rather than loop
                at = _line_end(text, at)
                continue
            for depth in range(1, len(parts) + 1):
                found.setdefault((*prefix, *parts[:depth]), line)
            at, line = _value(text, at + 1, line, (*prefix, *parts), found)
    return found


def nearest_line(found: dict[Path, int], path: Path) -> int:
    """The line of `path`, or of its closest ancestor that has one (inline values), or 1."""
    for depth in range(len(path), 0, -1):
        if path[:depth] in found:
            return found[path[:depth]]
    return 1


def underscored(part: str | int) -> str | int:
    """`max-tokens` and `max_tokens` are the same key."""
    return part.replace("-", "_") if isinstance(part, str) else part


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end


def _dotted_key(text: str, at: int) -> tuple[tuple[str, ...], int]:
    parts: list[str] = []
    while match := _KEY_PART.match(text, at):
        parts.append(next(group for group in match.groups() if group is not None))
        at = match.end()
        if at < len(text) and text[at] == ".":
            at += 1
        else:
            break
    return tuple(parts), at


def _resolve(parts: tuple[str, ...], counts: dict[Path, int]) -> Path:
    """`[a.b]` below `[[a]]` belongs to the last element of a."""
    path: Path = ()
    for part in parts[:-1]:
        path = (*path, part)
        if path in counts:
            path = (*path, counts[path] - 1)
    return (*path, parts[-1]) if parts else path


def _value(text: str, at: int, line: int, path: Path, found: dict[Path, int]) -> tuple[int, int]:
    """Skip one value; note the keys of inline tables on the way. Returns (position, line) behind it."""
    size = len(text)
    open_tables: list[Path | None] = []  # one entry per open bracket: the path of an inline table, None for an array
    expect_key = False
    while at < size:
        char = text[at]
        if char == "\n":
            if not open_tables:
                return at, line
            line, at = line + 1, at + 1
        elif char == "#":
            at = _line_end(text, at)
        elif expect_key and not char.isspace() and char not in "},":
            parts, after = _dotted_key(text, at)
            table = open_tables[-1]
            if after == at or table is None:
                at += 1
                continue
            found.setdefault((*table, *parts), line)
            path, at, expect_key = (*table, *parts), after + 1, False
        elif char in "\"'":
            end = _string_end(text, at)
            line, at = line + text.count("\n", at, end), end
        elif char in "[{":
            open_tables.append(path if char == "{" else None)
            at, expect_key = at + 1, char == "{"
        elif char in "]}":
            if open_tables:
                open_tables.pop()
            at, expect_key = at + 1, False
        elif char == ",":
            at, expect_key = at + 1, bool(open_tables) and open_tables[-1] is not None
        else:
            at += 1
    return at, line


def _string_end(text: str, at: int) -> int:
    quote = text[at]
    triple = quote * 3
    if text.startswith(triple, at):
        end = at + 3
        while end < len(text):
            if quote == '"' and text[end] == "\\":
                end += 2
            elif text.startswith(triple, end):
                end += 3
                while end < len(text) and text[end] == quote:  # up to two quotes may end the content
                    end += 1
                return end
            else:
                end += 1
        return end
    end = at + 1
    while end < len(text) and text[end] not in (quote, "\n"):
        end += 2 if quote == '"' and text[end] == "\\" else 1
    return end + 1
