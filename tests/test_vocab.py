"""The draft vocabulary: the right tokens, maps that agree, coverage as counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.eagle3.frozen import borrow, read_vocab, target_config, vocab_from_maps
from pipeline.stages.protocol import Refused, write_jsonl
from tests.lab.stage_run import run_stage, warnings
from tests.lab.tiny_model import EOS, make_tiny_model

ROWS = [
    {"id": "a", "input_ids": [9, 9, 9, 40, 41, 40, 42], "loss_mask": [0, 0, 0, 1, 1, 1, 1]},
    {"id": "b", "input_ids": [9, 40, 41, 300], "loss_mask": [0, 1, 1, 1]},
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    return make_tiny_model(tmp_path / "model")


def test_the_commonest_response_tokens_and_the_end_token_are_in(tmp_path: Path, model: Path) -> None:
    inputs = {"rows": tmp_path / "rows.jsonl", "model": model}
    result = run_stage("vocab", tmp_path / "out", inputs, {"size": 3, "mass_rows": 0})
    vocab = read_vocab(tmp_path / "out/vocab.safetensors")
    assert vocab.target_ids.tolist() == [EOS, 40, 41]  # 9 is in prompts only
    assert result["coverage"] == pytest.approx(5 / 7) and result["distinct_in_data"] == 4
    maps = load_file(tmp_path / "out/vocab.safetensors")
    assert torch.equal(maps["t2d"].nonzero().flatten(), maps["d2t"] + torch.arange(3))
    assert maps["d2t"].dtype == torch.int64 and maps["t2d"].dtype == torch.bool


@pytest.mark.training_report(19)
def test_what_the_data_lacks_is_filled_by_what_the_target_would_write(tmp_path: Path, model: Path) -> None:
    inputs = {"rows": tmp_path / "rows.jsonl", "model": model}
    run_stage("vocab", tmp_path / "counts", inputs, {"size": 60, "mass_rows": 0})
    run_stage("vocab", tmp_path / "mass", inputs, {"size": 60, "mass_rows": 2})
    counts, mass = (
        read_vocab(tmp_path / name / "vocab.safetensors").target_ids.tolist() for name in ("counts", "mass")
    )
    assert set(counts) >= {40, 41, 42, 300, EOS} and set(mass) >= {40, 41, 42, 300, EOS}
    assert counts != mass
    assert warnings(tmp_path / "counts") == ["vocab.few-tokens"]


def test_data_without_a_response_is_refused(tmp_path: Path, model: Path) -> None:
    write_jsonl(tmp_path / "none.jsonl", [{"id": "a", "input_ids": [5, 6], "loss_mask": [0, 0]}])
    with pytest.raises(Refused):
        run_stage("vocab", tmp_path / "out", {"rows": tmp_path / "none.jsonl", "model": model})


@pytest.mark.training_report(8)
def test_maps_that_contradict_each_other_are_found() -> None:
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[[2, 5, 7]] = True
    offsets = torch.tensor([2, 4, 5])
    assert vocab_from_maps(offsets, t2d).target_ids.tolist() == [2, 5, 7]
    with pytest.raises(ValueError, match="contradict"):
        vocab_from_maps(torch.tensor([2, 5, 7]), t2d)  # ids where offsets belong


def test_a_multimodal_target_lends_what_its_language_model_has(tmp_path: Path, model: Path) -> None:
    plain = borrow(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": config}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(tensors | {"vision_tower.patch_embed.weight": torch.ones(2)}, model / "model.safetensors")
    nested = borrow(model)
    assert target_config(model)["vocab_size"] == config["vocab_size"]
    for name in ("embed", "head", "final_norm"):
        assert torch.equal(getattr(nested, name), getattr(plain, name)), name
