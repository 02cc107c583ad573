"""Screen 7: the headline table, plain against speculative, and what is behind the one under the cursor."""

from __future__ import annotations

from typing import Any

from state.benchmarks import BenchRecord, accept_len, from_dict, per_position, tok_s
from tui.lines import BLANK, Column, Line, Part, clean, heading, line, table, wrap
from tui.look import Look, amount
from tui.screens.pane import BoardPane
from tui.snapshot import Snapshot
from tui.widgets.board import Board

VERDICT_STYLES = {
    "better": "ok",
    "worse": "bad",
    "no detectable change": "warn",
    "NOT COMPARABLE": "bad",
    "INVALID": "bad",
}


class BenchmarksPane(BoardPane):
    NAME, DIGIT, TITLE = "benchmarks", "7", "Bench"
    HINTS = (("Enter", "details"),)
    HELP = """Benchmarks in the book, the newest first; one line an arm, plain and speculative side by side.

tok/s is the median over the rounds (one round is one launch of the server). Accept length is tokens emitted per verify
step. Break-even is the accept length at which speculation only just pays on that machine; n-gram is what looking up
repeated text would reach on the same output, so that looping text cannot pass for a good drafter. Prompts that the
model wrote (self) and that people wrote (people) are never averaged."""

    def lines(self, snapshot: Snapshot, width: int) -> list[Line]:
        return bench_lines(snapshot, width, self.look, self.target)

    def on_board_moved(self, event: Board.Moved) -> None:
        self.redraw()


def records(snapshot: Snapshot) -> list[tuple[str, BenchRecord]]:
    """(identity, record), the newest first. The book hands out records or their stored form."""
    out = []
    for i, each in enumerate(reversed(snapshot.benches)):
        raw: Any = getattr(each, "record", None) or getattr(each, "bench", None) or each
        record = from_dict(raw) if isinstance(raw, dict) else raw
        out.append((f"bench:{i}:{record.name}", record))
    return out[::-1]


def bench_lines(snapshot: Snapshot, width: int, look: Look, target: str | None = None) -> list[Line]:
    found = records(snapshot)
    running = [f"running: {clean(run.name)}" for run in snapshot.running if run.what == "bench"]
    if not found:
        return [
            heading("Benchmarks", ", ".join(running)),
            line(("none in the book yet; `rigbook bench run` makes one", "dim")),
        ]
    rows: list[tuple[str | None, list[Part]]] = []
    for key, record in found:
        for i, arm in enumerate(record.arms):
            speed, accepted = tok_s(arm), accept_len(arm)
            rows.append(
                (
                    key if i == 0 else None,
                    [
                        (clean(record.name) if i == 0 else "", "bold"),
                        (f"{record.dataset.kind} ({record.dataset.n})" if i == 0 else "", "dim"),
                        (clean(arm.profile), ""),
                        (speed_words(speed.value if speed else None, look), "bold"),
                        (f"{accepted:.2f}" if accepted is not None and arm.speculative else look.dash, ""),
                        *verdict_cell(record, i, look),
                    ],
                )
            )
    columns = [
        Column("benchmark", flex=True, least=8), Column("prompts"), Column("profile"), Column("tok/s", True),
        Column("accept", True), Column("verdict", flex=True, least=12),
    ]  # fmt: skip
    out = [heading("Benchmarks", ", ".join(running)), *table(columns, rows, width, look)]
    chosen = next((r for key, r in found if key == target), found[0][1])
    return [*out, BLANK, *detail_lines(chosen, width, look)]


def verdict_cell(record: BenchRecord, arm: int, look: Look) -> tuple[Part]:
    verdict = record.verdict
    if arm != len(record.arms) - 1:
        return (("", ""),)
    if verdict is None:
        return ((f"no verdict {look.dash} judged by nobody", "dim"),)
    ratio = f" {(verdict.ratio - 1) * 100:+.1f} %" if verdict.ratio is not None else ""
    return ((verdict.kind + ratio, VERDICT_STYLES.get(verdict.kind, "")),)


def speed_words(value: float | None, look: Look) -> str:
    """Tokens per second, to a tenth."""
    return look.dash if value is None else f"{value:,.1f}"


def detail_lines(record: BenchRecord, width: int, look: Look) -> list[Line]:
    prompts = f"{record.dataset.n} prompts by {record.dataset.kind}"
    out = [heading(clean(record.name), f"{prompts}, {record.settings.max_tokens or look.dash} tokens each")]
    if record.verdict is not None:
        out += wrap(clean(record.verdict.text), width, VERDICT_STYLES.get(record.verdict.kind, ""))
    known = [
        ("break-even accept length", record.break_even),
        ("n-gram accept length", record.ngram_accept_len),
        ("repetition rate", record.repetition_rate),
    ]
    out += wrap(f" {look.sep} ".join(f"{name} {amount(value, look.dash)}" for name, value in known), width)
    if record.lossless is not None:
        same = record.lossless.get("identical")
        text = "output token-identical with and without speculation" if same else "OUTPUT DIFFERS under speculation"
        out.append(line((text if same is not None else "losslessness unknown", "ok" if same else "bad")))
    for arm in record.arms:
        shares = per_position(arm)
        if shares:
            out.append(line((f"{clean(arm.profile)}: accepted at each draft position", "dim")))
        for i, (count, share) in enumerate(shares, 1):
            bar = look.bar(share, max(10, min(40, width - 34)))
            out.append(line(f"  {i}  ", (bar, "bar"), f" {share * 100:3.0f} %", (f"  {count:,}", "dim")))
        speeds = ", ".join(speed_words(one.tok_s, look) for one in arm.counted)
        out += wrap(f"{clean(arm.profile)} rounds: {speeds} tok/s", width, "dim")
        for one in [*(f"round {r.order}: {r.excluded}" for r in arm.rounds if r.excluded), *arm.excluded]:
            out += wrap(f"{clean(arm.profile)}: left out: {clean(one)}", width, "warn")
    for badge in record.badges:
        out.append(line((clean(badge), "warn")))
    notes = [record.notes] if isinstance(record.notes, str) else list(record.notes)
    for note in filter(None, notes):
        out += wrap(clean(note), width)
    return out
