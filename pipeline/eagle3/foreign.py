"""A drafter directory that somebody else made: what is in it, by our names, without running anything of it.

Published EAGLE-3 drafters come in three layouts, tensor for tensor the same layer:

    SpecForge, SGLang     midlayer.*  (SGLang up to 0.5.6 loads only these; later versions rename them)
    speculators, vLLM     layers.0.*
    both                  sometimes below "model."; embed_tokens and d2t/t2d in the file or not

`NAMES` is the one table that says what each stored name is. A name that is in no row is unknown, which every engine
skips without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

LAYER = (
    "hidden_norm",
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
# Stored name (without "model." before it) -> our name.
NAMES: dict[str, str] = {
    "fc.weight": "fc.weight",
    "norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "embed_tokens.weight": "embed_tokens.weight",
    "d2t": "d2t",
    "t2d": "t2d",
    "input_norm.weight": "input_norm.weight",  # speculators: one norm over all captures, before fc
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
    **{f"fc_norm.{i}.weight": f"fc_norm.{i}.weight" for i in range(3)},
    **{f"{prefix}.{part}.weight": f"midlayer.{part}.weight" for part in LAYER for prefix in ("midlayer", "layers.0")},
}


class Unreadable(ValueError):
    """The directory is no drafter that can be read; a sentence says why."""


@dataclass
class Found:
    """A drafter directory. `stored` maps each name in the files to ours, or to None where no engine knows it."""

    directory: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]  # by stored name
    stored: dict[str, str | None]
    load: Callable[[str], Tensor] = field(repr=False)

    def names(self) -> dict[str, str]:
        """Our name -> stored name."""
        return {ours: name for name, ours in self.stored.items() if ours is not None}

    def tensor(self, ours: str) -> Tensor:
        return self.load(self.names()[ours])

    def shape(self, ours: str) -> tuple[int, ...] | None:
        name = self.names().get(ours)
        return None if name is None else self.shapes[name]


def our_name(stored: str) -> str | None:
    """What a stored tensor is, or None."""
    return NAMES.get(stored.removeprefix("model."))


def read_drafter(directory: Path) -> Found:
    """Headers only; tensors are read when asked for. Raises Unreadable.

    Pickled weights (.bin) are read with `weights_only`, so that nothing in them runs.
    """
    if not directory.is_dir():
        raise Unreadable(f"{directory} is no directory")
    try:
        config = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise Unreadable(f"config.json cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise Unreadable("config.json holds no JSON object")
    files = sorted(directory.glob("*.safetensors"))
    pickles = sorted(directory.glob("*.bin"))
    if files:
        shapes, load = _safetensors(files)
    elif pickles:
        shapes, load = _pickled(pickles)
    else:
        raise Unreadable("there is no .safetensors or .bin file")
    _complete(directory, set(shapes))
    stored: dict[str, str | None] = {name: our_name(name) for name in shapes}
    known = [ours for ours in stored.values() if ours is not None]
    if twice := {ours for ours in known if known.count(ours) > 1}:
        raise Unreadable(f"{', '.join(sorted(twice))} is in the files under two names: engines take the one read last")
    return Found(directory, config, shapes, stored, load)


def _safetensors(files: list[Path]) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    shapes: dict[str, tuple[int, ...]] = {}
    where: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    shapes[name] = tuple(file.get_slice(name).get_shape())
                    where[name] = path
        except (OSError, SafetensorError) as error:
            raise Unreadable(f"{path.name} cannot be read: {error}") from None

    def load(name: str) -> Tensor:
        with safe_open(where[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    return shapes, load


def _pickled(files: list[Path]) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises whatever the file makes it raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise Unreadable(f"{path.name} cannot be read as plain weights: {first}") from None
        if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise Unreadable(f"{path.name} holds something other than named tensors")
        tensors |= loaded
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__


def _complete(directory: Path, names: set[str]) -> None:
    for path in directory.glob("*.index.json"):
        try:
            listed = set(json.loads(path.read_text())["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unreadable(f"{path.name} cannot be read: {error}") from None
        if missing := sorted(listed - names):
            raise Unreadable(f"{path.name} lists {len(missing)} tensors that no file has, such as {missing[0]}")
