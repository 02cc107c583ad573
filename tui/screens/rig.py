"""Screen 1: what the rig is doing, what needs somebody, and what comes next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tui.lines import BLANK, Column, Line, Part, clean, heading, line, state, table
from tui.look import Look, age, amount, data_size, duration
from tui.screens.pane import BoardPane
from tui.snapshot import HostView, RunView, Snapshot

STALE_SECONDS = 15.0  # an answer older than this is not live any more


class RigPane(BoardPane):
    NAME, DIGIT, TITLE = "rig", "1", "Rig"
    HINTS = (("Enter", "details"), ("l", "log"))
    HELP = """What the rig is doing now.

Hosts: a host is up when it answered within the last seconds; a host that does not answer keeps its last values, dimmed,
with their age. Running: every run without an end in the book. Needs you: what failed last, warnings, servers that
ended by themselves. Next steps come from the book (`rigbook next`)."""

    def lines(self, snapshot: Snapshot, width: int) -> list[Line]:
        return rig_lines(snapshot, width, self.look)


def rig_lines(snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    out: list[Line] = [heading("Hosts")]
    out += host_lines(snapshot, width, look)
    out += [BLANK, heading("Running")]
    out += running_lines(snapshot, width, look)
    alerts = alert_lines(snapshot, width, look)
    if alerts:
        out += [BLANK, heading(f"Needs you ({len(alerts)})"), *alerts]
    out += [BLANK, heading("Next steps")]
    out += next_lines(snapshot, width, look)
    recent = [r for r in snapshot.runs if r.status != "running"][:8]
    if recent:
        out += [BLANK, heading("Ended lately")]
        rows = [
            (
                f"run:{r.run}",
                [
                    state(look, r.status),
                    (r.name, ""),
                    (r.what, "dim"),
                    (r.host or look.dash, "dim"),
                    (duration(r.seconds, look.dash), "dim"),
                    (ended_ago(r, snapshot.at, look), "dim"),
                ],
            )
            for r in recent
        ]
        columns = [Column(), Column(flex=True, least=8), Column(), Column(), Column(right=True), Column(right=True)]
        out += table(columns, rows, width, look, header=False)
    return out


def ended_ago(run: RunView, now: float, look: Look) -> str:
    if run.started is None or run.seconds is None:
        return look.dash
    how = age(now - run.started - run.seconds)
    return "just now" if how == "now" else f"{how} ago"


def link_state(host: HostView, now: float) -> str:
    """The state of a link as it is shown: an old answer is stale even where nothing has failed yet."""
    if host.link == "up" and host.answered is not None and now - host.answered > STALE_SECONDS:
        return "stale"
    return host.link


def host_lines(snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    if not snapshot.hosts:
        return [line(("no hosts: rigbook.toml declares none" if snapshot.loaded else "reading…", "dim"))]
    rows = []
    for host in snapshot.hosts:
        shown = link_state(host, snapshot.at)
        rows.append(
            (
                f"host:{host.name}",
                [
                    state(look, shown),
                    (host.name, "bold" if shown == "up" else "dim"),
                    (host.kind + (" (played)" if host.played else ""), "dim"),
                    (host_says(host, shown, snapshot, look), "" if shown == "up" else "dim"),
                ],
            )
        )
    return table([Column(), Column(), Column(), Column(flex=True, least=20)], rows, width, look, header=False)


def host_says(host: HostView, shown: str, snapshot: Snapshot, look: Look) -> str:
    """One line about a host: live figures, or why there are none and since when."""
    words = []
    if shown == "down":
        since = "never answered" if host.answered is None else f"no answer for {age(snapshot.at - host.answered)}"
        words.append(f"{since}: {clean(host.reason)}" if host.reason else since)
    elif shown == "connecting":
        words.append("connecting" + look.dots)
    elif shown == "stale" and host.answered is not None:
        words.append(f"as of {age(snapshot.at - host.answered)} ago")
    running = [job for job in host.jobs if job.state == "running"]
    if host.jobs_at is not None and running:
        words.append(f"{len(running)} job{'s' if len(running) != 1 else ''}")
    words += figure_words(host.figures, look)
    if host.gpus.words:
        words = [word for word in words if not word.endswith((" GPU", " GPUs"))] + [host.gpus.words]
    return f" {look.sep} ".join(words) if words else look.dash


def figure_words(figures: Mapping[str, Any], look: Look) -> list[str]:
    words = []
    if (load := figures.get("load1")) is not None:
        cores = figures.get("cores")
        words.append(f"load {load:.1f}" + (f"/{cores}" if cores else ""))
    used, total = figures.get("mem_used"), figures.get("mem_total")
    if used is not None and total:
        words.append(f"mem {used / 2**30:.0f}/{total / 2**30:.0f} GiB")
    if (free := figures.get("disk_free")) is not None:
        words.append(f"{data_size(free)} free")
    gpus = figures.get("gpus")
    if gpus is not None:
        words.append(f"{gpus} GPU{'s' if gpus != 1 else ''}" if gpus else "no GPU")
    return words


def running_lines(snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    rows: list[tuple[str | None, list[Part]]] = []
    for run in snapshot.running:
        if run.what == "demo":
            continue
        server = next((s for s in snapshot.servers if s.run == run.run), None)
        if server is not None:
            where = f"{server.host}:{server.port}"
            rows.append(
                (
                    f"profile:{server.profile}",
                    [state(look, server.state), (f"server {server.profile}", ""), (where, "dim"), ("", "")],
                )
            )
            continue
        rows.append(
            (
                f"run:{run.run}",
                [
                    state(look, run.status),
                    (run.name, ""),
                    (run.host or look.dash, "dim"),
                    (said(run, snapshot, look, 12), ""),
                ],
            )
        )
    for job in snapshot.bare_jobs:
        lasted = duration(snapshot.at - job.started if job.started is not None else None, look.dash)
        words = f"job {job.id}, for {lasted}; the book has no run of it"
        rows.append(
            (
                f"job:{job.host}/{job.id}",
                [state(look, job.state), (job.name, ""), (job.host, "dim"), (clean(words), "")],
            )
        )
    if not rows:
        return [line(("nothing runs" if snapshot.loaded else "reading" + look.dots, "dim"))]
    return table([Column(), Column(), Column(), Column(flex=True, least=16)], rows, width, look, header=False)


def said(run: RunView, snapshot: Snapshot, look: Look, bar: int) -> str:
    """How far a run is, in its own words: bar, percent, amount, rate, time left."""
    progress = run.progress
    if progress.total is None or progress.done is None:
        since = snapshot.at - run.started if run.started is not None else None
        return f"no progress told yet, for {duration(since, look.dash)}"
    fraction = progress.done / progress.total if progress.total else 1.0
    words = [f"{look.bar(fraction, bar)} {fraction * 100:3.0f} %"]
    words.append(f"{amount(progress.done)}/{amount(progress.total)} {clean(progress.unit)}")
    if progress.rate:
        words.append(f"{amount(progress.rate)}/s")
    if progress.eta is not None and progress.done < progress.total:
        words.append(f"{duration(progress.eta, look.dash)} left")
    return "  ".join(words)


def alert_lines(snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    """What needs somebody, the most pressing first. Each thing once."""
    rows: list[tuple[str | None, list[Part]]] = []
    for i, problem in enumerate(snapshot.problems):
        rows.append(
            (f"problem:{i}", [(f"{look.mark('warning')} project", "bad"), (clean(problem.splitlines()[-1]), "")])
        )
    for server in snapshot.servers:
        if server.state == "vanished":
            text = f"the server ended by itself: {clean(server.detail)}"
            rows.append(
                (f"profile:{server.profile}", [(f"{look.mark('vanished')} {server.profile}", "bad"), (text, "")])
            )
    newest: set[tuple[str, str]] = set()
    for run in snapshot.runs:
        # Only the last run of a name counts: a failure that was mended since is history.
        if run.what == "server" or (run.what, run.name) in newest:
            continue
        newest.add((run.what, run.name))
        if run.status in {"finished", "vanished", "lost_reboot"}:
            text = "its job is over and the book does not know yet: `rigbook status` records it"
            rows.append((f"run:{run.run}", [(f"{look.mark(run.status)} {run.name}", "warn"), (text, "")]))
        if run.status in {"failed", "lost"}:
            why = clean(str(run.result.get("error") or f"exit {run.exit}" if run.exit is not None else run.status))
            rows.append((f"run:{run.run}", [state(look, run.status, run.name), (why, "")]))
    for warning in snapshot.warnings:
        rows.append(
            (
                f"warning:{warning.where}/{warning.check}",
                [
                    (f"{look.mark('warning')} {clean(warning.check)}", "warn"),
                    (clean(f"{warning.where}: {warning.message}"), ""),
                ],
            )
        )
    return table([Column(), Column(flex=True, least=20)], rows, width, look, header=False)


def next_lines(snapshot: Snapshot, width: int, look: Look) -> list[Line]:
    if not snapshot.next_steps:
        return [line(("none in the book; add one with `rigbook next`", "dim"))]
    rows = [
        (f"next:{step.id}", [(f"{look.mark('next')} {step.priority}", "key"), (clean(step.title), "")])
        for step in snapshot.next_steps[:6]
    ]
    return table([Column(), Column(flex=True, least=20)], rows, width, look, header=False)
