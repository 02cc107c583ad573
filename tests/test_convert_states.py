"""States in other trainers' layouts: there and back they are the same; cut, missing or misfitting files are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.eagle3.shards import read_index, read_shards
from pipeline.eagle3.target import Target
from pipeline.stages.protocol import Refused, read_jsonl, write_jsonl
from tests.lab.stage_run import run_stage
from tests.lab.tiny_model import make_tiny_model

LAYERS = [1, 3, 4]
FOREIGN = ["specforge", "speculators"]


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(5):
        ids = torch.randint(3, 384, (20 + i,), generator=generator).tolist()
        rows.append({"id": f"row-{i}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * (16 + i)})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    model = make_tiny_model(tmp_path / "model")
    run_stage("hidden", tmp_path / "hidden", {"rows": tmp_path / "rows.jsonl", "model": model}, {"dtype": "float32"})
    return {"states": tmp_path / "hidden", "model": model, "rows": tmp_path / "rows.jsonl"}


def give(tmp_path: Path, inputs: dict[str, Path], to: str) -> Path:
    run_stage("convert_states", tmp_path / to, inputs, {"from": "rigbook", "to": to})
    return tmp_path / to / "states"


def take(tmp_path: Path, inputs: dict[str, Path], came: str, states: Path, out: str = "back") -> Any:
    settings = {"from": came, "to": "rigbook", "layers": LAYERS}
    return run_stage("convert_states", tmp_path / out, {**inputs, "states": states}, settings)


@pytest.mark.parametrize("layout", FOREIGN)
def test_there_and_back_states_are_the_same(tmp_path: Path, inputs: dict[str, Path], layout: str) -> None:
    assert take(tmp_path, inputs, layout, give(tmp_path, inputs, layout))["rows"]["out"] == 5
    old, new = read_index(inputs["states"]), read_index(tmp_path / "back")
    assert (new.layers, new.source) == ((1, 3, 4), layout) and new.target["model"] == old.target["model"]
    assert (new.rows, new.tokens, new.response_tokens) == (old.rows, old.tokens, old.response_tokens)
    for before, after in zip(read_shards(inputs["states"]), read_shards(tmp_path / "back"), strict=True):
        assert before.id == after.id and torch.equal(before.tokens, after.tokens)
        assert torch.equal(before.mask, after.mask) and torch.equal(before.aux, after.aux)
        tolerance = 0.0 if layout == "specforge" else 1e-2  # through the norm and back: two roundings
        torch.testing.assert_close(after.last.float(), before.last.float(), rtol=tolerance, atol=tolerance / 10)
    match = run_stage("match", tmp_path / "match", {"hidden": tmp_path / "back", "model": inputs["model"]})
    assert match["holds"]


def test_the_files_are_as_their_trainers_read_them(tmp_path: Path, inputs: dict[str, Path]) -> None:
    first = read_shards(inputs["states"])[0]
    one = torch.load(give(tmp_path, inputs, "specforge") / "rows_0-2000/data_0.ckpt", weights_only=True)
    assert {name: tuple(t.shape) for name, t in one.items()} == {
        "input_ids": (20,), "loss_mask": (20,), "hidden_state": (1, 20, 48), "aux_hidden_state": (1, 20, 144),
    }  # fmt: skip
    assert torch.equal(one["hidden_state"][0], first.last) and torch.equal(one["aux_hidden_state"][0], first.aux)
    two = load_file(give(tmp_path, inputs, "speculators") / "hs_0.safetensors")
    assert two["token_ids"].tolist() == first.tokens.tolist() and tuple(two["hidden_states"].shape) == (20, 4, 48)
    target = Target.load(inputs["model"], torch.float32)
    before_norm = target.forward(first.tokens.unsqueeze(0), captures=(8,)).captures
    assert before_norm is not None
    cosine = torch.nn.functional.cosine_similarity(two["hidden_states"][:, -1].float(), before_norm[0], dim=-1)
    assert cosine.min() > 0.999, "the last state is not the direction of the one before the norm"


@pytest.mark.training_report(28)
@pytest.mark.parametrize("layout", FOREIGN)
@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_a_half_written_file_is_refused_by_name(
    tmp_path: Path, inputs: dict[str, Path], layout: str, keep: float
) -> None:
    states = give(tmp_path, inputs, layout)
    (path,) = [*states.rglob("data_2.ckpt"), *states.rglob("hs_2.safetensors")]
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(Refused, match=rf"{path.name} is cut"):
        take(tmp_path, inputs, layout, states)
    assert not (tmp_path / "back/index.json").exists()


@pytest.mark.parametrize("layout", FOREIGN)
def test_a_gap_in_the_rows_is_told(tmp_path: Path, inputs: dict[str, Path], layout: str) -> None:
    states = give(tmp_path, inputs, layout)
    (path,) = [*states.rglob("data_2.ckpt"), *states.rglob("hs_2.safetensors")]
    path.unlink()
    with pytest.raises(Refused, match=r"rows \[2\] are missing"):
        take(tmp_path, inputs, layout, states)


def test_files_of_other_rows_other_layers_or_bad_numbers_are_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    states = give(tmp_path, inputs, "speculators")
    rows = list(read_jsonl(inputs["rows"]))
    write_jsonl(tmp_path / "other.jsonl", rows[::-1])
    with pytest.raises(Refused, match="their tokens differ"):
        take(tmp_path, {**inputs, "rows": tmp_path / "other.jsonl"}, "speculators", states)
    states = give(tmp_path, inputs, "specforge")
    with pytest.raises(Refused, match="do not make a row of 2 captures"):
        settings = {"from": "specforge", "to": "rigbook", "layers": [1, 3]}
        run_stage("convert_states", tmp_path / "two", {**inputs, "states": states}, settings)
    path = states / "rows_0-2000/data_1.ckpt"
    broken = torch.load(path, weights_only=True)
    broken["hidden_state"][0, 3, 0] = float("nan")
    torch.save(broken, path)
    with pytest.raises(Refused, match="not finite"):
        take(tmp_path, inputs, "specforge", states, "three")
    with pytest.raises(Refused, match="one of the two"):
        run_stage("convert_states", tmp_path / "four", inputs, {"from": "rigbook", "to": "rigbook"})
