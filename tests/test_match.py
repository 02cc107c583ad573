"""Which layers stored states really are: the right ones hold, every other is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.eagle3.shards import Row, index_json, read_index, read_shard, shard_bytes
from pipeline.eagle3.target import Target
from pipeline.stages.protocol import Refused, write_bytes, write_json, write_jsonl
from tests.lab.stage_run import run_stage, warnings
from tests.lab.tiny_model import make_tiny_model

H = 48


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    generator = torch.Generator().manual_seed(0)
    rows = [
        {"id": f"r{i}", "input_ids": torch.randint(3, 384, (20 + i,), generator=generator).tolist()} for i in range(5)
    ]
    write_jsonl(tmp_path / "rows.jsonl", [{**row, "loss_mask": [1] * len(row["input_ids"])} for row in rows])
    model = make_tiny_model(tmp_path / "model")
    run_stage("hidden", tmp_path / "hidden", {"rows": tmp_path / "rows.jsonl", "model": model}, {"dtype": "float32"})
    return {"hidden": tmp_path / "hidden", "model": model}


def rewrite(inputs: dict[str, Path], change: Callable[[Row, Target], Row]) -> None:
    """Store other states under the same index."""
    (shard,) = inputs["hidden"].glob("shard-*")
    target = Target.load(inputs["model"], torch.float32)
    write_bytes(shard, shard_bytes([change(row, target) for row in read_shard(shard)]))


def captured(row: Row, target: Target, layers: tuple[int, ...]) -> torch.Tensor:
    made = target.forward(row.tokens.unsqueeze(0), captures=layers).captures
    assert made is not None
    return made[0]


def match(tmp_path: Path, inputs: dict[str, Path]) -> list[str]:
    result = run_stage("match", tmp_path / "match", inputs, {"dtype": "float32", "rows": 3})
    table = result["slices"]
    assert result["holds"] == (not warnings(tmp_path / "match"))
    assert [line["expected"] for line in table] == ["1", "3", "4", "last"]
    return [line["best"] for line in table]


def test_states_that_are_what_they_say_hold(tmp_path: Path, inputs: dict[str, Path]) -> None:
    assert match(tmp_path, inputs) == ["1", "3", "4", "last"]
    result = run_stage("match", tmp_path / "again", inputs, {"dtype": "float32"})
    assert result["holds"] and all(line["cosine"] > 0.999 for line in result["slices"])


@pytest.mark.training_report(5)
@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.training_report(5)
def test_a_shift_by_one_layer_is_named(tmp_path: Path, inputs: dict[str, Path], shift: int) -> None:
    inputs_of = tuple(layer + 1 + shift for layer in (1, 3, 4))
    rewrite(inputs, lambda row, target: dataclasses.replace(row, aux=captured(row, target, inputs_of)))
    assert match(tmp_path, inputs) == [str(1 + shift), str(3 + shift), str(4 + shift), "last"]
    assert warnings(tmp_path / "match") == ["match.layer"] * 3


@pytest.mark.training_report(5)
def test_the_state_before_the_norm_is_told_from_that_after_it(tmp_path: Path, inputs: dict[str, Path]) -> None:
    rewrite(inputs, lambda row, target: dataclasses.replace(row, last=captured(row, target, (8,))))
    assert match(tmp_path, inputs) == ["1", "3", "4", "7"]


@pytest.mark.training_report(4)
def test_another_order_of_the_captures_is_named(tmp_path: Path, inputs: dict[str, Path]) -> None:
    rewrite(inputs, lambda row, _: dataclasses.replace(row, aux=row.aux.unflatten(-1, (3, H)).flip(1).flatten(1)))
    assert match(tmp_path, inputs) == ["4", "3", "1", "last"]


def test_states_of_another_model_are_none_of_its_layers(tmp_path: Path, inputs: dict[str, Path]) -> None:
    match(tmp_path, inputs | {"model": make_tiny_model(tmp_path / "other", seed=1)})
    assert warnings(tmp_path / "match") == ["match.far"] * 4


def test_states_of_another_width_or_none_are_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    index = read_index(inputs["hidden"])
    write_json(inputs["hidden"] / "index.json", index_json(dataclasses.replace(index, hidden_size=64)))
    with pytest.raises(Refused, match="64 wide, the target's 48"):
        match(tmp_path, inputs)
    (inputs["hidden"] / "index.json").unlink()
    with pytest.raises(Refused, match="no readable"):
        run_stage("match", tmp_path / "match2", inputs)
