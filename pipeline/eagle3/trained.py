"""The result of training: `trained.safetensors`, fp32, from which any engine's layout can be made."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from pipeline.eagle3.draft import DraftConfig, config_as_json, config_from_json
from pipeline.eagle3.frozen import Vocab, vocab_from_maps
from pipeline.eagle3.ttt import trained_shapes


@dataclass(frozen=True)
class Trained:
    config: DraftConfig
    weights: dict[str, Tensor]  # the names of `ttt.trained_shapes`; "head" where it is not the target's
    capture_rms: Tensor  # [3H]: what captures were divided by
    vocab: Vocab


def trained_bytes(trained: Trained) -> bytes:
    tensors = {name: tensor.detach().contiguous() for name, tensor in trained.weights.items()}
    tensors |= {"capture_rms": trained.capture_rms, "d2t": trained.vocab.d2t, "t2d": trained.vocab.t2d}
    return save(tensors, metadata={"config": json.dumps(config_as_json(trained.config))})


def read_trained(path: Path) -> Trained:
    """Raises ValueError if a tensor is missing, unknown or of the wrong shape."""
    with safe_open(path, framework="pt") as file:
        config = config_from_json(json.loads(file.metadata()["config"]))
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    rms, vocab = tensors.pop("capture_rms"), vocab_from_maps(tensors.pop("d2t"), tensors.pop("t2d"))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = trained_shapes(config, head="head" in shapes)
    if shapes != expected:
        raise ValueError(f"{path} holds {shapes}, expected {expected}")
    return Trained(config, tensors, rms, vocab)
