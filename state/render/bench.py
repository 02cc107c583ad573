"""The Benchmarks section, and the headline that stands on top of the document."""

from __future__ import annotations

from typing import Any

from state import benchmarks
from state.benchmarks import Arm, BenchRecord, Verdict
from state.book import Benchmark, Book
from state.render.text import code, duration, escape, flat, host, label, number, quantity, table, when

KINDS = {
    "self": "prompts the model wrote",
    "people": "prompts people wrote",
    "random": "random tokens",
    "other": "prompts of another kind",
}
DASH = "–"


def verdict_of(bench: BenchRecord) -> Verdict:
    """The recorded verdict, or the one that the rounds give."""
    return bench.verdict or benchmarks.judge(bench)


def latest(book: Book) -> list[Benchmark]:
    """The newest benchmark of each name and kind of prompts."""
    newest: dict[tuple[str, str], Benchmark] = {}
    for one in book.benchmarks:
        newest[one.bench.name, one.bench.dataset.kind] = one
    return list(newest.values())


def headline(book: Book) -> list[str]:
    """One table: what the drafter brings, per kind of prompts. Empty when nothing was measured."""
    rows = []
    kinds = [one.bench.dataset.kind for one in latest(book)]
    for one in latest(book):
        bench = one.bench
        if not bench.arms:
            continue
        base, spec = bench.arms[0], bench.arms[-1]
        verdict = verdict_of(bench)
        rows.append(
            [
                escape(KINDS.get(bench.dataset.kind, bench.dataset.kind))
                + (f" ({escape(bench.name)})" if kinds.count(bench.dataset.kind) > 1 else ""),
                _speed(base),
                _speed(spec) if spec is not base else DASH,
                f"**{escape(verdict.text)}**" + _badges(bench),
                _length(benchmarks.accept_len(spec)),
                _length(bench.break_even),
                _length(bench.ngram_accept_len),
                f"{host(book, bench.host)}, {when(one.at)}" + (f", run {code(one.run)}" if one.run else ""),
            ]
        )
    header = [
        "measured on",
        "plain tok/s",
        "speculative tok/s",
        "speculation is",
        "accept length",
        "break-even",
        "n-gram lookup",
        "source",
    ]
    return table(header, rows, right=[1, 2, 4, 5, 6])


def section(book: Book) -> list[str]:
    lines: list[str] = []
    newest = latest(book)
    for one in newest:
        lines += _one(book, one)
    earlier = [
        [
            escape(f"{one.bench.name}: {KINDS.get(one.bench.dataset.kind, one.bench.dataset.kind)}"),
            escape(verdict_of(one.bench).text) + _badges(one.bench),
            *([_speed(one.bench.arms[0]), _speed(one.bench.arms[-1])] if one.bench.arms else ["unknown", "unknown"]),
            f"{host(book, one.bench.host)}, {when(one.at)}" + (f", run {code(one.run)}" if one.run else ""),
        ]
        for one in reversed(book.benchmarks)
        if one not in newest
    ]
    if earlier:
        header = ["benchmark", "verdict", "tok/s, first arm", "tok/s, last arm", "source"]
        lines += ["### Earlier ones, newest first", "", *table(header, earlier, right=[2, 3])]
    if lines:
        lines = [
            f"Accept length = {benchmarks.ACCEPT_LEN}. A round is one launch of the server; intervals are bootstrap"
            " intervals over rounds. Kinds of prompts are never averaged.",
            "",
            *lines,
        ]
    return lines


def _one(book: Book, one: Benchmark) -> list[str]:
    bench, verdict = one.bench, verdict_of(one.bench)
    kind = KINDS.get(bench.dataset.kind, bench.dataset.kind)
    against = f" ({escape(verdict.candidate)} against {escape(verdict.baseline)})" if verdict.candidate else ""
    counts = f", {verdict.n[0]} vs {verdict.n[1]} rounds" if len(verdict.n) == 2 else ""
    lines = [
        f"### {escape(bench.name)}: {escape(kind)}",
        "",
        f"**{escape(verdict.text)}**{against}{counts}.{_badges(bench)}",
        "",
    ]
    lines += table(
        ["arm", "engine", "speculative", "rounds", "tok/s, median [95 % CI]", "accept length"],
        [_arm(arm) for arm in bench.arms],
        right=[3, 4, 5],
    )
    for arm in bench.arms:
        lines += _positions(arm)
    lines += [f"- {text}" for text in _reading(book, bench)]
    lines += [f"- {text}" for text in _conditions(book, one)]
    lines += ["", *_rounds(bench)]
    return lines


def _arm(arm: Arm) -> list[str]:
    engine = " ".join(part for part in (arm.engine, arm.engine_version) if part)
    counted = str(len(arm.counted))
    left_out = len(arm.rounds) - len(arm.counted) + len(arm.excluded)
    if left_out:
        counted += f" (+{left_out} excluded)"
    return [
        escape(arm.profile),
        escape(", ".join(part for part in (engine, arm.dtype) if part)) or "unknown",
        escape(_speculative(arm.speculative)),
        counted,
        _speed(arm, interval=True),
        _length(benchmarks.accept_len(arm)) if arm.speculative else DASH,
    ]


def _speculative(settings: dict[str, Any] | None) -> str:
    if not settings:
        return "none"
    rest = {key: value for key, value in settings.items() if key != "algorithm" and value is not None}
    words = [f"{label(key)} {quantity(value)}" for key, value in flat(rest)]
    return ", ".join([str(settings.get("algorithm", "yes")), *words])


def _positions(arm: Arm) -> list[str]:
    positions = benchmarks.per_position(arm)
    if not positions:
        return []
    steps = sum(one.verify_steps or 0 for one in arm.counted if one.per_position)
    rows = []
    before: float = steps
    for i, (count, share) in enumerate(positions, 1):
        given = f"{count / before * 100:.1f} %" if before else DASH
        rows.append([str(i), f"{count:,}", f"{share * 100:.1f} %", given])
        before = count
    return [
        f"Drafts of {escape(arm.profile)} accepted by position, over {steps:,} verify steps:",
        "",
        *table(["position", "accepted", "of all steps", "given the one before"], rows, right=[0, 1, 2, 3]),
    ]


def _reading(book: Book, bench: BenchRecord) -> list[str]:
    """What the figures mean, each beside what it must be compared with."""
    said = []
    spec = bench.arms[-1] if bench.arms else None
    reached = benchmarks.accept_len(spec) if spec and spec.speculative else None
    if margin := break_even_margin(bench):
        said.append(f"Break-even accept length on this machine: {margin}.")
    if bench.ngram_accept_len is not None:
        compared = ""
        if reached is not None:
            better = reached > bench.ngram_accept_len
            compared = " The drafter beats it." if better else " **The drafter does not beat it.**"
        said.append(f"N-gram lookup on the same output would reach {number(bench.ngram_accept_len, 3)}.{compared}")
    if bench.repetition_rate is not None:
        said.append(f"Repetition rate of the output: {bench.repetition_rate * 100:.1f} % of its 4-grams came before.")
    if bench.lossless:
        said.append(f"Does speculation change the output? {_lossless(bench.lossless)}")
    elif checked := _lossless_run(book):
        said.append(f"Does speculation change the output? {checked}")
    if bench.notes:
        notes = [bench.notes] if isinstance(bench.notes, str) else bench.notes
        said += [escape(note) for note in notes if note]
    return said


def break_even_margin(bench: BenchRecord) -> str:
    """Break-even and reached accept length, and what that means; empty when either is not known."""
    spec = bench.arms[-1] if bench.arms else None
    reached = benchmarks.accept_len(spec) if spec and spec.speculative else None
    if not bench.break_even or not reached:
        return ""
    margin = (reached / bench.break_even - 1) * 100
    judged = (
        f"{margin:.0f} % above: speculation pays here"
        if margin > 0
        else f"{-margin:.0f} % below: a verify step costs more time than its accepted tokens save, so speculation is"
        " slower here"
    )
    return f"{bench.break_even:.2f}; reached {reached:.2f}, {judged}"


def predicted(book: Book, forecast: dict[str, Any], told: str) -> list[str]:
    """Accept lengths that were predicted offline, beside those that a server reached."""
    rows = []
    for kind, values in forecast.items():
        expected = values.get("accept_len") if isinstance(values, dict) else None
        if not isinstance(expected, int | float):
            continue
        measured = [one for one in latest(book) if one.bench.dataset.kind == kind and one.bench.arms]
        reached = benchmarks.accept_len(measured[-1].bench.arms[-1]) if measured else None
        rows.append([escape(KINDS.get(kind, kind)), f"{expected:.2f}", f"{reached:.2f}" if reached else "not measured"])
    if not rows:
        return []
    header = ["accept length on", "predicted offline", "reached by a server"]
    return ["", *table(header, rows, right=[1, 2]), f"Predicted by {told}; reached: see Benchmarks.", ""]


def _lossless_run(book: Book) -> str:
    """The latest run of the stage that compares greedy output with and without speculation."""
    runs = [run for run in book.runs.values() if run.name == "lossless" and run.status == "done" and run.result]
    if not runs:
        return ""
    at = f"{host(book, runs[-1].host)}, {when(runs[-1].ended)}, run {code(runs[-1].run)}"
    return f"{_lossless(runs[-1].result).removesuffix('.')} ({at})."


def _lossless(values: dict[str, Any]) -> str:
    same, checked = values.get("identical"), values.get("checked")
    if isinstance(same, bool) and isinstance(checked, int):  # told for all of them at once
        if not same:
            return f"**Yes**: not all of {checked} greedy outputs are token-identical."
        same = checked
    if isinstance(same, int) and isinstance(checked, int):
        word = "No" if same == checked and checked else "**Yes**" if checked else "Not checked"
        rest = {key: value for key, value in values.items() if key not in ("identical", "checked", "rows")}
        more = "; ".join(f"{label(key)} {quantity(value)}" for key, value in flat(rest))
        return f"{word}: {same} of {checked} greedy outputs are token-identical" + (
            f" ({escape(more)})." if more else "."
        )
    return escape("; ".join(f"{label(key)} {quantity(value)}" for key, value in flat(values))) + "."


def _conditions(book: Book, one: Benchmark) -> list[str]:
    bench, settings = one.bench, one.bench.settings
    asked = [
        f"{bench.dataset.n or 'unknown number of'} prompts of {code(bench.dataset.id)}"
        + (f" (sha256 {code(bench.dataset.sha256[:12])})" if bench.dataset.sha256 else ""),
        f"up to {settings.max_tokens} tokens each" if settings.max_tokens else "length limit unknown",
        f"temperature {number(settings.temperature)}",
        f"concurrency {settings.concurrency}",
        "end token ignored" if settings.ignore_eos else "",
        f"{settings.warmup} warm-up requests" if settings.warmup else "",
        f"{settings.cache} prefix cache" if settings.cache else "",
    ]
    said = [f"Asked: {', '.join(part for part in asked if part)}."]
    if bench.target:
        said.append(f"Target: {escape(_pairs(bench.target))}.")
    if bench.system:
        said.append(f"Machine: {escape(_pairs(bench.system))}.")
    for arm in bench.arms:
        reasons = [*arm.excluded, *(f"round {r.order}: {r.excluded}" for r in arm.rounds if r.excluded)]
        if reasons:
            said.append(f"Excluded from {escape(arm.profile)}: {escape('; '.join(reasons))}.")
    prints = {arm.profile: benchmarks.fingerprint(bench, arm) for arm in bench.arms}
    listed = ", ".join(f"{escape(name)} {code(both['identity'])}" for name, both in prints.items())
    system = next((both["system"] for both in prints.values()), "")
    client = f", by {escape(bench.client)}" if bench.client else ""
    run = f", run {code(one.run)}" if one.run else ""
    said.append(f"Source: {host(book, bench.host)}{client}, {when(one.at)}{run}, event {code(one.id)}.")
    said.append(f"Fingerprints: {listed}; system {code(system)}. Equal ones may be compared.")
    return said


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{label(key)} {quantity(value)}" for key, value in flat(values))


def _rounds(bench: BenchRecord) -> list[str]:
    numbered = sorted(((one.order, arm, one) for arm in bench.arms for one in arm.rounds), key=lambda item: item[0])
    rows = []
    for order, arm, one in numbered:
        accepted = f"{_count(one.accepted_drafts)} of {_count(one.proposed_drafts)}" if arm.speculative else DASH
        rows.append(
            [
                str(order),
                escape(arm.profile) + (" (excluded)" if one.excluded else ""),
                f"{one.tok_s:.1f}" if one.tok_s is not None else "unknown",
                _count(one.output_tokens),
                duration(one.seconds),
                str(one.requests) + (f" ({one.errors} failed)" if one.errors else ""),
                _count(one.verify_steps) if arm.speculative else DASH,
                accepted,
            ]
        )
    header = ["round", "arm", "tok/s", "output tokens", "time", "requests", "verify steps", "drafts accepted"]
    return table(header, rows, right=[0, 2, 3, 4, 5, 6, 7])


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _speed(arm: Arm, interval: bool = False) -> str:
    speed = benchmarks.tok_s(arm)
    if speed is None:
        return "unknown"
    if not interval or speed.n < 2:
        return f"{speed.value:.1f}"
    return f"{speed.value:.1f} [{speed.low:.1f}, {speed.high:.1f}]"


def _length(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _badges(bench: BenchRecord) -> str:
    return "".join(f" **[{escape(badge)}]**" for badge in bench.badges)
