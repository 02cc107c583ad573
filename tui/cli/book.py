"""`rigbook book`: the project-state document."""

from __future__ import annotations

from typing import Any

import typer

from state.errors import USAGE, RigbookError
from tui.cli import show as cheap
from tui.cli.common import actor, confirm, ctx, emit, journal, root, table

app = typer.Typer(no_args_is_help=True, help="The project-state document, at any of its versions.")

AT = typer.Option(None, "--at", metavar="VERSION", help="The book as it was at this version. Default: now.")


@app.command()
def show(
    at: int | None = AT,
    section: str = typer.Option("", "--section", help="Only this one, e.g. benchmarks, next, hardware."),
) -> None:
    """Print the book as Markdown, or with --json as data.

    Example:  rigbook book show --section benchmarks
    """
    cheap.show(at, section)


@app.command()
def export(
    file: str | None = typer.Argument(None, help="Where to; .json gives JSON, - is stdout. Default: STATE.md."),
    at: int | None = AT,
) -> None:
    """Write the book to a file, in one step.

    Example:  rigbook book export /srv/wiki/state.md
    """
    cheap.export(file, at)


@app.command()
def log(
    last: int = typer.Option(30, "-n", "--last", min=0, help="How many, counted from the end; 0 is all."),
    kind: str = typer.Option("", "--kind", help="Only events whose kind begins so, e.g. run or fact."),
) -> None:
    """The versions of the book: one event a line, newest last.

    Example:  rigbook book log -n 0 --kind run
    """
    from state.summary import summary

    records = [record for record in _records() if record.kind.startswith(kind)]
    chosen = records[-last:] if last else records
    if ctx.json:
        for record in chosen:
            emit({**_header(record), "summary": summary(record), "body": record.body})
        return
    rows = [[str(r.seq), r.ts[:19].replace("T", " "), r.id, r.actor, r.kind, _short(summary(r), 100)] for r in chosen]
    emit(None, table(rows, ["version", "time (UTC)", "event", "who", "kind", "what"]) if rows else "no events\n")


@app.command()
def diff(
    a: int = typer.Argument(..., metavar="A", help="The older version."),
    b: int | None = typer.Argument(None, metavar="[B]", help="The newer one. Default: now."),
    md: bool = typer.Option(False, "--md", help="As a Markdown document."),
) -> None:
    """What changed between two versions, by key.

    Example:  rigbook book diff 10 20
    """
    from state import diff as changes
    from state.book import open_book

    older, newer = open_book(root(), a), open_book(root(), b)
    found = changes.diff(older, newer)
    text = changes.as_markdown(found, older, newer) if md else changes.as_text(found)
    emit({"from": older.seq, "to": newer.seq, "changes": changes.as_dicts(found)}, text)


@app.command()
def verify() -> None:
    """Check the journal: SQLite's integrity, every hash chain, every body. Exit code 1 when something is wrong.

    Example:  rigbook book verify
    """
    from state.journal import Journal
    from state.outline import journal_path

    with Journal.open(journal_path(root()), read_only=True) as opened:
        found = opened.verify()
    data = {"ok": found.ok, "events": found.events, "head": list(found.head), "problems": list(found.problems)}
    emit(data, found.text if found.ok else "\n".join(found.problems))
    if not found.ok:
        raise RigbookError("book.damaged", f"the journal is not whole: {len(found.problems)} problems")


@app.command()
def purge(
    event: str = typer.Argument(..., help="The event's id, as `book log` shows it."),
    because: str = typer.Option(..., "--because", help="Why; this stays in the book."),
) -> None:
    """Take the content of one event out for good, e.g. a secret that got in. That it was done stays on record.

    Example:  rigbook book purge 3fa2c1.118 --because "a password in a command line"
    """
    record = next((record for record in _records() if record.id == event), None)
    if record is None:
        raise RigbookError("journal.no-such-event", f"there is no event {event!r}", exit_code=USAGE)
    confirm(f"Take out what event {event} ({record.kind} of {record.ts[:16]}) says? It cannot be brought back.")
    opened = journal()
    try:
        purged = opened.purge(event, because, actor=actor())
    finally:
        opened.close()
    emit({"purged": event, "seq": purged.seq, "id": purged.id}, f"taken out; version {purged.seq} says so")


@app.command()
def blame(key: str = typer.Argument(..., help="A fact, e.g. hosts.llm.hw.cpu.model; * matches any part.")) -> None:
    """Where a value comes from: every time somebody or something said it.

    Example:  rigbook book blame 'hosts.*.hw.cpu.threads'
    """
    from fnmatch import fnmatchcase

    said = [
        record
        for record in _records()
        if record.kind == "fact.observed" and fnmatchcase(record.current_body.get("key", ""), key)
    ]
    if not said:
        from difflib import get_close_matches

        known = {record.current_body.get("key", "") for record in _records() if record.kind == "fact.observed"}
        near = get_close_matches(key, known, 3)
        hint = f"near it: {', '.join(near)}" if near else "`rigbook book search WORD` looks everywhere"
        raise RigbookError("book.no-such-key", f"no fact {key!r} was ever recorded", hint=hint, exit_code=USAGE)
    if ctx.json:
        emit([{**_header(record), **record.current_body} for record in said])
        return
    from state.render.text import quantity

    rows = []
    for record in said:
        body = record.current_body
        source = body["source"]
        where = ", ".join(str(source[name]) for name in ("host", "command", "run", "note") if source.get(name))
        rows.append(
            [
                str(record.seq),
                record.ts[:19].replace("T", " "),
                body["key"],
                _short(quantity(body["value"], body["unit"]), 60),
                f"{body['owner']} {record.actor}",
                where or "a claim",
            ]
        )
    emit(None, table(rows, ["version", "time (UTC)", "key", "value", "by", "source"]))


@app.command()
def search(words: list[str] = typer.Argument(..., help="All of them must stand in an event; case is ignored.")) -> None:
    """Events that contain all these words.

    Example:  rigbook book search eagle slower
    """
    import json

    from state.summary import summary

    wanted = [word.casefold() for word in words]
    found = []
    for record in _records():
        text = f"{record.kind} {record.actor} {json.dumps(record.body, ensure_ascii=False)}".casefold()
        if all(word in text for word in wanted):
            found.append(record)
    if ctx.json:
        emit([{**_header(record), "body": record.body} for record in found])
        return
    rows = [[str(r.seq), r.ts[:19].replace("T", " "), r.kind, _short(summary(r), 120)] for r in found]
    emit(None, table(rows, ["version", "time (UTC)", "kind", "what"]) if rows else "nothing found\n")


def _records() -> list[Any]:
    from state.book import stored_records

    return stored_records(root())


def _header(record: Any) -> dict[str, Any]:
    names = ("seq", "id", "ts", "actor", "actor_kind", "kind", "v", "hash")
    return {name: getattr(record, name) for name in names}


def _short(text: str, limit: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"
