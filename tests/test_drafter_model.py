"""The drafter as a decoder: cache, rows at different slots, the draft vocabulary, the file it is loaded from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.eagle3.draft import (
    Drafter,
    config_for_target,
    inverse_frequencies,
    read_config,
    read_rope,
    rope_table,
    write_config,
)
from pipeline.eagle3.sizes import bytes_per_token, file_parameters, parameters, training_parameters
from tests.lab.kimi import KIMI
from tests.lab.tiny_drafter import CONFIG, random_drafter, random_weights


def test_slots_one_by_one_equal_all_at_once() -> None:
    drafter = random_drafter()
    g = torch.Generator().manual_seed(3)
    ids = torch.randint(CONFIG.vocab_size, (2, 10), generator=g)
    hidden = drafter.fuse(torch.randn(2, 10, CONFIG.capture_size, generator=g))
    positions = torch.arange(10).expand(2, 10)
    whole = drafter(ids, hidden, positions, drafter.new_cache(2, 16))
    cache = drafter.new_cache(2, 16)
    steps = [drafter(ids[:, i : i + 1], hidden[:, i : i + 1], positions[:, i : i + 1], cache) for i in range(10)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-4)


def test_rows_may_stand_at_different_slots_and_refused_drafts_leave_no_trace() -> None:
    drafter = random_drafter()
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(CONFIG.vocab_size, (2, 9), generator=g)
    hidden = torch.randn(2, 9, CONFIG.hidden_size, generator=g)
    positions = torch.arange(9).expand(2, 9)
    alone = drafter(ids, hidden, positions, drafter.new_cache(2, 12))
    cache = drafter.new_cache(2, 12)
    # Row 0 has read 5 slots and row 1 three (its two others are padding, in the last slot).
    at = torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 11, 11]])
    drafter(ids[:, :5], hidden[:, :5], at, cache)
    # A draft that will be refused writes slots 5.. of row 0 and 3.. of row 1.
    drafter(ids[:, :2], hidden[:, 5:7], torch.tensor([[5, 6], [3, 4]]), cache)
    rows = torch.tensor([[5, 6, 7], [3, 4, 5]])
    out = drafter(ids.gather(1, rows), hidden.gather(1, rows[..., None].expand(-1, -1, 32)), rows, cache)
    torch.testing.assert_close(out[0], alone[0, 5:8], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out[1], alone[1, 3:6], rtol=1e-4, atol=1e-4)


def test_draft_ids_are_offsets_into_the_target_vocabulary() -> None:
    drafter, weights = random_drafter(), random_weights()
    mapped = drafter.to_target(torch.arange(CONFIG.draft_vocab_size))
    assert torch.equal(mapped, weights["t2d"].nonzero().flatten())


def test_a_directory_in_the_engines_layout_loads_and_a_foreign_one_is_refused(tmp_path: Path) -> None:
    weights, embed = random_weights(), torch.randn(CONFIG.vocab_size, CONFIG.hidden_size)
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(write_config(CONFIG)))
    assert read_config(tmp_path) == CONFIG
    loaded = Drafter.load(tmp_path, embed, torch.float32)
    assert torch.equal(loaded.w("fc.weight"), weights["fc.weight"])

    renamed = {k.replace("midlayer.", "layers.0."): v for k, v in load_file(tmp_path / "model.safetensors").items()}
    save_file(renamed, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unknown tensors: layers"):
        Drafter.load(tmp_path, embed, torch.float32)
    save_file({k: v for k, v in weights.items() if k != "lm_head.weight"}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: lm_head\.weight"):
        Drafter.load(tmp_path, embed, torch.float32)


@pytest.mark.training_report(4)
def test_layers_other_than_the_default_are_told_in_the_engines_convention(tmp_path: Path) -> None:
    assert "eagle_aux_hidden_state_layer_ids" not in write_config(CONFIG)["eagle_config"]
    other = replace(CONFIG, aux_layers=(1, 3, 6))
    (tmp_path / "config.json").write_text(json.dumps(write_config(other)))
    told = json.loads((tmp_path / "config.json").read_text())["eagle_config"]
    assert told["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5]
    assert read_config(tmp_path) == other


@pytest.mark.parametrize("rope_schema", ["old", "new"])
@pytest.mark.training_report(11)
def test_rope_survives_in_both_schemas(tmp_path: Path, rope_schema: str) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = replace(CONFIG, rope_theta=5e5, rope_scaling={**scaling, "original_max_position_embeddings": 64})
    raw = write_config(config)
    for key in ("rope_parameters",) if rope_schema == "old" else ("rope_theta", "rope_scaling"):
        del raw[key]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    back = read_config(tmp_path)
    assert back.rope_theta == 5e5
    torch.testing.assert_close(inverse_frequencies(back), inverse_frequencies(config))
    assert not torch.allclose(inverse_frequencies(back), inverse_frequencies(replace(config, rope_scaling=None)))


def test_a_drafter_for_kimi_k2_5_has_the_published_sizes() -> None:
    config = config_for_target(KIMI, (), 32_000)
    sizes = parameters(config)
    assert round(sizes["lm_head.weight"] / 1e6, 1) == 229.4
    assert file_parameters(config) - sizes["lm_head.weight"] == 961_572_864  # 961.5 M, as it is told
    assert round(file_parameters(config) / 1e6, 1) == 1190.9
    assert round(config.vocab_size * config.hidden_size / 1e6, 1) == 1174.4
    assert round(training_parameters(config) / 1e6, 1) == 2594.7
    assert bytes_per_token(config.hidden_size, len(config.aux_layers)) == 57_344
    assert config.aux_layers == (2, 30, 58) and config.max_position_embeddings == 262_144
    assert "mscale" not in (config.rope_scaling or {}) and read_rope(write_config(config))[1] == config.rope_scaling


def test_a_width_that_the_target_does_not_say_is_named() -> None:
    text = {key: value for key, value in KIMI["text_config"].items() if key != "intermediate_size"}
    with pytest.raises(ValueError, match="no intermediate_size"):
        config_for_target({"text_config": text}, (), 32_000)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2},
    ],
    ids=["linear", "llama3", "yarn of Kimi", "yarn with betas"],
)
def test_rope_is_the_one_that_transformers_computes(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = replace(CONFIG, head_dim=128, rope_theta=50000.0, rope_scaling=scaling, max_position_embeddings=512)
    theirs = LlamaConfig(
        head_dim=128,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 50000.0, **scaling},
    )
    wanted, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(config), wanted, rtol=1e-5, atol=0)
    cos, sin = rope_table(config, torch.arange(300))
    angles = torch.arange(300).float().unsqueeze(1) * wanted
    torch.testing.assert_close(cos, angles.cos() * factor, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(sin, angles.sin() * factor, rtol=1e-3, atol=1e-4)
