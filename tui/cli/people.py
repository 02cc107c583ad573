"""What people write into the book: notes, decisions, discoveries, assumptions, instructions, next steps."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from state.errors import USAGE, RigbookError
from tui.cli.common import actor, emit, journal, root

if TYPE_CHECKING:
    from state.book import Book, NextStep
    from state.events import Event

TEXT = typer.Argument(..., help="What to write; - reads it from standard input.")
MORE = typer.Option("", "--text", help="More about it; - reads it from standard input.")


def note(
    text: str = TEXT,
    section: str | None = typer.Option(None, "--section", help="A section of the book that it belongs to."),
) -> None:
    """Write a note into the book.

    Example:  rigbook note --section hardware "GPU 3 sits behind a riser"
    """
    from state import events

    if section is not None:
        _known_section(section)
    _write(events.NoteAdded(text=_text(text), section=section))


def decide(
    title: str = typer.Argument(..., help="What was decided."),
    because: str = typer.Option("", "--because", help="Why."),
    instead_of: list[str] = typer.Option([], "--instead-of", help="An alternative that was turned down; repeat it."),
    supersedes: str | None = typer.Option(None, "--supersedes", help="Event id of the decision that it replaces."),
    text: str = MORE,
) -> None:
    """Record a decision, its reasons and what was turned down.

    Example:  rigbook decide "Draft vocabulary of 8,192" --because "the head dominates" --instead-of 32000
    """
    from state import events

    known = [entry.id for entry in _book().decisions]
    if supersedes is not None and supersedes not in known:
        hint = f"decisions: {', '.join(known)}" if known else "no decision was recorded yet"
        raise RigbookError("decision.unknown", f"no decision {supersedes!r}", hint=hint, exit_code=USAGE)
    _write(
        events.DecisionMade(
            title=_filled(title),
            text=_text(text) if text else "",
            because=because,
            alternatives=instead_of,
            supersedes=supersedes,
        )
    )


def discover(
    title: str = typer.Argument(..., help="What was found out."),
    evidence: list[str] = typer.Option([], "--evidence", help="What it rests on: a run, a file, a command; repeat it."),
    refuted: bool = typer.Option(False, "--refuted", help="It was believed, and it is not so: what did not work."),
    guard: str | None = typer.Option(None, "--guard", help="What preflight shall refuse because of it."),
    text: str = MORE,
) -> None:
    """Record a discovery, including what did not work.

    Example:  rigbook discover "FP8 KV cache is faster" --refuted --evidence "run r12"
    """
    from state import events

    _write(
        events.DiscoveryMade(
            title=_filled(title),
            text=_text(text) if text else "",
            evidence=evidence,
            status="refuted" if refuted else "holds",
            guard=guard,
        )
    )


def assume(text: str = TEXT, because: str = typer.Option("", "--because", help="Why it seems safe.")) -> None:
    """Record what is taken for granted, so that the next person may doubt it.

    Example:  rigbook assume "nobody else uses GPU 0-3 at night"
    """
    from state import events

    _write(events.AssumptionMade(text=_text(text), because=because))


def instruct(text: str = TEXT) -> None:
    """Add a standing instruction for everyone who works on this rig.

    Example:  rigbook instruct "No FP8 KV cache"
    """
    from state import events

    _write(events.InstructionAdded(text=_text(text)))


def next_(
    title: str = typer.Argument(..., help="What is to be done."),
    priority: int = typer.Option(2, "--priority", "-p", min=1, max=5, help="1 is first."),
    done_when: str = typer.Option("", "--done-when", help="How one sees that it is done."),
    otherwise: str = typer.Option("", "--otherwise", help="What to do when it fails."),
    after: list[str] = typer.Option([], "--after", help="Id of a next step that comes before it; repeat it."),
) -> None:
    """Add a next step.

    Example:  rigbook next "Train on 40k samples" -p 1 --done-when "accept length above 2.5"
    """
    from state import events

    steps = _book().next_steps
    depends_on = [_step(steps, words).id for words in after]
    _write(
        events.NextAdded(
            title=_filled(title), priority=priority, done_when=done_when, otherwise=otherwise, depends_on=depends_on
        )
    )


def done(
    step: str = typer.Argument(..., help="The step's id, the number in it, or words of its title."),
    text: str = typer.Option("", "--text", help="What came of it."),
) -> None:
    """Mark a next step as done.

    Example:  rigbook done "Train on 40k" --text "accept length 2.61"
    """
    from state import events

    found = _step([one for one in _book().next_steps if not one.done_at], step)
    _write(events.NextDone(next=found.id, text=_text(text) if text else ""), f"done: {found.title}")


def _write(event: Event, told: str = "") -> None:
    opened = journal()
    try:
        record = opened.append(event, actor=actor(), actor_kind="person")[0]
    finally:
        opened.close()
    emit({"seq": record.seq, "id": record.id, "kind": record.kind}, told or f"{record.id}, version {record.seq}")


def _book() -> Book:
    from state.book import open_book

    return open_book(root())


def _text(text: str) -> str:
    return _filled(sys.stdin.read() if text == "-" else text)


def _filled(text: str) -> str:
    if not text.strip():
        raise RigbookError("usage", "there is nothing to write: the text is empty", exit_code=USAGE)
    return text.strip()


def _known_section(section: str) -> None:
    from state.render.markdown import SECTIONS

    known = [ident for ident, *_ in SECTIONS]
    if section not in known:
        raise RigbookError(
            "book.no-such-section",
            f"the book has no section {section!r}",
            hint=f"sections: {', '.join(known)}",
            exit_code=USAGE,
        )


def _step(steps: list[NextStep], wanted: str) -> NextStep:
    """The one step that `wanted` names: its id, the number in it, or words of its title."""
    exact = [step for step in steps if wanted in (step.id, step.id.partition(".")[2])]
    found = exact or [step for step in steps if wanted.casefold() in step.title.casefold()]
    if len(found) == 1:
        return found[0]
    names = "; ".join(f"{step.id} {step.title}" for step in (found or steps))
    raise RigbookError(
        "next.unknown",
        f"{'no' if not found else len(found)} next steps match {wanted!r}",
        hint=f"there is: {names}" if names else "no next step is open",
        exit_code=USAGE,
    )
