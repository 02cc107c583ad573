"""`rigbook run --dry-run`: what the stages would take, and on what each figure rests."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from state.errors import USAGE, RigbookError
from tui.cli.common import emit, root, table, wait_for

if TYPE_CHECKING:
    from pipeline.estimate import Guess
    from remote.connect import Link


def show(chosen: list[Any], assumed: list[str], target_config: str) -> None:
    """The plan of the chosen stages, as a table or as one JSON document."""
    from pipeline import estimate as e
    from pipeline.recipe import pipeline_of
    from state.book import open_book
    from state.project import load
    from tui.cli.work import states

    loaded = load(root())
    host = pipeline_of(loaded).host
    assume = e.parse_assumptions(assumed)
    found, target, free = wait_for(_look(chosen, target_config, states))
    guesses = {g.stage: g for g in e.estimate(loaded, target, open_book(root()).runs.values(), assume)}
    todo = [guesses[row["stage"]] for row in found if row["state"] != "done" and row["stage"] in guesses]
    total = e.total(todo)
    short = free is not None and total.disk > free
    document = {
        "stages": [{**row, "estimate": _plain(guesses.get(row["stage"]))} for row in found],
        "total": asdict(total),
        "host": host,
        "free_bytes": free,
        "enough_disk": None if free is None else not short,
    }
    emit(document, _text(found, guesses, total, free, short, host))


def _text(
    found: list[dict[str, str]], guesses: dict[str, Guess], total: Any, free: int | None, short: bool, host: str
) -> str:
    from state.render.text import duration

    rows = []
    for row in found:
        guess = guesses.get(row["stage"])
        if guess is None:
            continue
        done = row["state"] == "done"
        cells = ["", "", ""] if done else [duration(guess.seconds), _bytes(guess.disk), _money(guess.money)]
        rows.append(
            [
                row["stage"],
                row["state"],
                "" if guess.tokens is None else f"{'≤ ' if guess.most else ''}{guess.tokens:,}",
                *cells,
            ]
        )
    unknown = "at least " if total.unknown_time else ""
    rows.append(["to do", "", "", unknown + duration(total.seconds), _bytes(total.disk), _money(total.money)])
    lines = [table(rows, ["stage", "state", "tokens", "time", "disk", "money"]), "", "resting on:"]
    lines += [f"  {row['stage']}: {'; '.join(guesses[row['stage']].basis)}" for row in found if row["stage"] in guesses]
    if total.unknown_disk:
        lines.append(f"disk unknown: {', '.join(total.unknown_disk)}")
    if free is not None:
        lines.append(
            f"{_bytes(free)} are free on {host} or hold these stages already" + (": NOT ENOUGH" if short else "")
        )
    return "\n".join(lines)


async def _look(
    chosen: list[Any], file: str, states: Any
) -> tuple[list[dict[str, str]], dict[str, Any] | None, int | None]:
    """(state of each stage, the target's config, bytes free); None where it cannot be read."""
    from pipeline.recipe import pipeline_of
    from pipeline.room import room
    from pipeline.runs import open_work

    async with open_work(root()) as work:
        pipeline = pipeline_of(work.project)
        link = await work.rig.link(pipeline.host)
        found: list[dict[str, str]] = await states(work, chosen)
        told = await room(link, pipeline.workdir, [row["folder"] for row in found if row["state"] != "done"])
        # What these stages have written already need not be free any more.
        return found, await _config(link, work.project.target, file), None if told is None else sum(told)


async def _config(link: Link, target: Any, file: str) -> dict[str, Any] | None:
    try:
        data = Path(file).read_bytes() if file else await link.read(f"{target.path}/config.json")
    except OSError as error:
        raise RigbookError("estimate.config", f"{file}: {error.strerror}", exit_code=USAGE) from None
    except RigbookError as error:
        if error.id == "file.not-found":
            return None  # the model is not there yet
        raise
    try:
        config = json.loads(data)
    except ValueError as error:
        raise RigbookError("estimate.config", f"the target's config.json: {error}", exit_code=USAGE) from None
    return config if isinstance(config, dict) else None


def _plain(guess: Guess | None) -> dict[str, Any] | None:
    return None if guess is None else asdict(guess)


def _bytes(count: int | None) -> str:
    """Decimal, as disks are sold and as bytes a token multiply."""
    if count is None:
        return "unknown"
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            value = count / size
            return f"{value:,.1f} {unit}" if value < 100 else f"{value:,.0f} {unit}"
    return f"{count / 1e3:,.0f} kB"


def _money(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
