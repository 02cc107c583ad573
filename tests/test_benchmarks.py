"""What may be said about two measurements: verdicts, comparability, and figures that keep drafters honest."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from state import benchmarks as b
from state.benchmarks import Arm, BenchRecord, Dataset, Round
from state.events import BenchmarkRecorded, body_of, parse
from state.ngrams import lookup_accept_length, repetition_rate
from state.stats import median_of, min_detectable_effect, ratio_interval
from tests.lab.rig_journal import bench, round_


def record(plain: list[float], fast: list[float], **more: Any) -> BenchRecord:
    return replace(bench("self", plain, fast, [10, 5, 5, 20], 1.2), verdict=None, **more)


@pytest.mark.parametrize(
    ("plain", "fast", "verdict"),
    [
        ([40, 41, 42], [50, 51, 52], "better"),
        ([50, 51, 52], [40, 41, 42], "worse"),
        ([40, 41, 42], [40.5, 41.2, 41.9], "no detectable change"),
        ([40, 41, 60], [45, 50, 52], "no detectable change"),
        ([40], [60], "INVALID"),
        ([], [60, 61], "INVALID"),
    ],
)
def test_verdicts(plain: list[float], fast: list[float], verdict: str) -> None:
    found = b.judge(record(plain, fast) if plain and len(plain) > 1 else _short(plain, fast))
    assert found.kind == verdict
    assert found.text


def _short(plain: list[float], fast: list[float]) -> BenchRecord:
    whole = record([1, 1, 1], [1, 1, 1])
    whole.arms[0].rounds = [round_(i, v) for i, v in enumerate(plain)]
    whole.arms[1].rounds = [round_(i, v, [10, 5, 5, 20]) for i, v in enumerate(fast)]
    return whole


def test_no_change_says_what_could_have_been_seen() -> None:
    found = b.judge(record([40, 41, 42], [40.5, 41.2, 41.9]))
    assert found.mde is not None and 0 < found.mde < 0.2
    assert "would not have shown" in found.text


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1, 1000), min_size=2, max_size=6), st.lists(st.floats(1, 1000), min_size=2, max_size=6))
def test_an_interval_holds_its_value_and_turns_with_the_arms(base: list[float], other: list[float]) -> None:
    forth, back = ratio_interval(base, other), ratio_interval(other, base)
    assert forth.low <= forth.value <= forth.high
    assert forth.value == pytest.approx(1 / back.value)
    assert ratio_interval(base, other) == forth, "the same numbers must give the same interval"


@settings(deadline=None, max_examples=40)
@given(st.permutations([40.0, 41.0, 42.0, 43.0]), st.permutations([44.0, 45.0, 46.0, 47.0]))
def test_the_order_of_rounds_does_not_matter(base: list[float], other: list[float]) -> None:
    assert ratio_interval(base, other) == ratio_interval(sorted(base), sorted(other))


def test_false_alarms_are_rare_when_nothing_differs() -> None:
    """Five rounds each from one distribution: at most about one verdict in ten may claim a difference."""
    draw = random.Random(1)
    alarms = 0
    for _ in range(60):
        base = [draw.gauss(40, 1) for _ in range(5)]
        other = [draw.gauss(40, 1) for _ in range(5)]
        found = ratio_interval(base, other)
        alarms += found.low > 1 or found.high < 1
    assert alarms <= 8


def test_one_value_has_no_known_spread() -> None:
    assert median_of([5.0]) == (5.0, 5.0, 5.0, 1)
    assert median_of([]) is None
    assert min_detectable_effect([1.0], [2.0, 3.0]) is None


# ── comparability ────────────────────────────────────────────────────────────────────────────────────────────────


def test_arms_of_one_record_differ_in_the_declared_factor_only() -> None:
    one = record([40, 41, 42], [50, 51, 52])
    base, spec = one.arms
    assert b.differing((one, base), (one, spec), factor="speculative") == {}
    assert "speculative.steps" in b.differing((one, base), (one, spec))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: r.dataset.__setattr__("sha256", "00"), "dataset.sha256"),
        (lambda r: r.settings.__setattr__("temperature", 0.7), "settings.temperature"),
        (lambda r: r.system.__setitem__("torch", "2.12"), "system.torch"),
        (lambda r: r.target.__setitem__("dtype", "float8"), "target.dtype"),
        (lambda r: r.badges.append("synthetic acceptance"), "badges"),
        (lambda r: r.arms[1].__setattr__("dtype", "float32"), "dtype"),
        (lambda r: r.arms[1].args.__setitem__("kv-cache-dtype", "fp8"), "args.kv-cache-dtype"),
        (lambda r: r.arms[1].__setattr__("engine_version", "9"), "engine_version"),
    ],
)
@pytest.mark.training_report(13)
def test_what_differs_is_named(change: Any, field: str) -> None:
    old, new = record([40, 41, 42], [50, 51, 52]), record([40, 41, 42], [50, 51, 52])
    change(new)
    found = b.compare((old, old.arms[1]), (new, new.arms[1]))
    assert found.kind == "NOT COMPARABLE"
    assert len(found.reasons) == 1 and found.reasons[0].startswith(f"{field}: ")
    assert b.fingerprint(old, old.arms[1]) != b.fingerprint(new, new.arms[1])


def test_equal_conditions_have_equal_fingerprints() -> None:
    old, new = record([40, 41, 42], [50, 51, 52]), record([30, 31, 32], [60, 61, 62])
    assert b.fingerprint(old, old.arms[1]) == b.fingerprint(new, new.arms[1])
    assert b.compare((old, old.arms[1]), (new, new.arms[1])).kind == "better"


# ── counters ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"accepted_drafts": 1000}, "more drafts accepted"),
        ({"verify_steps": 7}, "histogram has 40 steps"),
        ({"accept_histogram": [10, 5, 5, 19, 1]}, "accepted drafts, counter says"),
        ({"errors": 2}, "2 requests failed"),
        ({"tok_s": None}, "without a speed"),
        ({"tok_s": float("nan")}, "without a speed"),
    ],
)
def test_counters_that_contradict_each_other_invalidate(change: dict[str, Any], told: str) -> None:
    one = record([40, 41, 42], [50, 51, 52])
    one.arms[1].rounds[0] = replace(one.arms[1].rounds[0], **change)
    found = b.judge(one)
    assert found.kind == "INVALID" and any(told in reason for reason in found.reasons), found.reasons


def test_an_excluded_round_is_kept_and_not_counted() -> None:
    one = record([40, 41, 42], [50, 51, 52])
    one.arms[1].rounds.append(replace(round_(7, 500.0, [10, 5, 5, 20]), excluded="throttled"))
    found = b.judge(one)
    assert found.n == [3, 3]
    speed = b.tok_s(one.arms[1])
    assert speed is not None and speed.value == 51


@pytest.mark.training_report(41)
def test_accept_length_comes_from_raw_counters() -> None:
    arm = Arm(
        profile="x", rounds=[Round(verify_steps=100, accepted_drafts=50), Round(verify_steps=300, accepted_drafts=450)]
    )
    assert b.accept_len(arm) == 2.25  # not the mean of 1.5 and 2.5
    assert b.accept_len(Arm(profile="x", rounds=[Round(accept_len=1.5), Round(accept_len=2.5)])) == 2.0
    assert b.accept_len(Arm(profile="x")) is None


def test_per_position_is_over_all_rounds() -> None:
    arm = Arm(profile="x", rounds=[round_(0, 1.0, [10, 10, 10, 10]), round_(1, 1.0, [40, 0, 0, 0])])
    assert b.per_position(arm) == [(30, 30 / 80), (20, 20 / 80), (10, 10 / 80)]


@pytest.mark.training_report(42)
def test_break_even() -> None:
    # 2.5 tokens a verify step at 50 tok/s is 50 ms a step; plain decoding emits 2 tokens in 50 ms at 40 tok/s.
    assert b.break_even_accept_len(2.5, 40.0, 50.0) == 2.0


def test_a_record_survives_the_journal() -> None:
    one = bench("people", [40, 41, 42], [50, 51, 52], [10, 5, 5, 20], 1.2)
    event = BenchmarkRecorded(run="r1", bench=one)
    body = body_of(event)
    assert parse(event.kind, event.v, body) == event
    assert b.from_dict(body["bench"]) == one
    assert b.from_dict({**body["bench"], "from_the_future": 1}) == one


# ── tokens ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_text_that_never_repeats_gains_nothing() -> None:
    assert lookup_accept_length([list(range(50))]) == 1.0
    assert repetition_rate([list(range(50))]) == 0.0


def test_a_loop_is_seen_through() -> None:
    loop = [1, 2, 3, 4] * 25
    length = lookup_accept_length([loop], steps=3)
    assert length is not None and length > 3.5
    rate = repetition_rate([loop])
    assert rate is not None and rate > 0.9


def test_the_prompt_may_be_looked_into() -> None:
    prompt, output = list(range(20)), list(range(20))
    assert lookup_accept_length([output]) == 1.0
    with_prompt = lookup_accept_length([output], prompts=[prompt], steps=3)
    assert with_prompt is not None and with_prompt > 3


def test_the_latest_occurrence_of_the_longest_match_proposes() -> None:
    # The second "1" is followed by "2 9 5" as far as is known: one draft is right. The third one's latest occurrence
    # is the second, which was followed by "2 7 8": all three are right. Seven tokens come without help.
    tokens = [1, 2, 9, 5, 1, 2, 7, 8, 6, 1, 2, 7, 8]
    assert lookup_accept_length([tokens], steps=3) == pytest.approx(12 / 9)


def reference_lookup(output: list[int], steps: int, longest: int) -> float | None:
    """The definition, word by word, slowly."""
    at, emitted, verify = 1, 0, 0
    while at < len(output):
        draft: list[int] = []
        for n in range(min(longest, at), 0, -1):
            starts = [s for s in range(at - n) if output[s : s + n] == output[at - n : at]]
            if starts:
                begin = starts[-1] + n
                draft = output[begin : min(begin + steps, at)]
                break
        accepted = 0
        while accepted < len(draft) and at + accepted < len(output) and draft[accepted] == output[at + accepted]:
            accepted += 1
        emitted += min(accepted + 1, len(output) - at)
        at += min(accepted + 1, len(output) - at)
        verify += 1
    return emitted / verify if verify else None


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.integers(1, 3))
def test_lookup_is_what_its_definition_says(output: list[int], steps: int, longest: int) -> None:
    assert lookup_accept_length([output], steps=steps, longest=longest) == reference_lookup(output, steps, longest)


def test_datasets_have_a_kind() -> None:
    with pytest.raises(ValueError, match="kind"):
        BenchmarkRecorded.model_validate({"bench": {"name": "x", "arms": [], "dataset": {"id": "d", "kind": "mixed"}}})
    assert Dataset(id="d").kind == "other"
