"""`rigbook runs`: every execution of anything that the book knows; one of them with its curves; two side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from state.errors import USAGE, RigbookError
from tui.cli.common import emit, root, table

if TYPE_CHECKING:
    from state.book import Book, Run

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
RUN = typer.Argument(..., help="The run's id; a unique beginning is enough.")
Curves = dict[str, list[tuple[float, float]]]


@app.command("list")
def list_() -> None:
    """Every run that the book knows, newest last.

    Example:  rigbook runs list --json
    """
    from state.book import open_book

    found = list(open_book(root()).runs.values())
    names = ("run", "what", "name", "host", "started", "ended", "status", "exit", "seconds")
    text = table(
        [[r.run, r.what, r.host or "", _clock(r.started), r.status, _seconds(r.seconds)] for r in found],
        ["run", "what", "host", "started (UTC)", "status", "time"],
    )
    emit([{name: getattr(r, name) for name in names} for r in found], text if found else "no runs")


@app.command("show")
def show(run: str = RUN) -> None:
    """One run: settings, result, artifacts, and the course of what it measured.

    Example:  rigbook runs show train
    """
    from dataclasses import asdict

    from state.book import open_book

    book = open_book(root())
    found = find(book, run)
    made = [asdict(a) for a in book.artifacts if a.run == found.run]
    told = curves(root() / ".rigbook" / "runs" / found.run / "events.jsonl")
    emit({**asdict(found), "artifacts": made, "curves": told}, "\n".join(_lines(found, made, told)))


@app.command("compare")
def compare(
    first: str = typer.Argument(..., help="One run; a unique beginning of its id is enough."),
    second: str = typer.Argument(..., help="Another run."),
) -> None:
    """What differs between two runs: settings first, then what came of them.

    Example:  rigbook runs compare train-1a2b3c4d-1 train-5e6f7a8b-1
    """
    from state.book import open_book

    book = open_book(root())
    a, b = find(book, first), find(book, second)
    differing = {
        "settings": differences(a.settings, b.settings),
        "result": differences(a.result, b.result),
        "run": differences(_about(a), _about(b)),
    }
    lines = []
    for part, found in differing.items():
        if found:
            rows = [[name, _short(x), _short(y), _change(x, y)] for name, (x, y) in found.items()]
            lines += [table(rows, [part, a.run, b.run, ""]), ""]
        elif part != "run":
            lines += [f"{part}: the same", ""]
    emit({"first": a.run, "second": b.run, **differing}, "\n".join(lines).rstrip())


def find(book: Book, run: str) -> Run:
    """The run of this id, or the only one that begins so. Raises RigbookError `run.unknown`."""
    known = book.runs
    found = [known[run]] if run in known else [r for name, r in known.items() if name.startswith(run)]
    if len(found) != 1:
        what = "no run begins" if not found else f"{len(found)} runs begin"
        raise RigbookError("run.unknown", f"{what} with {run!r}", hint="rigbook runs list", exit_code=USAGE)
    return found[0]


def curves(path: Path) -> Curves:
    """name -> (step, value) points of each metric in a run's mirrored event lines; without a step they are counted."""
    from pipeline.runs import event_lines
    from tui.run_source import number, series_of

    found: Curves = {}
    for _, event in event_lines(path):
        if event["kind"] != "metric":
            continue
        step = number(event.get("step"))
        for name, value in series_of(event):
            points = found.setdefault(name, [])
            if value is None:
                continue
            while step is not None and points and points[-1][0] >= step:
                points.pop()  # a resumed run does the steps after its checkpoint again: what it said later holds
            points.append((float(len(points)) if step is None else step, value))
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted names of what differs, with both values; None where one side has none."""
    left, right = _flat(a), _flat(b)
    names = list(dict.fromkeys([*left, *right]))
    return {name: (left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name)}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        out |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return out


def _about(run: Run) -> dict[str, Any]:
    return {"stage": run.name, "host": run.host, "status": run.status, "seconds": run.seconds}


def _lines(run: Run, made: list[dict[str, Any]], told: Curves) -> list[str]:
    from tui.chart import chart
    from tui.look import amount, choose

    look = choose()
    lines = [f"{run.run}: {run.what} {run.name}" + (f" on {run.host}" if run.host else "") + f", {run.status}"]
    lines.append(f"started {_clock(run.started)} UTC" + (f", {_seconds(run.seconds)}" if run.seconds else ""))
    for title, values in (("settings", run.settings), ("result", run.result)):
        cells = [[f"  {name}", _short(value)] for name, value in _flat(values).items()]
        lines += ["", table(cells, [title, ""])] if cells else []
    if made:
        cells = [[f"  {a['name']}", amount(a["bytes"]), a["path"]] for a in made]
        lines += ["", table(cells, ["artifacts", "bytes", ""])]
    for name, points in told.items():
        if len(points) == 1:
            lines += ["", f"{name}: {amount(points[0][1])}"]
        elif points:
            lines += ["", f"{name}: {amount(points[-1][1])} in the end", *chart(points, look)]
    return lines


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _change(a: Any, b: Any) -> str:
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (a, b))
    return f"{b / a - 1:+.1%}" if numbers and a else ""


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f} s"


def _clock(ts: str) -> str:
    return ts[:19].replace("T", " ")
