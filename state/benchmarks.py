"""Benchmark records: what makes two numbers comparable, and what may be said about their difference.

Pure functions. The statistical unit is a *round*, one server launch: requests within a launch share its luck, so
more of them say nothing about the next launch. Records are plain dataclasses, cheap to read.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from state.stats import Interval, median_of, min_detectable_effect, ratio_interval

__all__ = [
    "ACCEPT_LEN",
    "Arm",
    "BenchRecord",
    "Dataset",
    "Round",
    "Settings",
    "Verdict",
    "accept_len",
    "break_even_accept_len",
    "compare",
    "differing",
    "fingerprint",
    "from_dict",
    "inconsistencies",
    "judge",
    "per_position",
    "tok_s",
]

DatasetKind = Literal["self", "people", "random", "other"]
VerdictKind = Literal["better", "worse", "no detectable change", "NOT COMPARABLE", "INVALID"]

# The definition behind `accept_len`. Accept *rate* changed its meaning between engine versions; this did not.
ACCEPT_LEN = "1 + accepted drafts / verify steps"


@dataclass(kw_only=True)
class Round:
    """One launch of the server, measured once. Raw counters, as differences over the round; None: not known."""

    order: int = 0  # position in the interleaved sequence of all launches
    requests: int = 0
    errors: int = 0
    output_tokens: int | None = None
    seconds: float | None = None
    tok_s: float | None = None
    verify_steps: int | None = None
    accepted_drafts: int | None = None
    proposed_drafts: int | None = None
    accept_len: float | None = None
    accept_histogram: list[int] = field(default_factory=list)  # [i] = verify steps that accepted i drafts
    per_position: list[int] = field(default_factory=list)  # [i] = how often the draft at position i was accepted
    run: str | None = None
    excluded: str = ""  # why this round does not count; the reason is shown, the numbers are kept


@dataclass(kw_only=True)
class Arm:
    """One of the configurations that are compared."""

    profile: str
    engine: str = ""
    engine_version: str = ""
    dtype: str = ""
    speculative: dict[str, Any] | None = None  # algorithm, steps, topk, draft_tokens; None: plain decoding
    draft: str | None = None  # which drafter: a hash or a path
    args: dict[str, Any] = field(default_factory=dict)  # resolved server arguments that may matter
    rounds: list[Round] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)  # launches that gave no round at all, and why

    @property
    def counted(self) -> list[Round]:
        return [one for one in self.rounds if not one.excluded]


@dataclass(kw_only=True)
class Dataset:
    id: str
    sha256: str = ""
    kind: DatasetKind = "other"  # who wrote the prompts; the kinds are never averaged
    n: int = 0


@dataclass(kw_only=True)
class Settings:
    max_tokens: int | None = None
    temperature: float = 0.0
    concurrency: int = 1
    ignore_eos: bool = False
    warmup: int = 0  # requests before the clock starts
    cache: str = ""  # flushed, warm or cold prefix cache
    seed: int | None = None


@dataclass(kw_only=True)
class Verdict:
    """What may be said about candidate against baseline."""

    kind: VerdictKind
    baseline: str = ""  # profile
    candidate: str = ""
    ratio: float | None = None  # median tok/s of the candidate over that of the baseline
    low: float | None = None  # 95 % interval of the ratio
    high: float | None = None
    mde: float | None = None  # smallest relative change that this many rounds could have shown
    n: list[int] = field(default_factory=list)  # rounds counted: baseline, candidate
    reasons: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """One line for tables."""
        if self.kind in ("better", "worse") and self.ratio is not None:
            interval = f", 95 % CI {_percent(self.low)} to {_percent(self.high)}" if self.low is not None else ""
            return f"{self.kind}: {_percent(self.ratio)}{interval}"
        if self.kind == "no detectable change":
            limit = f" (smaller than {self.mde * 100:.0f} % would not have shown)" if self.mde is not None else ""
            return f"{self.kind}{limit}"
        return f"{self.kind}: {'; '.join(self.reasons)}" if self.reasons else self.kind


@dataclass(kw_only=True)
class BenchRecord:
    """One benchmark: arms measured in interleaved rounds on one dataset."""

    name: str
    arms: list[Arm]
    dataset: Dataset
    settings: Settings = field(default_factory=Settings)
    target: dict[str, Any] = field(default_factory=dict)  # name, revision, sha256, dtype
    host: str | None = None
    system: dict[str, Any] = field(default_factory=dict)  # cpu, threads, torch, gpu, driver, patch set …
    client: str = ""  # load generator and its version
    factor: str = "speculative"  # the one thing that is meant to differ between the arms
    ngram_accept_len: float | None = None  # what looking up repeated n-grams would reach on the same output
    repetition_rate: float | None = None  # share of output n-grams that the same output had before
    break_even: float | None = None  # accept length at which speculation only just pays on this machine
    lossless: dict[str, Any] | None = None  # checked, identical, dtype …: does speculation change the output?
    badges: list[str] = field(default_factory=list)  # e.g. "synthetic acceptance": formatting may not drop them
    verdict: Verdict | None = None
    notes: str | list[str] = ""


def from_dict(raw: dict[str, Any]) -> BenchRecord:
    """A record from its stored form. Fields that this version does not know are dropped, absent ones are default."""
    record: BenchRecord = _build(BenchRecord, raw)
    record.arms = [_arm(arm) for arm in raw.get("arms") or []]
    record.dataset = _build(Dataset, raw.get("dataset") or {"id": "?"})
    record.settings = _build(Settings, raw.get("settings") or {})
    record.verdict = _build(Verdict, raw["verdict"]) if raw.get("verdict") else None
    return record


def _arm(raw: dict[str, Any]) -> Arm:
    arm: Arm = _build(Arm, raw)
    arm.rounds = [_build(Round, one) for one in raw.get("rounds") or []]
    return arm


def _build(cls: type[Any], raw: dict[str, Any]) -> Any:
    names = {one.name for one in fields(cls)}
    return cls(**{key: value for key, value in raw.items() if key in names})


# ── comparability ────────────────────────────────────────────────────────────────────────────────────────────────


def identity_fields(record: BenchRecord, arm: Arm) -> dict[str, Any]:
    """Layer A: what was measured and how. Must be equal but for the one declared factor."""
    return _flat(
        {
            "target": record.target,
            "engine": arm.engine,
            "engine_version": arm.engine_version,
            "dtype": arm.dtype,
            "speculative": {**(arm.speculative or {"algorithm": "none"}), "draft": arm.draft},
            "args": arm.args,
            "dataset": record.dataset,
            "settings": record.settings,
            "client": record.client,
            "metric": ACCEPT_LEN,
            "badges": sorted(record.badges),
        }
    )


def system_fields(record: BenchRecord) -> dict[str, Any]:
    """Layer B: on what it was measured."""
    return _flat({"host": record.host, "system": record.system})


def fingerprint(record: BenchRecord, arm: Arm) -> dict[str, str]:
    """Short hashes of the two layers: equal hashes may be compared without reading on."""
    return {
        "identity": _digest(identity_fields(record, arm)),
        "system": _digest(system_fields(record)),
    }


def differing(
    a: tuple[BenchRecord, Arm], b: tuple[BenchRecord, Arm], *, factor: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Fields in which two measurements differ, outside `factor` (a field or a prefix such as "speculative")."""
    left = {**identity_fields(*a), **system_fields(a[0])}
    right = {**identity_fields(*b), **system_fields(b[0])}
    names = sorted(left.keys() | right.keys())
    return {
        name: (left.get(name), right.get(name))
        for name in names
        if left.get(name) != right.get(name) and not (factor and (name == factor or name.startswith(f"{factor}.")))
    }


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat.update(_flat(inner, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def inconsistencies(one: Round) -> list[str]:
    """Counters of a round that contradict each other; empty when they add up or are not known."""
    found = []
    accepted, proposed, steps = one.accepted_drafts, one.proposed_drafts, one.verify_steps
    if accepted is not None and proposed is not None and accepted > proposed:
        found.append(f"round {one.order}: more drafts accepted ({accepted}) than proposed ({proposed})")
    if one.accept_histogram and steps is not None and sum(one.accept_histogram) != steps:
        found.append(f"round {one.order}: histogram has {sum(one.accept_histogram)} steps, counter says {steps}")
    if one.accept_histogram and accepted is not None:
        total = sum(i * count for i, count in enumerate(one.accept_histogram))
        if total != accepted:
            found.append(f"round {one.order}: histogram has {total} accepted drafts, counter says {accepted}")
    return found


def judge(record: BenchRecord, baseline: str | None = None, candidate: str | None = None) -> Verdict:
    """The verdict between two arms of one record, by default the first and the last, on output tokens per second."""
    arms = {arm.profile: arm for arm in record.arms}
    if len(record.arms) < 2:
        return Verdict(kind="INVALID", reasons=["only one arm was measured"])
    a = arms.get(baseline) if baseline else record.arms[0]
    b = arms.get(candidate) if candidate else record.arms[-1]
    if a is None or b is None:
        return Verdict(kind="INVALID", reasons=[f"no arm named {baseline if a is None else candidate}"])
    return compare((record, a), (record, b), factor=record.factor)


def compare(a: tuple[BenchRecord, Arm], b: tuple[BenchRecord, Arm], *, factor: str = "") -> Verdict:
    """The verdict of arm `b` against arm `a`, from the same record or from two."""
    baseline, candidate = a[1].profile, b[1].profile
    counts = [len(a[1].counted), len(b[1].counted)]
    if differences := differing(a, b, factor=factor):
        reasons = [f"{name}: {_short(left)} ≠ {_short(right)}" for name, (left, right) in differences.items()]
        return Verdict(kind="NOT COMPARABLE", baseline=baseline, candidate=candidate, n=counts, reasons=reasons)
    if reasons := _invalid(a[1]) + _invalid(b[1]):
        return Verdict(kind="INVALID", baseline=baseline, candidate=candidate, n=counts, reasons=reasons)
    base = [one.tok_s for one in a[1].counted if one.tok_s]
    other = [one.tok_s for one in b[1].counted if one.tok_s]
    interval = ratio_interval(base, other)
    kind: VerdictKind = "better" if interval.low > 1 else "worse" if interval.high < 1 else "no detectable change"
    return Verdict(
        kind=kind,
        ratio=interval.value,
        low=interval.low,
        high=interval.high,
        mde=min_detectable_effect(base, other),
        n=counts,
        baseline=baseline,
        candidate=candidate,
    )


def _invalid(arm: Arm) -> list[str]:
    rounds = arm.counted
    reasons = [f"{arm.profile}: {text}" for one in rounds for text in inconsistencies(one)]
    if failed := sum(one.errors for one in rounds):
        reasons.append(f"{arm.profile}: {failed} requests failed")
    if any(not one.tok_s or not one.tok_s > 0 for one in rounds):
        reasons.append(f"{arm.profile}: a round without a speed")
    if len(rounds) < 2:
        reasons.append(f"{arm.profile}: {len(rounds)} round(s) counted; one launch says nothing about the next")
    return reasons


def tok_s(arm: Arm) -> Interval | None:
    """Median output tokens per second over the counted rounds, with its 95 % interval; None when unknown."""
    return median_of([one.tok_s for one in arm.counted if one.tok_s])


def accept_len(arm: Arm) -> float | None:
    """Accept length over all counted rounds, from the raw counters where there are any."""
    steps = sum(one.verify_steps or 0 for one in arm.counted)
    accepted = [one.accepted_drafts for one in arm.counted]
    if steps and all(value is not None for value in accepted):
        return 1 + sum(value or 0 for value in accepted) / steps
    interval = median_of([one.accept_len for one in arm.counted if one.accept_len])
    return interval.value if interval else None


GAP = 0.15  # of the prediction; beyond it trainer and server do not do the same thing
FEW_STEPS = 200  # verify steps, below which chance alone makes such a gap


def prediction_gap(arm: Arm, predicted: float, steps: int) -> str | None:
    """A sentence where the server's accept length is further from the offline prediction than it should be; None where
    it is not, or where the two cannot be held against each other: another number of draft steps, a tree, too few
    verify steps."""
    told = arm.speculative or {}
    reached, counted = accept_len(arm), sum(one.verify_steps or 0 for one in arm.counted)
    if reached is None or counted < FEW_STEPS or told.get("steps") != steps or told.get("topk", 1) != 1:
        return None
    if abs(reached / predicted - 1) <= GAP:
        return None
    return (
        f"{arm.profile} reaches an accept length of {reached:.2f}, and {predicted:.2f} was predicted from its own "
        f"guesses ({reached / predicted - 1:+.0%}): layers, norms, vocabulary or template differ between the two"
    )


def per_position(arm: Arm) -> list[tuple[int, float]]:
    """For each draft position: how often accepted, and that as a share of all verify steps (marginal)."""
    rounds = [one for one in arm.counted if one.per_position and one.verify_steps]
    steps = sum(one.verify_steps or 0 for one in rounds)
    width = max((len(one.per_position) for one in rounds), default=0)
    totals = [sum(one.per_position[i] if i < len(one.per_position) else 0 for one in rounds) for i in range(width)]
    return [(total, total / steps) for total in totals]


def break_even_accept_len(accept_len: float, plain_tok_s: float, spec_tok_s: float) -> float:
    """The accept length at which speculation would be exactly as fast as plain decoding, all else equal.

    Time per verify step = accept_len / spec_tok_s; plain decoding emits plain_tok_s times that in the same time.
    """
    return accept_len * plain_tok_s / spec_tok_s


def _percent(ratio: float | None) -> str:
    return "unknown" if ratio is None else f"{(ratio - 1) * 100:+.1f} %"


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "…"
