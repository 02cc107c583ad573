"""The elementwise parts of training for a GPU, each one pass over its data. RMS norm has a kernel of torch's own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.attention import Merge, merge, merge_backward
from pipeline.eagle3.compiled import compiled
from pipeline.eagle3.draft import DraftConfig, rope_table
from pipeline.eagle3.ttt import Ops, rotate_packed, swiglu

BEHIND = 64  # positions past the model's last: a chain of guesses may stand there


def kernel_norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, eps)


def gpu_ops(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    c = config
    heads, groups, hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    # Made once: the angles of a batch would be computed on the CPU and waited for.
    cos, sin = (t.to(device) for t in rope_table(c, torch.arange(c.max_position_embeddings + BEHIND)))
    g = torch.Generator().manual_seed(0)

    def random(*shape: int, grad: bool = False, wide: bool = False) -> Tensor:
        made = torch.randn(shape, generator=g).to(device, torch.float32 if wide else dtype)
        return made.requires_grad_(grad)

    def merging(n: int) -> tuple[Any, ...]:
        keys, values = ([random(n, groups, hd) for _ in range(2)] for _ in range(2))
        return random(n, heads, hd), random(n, heads, hd), random(n, heads, wide=True), keys, values, hd**-0.5

    def merging_back(n: int) -> tuple[Any, ...]:
        keys, values = ([random(n, groups, hd) for _ in range(2)] for _ in range(2))
        many = [random(n, heads, hd) for _ in range(3)]
        return (*many, random(n, heads, wide=True).abs() + 20, keys, values, hd**-0.5)

    return Ops(
        norm=kernel_norm,
        rotate=compiled(
            rotate_packed,
            lambda n: (random(n, heads, hd, grad=True), random(n, 1, hd // 2), random(n, 1, hd // 2)),
        ),
        swiglu=compiled(swiglu, lambda n: (random(n, 2 * c.intermediate_size, grad=True),)),
        merge=Merge(compiled(merge, merging), compiled(merge_backward, merging_back)),
        rope=(cos, sin),
    )
