"""Facts as tables: what is the same for all rows is said once below, what differs stands in the row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from state.book import Book
from state.facts import Fact, seconds_of
from state.render.text import code, escape, host, label, quantity, table, when

# Facts of several things of one kind: `gpu.<uuid>.memory` and its like become a table with one row per thing.
GROUPS = ("gpu", "disk")
LIST_FROM = 6  # more packages than this go into one paragraph


ONE_LOOK = 600.0  # seconds: what one host told within this time was one look at it


def source(book: Book, fact: Fact, command: bool = True, at: str = "") -> str:
    """Where a fact's value comes from, in one line; without the command where a column shows it. `at` overrides the
    time that is told."""
    origin, at = fact.source, at or when(fact.observed_at)
    # That a host is played stands beside its name already, and on top of the document.
    known = book.played(origin.host) and (origin.note or "").startswith("a played host")
    note = f": {escape(origin.note)}" if origin.note and not known else ""
    if fact.owner == "person":
        return f"set by {escape(fact.now.actor)}, {at}{note}"
    if fact.confidence == "claimed":
        return f"a claim, {at}{note}"
    parts = [
        host(book, origin.host) if origin.host else "",
        code(origin.command) if command and origin.command else "",
        at,
        f"run {code(origin.run)}" if origin.run else "",
    ]
    return ", ".join(part for part in parts if part) + note


def remarks(fact: Fact, failure: bool = True) -> str:
    """What a reader must know before trusting the value: a claim, an age, a failed look."""
    said = []
    if fact.owner == "person":
        said.append(f"set by {escape(fact.now.actor)}")
    elif fact.confidence != "measured":
        said.append(fact.confidence)
    if fact.state != "fresh":
        said.append(f"**{fact.state}**: {escape(fact.because)}")
    if failure and fact.failure:
        said.append(_not_seen(fact))
    return "; ".join(said)


def _not_seen(fact: Fact) -> str:
    return f"**not seen since**: the look at {when(fact.failed_at)} failed: {escape(fact.failure)}"


def fact_table(book: Book, facts: Sequence[Fact], prefix: str) -> list[str]:
    """Facts whose keys begin with `prefix`, with the source of each."""
    lines: list[str] = []
    rest = list(facts)
    for group in GROUPS:
        members = [fact for fact in rest if _member(fact, prefix, group)]
        rest = [fact for fact in rest if fact not in members]
        if members:
            lines += _pivot(book, members, prefix, group)
    packages = [fact for fact in rest if fact.key.startswith(f"{prefix}packages.")]
    if len(packages) > LIST_FROM:
        rest = [fact for fact in rest if fact not in packages]
        lines += _packages(book, packages, f"{prefix}packages.")
    return [*(_plain(book, rest, prefix) if rest else []), *lines]


def _plain(book: Book, facts: Sequence[Fact], prefix: str) -> list[str]:
    commands = {fact.source.command for fact in facts}
    sources = _Sources(book, facts, command=len(commands) == 1)
    rows: list[list[str]] = []
    nested: list[str] = []
    for fact in facts:
        name = escape(label(fact.key.removeprefix(prefix)))
        note = remarks(fact, failure=not sources.shared_failure)
        if isinstance(fact.value, list) and fact.value and all(isinstance(item, dict) for item in fact.value):
            shown = f"{len(fact.value)} (table below)"
            nested += [f"{name}:", "", *_records(fact.value)]
        else:
            shown = escape(quantity(fact.value, fact.unit))
        row = [name, f"{shown} ({note})" if note else shown]
        if len(commands) > 1:
            row.append(code(fact.source.command or ""))
        rows.append([*row, *sources.column(fact)])
    header = ["what", "value", *(["read from"] if len(commands) > 1 else []), *sources.header]
    return [*table(header, rows), *sources.lines(), *nested]


class _Sources:
    """The sources of one table: told in a line below where all rows share one, else numbered."""

    def __init__(self, book: Book, facts: Sequence[Fact], command: bool) -> None:
        looks: dict[str, list[Fact]] = {}
        for fact in sorted(facts, key=lambda fact: seconds_of(fact.observed_at)):
            seen = looks.setdefault(source(book, fact, command, at="-"), [])
            if seen and seconds_of(fact.observed_at) - seconds_of(seen[0].observed_at) > ONE_LOOK:
                looks[f"{len(looks)}"] = seen  # an earlier look, put aside under a name of its own
                seen = looks[source(book, fact, command, at="-")] = []
            seen.append(fact)
        times = {fact.key: _span(seen) for seen in looks.values() for fact in seen}
        self._told = {fact.key: source(book, fact, command, times[fact.key]) for fact in facts}
        self._all = list(dict.fromkeys(self._told.values()))
        failures = {_not_seen(fact) if fact.failure else "" for fact in facts}
        # The whole host was out of reach: said once, not in every row.
        self.shared_failure = failures.pop() if len(failures) == 1 else ""
        self.header = ["source"] if len(self._all) > 1 else []

    def column(self, fact: Fact) -> list[str]:
        return [str(self._all.index(self._told[fact.key]) + 1)] if self.header else []

    def lines(self) -> list[str]:
        told = [f"Source: {self._all[0]}."]
        if self.header:
            told = ["Sources:", "", *(f"{i}. {text}" for i, text in enumerate(self._all, 1))]
        failure = self.shared_failure
        return [*told, "", *([f"{failure[:2]}{failure[2:3].upper()}{failure[3:]}.", ""] if failure else [])]


def _span(seen: list[Fact]) -> str:
    first, last = when(seen[0].observed_at), when(seen[-1].observed_at)
    return first if first == last else f"{first.removesuffix(' UTC')} to {last[11:]}"


def _member(fact: Fact, prefix: str, group: str) -> bool:
    parts = fact.key.removeprefix(prefix).split(".")
    return len(parts) >= 3 and parts[0] == group


def _pivot(book: Book, facts: list[Fact], prefix: str, group: str) -> list[str]:
    """One row per thing, one column per attribute."""
    names: dict[str, dict[str, Fact]] = {}
    for fact in facts:
        _, name, attribute = fact.key.removeprefix(prefix).split(".", 2)
        names.setdefault(name, {})[attribute] = fact
    columns = list(dict.fromkeys(attribute for attributes in names.values() for attribute in attributes))
    commands = {fact.source.command for fact in facts}
    sources = _Sources(book, facts, command=len(commands) == 1)
    rows = []
    for name, attributes in names.items():
        row = [escape(name)]
        for column in columns:
            known = attributes.get(column)
            note = remarks(known, failure=not sources.shared_failure) if known else ""
            shown = escape(quantity(known.value, known.unit)) if known else "unknown"
            row.append(f"{shown} ({note})" if note else shown)
        if len(commands) > 1:
            row.append(", ".join(dict.fromkeys(code(fact.source.command or "") for fact in attributes.values())))
        numbers = dict.fromkeys(number for fact in attributes.values() for number in sources.column(fact))
        rows.append([*row, *([", ".join(numbers)] if numbers else [])])
    read = ["read from"] if len(commands) > 1 else []
    header = [group, *(escape(label(column)) for column in columns), *read, *sources.header]
    return [*table(header, rows), *sources.lines()]


def _packages(book: Book, facts: list[Fact], prefix: str) -> list[str]:
    listed = ", ".join(f"{escape(fact.key.removeprefix(prefix))} {escape(quantity(fact.value))}" for fact in facts)
    return [f"{len(facts)} packages: {listed}.", "", *_Sources(book, facts, command=True).lines()]


def _records(values: list[dict[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for value in values for key in value))
    rows = [[escape(quantity(value.get(column))) for column in columns] for value in values]
    return table([escape(str(column).replace("_", " ")) for column in columns], rows)
