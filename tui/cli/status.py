"""`rigbook status` and `explain`."""

from __future__ import annotations

from typing import Any

import typer

from state.errors import UNREACHABLE, USAGE, RigbookError
from tui.cli.common import ctx, emit, root, wait_for


def status(
    md: bool = typer.Option(False, "--md", help="The whole book as Markdown, instead of the summary."),
) -> None:
    """Look at the rig once: probe every host, record what ended, bring the book up to date, say where things stand.

    Example:  rigbook status --md > STATE.md
    """
    unreachable = wait_for(_look())
    from state.book import open_book
    from state.render import json as as_json
    from state.render import markdown

    book = open_book(root())
    if ctx.json:
        emit(as_json.render(book))
    elif md:
        emit(None, markdown.render(book))
    else:
        emit(None, _summary(book, unreachable))
    if unreachable:
        raise typer.Exit(UNREACHABLE)


async def _look() -> dict[str, str]:
    from pipeline.runs import open_work, settle_all
    from remote.inventory import probe_host
    from state import events
    from state.condense import append_observations

    unreachable: dict[str, str] = {}
    async with open_work(root()) as work:
        for name in work.project.hosts:
            try:
                link = await work.rig.link(name)
                append_observations(work.journal, await probe_host(link, work.project))
            except RigbookError as error:
                # A failed look never replaces what was known; it is recorded as a failed look.
                unreachable[name] = str(error)
                work.journal.append(events.ProbeFailed(host=name, what="system", reason=str(error)))
        await settle_all(work)
    return unreachable


def _summary(book: Any, unreachable: dict[str, str]) -> str:
    from state.render import people, work
    from tui.cli.demo import headline

    lines = [f"{book.project.name}: version {book.seq}"]
    lines += [f"unreachable: {name}: {why}" for name, why in unreachable.items()]
    working = [run for run in book.runs.values() if run.status == "running"]
    lines.append("in progress: " + (", ".join(run.run for run in working) or "nothing"))
    # What the document says at a glance: servers, how far the pipeline is, what failed, what is next.
    glance = [_plain(line) for line in (*work.glance(book), *people.glance(book))]
    lines += [line for line in glance if not line.startswith("Running: ") and " did not answer: " not in line]
    if book.benchmarks:
        lines += ["", headline(book)]
    return "\n".join(lines)


def _plain(markdown: str) -> str:
    """A line of the document without its marks."""
    import html
    import re

    return html.unescape(re.sub(r"\\(.)|[*`]", lambda mark: mark.group(1) or "", markdown))


def explain(id: str = typer.Argument(..., help="An error id or check id, e.g. stage.changed.")) -> None:
    """What an error id or check id means and what to do.

    Example:  rigbook explain stage.changed
    """
    known = explanations()
    if id not in known:
        from difflib import get_close_matches

        near = get_close_matches(id, known, 1)
        raise RigbookError(
            "explain.unknown",
            f"no id {id!r}",
            hint=f"did you mean {near[0]}?" if near else "ids stand in brackets: error[ID]",
            exit_code=USAGE,
        )
    emit({"id": id, "text": known[id]}, f"{id}: {known[id]}")


def explanations() -> dict[str, str]:
    """The tables of all rooms, joined."""
    from pipeline.checks import CHECKS as STAGES
    from pipeline.explain import EXPLAIN as WORK
    from remote.check_list import CHECKS as HOSTS
    from remote.explain import EXPLAIN as RIG
    from remote.gpu_checks import CHECKS as GPUS
    from state.checks import HERE
    from state.explain import EXPLAIN as BOOK
    from tui.explain import EXPLAIN as DESK

    checks = {id: check.text() for id, check in {**HERE, **HOSTS, **GPUS, **STAGES}.items()}
    # Where an error has the name of a check, the check's text says the same and more.
    return {**BOOK, **RIG, **WORK, **DESK, **checks}
