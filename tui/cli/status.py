"""`rigbook status`, `doctor`, `explain`."""

from __future__ import annotations

import sys
from typing import Any

import typer

from state.errors import FINDINGS, UNREACHABLE, USAGE, RigbookError
from tui.cli.common import ctx, emit, root, table, wait_for


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


def doctor() -> None:
    """Check what rigbook needs here and on the rig, and say what is wrong and what to do.

    Example:  rigbook doctor
    """
    findings = wait_for(_checks())
    rows = [[f["check"], f["state"], f["text"]] for f in findings]
    emit(findings, table(rows, ["check", "state", ""]))
    if any(f["state"] == "wrong" for f in findings):
        raise typer.Exit(FINDINGS)


async def _checks() -> list[dict[str, str]]:
    import shutil

    from state.journal import Journal
    from state.project import journal_path, load

    found: list[dict[str, str]] = []

    def add(check: str, good: bool, text: str) -> None:
        found.append({"check": check, "state": "ok" if good else "wrong", "text": text})

    add("python", sys.version_info >= (3, 11), sys.version.split()[0])
    free = shutil.disk_usage(root()).free
    add("disk", free > 1 << 30, f"{free / (1 << 30):.1f} GiB free in {root()}")
    try:
        project = load(root())
    except RigbookError as error:
        add("project", False, str(error))
        return found
    add("project", True, f"{project.project.name}: {len(project.hosts)} hosts, {len(project.profiles)} profiles")
    path = journal_path(project.root)
    if path.exists():
        journal = Journal.open(path, read_only=True)
        try:
            verified = journal.verify()
            add("journal", verified.ok, verified.text)
        finally:
            journal.close()
    from remote.connect import Rig

    async with Rig(project) as rig:
        for name, host in project.hosts.items():
            try:
                link = await rig.link(name)
                (await link.run(["true"], timeout=20)).check("true")
                add(f"host.{name}", True, f"{host.kind}{', played' if host.played else ''}: answers")
            except RigbookError as error:
                add(f"host.{name}", False, str(error))
    return found


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
    from pipeline.explain import EXPLAIN as WORK
    from remote.explain import EXPLAIN as RIG
    from state.explain import EXPLAIN as BOOK
    from tui.explain import EXPLAIN as DESK

    return {**BOOK, **RIG, **WORK, **DESK}
