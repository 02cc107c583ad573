"""Screen 5: the stages in the order of work, how far each is, and what the one under the cursor says."""

from __future__ import annotations

import math

from tui.lines import BLANK, Column, Line, Part, clean, heading, line, state, table, wrap
from tui.look import Look, amount, duration
from tui.screens.pane import BoardPane
from tui.snapshot import Snapshot, StageView
from tui.widgets.board import Board


class PipelinePane(BoardPane):
    NAME, DIGIT, TITLE = "pipeline", "5", "Pipeline"
    HINTS = (("Enter", "details"), ("l", "log"))
    HELP = """The stages from prompts to an audited drafter, in the order of work.

Done means that the book has a run of the stage that ended well. A running stage shows its own progress, rate and time
left; below the table is what the stage under the cursor measured: each metric with its course and last value, rows
in and out, warnings, and why it failed. `x` runs a stage, everything from it on, or stops it (unlock with R first)."""

    def lines(self, snapshot: Snapshot, width: int) -> list[Line]:
        return pipeline_lines(snapshot, width, self.look, self.target)

    def start(self, snapshot: Snapshot) -> str | None:
        return next((f"stage:{s.name}" for s in snapshot.stages if s.state == "running"), None)

    def on_board_moved(self, event: Board.Moved) -> None:
        self.redraw()


def pipeline_lines(snapshot: Snapshot, width: int, look: Look, target: str | None = None) -> list[Line]:
    if not snapshot.stages:
        words = "rigbook.toml has no [pipeline] table" if snapshot.loaded else f"reading{look.dots}"
        return [heading("Pipeline"), line((words, "dim"))]
    out = [summary(snapshot, look)]
    rows = [(f"stage:{stage.name}", stage_cells(stage, snapshot, look, width)) for stage in snapshot.stages]
    columns = [
        Column("state"),
        Column("stage"),
        Column("how far", flex=True, least=16),
        Column("rows", True),
        Column("time", True),
    ]
    out += table(columns, rows, width, look)
    chosen = next((s for s in snapshot.stages if f"stage:{s.name}" == target), None)
    chosen = chosen or next((s for s in snapshot.stages if s.state == "running"), None)
    if chosen is not None:
        out += [BLANK, *detail_lines(chosen, width, look)]
    return out


def summary(snapshot: Snapshot, look: Look) -> Line:
    # Counted as the document counts: the recipe, and the target where rigbook made it; not the checks beside it.
    counted = [stage for stage in snapshot.stages if stage.in_recipe or stage.name == "target"]
    done = sum(1 for stage in counted if stage.state == "done")
    note = f"{done} of {len(counted)} stages done"
    running = [stage for stage in snapshot.stages if stage.state == "running"]
    if running:
        note += f" {look.sep} {running[0].name} is running"
    failed = [stage.name for stage in snapshot.stages if stage.state in {"failed", "lost", "vanished"}]
    if failed:
        note += f" {look.sep} failed: {', '.join(failed)}"
    return heading("Pipeline", note)


def stage_cells(stage: StageView, snapshot: Snapshot, look: Look, width: int) -> list[Part]:
    run = stage.run
    far: Part = (stage.help, "dim")
    took = look.dash
    if run is not None and stage.state == "running":
        progress = run.progress
        took = duration(snapshot.at - run.started, look.dash) if run.started is not None else look.dash
        if progress.total:
            fraction = (progress.done or 0.0) / progress.total
            words = f"{look.bar(fraction, 10 if width < 100 else 24)} {fraction * 100:3.0f} %"
            if width >= 100:
                words += f"  {amount(progress.done)}/{amount(progress.total)} {clean(progress.unit)}"
            if progress.eta is not None:
                words += f"  {duration(progress.eta, look.dash)} left"
            if progress.rate:
                words += f"  {amount(progress.rate)} {clean(progress.unit)}/s"
            far = (words, "")
        else:
            far = ("started; no progress told yet", "dim")
    elif run is not None:
        took = duration(run.seconds, look.dash)
        if stage.state in {"failed", "lost"}:
            far = (clean(str(run.result.get("error") or run.progress.error or f"exit {run.exit}")), "bad")
        elif (told := told_numbers(stage, look)) is not None:
            far = (told, "")
    return [state(look, stage.state), (stage.name, "bold"), far, (rows_of(stage, look), ""), (took, "dim")]


def rows_of(stage: StageView, look: Look) -> str:
    rows = stage.run.result.get("rows") if stage.run is not None else None
    if not isinstance(rows, dict):
        return ""
    text = amount(rows.get("out"), look.dash)
    return text + (f" {look.mark('warning')}{rows['errors']}" if rows.get("errors") else "")


def told_numbers(stage: StageView, look: Look) -> str | None:
    """The first metrics of a stage in one line: last value, and the course where there is one."""
    metrics = stage.run.progress.metrics if stage.run is not None else {}
    words = []
    for name, values in list(metrics.items())[:2]:
        course = f" {look.sparkline(values, 12)}" if len(values) > 2 else ""
        words.append(f"{short(name, stage.name)} {amount(values[-1])}{course}")
    return f" {look.sep} ".join(words) or None


def short(metric: str, stage: str) -> str:
    """The name of a metric without the stage's own name before it."""
    return clean(metric.removeprefix(f"{stage}."))


def detail_lines(stage: StageView, width: int, look: Look) -> list[Line]:
    """What the stage under the cursor measured and said."""
    run = stage.run
    if run is None:
        return [heading(stage.name, stage.help), line(("no run in the book yet", "dim"))]
    out = [heading(stage.name, f"run {run.run}" + (f" on {run.host}" if run.host else ""))]
    progress = run.progress
    error = run.result.get("error") or progress.error
    if error:
        out += wrap(clean(str(error)), width, "bad")
    rows: list[tuple[str | None, list[Part]]] = []
    for name, values in progress.metrics.items():
        known = [v for v in values if math.isfinite(v)]
        span = f"{amount(min(known))} to {amount(max(known))}" if known else look.dash
        course = look.sparkline(values, max(8, min(60, width - 44)))
        rows.append(
            (None, [(short(name, stage.name), ""), (amount(values[-1]), "bold"), (course, "bar"), (span, "dim")])
        )
    out += table([Column(), Column(right=True), Column(flex=True), Column()], rows, width, look, header=False)
    numbers = [(k, v) for k, v in run.result.items() if isinstance(v, int | float) and not isinstance(v, bool)]
    if numbers:
        words = f" {look.sep} ".join(f"{clean(k)} {amount(float(v))}" for k, v in numbers[:12])
        out += wrap(words, width)
    counted = run.result.get("rows")
    if isinstance(counted, dict):
        words = ", ".join(f"{amount(counted.get(k), look.dash)} {k}" for k in ("in", "out", "errors", "skipped"))
        out.append(line(("rows: ", "dim"), words))
    for warning in progress.warnings[-3:]:
        out += wrap(f"{look.mark('warning')} {clean(warning)}", width, "warn")
    if len(out) == 1:
        out.append(line(("it has told no numbers" + (" yet" if stage.state == "running" else ""), "dim")))
    return out
