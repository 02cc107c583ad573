"""Small pieces of Markdown: escaping, tables, and values, times and sources in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from state.book import Book

UNKNOWN = "unknown"

_ACTIVE = re.compile(r"([\\`*<|])|(&)(?=#?\w+;)|(~)(?=~)|(?<![^\W_])(_)|(_)(?![^\W_])|(\[)(?=[^\]]*\]\()")
_ENTITIES = {"<": "&lt;", "&": "&amp;"}
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def escape(text: str) -> str:
    """Text that means itself inside a paragraph or a table cell, on one line."""
    escaped = _ACTIVE.sub(lambda match: _ENTITIES.get(match.group()) or "\\" + match.group(), text.strip())
    return re.sub(r"\s*\n\s*", "<br>", escaped)


def code(text: str) -> str:
    """An inline code span that may stand in a table cell."""
    flat = re.sub(r"\s*\n\s*", " ⏎ ", text.strip()).replace("|", "\\|")
    if not flat:
        return ""
    fence = "`"
    while fence in flat:
        fence += "`"
    pad = " " if flat.startswith("`") or flat.endswith("`") else ""
    return f"{fence}{pad}{flat}{pad}{fence}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """A GitHub table; cells are escaped already. Columns in `right` hold numbers. No rows, no table."""
    body = [f"| {' | '.join(row)} |" for row in rows]
    if not body:
        return []
    rule = " | ".join("---:" if i in right else "---" for i in range(len(header)))
    return [f"| {' | '.join(header)} |", f"| {rule} |", *body, ""]


def number(value: float, digits: int = 4) -> str:
    """A number to read: significant digits for fractions, separators for large whole numbers."""
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 1_000_000 else str(value)
    if not isfinite(value):
        return "NaN" if value != value else "infinity" if value > 0 else "-infinity"
    if value == int(value) and abs(value) >= 10**digits:
        return f"{int(value):,}" if abs(value) >= 1_000_000 else str(int(value))
    if value == 0 or 1e-4 <= abs(value) < 10**digits:
        text = f"{value:.{digits}g}"
        return text if "e" not in text else str(round(value))
    return f"{value:.3g}" if abs(value) < 1e-4 else f"{value:,.0f}"


def quantity(value: Any, unit: str | None = None) -> str:
    """A fact's value with its unit, as text that still needs escaping. None is unknown, never zero."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if unit in ("B", "bytes"):
            return size(value)
        if unit in ("s", "seconds") and value >= 100:
            return duration(value)
        if unit in ("%", "percent"):
            return f"{number(value, 3)} %"
        grouped = f"{value:,}" if unit and isinstance(value, int) and abs(value) >= 10_000 else number(value)
        return f"{grouped} {unit}" if unit else grouped
    if isinstance(value, list):
        return ", ".join(quantity(item) for item in value) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {quantity(inner)}" for key, inner in value.items()) or "none"
    return f"{value} {unit}" if unit else str(value)


def size(count: float) -> str:
    """Bytes in binary units."""
    if not isfinite(count):
        return f"{number(count)} B"
    scaled, unit = float(count), 0
    while abs(scaled) >= 1024 and unit < len(_BINARY) - 1:
        scaled, unit = scaled / 1024, unit + 1
    return f"{scaled:.0f} {_BINARY[unit]}" if unit == 0 else f"{scaled:.1f} {_BINARY[unit]}"


def duration(seconds: float | None) -> str:
    """Seconds as people say them."""
    if seconds is None:
        return UNKNOWN
    if not isfinite(seconds):
        return f"{number(seconds)} s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def when(ts: str) -> str:
    """An RFC 3339 time, to the minute, in UTC."""
    if not ts:
        return UNKNOWN
    try:
        moment = datetime.fromisoformat(ts)
    except ValueError:
        return ts
    if moment.tzinfo is not None and moment.utcoffset():
        moment = moment.astimezone(UTC)
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def host(book: Book, name: str | None) -> str:
    """A host's name, marked when the demo plays it."""
    if not name:
        return UNKNOWN
    return f"{escape(name)} (played)" if book.played(name) else escape(name)


def label(dotted: str) -> str:
    """A dotted name in words; parts that are names of something (a token, a file) stay as they are."""
    parts = [part.replace("_", " ") if re.fullmatch(r"[a-z0-9_]+", part) else part for part in dotted.split(".")]
    return " ".join(parts)


def flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested results as dotted names with plain values; long lists and tables only by their length."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and len(value) <= 6:
            found += flat(value, f"{name}.")
        elif isinstance(value, dict):
            found.append((name, f"{len(value)} values"))
        elif isinstance(value, list) and (len(value) > 8 or any(isinstance(item, dict | list) for item in value)):
            found.append((name, f"{len(value)} items"))
        else:
            found.append((name, value))
    return found


def results(values: dict[str, Any], limit: int | None = None, more: str = "") -> str:
    """The result of a run in one table cell; beyond `limit` values, how many there are and where (`more`)."""
    ordered = {"rows": values["rows"], **values} if "rows" in values else values
    said = [_result(name, value) for name, value in ordered.items()]
    if limit is None or len(said) <= limit + 1:
        return "; ".join(said)
    return "; ".join([*said[:limit], f"{len(said) - limit} more: {more}"])


def _result(name: str, value: Any) -> str:
    """One named value; a small table of numbers as "name: 3 of this, 4 of that"."""
    if (
        isinstance(value, dict)
        and len(value) <= 6
        and not any(isinstance(inner, dict | list) for inner in value.values())
    ):
        if name == "rows":
            parts = [f"{_count(key, inner)} {escape(label(key))}" for key, inner in value.items()]
        else:
            parts = [f"{escape(label(key))} {_count(key, inner, name)}" for key, inner in value.items()]
        return f"{escape(label(name))}: {', '.join(parts)}"
    return "; ".join(f"{escape(label(key))} {_count(key, inner)}" for key, inner in flat({name: value}))


_IDS = ("special_tokens", "port", "seed", "pid", "pids", "id", "ids")  # whole numbers that count nothing


def _count(name: str, value: Any, group: str = "") -> str:
    """Whole numbers in results are counts as a rule: grouped, so that one can read them."""
    last, unit = name.rsplit(".", 1)[-1], _unit_in(name)
    plain = unit is not None or isinstance(value, bool) or group in _IDS or (not group and last in _IDS)
    if isinstance(value, int) and not plain:
        return f"{value:,}"
    return escape(
        str(value) if isinstance(value, int) and not isinstance(value, bool) and not unit else quantity(value, unit)
    )


def _unit_in(name: str) -> str | None:
    """A unit that a result carries in its name."""
    last = name.rsplit(".", 1)[-1].rsplit("_", 1)[-1]
    return {"bytes": "bytes", "seconds": "s"}.get(last)


def prose(text: str) -> list[str]:
    """What a person wrote, as Markdown; but headings are taken down, so that they do not break up the document, and
    tags outside code are shown: `<think>` is a token in our field, not HTML."""
    lines, fenced = [], False
    for line in text.strip().splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            fenced = not fenced
        elif not fenced:
            line = re.sub(r"^(#{1,6})\s+(.*)", r"**\2**", line)
            parts = re.split(r"(`+[^`]*`+)", line)
            parts[::2] = [re.sub(r"<(?=[A-Za-z/!?|])", "&lt;", part) for part in parts[::2]]
            line = "".join(parts)
        lines.append(line.rstrip())
    if fenced:
        lines.append("```")
    return lines
