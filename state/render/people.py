"""Sections that people fill: instructions, decisions, next steps, and where they and the machines disagree."""

from __future__ import annotations

from state.book import Book, Decision, NextStep, Said
from state.render.facts import source
from state.render.text import code, escape, prose, quantity, table, when


def item(entry: Said, text: str) -> list[str]:
    """A list item of what somebody said, with who and when. Further lines are kept, indented."""
    first, *rest = prose(text) or [""]
    return [f"- {first} _({_by(entry)})_", *(f"  {line}".rstrip() for line in rest)]


def _by(entry: Said) -> str:
    return f"{escape(entry.actor)}, {when(entry.at)}"


def instructions(book: Book) -> list[str]:
    lines = [line for text in book.project.instructions for line in _declared(text)]
    lines += [line for entry in book.instructions for line in item(entry, entry.text)]
    rules = [[code(str(rule.get("forbid", ""))), escape(str(rule.get("because", "")))] for rule in book.project.rules]
    if rules:
        lines += ["", "Enforced before anything starts:", "", *table(["forbidden", "because"], rules)]
    if book.assumptions:
        lines += ["", "Taken for granted, not checked:", ""]
        for entry in book.assumptions:
            because = f" (because {escape(entry.because)})" if entry.because else ""
            lines += item(entry, entry.text + because)
    loose = [note for note in book.notes if note.section is None]
    if loose:
        lines += ["", "Notes:", "", *(line for note in loose for line in item(note, note.text))]
    return lines


def _declared(text: str) -> list[str]:
    first, *rest = prose(text) or [""]
    return [f"- {first}", *(f"  {line}".rstrip() for line in rest)]


def decisions(book: Book) -> list[str]:
    lines: list[str] = []
    for decision in reversed(book.decisions):
        lines += _decision(book, decision)
    return lines


def _decision(book: Book, decision: Decision) -> list[str]:
    title = escape(decision.title)
    head = f"~~{title}~~ (superseded by {code(decision.superseded_by)})" if decision.superseded_by else title
    lines = [f"### {head}", "", *prose(decision.text), ""]
    if decision.because:
        lines.append(f"- Because: {escape(decision.because)}")
    if decision.alternatives:
        lines.append(f"- Instead of: {'; '.join(escape(other) for other in decision.alternatives)}")
    if decision.supersedes:
        lines.append(f"- Supersedes {code(decision.supersedes)}")
    return [*lines, f"- {_by(decision)}, {code(decision.id)}", ""]


def next_steps(book: Book) -> list[str]:
    waiting = open_steps(book)
    lines: list[str] = []
    for number, step in enumerate(waiting, 1):
        first, *rest = prose(step.title)
        lines.append(f"{number}. **{first}** (priority {step.priority}, {code(step.id)}, {_by(step)})")
        lines += [f"   {line}".rstrip() for line in rest]
        blockers = _blockers(book, step)
        if blockers:
            lines.append(f"   - waits for {', '.join(blockers)}")
        if step.done_when:
            lines.append(f"   - done when: {escape(step.done_when)}")
        if step.otherwise:
            lines.append(f"   - otherwise: {escape(step.otherwise)}")
    done = [step for step in book.next_steps if step.done_at]
    if done:
        lines += ["", "Done:", ""]
        for step in done:
            told = f": {escape(step.done_text)}" if step.done_text else ""
            lines.append(f"- {escape(step.title)}{told} _({escape(step.done_by)}, {when(step.done_at)})_")
    return lines


def open_steps(book: Book) -> list[NextStep]:
    """What is still to be done, the most urgent first; what waits for another step comes after it."""
    waiting = sorted((s for s in book.next_steps if not s.done_at), key=lambda step: (step.priority, step.seq))
    ids = {step.id for step in waiting}
    ordered: list[NextStep] = []
    while waiting:
        placed = {step.id for step in ordered}
        ready = [s for s in waiting if all(d in placed or d not in ids for d in s.depends_on)]
        step = ready[0] if ready else waiting[0]  # a circle of dependencies: the order of priority
        ordered.append(step)
        waiting.remove(step)
    return ordered


def _blockers(book: Book, step: NextStep) -> list[str]:
    by_id = {other.id: other for other in book.next_steps}
    return [
        f"“{escape(by_id[d].title)}”" if d in by_id else code(d)
        for d in step.depends_on
        if d not in by_id or not by_id[d].done_at
    ]


def conflicts(book: Book) -> list[str]:
    rows = []
    for fact in book.conflicts:
        contrary = fact.contrary
        if contrary is None:
            continue
        saw = escape(quantity(contrary.value, contrary.unit))
        where = ", ".join(
            part
            for part in (
                escape(contrary.source.host or ""),
                code(contrary.source.command or ""),
                when(contrary.observed_at),
            )
            if part
        )
        rows.append([code(fact.key), escape(quantity(fact.value, fact.unit)), source(book, fact), saw, where])
    return table(["key", "a person says", "who", "a machine saw", "where"], rows)


def glance(book: Book) -> list[str]:
    """Lines for the top of the document."""
    steps = open_steps(book)
    return (
        [f"Next: {escape(steps[0].title)}" + (f" (and {len(steps) - 1} more)" if len(steps) > 1 else "")]
        if (steps)
        else []
    )
