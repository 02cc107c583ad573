"""The exported file is what engines load, and the audit finds each way in which it can be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.eagle3.draft import Drafter, read_config
from pipeline.eagle3.frozen import borrow
from pipeline.stages.audit import audit
from pipeline.stages.protocol import Refused
from tests.lab.stage_run import run_stage
from tests.lab.tiny_pipeline import up_to_export

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return up_to_export(tmp_path_factory.mktemp("export"))


def failed(paths: dict[str, Path], drafter: Path) -> dict[str, str]:
    return {c["check"]: c["text"] for c in audit(drafter, paths["checkpoint"], paths["model"]) if not c["ok"]}


def test_a_good_drafter_passes_and_loads(paths: dict[str, Path], tmp_path: Path) -> None:
    inputs = {name: paths[name] for name in ("drafter", "checkpoint", "model")}
    assert run_stage("audit", tmp_path / "audit", inputs)["passed"]
    assert json.loads((tmp_path / "audit/audit.json").read_text())["passed"]
    drafter = Drafter.load(paths["drafter"], borrow(paths["model"]).embed, torch.float32)
    assert drafter.config.draft_vocab_size == 200 and drafter.config.aux_layers == (2, 4, 5)


def swap_d2t_for_ids(t: Tensors) -> None:
    t["d2t"] = t["d2t"] + torch.arange(len(t["d2t"]))


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda t: t.__delitem__(name)


def put(name: str, change: Callable[[Tensor], Tensor], source: str | None = None) -> Callable[[Tensors], None]:
    def apply(t: Tensors) -> None:
        t[name] = change(t[source or name]).contiguous()

    return apply


def one_nan(x: Tensor) -> Tensor:
    return x.clone().index_fill_(0, torch.tensor([0]), float("nan"))


BAD_TENSORS: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "head missing": (drop("lm_head.weight"), "names"),
    "maps missing": (drop("d2t"), "names"),
    "a name of another engine": (put("layers.0.hidden_norm.weight", torch.clone, "norm.weight"), "names"),
    "embeddings inside": (put("embed_tokens.weight", torch.clone, "lm_head.weight"), "names"),
    "shape": (put("fc.weight", lambda x: x[:, :-1]), "shapes"),
    "type": (put("midlayer.mlp.up_proj.weight", Tensor.float), "types"),
    "not a number": (put("midlayer.self_attn.o_proj.weight", one_nan), "finite"),
    "all zero": (put("midlayer.mlp.down_proj.weight", torch.zeros_like), "finite"),
    "ids in place of offsets": (swap_d2t_for_ids, "vocabulary"),
    "a mask shifted by one": (put("t2d", lambda x: x.roll(1)), "vocabulary"),
    "head rows in another order": (put("lm_head.weight", lambda x: x.flip(0)), "head"),
    "captures not folded back": (put("fc.weight", lambda x: x * 1.3), "outputs"),
    "k and v swapped": (
        put("midlayer.self_attn.k_proj.weight", torch.clone, "midlayer.self_attn.v_proj.weight"),
        "outputs",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
@pytest.mark.training_report(3)
@pytest.mark.training_report(8)
@pytest.mark.training_report(9)
def test_a_corrupt_tensor_is_found(paths: dict[str, Path], tmp_path: Path, case: str) -> None:
    corrupt, check = BAD_TENSORS[case]
    shutil.copytree(paths["drafter"], tmp_path / "drafter")
    tensors = load_file(tmp_path / "drafter/model.safetensors")
    corrupt(tensors)
    save_file(tensors, tmp_path / "drafter/model.safetensors")
    assert check in failed(paths, tmp_path / "drafter")


BAD_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "tied embeddings": ({"tie_word_embeddings": True}, "config"),
    "short context": ({"max_position_embeddings": 64}, "context"),
    "old rope lost": ({"rope_theta": 500.0}, "rope"),
    "new rope lost": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope"),
    "rope scaled in one schema": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope"),
    "other layers": ({"captures": {"inputs_of_layers": [1, 4, 5], "target_layers": 8}}, "config"),
    "heads": ({"num_key_value_heads": 3}, "config"),
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "config"),
}


@pytest.mark.parametrize("case", BAD_CONFIG)
@pytest.mark.training_report(10)
@pytest.mark.training_report(11)
@pytest.mark.training_report(12)
def test_a_wrong_config_is_found(paths: dict[str, Path], tmp_path: Path, case: str) -> None:
    change, check = BAD_CONFIG[case]
    shutil.copytree(paths["drafter"], tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter/config.json").read_text())
    (tmp_path / "drafter/config.json").write_text(json.dumps(config | change))
    assert check in failed(paths, tmp_path / "drafter")


def test_a_truncated_file_is_a_finding_and_the_stage_refuses(paths: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(paths["drafter"], tmp_path / "drafter")
    file = tmp_path / "drafter/model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    inputs = {"drafter": tmp_path / "drafter", "checkpoint": paths["checkpoint"], "model": paths["model"]}
    with pytest.raises(Refused, match="cannot be read"):
        run_stage("audit", tmp_path / "audit", inputs)
    assert not json.loads((tmp_path / "audit/audit.json").read_text())["passed"]


def test_what_is_written_is_what_is_read(paths: dict[str, Path]) -> None:
    config = read_config(paths["drafter"])
    assert config.rope_theta == 10000.0 and config.max_position_embeddings == 256
