"""The audit of drafters that others made: every fault that engines swallow in silence is named, a good one is not."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.eagle3.draft import write_config
from pipeline.stages.audit_any import CHECKS, inspect
from pipeline.stages.audit_checks import AUDIT
from tests.lab.stage_run import run_stage, warnings
from tests.lab.tiny_drafter import CONFIG, random_weights
from tests.test_rig_commands import rigbook

Tensors = dict[str, Tensor]
Config = dict[str, Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """What the audit reads of a target: config.json, embeddings, head, last norm."""
    directory = tmp_path / "model"
    directory.mkdir()
    g = torch.Generator().manual_seed(1)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    norm = torch.ones(CONFIG.hidden_size)
    names = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": norm}
    save_file(names, directory / "model.safetensors")
    target = {
        "model_type": "llama",
        "hidden_size": CONFIG.hidden_size,
        "vocab_size": CONFIG.vocab_size,
        "num_hidden_layers": CONFIG.target_layers,
        "max_position_embeddings": CONFIG.max_position_embeddings,
        "rope_theta": CONFIG.rope_theta,
        "tie_word_embeddings": False,
    }
    (directory / "config.json").write_text(json.dumps(target))
    return directory


@pytest.fixture
def drafter(tmp_path: Path, model: Path) -> Path:
    """A good one, in SGLang's layout."""
    directory = tmp_path / "drafter"
    directory.mkdir()
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in random_weights().items()}
    ids = tensors["d2t"] + torch.arange(CONFIG.draft_vocab_size)
    tensors["lm_head.weight"] = load_file(model / "model.safetensors")["lm_head.weight"][ids].bfloat16()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(write_config(CONFIG)))
    return directory


def change(drafter: Path, tensors: Callable[[Tensors], None] | None = None, config: Config | None = None) -> None:
    if tensors is not None:
        found = load_file(drafter / "model.safetensors")
        tensors(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, drafter / "model.safetensors")
    if config is not None:
        raw = json.loads((drafter / "config.json").read_text()) | config
        raw = {key: value for key, value in raw.items() if value != "absent"}
        (drafter / "config.json").write_text(json.dumps(raw))


def named(report: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["text"] for finding in report["findings"]}


def rename(old: str, new: str) -> Callable[[Tensors], None]:
    def apply(t: Tensors) -> None:
        for name in [n for n in t if old in n]:
            t[name.replace(old, new)] = t.pop(name)

    return apply


def put(name: str, make: Callable[[Tensors], Tensor]) -> Callable[[Tensors], None]:
    return lambda t: t.__setitem__(name, make(t))


def test_a_good_drafter_has_no_findings(drafter: Path, model: Path) -> None:
    report = inspect(drafter, model)
    assert report["findings"] == [] and report["unchecked"] == []
    assert set(report["checked"]) == set(CHECKS) and set(AUDIT) == {*CHECKS, "audit.readable", "audit.config"}


def test_what_needs_the_target_is_not_said_to_be_in_order_without_it(drafter: Path) -> None:
    report = inspect(drafter, None)
    assert report["findings"] == []
    assert {one["check"] for one in report["unchecked"]} == {"audit.head", "audit.context", "audit.rope"}


@pytest.mark.training_report(7)
def test_the_other_layout_is_as_good_where_the_engine_reads_it(drafter: Path, model: Path) -> None:
    change(drafter, rename("midlayer.", "layers.0."))
    assert inspect(drafter, model, engine="sglang", version="0.5.15")["findings"] == []
    assert "drops layers.0." in named(inspect(drafter, model, engine="sglang", version="0.5.6"))["audit.names"]


def test_a_config_of_speculators_is_read(drafter: Path, model: Path) -> None:
    change(drafter, rename("midlayer.", "layers.0."))
    flat = json.loads((drafter / "config.json").read_text())
    nested = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": flat["draft_vocab_size"],
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "transformer_layer_config": {k: v for k, v in flat.items() if k not in ("architectures", "eagle_config")},
    }
    (drafter / "config.json").write_text(json.dumps(nested))
    assert inspect(drafter, model, engine="vllm")["findings"] == []
    change(drafter, rename("layers.0.", "midlayer."))
    assert "audit.names" in named(inspect(drafter, model, engine="vllm"))


def ids_for_offsets(t: Tensors) -> None:
    t["d2t"] = t["d2t"] + torch.arange(len(t["d2t"]))


def random_like(name: str) -> Callable[[Tensors], Tensor]:
    return lambda t: torch.randn(t[name].shape, generator=torch.Generator().manual_seed(9)).to(t[name].dtype)


def big(t: Tensors) -> Tensor:
    return torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=torch.Generator().manual_seed(4)).bfloat16()


def norm_of(t: Tensors) -> Tensor:
    return torch.ones(CONFIG.hidden_size).bfloat16()


# What is wrong -> (tensors, config, settings, the check, words of its sentence).
FAULTS: dict[str, tuple[Callable[[Tensors], None] | None, Config | None, dict[str, Any], str, str]] = {
    "EAGLE in place of EAGLE-3": (None, {"architectures": ["LlamaForCausalLMEagle"]}, {}, "audit.algorithm", "1.0"),
    "no drafter at all": (
        put("fc.weight", lambda t: t["fc.weight"][:, : 2 * CONFIG.hidden_size]),
        {"architectures": ["LlamaForCausalLM"]},
        {},
        "audit.algorithm",
        "no EAGLE-3",
    ),
    "a name that nobody knows": (rename("norm.weight", "normal.weight"), None, {}, "audit.names", "silence"),
    "no head": (lambda t: t.__delitem__("lm_head.weight"), None, {}, "audit.missing", "accept length 1.0"),
    "no projection": (
        lambda t: t.__delitem__("midlayer.self_attn.k_proj.weight"),
        None,
        {},
        "audit.missing",
        "k_proj",
    ),
    "config of another size": (None, {"num_key_value_heads": 4}, {}, "audit.shapes", "k_proj"),
    "two captures": (
        put("fc.weight", lambda t: t["fc.weight"][:, : 2 * CONFIG.hidden_size]),
        None,
        {},
        "audit.captures",
        "3 captures",
    ),
    "states of another target": (None, {"target_hidden_size": 48}, {}, "audit.captures", "48"),
    "not a number": (
        put("norm.weight", lambda t: t["norm.weight"] * float("nan")),
        None,
        {},
        "audit.values",
        "not finite",
    ),
    "all zero": (
        put("midlayer.mlp.down_proj.weight", lambda t: torch.zeros_like(t["midlayer.mlp.down_proj.weight"])),
        None,
        {},
        "audit.values",
        "all zero",
    ),
    "stored in fp32": (put("fc.weight", lambda t: t["fc.weight"].float()), None, {}, "audit.values", "float32"),
    "d2t lost": (lambda t: t.__delitem__("d2t"), None, {}, "audit.vocabulary", "d2t"),
    "ids in place of offsets": (ids_for_offsets, None, {}, "audit.vocabulary", "target ids"),
    "a stale map": (put("t2d", lambda t: t["t2d"].roll(1)), None, {}, "audit.vocabulary", "contradict"),
    "a map of another size": (None, {"draft_vocab_size": 20}, {}, "audit.vocabulary", "24 entries"),
    "random embeddings": (put("embed_tokens.weight", big), None, {}, "audit.embeddings", "random"),
    "a head in another order": (
        put("lm_head.weight", lambda t: t["lm_head.weight"].flip(0)),
        None,
        {},
        "audit.head",
        "order",
    ),
    "a random head": (put("lm_head.weight", random_like("lm_head.weight")), None, {}, "audit.head", "random"),
    "tied": (None, {"tie_word_embeddings": True}, {}, "audit.tied", "true"),
    "tied by default": (None, {"tie_word_embeddings": "absent"}, {}, "audit.tied", "not said"),
    "short context": (None, {"max_position_embeddings": 64}, {}, "audit.context", "64 positions"),
    "more is served than it knows": (None, None, {"context": 4096}, "audit.context", "4,096"),
    "rope lost": (None, {"rope_theta": "absent", "rope_parameters": "absent"}, {}, "audit.rope", "neither"),
    "rope of another target": (
        None,
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {},
        "audit.rope",
        "500000",
    ),
    "two ropes": (None, {"rope_theta": 5e5}, {}, "audit.rope", "rope_parameters"),
    "layers in another order": (
        None,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [5, 2, 4]}},
        {},
        "audit.layers",
        "not ascending",
    ),
    "layers by nobody's convention": (
        None,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 4, 5]}},
        {},
        "audit.layers",
        "neither 1",
    ),
    "a layer too far": (
        None,
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}},
        {},
        "audit.layers",
        "has 8",
    ),
    "fc_norm lost": (None, {"fc_norm": True}, {}, "audit.norms", "fc_norm"),
    "fc_norm not said": (put("aux_norm_low.weight", norm_of), None, {}, "audit.norms", "1 such"),
    "a flag that the engine ignores": (
        None,
        {"norm_output": True},
        {"engine": "sglang", "version": "0.5.6"},
        "audit.norms",
        "ignores norm_output",
    ),
    "a norm that the engine skips": (
        put("input_norm.weight", norm_of),
        {"norm_before_fc": True},
        {"engine": "sglang", "version": "0.5.15"},
        "audit.norms",
        "input_norm",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.training_report(1)
@pytest.mark.training_report(3)
@pytest.mark.training_report(4)
@pytest.mark.training_report(5)
@pytest.mark.training_report(6)
@pytest.mark.training_report(8)
@pytest.mark.training_report(9)
@pytest.mark.training_report(10)
@pytest.mark.training_report(11)
@pytest.mark.training_report(12)
def test_each_fault_is_named(drafter: Path, model: Path, fault: str) -> None:
    tensors, config, settings, check, words = FAULTS[fault]
    change(drafter, tensors, config)
    report = inspect(drafter, model, **settings)
    texts = [one["text"] for one in report["findings"] if one["check"] == check]
    assert any(words in text for text in texts), report["findings"]
    assert not any("cannot be judged" in one["text"] for one in report["findings"]), report["findings"]


def hostile_header(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")


def overlapping(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize("spoil", [hostile_header, overlapping, cut, Path.unlink], ids=lambda f: f.__name__)
def test_a_file_that_cannot_be_read_is_a_finding_and_no_crash(
    drafter: Path, model: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(drafter / "model.safetensors")
    assert set(named(inspect(drafter, model))) == {"audit.readable"}


@pytest.mark.parametrize("text", ["", "[]", '{"hidden_size": "wide"}', '{"architectures": "one"}', '{"a": 1', "{}"])
def test_a_config_that_says_nothing_useful_is_a_finding(drafter: Path, model: Path, text: str) -> None:
    (drafter / "config.json").write_text(text)
    assert (
        set(named(inspect(drafter, model))) <= {"audit.readable", "audit.config"}
        and inspect(drafter, model)["findings"]
    )


class Trap:
    """Pickled, it would make a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickled_weights_are_read_and_a_trap_in_them_is_not_sprung(drafter: Path, model: Path, tmp_path: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    (drafter / "model.safetensors").unlink()
    torch.save(tensors, drafter / "pytorch_model.bin")
    assert inspect(drafter, model)["findings"] == []
    torch.save(tensors | {"fc.weight": Trap(tmp_path / "sprung")}, drafter / "pytorch_model.bin")
    assert set(named(inspect(drafter, model))) == {"audit.readable"} and not (tmp_path / "sprung").exists()


def test_shards_are_read_as_one_and_a_missing_one_is_told(drafter: Path, model: Path) -> None:
    tensors = load_file(drafter / "model.safetensors")
    (drafter / "model.safetensors").unlink()
    names = sorted(tensors)
    for number, part in enumerate((names[:7], names[7:]), 1):
        save_file({name: tensors[name] for name in part}, drafter / f"model-0000{number}-of-00002.safetensors")
    weight_map = {name: "model-00001-of-00002.safetensors" for name in names}
    (drafter / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert inspect(drafter, model)["findings"] == []
    (drafter / "model-00002-of-00002.safetensors").unlink()
    assert "no file has" in named(inspect(drafter, model))["audit.readable"]


def test_two_drafters_are_told_apart_tensor_by_tensor(drafter: Path, model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in drafter.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    change(other, rename("midlayer.", "layers.0."), {"rope_theta": 7.0})
    change(other, put("norm.weight", lambda t: t["norm.weight"] + 1))
    change(other, put("embed_tokens.weight", big))
    inputs = {"drafter": drafter, "against": other, "model": model}
    told = run_stage("audit_any", tmp_path / "out", inputs)["against"]
    assert told["only_here"] == [] and told["only_there"] == ["embed_tokens.weight"]
    assert list(told["tensors"]) == ["norm.weight"] and told["tensors"]["norm.weight"]["largest_difference"] >= 0.99
    assert list(told["config"]) == ["rope_theta"]
    assert warnings(tmp_path / "out") == []


def test_the_command_runs_it_on_the_host_and_exits_by_what_was_found(
    drafter: Path, model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "rig"
    root.mkdir()
    text = f"""[project]
name = "lab"
[hosts.here]
kind = "local"
state_dir = "{tmp_path}/state"
[envs.work]
host = "here"
python = "{sys.executable}"
[target]
path = "{model}"
"""
    (root / "rigbook.toml").write_text(text)
    words = ("--json", "run", "audit", "--draft", str(drafter))
    good = rigbook(root, *words)
    assert good.returncode == 0 and json.loads(good.stdout)["findings"] == [], good.stderr
    change(drafter, lambda t: t.__delitem__("lm_head.weight"))
    bad = rigbook(root, *words)
    assert bad.returncode == 6 and "audit.missing" in named(json.loads(bad.stdout))
    shown = rigbook(root, "run", "audit", "--draft", str(drafter), "--against", str(drafter))
    assert shown.returncode == 6 and b"accept length 1.0  [audit.missing]" in shown.stdout
    assert b"against the other: 14 tensors are the same" in shown.stdout
    assert rigbook(root, "run", "--draft", str(drafter)).returncode == 2
    gone = rigbook(root, "run", "audit", "--draft", str(tmp_path / "nowhere"))
    assert gone.returncode == 3 and b"is not there" in gone.stderr, gone.stderr
