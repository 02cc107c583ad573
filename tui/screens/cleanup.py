"""Screen 4: what dead work still holds: evidence, plan, confirmation, proof."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tui.book_source import when
from tui.lines import BLANK, Column, Line, Part, clean, heading, line, state, table, wrap
from tui.look import Look, age, data_size
from tui.screens.pane import BoardPane
from tui.snapshot import Snapshot
from tui.widgets.board import Board

SHOWN = 12  # plans


class CleanupPane(BoardPane):
    NAME, DIGIT, TITLE = "cleanup", "4", "Clean"
    HINTS = (("Enter", "details"),)
    HELP = """What dead work still holds on the rig, and giving it back.

`x` looks: which processes of jobs that rigbook started outlived their job, and which ports, memory and GPUs they
hold. What is found becomes a plan: a frozen list of exactly these processes (boot, pid and start time), never a name
or a pattern. `x` on a plan shows it and asks; carried out, it is proved by looking again: processes gone, ports free,
memory back. What could not be proved is said to be not verified. Other people's work is never in a plan."""

    def lines(self, snapshot: Snapshot, width: int) -> list[Line]:
        return cleanup_lines(snapshot, width, self.look, self.target)

    def start(self, snapshot: Snapshot) -> str | None:
        return next((f"plan:{p.plan}" for p in clean_plans(snapshot) if p.verified is None), None)

    def on_board_moved(self, event: Board.Moved) -> None:
        self.redraw()


def clean_plans(snapshot: Snapshot) -> list[Any]:
    """The clean-up plans of the book, the newest first."""
    return [plan for plan in snapshot.plans if plan.action == "clean"][:SHOWN]


def plan_state(plan: Any) -> tuple[str, str]:
    """(state for its glyph and colour, words)."""
    if plan.verified is None:
        return "warning", "to give back"
    return ("done", "given back") if plan.verified else ("unknown", "NOT verified")


def cleanup_lines(snapshot: Snapshot, width: int, look: Look, target: str | None = None) -> list[Line]:
    plans = clean_plans(snapshot)
    if not plans:
        words = "no plan in the book: nothing was found, or nobody has looked yet (x looks)"
        return [heading("Clean-up"), *wrap(words if snapshot.loaded else f"reading{look.dots}", width, "dim")]
    rows = []
    for plan in plans:
        mark, words = plan_state(plan)
        at = when(plan.applied_at or plan.at)
        rows.append(
            (
                f"plan:{plan.plan}",
                [
                    state(look, mark, words),
                    (clean(plan.host or look.dash), "bold"),
                    (holds(plan.items, look), ""),
                    (look.dash if at is None else age(snapshot.at - at), "dim"),
                ],
            )
        )
    columns = [Column("state"), Column("host"), Column("what", flex=True, least=20), Column("since", True)]
    out = [heading("Clean-up"), *table(columns, rows, width, look)]
    chosen = next((plan for plan in plans if f"plan:{plan.plan}" == target), plans[0])
    return [*out, BLANK, *detail_lines(chosen, width, look)]


def holds(items: list[Mapping[str, Any]], look: Look) -> str:
    """What the processes of a plan hold together."""
    known = [item["rss"] for item in items if item.get("rss") is not None]
    words = [f"{len(items)} process{'es' if len(items) != 1 else ''}"]
    words.append(data_size(float(sum(known))) if known else "memory unknown")
    ports = sorted({port for item in items for port in item.get("ports", ())})
    if ports:
        words.append(f"port {', '.join(map(str, ports))}")
    gpus = sorted({str(file).rpartition("/")[2] for item in items for file in item.get("gpu_files", ())})
    return f" {look.sep} ".join([*words, *gpus])


def detail_lines(plan: Any, width: int, look: Look) -> list[Line]:
    """The evidence, and the proof where it was carried out."""
    out = [heading(clean(plan.plan), f"on {plan.host}")]
    rows: list[tuple[str | None, list[Part]]] = []
    for item in plan.items:
        memory = data_size(item.get("rss"), "memory unknown")
        ports = ", ".join(f"port {port}" for port in item.get("ports", ()))
        whose = {"unclaimed": "nobody's: see the plan", "foreign": "of others, named by you"}
        why = whose.get(str(item.get("kind")), f"{item.get('job')} is {item.get('job_state')}")
        rows.append(
            (
                None,
                [
                    (f"pid {item.get('pid')}", "bold"),
                    (memory, ""),
                    (ports, ""),
                    (clean(why), "dim"),
                    (clean(str(item.get("command", ""))), "dim"),
                ],
            )
        )
    columns = [Column(), Column(right=True), Column(), Column(flex=True, least=20), Column(flex=True, least=8)]
    out += table(columns, rows, width, look, header=False)
    if plan.verified is None:
        out.append(line(("not carried out yet: x shows it and asks", "dim")))
        return out
    outcome = plan.outcome
    before, after = outcome.get("rss_before"), outcome.get("rss_after")
    gone = [p for p in outcome.get("processes", ()) if p.get("outcome") in {"gone", "ended by TERM", "ended by KILL"}]
    out += [BLANK, heading("Proof" if plan.verified else "Not proved")]
    out.append(line(f"processes gone: {len(gone)} of {len(outcome.get('processes', ()))}"))
    out.append(line(f"their memory: {data_size(before, look.dash)} before, {data_size(after, look.dash)} after"))
    free, held = outcome.get("ports_free", ()), outcome.get("ports_held", ())
    if free:
        out.append(line((f"{look.mark('done')} free again: port {', '.join(map(str, free))}", "ok")))
    if held:
        out.append(line((f"{look.mark('failed')} STILL HELD: port {', '.join(map(str, held))}", "bad")))
    for process in outcome.get("processes", ()):
        if process not in gone:
            text = f"pid {process.get('pid')}: {process.get('outcome')} ({process.get('reason')})"
            out += wrap(clean(text), width, "bad")
    for text in [*(f"left: {each}" for each in outcome.get("left", ())), *outcome.get("notes", ())]:
        out += wrap(clean(str(text)), width, "warn")
    return out
