"""What changed between two versions of a book, by key rather than by line. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from state.book import Book
from state.facts import same
from state.render.bench import KINDS, verdict_of
from state.render.facts import source
from state.render.text import code, duration, escape, quantity, results, table, when

ADDED, REMOVED, CHANGED = "added", "removed", "changed"
SIGNS = {ADDED: "+", REMOVED: "-", CHANGED: "~"}


@dataclass(frozen=True)
class Change:
    """One key that is not the same in both versions. `before` and `after` are text to show."""

    section: str  # title of the section of the book it belongs to
    key: str
    what: str  # added, removed, changed
    before: str = ""
    after: str = ""
    source: str = ""  # where the newer value comes from


def diff(a: Book, b: Book) -> list[Change]:
    """Changes from `a` to `b`, in the order of the book's sections."""
    changes: list[Change] = []
    if a.goal != b.goal:
        changes += _keyed("Goal", {"goal": a.goal}, {"goal": b.goal})
    changes += _keyed("Instructions", _said(a.instructions), _said(b.instructions))
    changes += _keyed("Instructions", _said(a.assumptions), _said(b.assumptions))
    changes += _facts(a, b)
    changes += _keyed("Discoveries", _titled(a.discoveries), _titled(b.discoveries))
    changes += _keyed("Discoveries", _warnings(a), _warnings(b))
    changes += _keyed("Benchmarks", _benchmarks(a), _benchmarks(b))
    changes += _keyed("Decisions", _titled(a.decisions), _titled(b.decisions))
    changes += _keyed("Done / In progress / Not started", _runs(a), _runs(b))
    changes += _keyed("Done / In progress / Not started", _servers(a), _servers(b))
    changes += _keyed("Done / In progress / Not started", _plans(a), _plans(b))
    changes += _keyed("Files", _files(a), _files(b))
    changes += _keyed("Next steps", _steps(a), _steps(b))
    changes += _keyed("Notes", _said(a.notes), _said(b.notes))
    changes += _keyed("Prose", dict(a.prose), dict(b.prose))
    return changes


def as_text(changes: list[Change]) -> str:
    """For a terminal: one line a change, `+` added, `-` removed, `~` changed."""
    lines: list[str] = []
    section = ""
    for change in changes:
        if change.section != section:
            section = change.section
            lines += ["", section] if lines else [section]
        values = f"{change.before} → {change.after}" if change.what == CHANGED else change.after or change.before
        lines.append(f"  {SIGNS[change.what]} {change.key}: {' '.join(values.split())}")
    return "\n".join(lines) + "\n" if lines else "no differences\n"


def as_markdown(changes: list[Change], a: Book, b: Book) -> str:
    """The same as a Markdown document."""
    lines = [f"# {escape(b.project.name)}: version {a.seq} → {b.seq}", ""]
    count = "1 change" if len(changes) == 1 else f"{len(changes)} changes"
    lines += [f"From {when(a.generated_at)} to {when(b.generated_at)}: {count}.", ""]
    for section in dict.fromkeys(change.section for change in changes):
        rows = [
            [code(c.key), c.what, escape(c.before), escape(c.after), c.source] for c in changes if c.section == section
        ]
        lines += [f"## {section}", "", *table(["key", "what", "before", "after", "source"], rows)]
    return "\n".join(lines).rstrip() + "\n"


def as_dicts(changes: list[Change]) -> list[dict[str, str]]:
    """For `--json`."""
    return [dict(vars(change)) for change in changes]


def _keyed(section: str, before: dict[str, str], after: dict[str, str]) -> list[Change]:
    changes = []
    for key in [*before, *(key for key in after if key not in before)]:
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        what = ADDED if old is None else REMOVED if new is None else CHANGED
        changes.append(Change(section, key, what, old or "", new or ""))
    return changes


_SECTION_OF = (
    ("hosts.*.access", "Hosts and access"),
    ("hosts.*.hw", "Hardware"),
    ("hosts.", "Software"),
    ("envs.", "Software"),
    ("target.", "Target model and tokenizer"),
    ("patches.", "Patches"),
    ("profiles.", "Profiling"),
    ("peers.", "Peers"),
    ("drafters.", "Drafters and training"),
    ("files.", "Files"),
    ("costs.", "Costs"),
)


def _section_of(key: str) -> str:
    parts = key.split(".")
    general = ".".join([parts[0], "*", parts[2]]) if len(parts) > 2 else key
    return next((title for start, title in _SECTION_OF if key.startswith(start) or general == start), "Software")


def _facts(a: Book, b: Book) -> list[Change]:
    changes = []
    for key in sorted(a.facts.keys() | b.facts.keys()):
        old, new = a.facts.get(key), b.facts.get(key)
        section = _section_of(key)
        if old is None and new is not None:
            changes.append(Change(section, key, ADDED, "", quantity(new.value, new.unit), source(b, new)))
        elif new is None and old is not None:
            changes.append(Change(section, key, REMOVED, quantity(old.value, old.unit), ""))
        elif old is not None and new is not None:
            before, after = quantity(old.value, old.unit), quantity(new.value, new.unit)
            if not same(old.now, new.now):
                changes.append(Change(section, key, CHANGED, before, after, source(b, new)))
            elif old.state != new.state:
                changes.append(Change(section, key, CHANGED, f"{before} ({old.state})", f"{after} ({new.state})"))
            elif old.failure != new.failure:
                told = f"{after} (not seen since: {new.failure})" if new.failure else f"{after} (seen again)"
                changes.append(Change(section, key, CHANGED, before, told))
    order = {title: i for i, (_, title) in enumerate(_SECTION_OF)}
    return sorted(changes, key=lambda change: order[change.section])


def _said(entries: Iterable[Any]) -> dict[str, str]:
    return {entry.id: entry.text for entry in entries}


def _titled(entries: Iterable[Any]) -> dict[str, str]:
    found = {}
    for entry in entries:
        state = getattr(entry, "status", "")
        if getattr(entry, "superseded_by", None):
            state = f"superseded by {entry.superseded_by}"
        found[entry.id] = entry.title + (f" ({state})" if state and state != "holds" else "")
    return found


def _steps(book: Book) -> dict[str, str]:
    return {step.id: step.title + (" (done)" if step.done_at else "") for step in book.next_steps}


def _warnings(book: Book) -> dict[str, str]:
    return {f"{one.where} {one.check}": one.message for one in book.warnings}


def _benchmarks(book: Book) -> dict[str, str]:
    return {
        one.id: f"{one.bench.name}, {KINDS.get(one.bench.dataset.kind, one.bench.dataset.kind)}:"
        f" {verdict_of(one.bench).text}"
        for one in book.benchmarks
    }


def _runs(book: Book) -> dict[str, str]:
    return {
        run.run: f"{run.what} {run.name} {run.status}"
        + (f" in {duration(run.seconds)}" if run.seconds is not None else "")
        + (f": {results(run.result)}" if run.result else "")
        for run in book.runs.values()
    }


def _servers(book: Book) -> dict[str, str]:
    return {f"server {server.run}": f"{server.profile} {server.state}" for server in book.servers.values()}


def _plans(book: Book) -> dict[str, str]:
    states = {None: "not applied", True: "applied, verified", False: "applied, not verified"}
    return {f"plan {plan.plan}": f"{plan.action} {states[plan.verified]}" for plan in book.plans.values()}


def _files(book: Book) -> dict[str, str]:
    return {
        f"{made.host or '?'}:{made.path}": f"{made.name} {(made.sha256 or 'unhashed')[:12]}" for made in book.artifacts
    }
