"""Hidden states of targets that our own decoder does not load, by the `transformers` library where it is installed.

Captures are what decoder layers give out, by forward hooks: `output_hidden_states` would keep every layer of a pass,
and its last entry is before the norm in some models and after it in others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.stages.protocol import Stage


def transformers_forward(
    stage: Stage, path: Path, layers: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """ids [B, T] -> captures [B, T, A*H] and final normed states [B, T, H]. No code of the model's folder is run."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        stage.refuse("hidden.no-transformers", "the env of the stage has no `transformers`: install it there")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    except (ValueError, OSError, KeyError, ImportError) as error:
        stage.refuse("target.unsupported", f"transformers cannot load {path}: {str(error).splitlines()[0]}")
    model.to(device).eval()
    decoder = model.get_decoder()
    if not hasattr(decoder, "layers"):
        stage.refuse("target.unsupported", f"{type(decoder).__name__} has no list of layers to take states from")
    kept: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable[[Any, Any, Any], None]:
        def hook(module: Any, given: Any, out: Any) -> None:
            kept[layer] = out[0] if isinstance(out, tuple) else out  # some layers give caches and router scores as well

        return hook

    for layer in layers:
        decoder.layers[layer].register_forward_hook(keep(layer))

    def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
        # No mask for the padding: it comes after each row, where nothing of the row sees it.
        final: Tensor = decoder(input_ids=ids.to(device), use_cache=False).last_hidden_state
        return torch.cat([kept[layer] for layer in layers], -1), final

    return forward
