"""Mix: nothing that the held-out rows would recognise, nothing twice, an order that a seed decides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.stages.protocol import Refused, write_jsonl
from tests.lab.stage_run import rows, run_stage
from tests.lab.tiny_model import make_tiny_model

HELD_PROMPT, HELD_RESPONSE = "why is the sea salty?", "rivers carry salt from rocks into the sea"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def row(i: int, prompt: str, response: str) -> dict[str, Any]:
    ids = [3 + byte % 250 for byte in f"{prompt}|{response}".encode()]
    return {"id": f"r{i}", "source": "self", "texts": [prompt, response], "input_ids": ids, "loss_mask": [1] * len(ids)}


def mix(base: Path, model: Path, given: list[dict[str, Any]], seed: int = 0) -> dict[str, Any]:
    base.mkdir(exist_ok=True)
    held = {"id": "h", "messages": [{"role": "user", "content": HELD_PROMPT}], "response": HELD_RESPONSE}
    write_jsonl(base / "given.jsonl", given)
    write_jsonl(base / "self.jsonl", [held])
    write_jsonl(base / "people.jsonl", [{**held, "messages": [{"role": "user", "content": "Hi"}], "response": "Hello"}])
    inputs = {"rows": base / "given.jsonl", "held_self": base / "self.jsonl", "held_people": base / "people.jsonl"}
    return run_stage("mix", base / "out", {**inputs, "model": model}, {"seed": seed})


def test_rows_that_overlap_with_held_out_ones_go_and_are_accounted_for(tmp_path: Path, model: Path) -> None:
    given = [
        row(0, "something else", "an answer of its own"),
        row(1, "tell me", "well, " + HELD_RESPONSE[3:20]),  # 17 byte tokens of a held-out response
        row(2, "tell me", "well, " + HELD_RESPONSE[3:15]),  # 12 only
        row(3, "  HI ", "good day to you"),  # a prompt too short for 13 tokens
        row(4, "prefix " + HELD_PROMPT, "ok"),
        row(5, "something else", "an answer of its own"),
    ]
    result = mix(tmp_path / "a", model, given)
    assert {r["id"] for r in rows(tmp_path / "a/out/rows.jsonl")} == {"r0", "r2"}
    reasons = {r["id"]: r["reason"] for r in rows(tmp_path / "a/out/dropped.jsonl")}
    assert reasons == {
        "r1": "shares 13 tokens with a held-out row",
        "r3": "held-out prompt",
        "r4": "shares 13 tokens with a held-out row",
        "r5": "repeats another row",
    }
    assert result["rows"] == {"in": 6, "out": 2, "errors": 0, "skipped": 4}


def test_the_order_is_shuffled_by_the_seed(tmp_path: Path, model: Path) -> None:
    given = [row(i, f"prompt {i}", f"{i * 7919} answer") for i in range(40)]
    orders = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        mix(tmp_path / name, model, given, seed)
        orders.append([r["id"] for r in rows(tmp_path / name / "out/rows.jsonl")])
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != [r["id"] for r in given] and sorted(orders[0]) == sorted(r["id"] for r in given)


def test_nothing_left_is_a_refusal(tmp_path: Path, model: Path) -> None:
    with pytest.raises(Refused, match="overlap"):
        mix(tmp_path / "a", model, [row(0, HELD_PROMPT, "x")])
