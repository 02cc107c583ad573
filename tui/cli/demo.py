"""`rigbook demo`: the whole thing on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from state.errors import FINDINGS
from tui.cli.common import ctx, emit, say, table, wait_for

if TYPE_CHECKING:
    from pipeline.runs import Update

PLAIN_SECONDS = 10.0  # between progress lines where the output is not a terminal


def demo(
    directory: Path = typer.Option(Path("demo-rig"), "--dir", help="The demo's folder; it is made, or gone on with."),
    tui: bool = typer.Option(False, "--tui", help="Watch it in the app; the work goes on if you leave."),
    keep_going: bool = typer.Option(False, "--keep-going", help="Go on with the next step where one fails."),
    stop: bool = typer.Option(False, "--stop", help="Stop the demo's servers and played hosts; files stay."),
) -> None:
    """The whole pipeline on this machine: no GPU, no root, no network but the package index; real numbers.

    Three SSH servers on loopback play a Proxmox host, its container and its VM. A small real model writes prompts and
    answers, a drafter is trained on its hidden states, served, and benchmarked. Interrupt it at any time: the same
    command goes on where it was.

    Example:  rigbook demo --dir demo-rig
    """
    if stop:
        stop_demo(directory)
        return
    if tui:
        watch(directory, keep_going)
        return
    from pipeline.demo import run

    console = Console()
    summary = wait_for(run(directory, console, keep_going=keep_going))
    console.end()
    if ctx.json:
        emit({"kind": "summary", **summary})
    else:
        emit(summary, closing(summary))
    if summary["failures"]:
        raise typer.Exit(FINDINGS)


class Console:
    """Shows updates: a line that is rewritten on a terminal, plain lines elsewhere, JSON lines with --json."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty() and not ctx.json
        self.open_line = False
        self.last_progress: dict[str, float] = {}

    def __call__(self, update: Update) -> None:
        if ctx.json:
            print(json.dumps({"kind": update.kind, "step": update.name, "run": update.run, **update.data}, default=str))
            sys.stdout.flush()
            return
        if update.kind == "progress":
            self.progress(update.name, update.data)
            return
        text = WORDS[update.kind](update.data) if update.kind in WORDS else None
        if text is not None:
            self.line(text if update.kind == "step" else f"         {text}")

    def progress(self, name: str, data: dict[str, Any]) -> None:
        now = time.monotonic()
        last = data["done"] >= data["total"]
        if not self.live and not last and now - self.last_progress.get(name, 0.0) < PLAIN_SECONDS:
            return
        self.last_progress[name] = now
        percent = 100.0 * data["done"] / data["total"] if data["total"] else 100.0
        words = [f"{percent:5.1f} %", f"{data['done']:,.0f}/{data['total']:,.0f} {data['unit']}"]
        if data.get("rate"):
            words.append(f"{data['rate']:,.1f} {data['unit']}/s")
        if data.get("eta") and not last:
            words.append(f"ETA {data['eta']:.0f} s")
        known = {"kind", "t", "done", "total", "unit", "rate", "eta"}
        words += [f"{k} {number(v)}" for k, v in data.items() if k not in known]
        text = "         " + "  ".join(words)
        if self.live:
            sys.stderr.write(f"\r\x1b[K{text[:110]}")
            sys.stderr.flush()
            self.open_line = True
        else:
            say(text)

    def line(self, text: str) -> None:
        self.end()
        say(text)

    def end(self) -> None:
        if self.open_line:
            sys.stderr.write("\n")
            self.open_line = False


def number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _result(data: dict[str, Any]) -> str:
    shown = {k: v for k, v in (data.get("result") or {}).items() if isinstance(v, int | float | str)}
    words = [f"{k} {number(v)}" for k, v in list(shown.items())[:6]]
    seconds = f"{data['seconds']:.0f} s" if data.get("seconds") else ""
    return "done" + (f" in {seconds}" if seconds else "") + (": " + ", ".join(words) if words else "")


def _host_line(host: str, facts: dict[str, Any]) -> str:
    """The first facts of a host in one line; all of them are in the book."""
    at = f"hosts.{host}."
    words = [f"{facts.get(at + 'hw.cores', '?')} cores of {facts.get(at + 'hw.cpu', 'an unknown CPU')}"]
    for key, what in (("hw.memory", "memory"), ("hw.disk.root.free", "disk free")):
        if isinstance(size := facts.get(at + key), int):
            words.append(f"{size / (1 << 30):.1f} GiB {what}")
    words += [str(facts[at + key]) for key in ("sw.os", "sw.kernel") if at + key in facts]
    return f"{host}: " + ", ".join(words) + f" ({len(facts)} facts)"


WORDS: dict[str, Any] = {
    "step": lambda d: f"[{d['number']:2d}/{d['of']}] {d['title']}",
    "host": lambda d: f"{d['host']} ({d.get('kind', '')}, played) on 127.0.0.1:{d.get('port')}",
    "host_facts": lambda d: _host_line(d["host"], d["facts"]),
    "warning": lambda d: f"warning [{d['check']}] {d['message']}",
    "error": lambda d: f"error [{d['id']}] {d['message']}",
    "failed": lambda d: f"failed: {d.get('message') or d.get('error')}",
    "lost": lambda d: "lost: it ended and left no record",
    "started": lambda d: f"started on {d['host']}",
    "attached": lambda d: f"found at work on {d['host']}; following it",
    "unreachable": lambda d: f"{d['message']}; the job goes on, trying again in {d['retry_in']:.0f} s",
    "ready": lambda d: f"ready after {d['seconds']:.1f} s on port {d['port']}",
    "stopped": lambda d: f"stopped, port {d['port']} is free" if "port" in d else "stopped",
    "skipped": lambda d: "done before, nothing to do",
    "done": _result,
    "round": lambda d: (
        f"{d['arm']:9s} {d['tok_s']:6.1f} tok/s"
        + (f"  accept length {d['accept_len']:.2f}" if d.get("accept_len") else "")
        if d.get("tok_s")
        else f"{d['arm']}: no figure: {d.get('excluded')}"
    ),
    "verdict": lambda d: f"on prompts by {d['prompts']}: {d['verdict']}",
    "killed": lambda d: f"killed with SIGKILL: the launch chain of {d['run']} (pids {', '.join(map(str, d['pids']))})",
    "plan": lambda d: f"plan: {d['item']}",
    "proof": lambda d: f"{'proved' if d['verified'] else 'NOT PROVED'}: {d['text']}",
    "bystander": lambda d: f"{d['profile']} beside it still answers: HTTP {d['health']}",
}


def closing(summary: dict[str, Any]) -> str:
    """What a user wants to know at the end: where the document is, the headline, the times, what to try."""
    from state.book import open_book

    root = Path(summary["root"])
    lines = ["", headline(open_book(root)), ""]
    rows = [[name, f"{spent:.1f} s"] for name, spent in summary["seconds"].items()]
    lines += [table(rows, ["step", "time"]), ""]
    minutes = summary["pipeline_seconds"] / 60
    lines.append(
        f"pipeline part: {minutes:.1f} min" + ("" if summary["within_budget"] else " (more than 12 on this run)")
    )
    for step, why in summary["failures"].items():
        lines.append(f"failed: {step}: {why}")
    shown = directory_as_typed(root)
    lines += [
        "",
        f"The book: {summary['state']}",
        "Try next:",
        f"  rigbook -C {shown}                     the app",
        f"  rigbook -C {shown} book show           the same document, in the terminal",
        f"  rigbook -C {shown} book diff 10 20     what changed between two versions",
        f"  rigbook -C {shown} serve start eagle3  the speculative server",
        f"  rigbook demo --dir {shown} --stop      stop the played hosts",
    ]
    return "\n".join(lines)


def directory_as_typed(root: Path) -> str:
    try:
        return str(root.relative_to(Path.cwd()))
    except ValueError:
        return str(root)


def headline(book: Any) -> str:
    """The benchmark table: one row an arm and kind of prompt."""
    from state import benchmarks

    rows = []
    for entry in book.benchmarks:
        record = entry.bench
        for arm in record.arms:
            speed = benchmarks.tok_s(arm)
            length = benchmarks.accept_len(arm) if arm.speculative else None
            rows.append(
                [
                    record.dataset.kind,
                    arm.profile,
                    f"{speed.value:.1f}" if speed else "unknown",
                    f"{length:.2f}" if length else "",
                    f"{record.break_even:.2f}" if arm.speculative and record.break_even else "",
                    f"{record.ngram_accept_len:.2f}" if arm.speculative and record.ngram_accept_len else "",
                    record.verdict.text if arm.speculative and record.verdict else "",
                ]
            )
    return table(rows, ["prompts by", "profile", "tok/s", "accept length", "break-even", "n-gram lookup", "verdict"])


def stop_demo(directory: Path) -> None:
    """Stop the served models (through the rig), then the played hosts."""
    from pipeline.demo import stop as stop_all

    stopped = wait_for(stop_all(directory))
    emit({"stopped": stopped}, "stopped: " + (", ".join(stopped) or "nothing ran"))


def watch(directory: Path, keep_going: bool) -> None:
    """Start the demo on its own, so that it outlives the app, and open the app on its folder."""
    from pipeline.demo_project import prepare

    prepare(directory)
    log = directory / ".rigbook" / "controller.log"
    command = [sys.executable, "-m", "tui.cli.main", "demo", "--dir", str(directory)]
    if keep_going:
        command.append("--keep-going")
    with log.open("ab") as out:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    from tui.app import open_app

    raise typer.Exit(open_app(directory=directory))
