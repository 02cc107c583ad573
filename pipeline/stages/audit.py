"""Read the exported drafter back, and hold every tensor against what a server will expect.

inputs    drafter (folder of `export`), checkpoint (folder of `train`), model
output    audit.json: {"checks": [{"check", "ok", "text"}], "passed"}

Servers skip tensors that they do not know and leave random what is missing, with HTTP 200 and an accept length of 1.
So nothing is taken on trust: names, shapes, types, values, both maps, both rope schemas, and at last the outputs of the
reloaded drafter against those of the trained one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.eagle3.draft import Drafter, expected_shapes, plain_scaling, read_config, read_rope, text_config
from pipeline.eagle3.frozen import borrow, target_config, vocab_from_maps
from pipeline.eagle3.trained import Trained, read_trained
from pipeline.eagle3.ttt import to_engine_layout
from pipeline.stages.protocol import Stage, main, write_json

OUTPUT_TOLERANCE = 0.05  # of the logits' standard deviation: what rounding the weights to bf16 may do


class Finding(Exception):
    """What is wrong, in a sentence."""


def run(stage: Stage) -> dict[str, Any]:
    checks = audit(stage.inputs["drafter"], stage.inputs["checkpoint"], stage.inputs["model"])
    failed = [check for check in checks if not check["ok"]]
    write_json(stage.out / "audit.json", {"checks": checks, "passed": not failed})
    stage.artifact("audit", stage.out / "audit.json")
    if failed:
        stage.refuse("audit.failed", "; ".join(f"{c['check']}: {c['text']}" for c in failed))
    return {"checks": len(checks), "passed": True}


def audit(drafter: Path, checkpoint: Path, model: Path) -> list[dict[str, Any]]:
    """All checks that can be made; those after one that failed may rest on it, and say so by failing too."""
    try:
        trained = read_trained(checkpoint / "trained.safetensors")
        config = json.loads((drafter / "config.json").read_text())
        with safe_open(drafter / "model.safetensors", framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, ValueError, SafetensorError) as error:
        return [{"check": "readable", "ok": False, "text": f"cannot be read: {error}"}]
    target = target_config(model)
    table: dict[str, Callable[[], str]] = {
        "names": lambda: check_names(trained, tensors),
        "shapes": lambda: check_shapes(trained, tensors),
        "types": lambda: check_types(tensors),
        "finite": lambda: check_finite(tensors),
        "vocabulary": lambda: check_vocabulary(tensors, target),
        "head": lambda: check_head(tensors, model),
        "config": lambda: check_config(config, trained, drafter),
        "context": lambda: check_context(config, target),
        "rope": lambda: check_rope(config, target),
        "outputs": lambda: check_outputs(drafter, trained, model),
    }
    checks = []
    for name, check in table.items():
        try:
            checks.append({"check": name, "ok": True, "text": check()})
        except Finding as finding:
            checks.append({"check": name, "ok": False, "text": str(finding)})
        except (KeyError, ValueError, RuntimeError) as error:
            checks.append({"check": name, "ok": False, "text": f"could not be checked: {error}"})
    return checks


def check_names(trained: Trained, tensors: dict[str, Tensor]) -> str:
    expected = set(expected_shapes(trained.config))
    if embeds := [name for name in tensors if "embed" in name]:
        raise Finding(f"embeddings are in the file ({embeds[0]}): an engine may take them for the target's")
    if unknown := sorted(set(tensors) - expected):
        raise Finding(f"unknown tensors, which engines skip in silence: {', '.join(unknown)}")
    if missing := sorted(expected - set(tensors)):
        raise Finding(f"missing tensors, which engines leave random: {', '.join(missing)}")
    return f"{len(tensors)} tensors, as expected"


def check_shapes(trained: Trained, tensors: dict[str, Tensor]) -> str:
    for name, shape in expected_shapes(trained.config).items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise Finding(f"{name} is {list(tensors[name].shape)}, expected {list(shape)}")
    return "all as expected"


def check_types(tensors: dict[str, Tensor]) -> str:
    for name, tensor in tensors.items():
        wanted = {"d2t": torch.int64, "t2d": torch.bool}.get(name, torch.bfloat16)
        if tensor.dtype != wanted:
            raise Finding(f"{name} is {tensor.dtype}, expected {wanted}")
    return "weights bf16, d2t int64, t2d bool"


def check_finite(tensors: dict[str, Tensor]) -> str:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise Finding(f"{name} holds values that are not finite")
        if tensor.is_floating_point() and not bool(tensor.any()):
            raise Finding(f"{name} is all zero")
    return "all values finite, no tensor all zero"


def check_vocabulary(tensors: dict[str, Tensor], target: dict[str, Any]) -> str:
    vocab = vocab_from_maps(tensors["d2t"], tensors["t2d"])
    if vocab.target_size != int(target["vocab_size"]):
        raise Finding(f"t2d has {vocab.target_size} entries, the target's vocabulary {target['vocab_size']}")
    return f"d2t and t2d agree on {len(vocab.target_ids)} tokens"


def check_head(tensors: dict[str, Tensor], model: Path) -> str:
    ids = vocab_from_maps(tensors["d2t"], tensors["t2d"]).target_ids
    if not torch.equal(tensors["lm_head.weight"], borrow(model).head[ids].to(torch.bfloat16)):
        raise Finding("lm_head is not the target's rows for the draft vocabulary, which training froze")
    return "rows of the target's head, in the order of d2t"


def check_config(config: dict[str, Any], trained: Trained, drafter: Path) -> str:
    if config.get("tie_word_embeddings") is not False:
        raise Finding("tie_word_embeddings must be false: the head has another vocabulary than the embeddings")
    if (read := read_config(drafter)) != trained.config:
        raise Finding(f"config.json says {read}, trained was {trained.config}")
    return "what was trained"


def check_context(config: dict[str, Any], target: dict[str, Any]) -> str:
    drafts, wants = int(config["max_position_embeddings"]), int(target["max_position_embeddings"])
    if drafts < wants:
        raise Finding(f"max_position_embeddings is {drafts}, the target serves {wants}: beyond, acceptance collapses")
    return f"{drafts} positions"


def check_rope(config: dict[str, Any], target: dict[str, Any]) -> str:
    old = {name: config[name] for name in ("rope_theta", "rope_scaling")}
    new = {"rope_parameters": config["rope_parameters"]}
    theta, scaling = read_rope(text_config(target))
    wanted = theta, plain_scaling(scaling)
    for name, part in (("rope_theta and rope_scaling", old), ("rope_parameters", new)):
        if read_rope(part) != wanted:
            raise Finding(f"{name} say {read_rope(part)}, the target has {wanted}")
    return f"theta {wanted[0]:g} in both schemas"


@torch.inference_mode()
def check_outputs(drafter: Path, trained: Trained, model: Path) -> str:
    """The file's drafter against the trained tensors in fp32, on random input: they may differ by rounding only."""
    borrowed = borrow(model)
    embed = borrowed.embed.float()
    exact = to_engine_layout(trained.weights, trained.capture_rms)
    exact |= {"lm_head.weight": borrowed.head[trained.vocab.target_ids].float()}
    exact |= {"d2t": trained.vocab.d2t, "t2d": trained.vocab.t2d}
    loaded, reference = Drafter.load(drafter, embed, torch.float32), Drafter(trained.config, exact, embed)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(trained.config.vocab_size, (1, 32), generator=generator)
    captures = torch.randn(1, 32, trained.config.capture_size, generator=generator) * trained.capture_rms
    positions = torch.arange(32).unsqueeze(0)

    def guess(drafter: Drafter) -> Tensor:
        out = drafter(ids, drafter.fuse(captures), positions, drafter.new_cache(1, 32))
        return drafter.logits(drafter(ids, out, positions, drafter.new_cache(1, 32)))  # a second guess on top

    wanted = guess(reference)
    difference = float((guess(loaded) - wanted).square().mean().sqrt() / wanted.std())
    if not difference < OUTPUT_TOLERANCE:
        raise Finding(f"the reloaded drafter's logits differ from the trained one's by {difference:.1%}")
    return f"logits of the reloaded drafter within {difference:.2%} of the trained one's"


if __name__ == "__main__":
    main(run)
