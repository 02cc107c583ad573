"""What Enter shows: everything that is known about the thing under the cursor, with the source of each value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tui.lines import BLANK, Column, Line, Part, clean, heading, line, state, table, wrap
from tui.look import Look, age, duration
from tui.screens import benchmarks, cleanup, pipeline, server
from tui.screens.rig import figure_words, link_state
from tui.snapshot import HostView, RunView, Snapshot

Detail = tuple[str, list[Line]]


def detail_lines(key: str, snapshot: Snapshot, width: int, look: Look) -> Detail | None:
    """(title, lines) for a thing; None where there is nothing to tell."""
    kind, _, name = key.partition(":")
    if kind == "host" and (host := snapshot.host(name)) is not None:
        return f"Host {name}", host_detail(host, snapshot, width, look)
    if kind == "run" and (run := snapshot.run(name)) is not None:
        return f"Run {name}", run_detail(run, snapshot, width, look)
    if kind == "stage":
        for stage in snapshot.stages:
            if stage.name == name:
                told = pipeline.detail_lines(stage, width, look)
                return f"Stage {name}", [
                    *told,
                    BLANK,
                    *run_detail(stage.run, snapshot, width, look),
                ] if stage.run else told
    if kind == "profile":
        for each in snapshot.servers:
            if each.profile == name:
                told = server.detail_lines(each, snapshot, width, look)
                return f"Profile {name}", [*told, BLANK, *fact_lines(f"profiles.{name}.", snapshot, width, look)]
    if kind == "bench":
        for found, record in benchmarks.records(snapshot):
            if found == key:
                return f"Benchmark {record.name}", benchmarks.detail_lines(record, width, look)
    if kind == "plan":
        for plan in snapshot.plans:
            if plan.plan == name:
                return f"Plan {name}", cleanup.detail_lines(plan, width, look)
    if kind == "warning":
        for warning in snapshot.warnings:
            if f"{warning.where}/{warning.check}" == name:
                text = wrap(clean(warning.message), width)
                return f"Warning {warning.check}", [*text, BLANK, line((f"rigbook explain {warning.check}", "dim"))]
    if kind == "problem" and int(name) < len(snapshot.problems):
        rows = snapshot.problems[int(name)].splitlines()
        return "Problem", [each for row in rows for each in wrap(clean(row), width)]
    if kind == "next":
        for step in snapshot.next_steps:
            if step.id == name:
                done = [line(("done when: ", "dim"), clean(step.done_when))] if step.done_when else []
                return "Next step", [
                    *wrap(clean(step.title), width),
                    *done,
                    BLANK,
                    line((f"rigbook done {step.id}", "dim")),
                ]
    return None


def host_detail(host: HostView, snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    shown = link_state(host, snapshot.at)
    out = [line(state(look, shown), f"  {host.kind}, reached as {clean(host.route) or look.dash}")]
    if host.played:
        out.append(line(("played by the demo: a stand-in, not a machine of its own", "warn")))
    if host.reason:
        out += wrap(clean(host.reason), width, "bad")
    if host.answered is not None:
        trip = f", round trip {host.round_trip * 1000:.0f} ms" if host.round_trip is not None else ""
        out.append(line((f"last answer: {age(snapshot.at - host.answered)}{trip}", "dim")))
    words = figure_words(host.figures, look)
    if words:
        out.append(line(f" {look.sep} ".join(words)))
    if host.gpus.lines:
        old = "" if host.gpus.at is None else f"as of {age(snapshot.at - host.gpus.at)}"
        out += [BLANK, heading("GPUs", old), *(line(clean(text)) for text in host.gpus.lines)]
    out += [BLANK, heading("Jobs", "" if host.jobs_at is not None else "not known")]
    rows: list[tuple[str | None, list[Part]]] = [
        (None, [state(look, job.state), (clean(job.id), ""), (duration(_lasted(job, snapshot.at), look.dash), "dim")])
        for job in sorted(host.jobs, key=lambda job: job.started or 0.0, reverse=True)[:30]
    ]
    out += table([Column(), Column(flex=True, least=12), Column(right=True)], rows, width, look, header=False) or [
        line(("none", "dim"))
    ]
    return [*out, BLANK, *fact_lines(f"hosts.{host.name}.", snapshot, width, look)]


def _lasted(job: Any, now: float) -> float | None:
    if job.started is None:
        return None
    end = now if job.state == "running" else job.ended
    return None if end is None else float(end - job.started)


def fact_lines(prefix: str, snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    """Facts under a prefix, each with where it comes from and how old it is."""
    out = [heading("Facts in the book")]
    rows: list[tuple[str | None, list[Part]]] = []
    for key, fact in snapshot.facts.items():
        if key.startswith(prefix):
            value = f"{clean(fact.value)} {fact.unit}" if fact.unit else clean(fact.value)
            old = look.dash if fact.at is None else age(snapshot.at - fact.at)
            mark = "" if fact.state == "fresh" else f" ({fact.state})"
            rows.append(
                (
                    None,
                    [
                        (key.removeprefix(prefix), "dim"),
                        (value + mark, "warn" if mark else ""),
                        (f"{old}, {clean(fact.source)}", "dim"),
                    ],
                )
            )
    columns = [
        Column("fact", flex=True, least=12),
        Column("value", flex=True, least=24),
        Column("seen, by", flex=True, least=10),
    ]
    return [*out, *(table(columns, rows, width, look) or [line(("none yet; `rigbook probe` looks", "dim"))])]


def run_detail(run: RunView | None, snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    if run is None:
        return []
    out = [line(state(look, run.status), f"  {run.what} {run.name} on {run.host or look.dash}")]
    took = run.seconds if run.seconds is not None else (snapshot.at - run.started if run.started is not None else None)
    out.append(line(("time: ", "dim"), duration(took, look.dash)))
    if run.status not in {"running", "done", "skipped"}:
        out.append(line(("exit: ", "dim"), "unknown" if run.exit is None else str(run.exit)))
    error = run.result.get("error") or run.progress.error
    if error:
        out += wrap(clean(str(error)), width, "bad")
    out += mapping_lines("result", {k: v for k, v in run.result.items() if k != "error"}, width)
    return out


def mapping_lines(title: str, values: Mapping[str, Any], width: int) -> list[Line]:
    if not values:
        return []
    out = [BLANK, heading(title)]
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        out += wrap(f"{clean(name)}: {clean(text)[:2000]}", width)
    return out
