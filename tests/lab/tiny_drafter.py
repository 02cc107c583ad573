"""A drafter small enough to check by hand, with random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.eagle3.draft import DraftConfig, Drafter, expected_shapes

CONFIG = DraftConfig(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    draft_vocab_size=24,
    max_position_embeddings=128,
    target_layers=8,
    aux_layers=(2, 4, 5),
    rope_theta=100.0,
)


def random_weights(config: DraftConfig = CONFIG, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in expected_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.2 * torch.randn(shape, generator=g)
        elif name not in ("d2t", "t2d"):
            weights[name] = torch.randn(shape, generator=g) * 1.5 / shape[-1] ** 0.5
    chosen = torch.randperm(config.vocab_size, generator=g)[: config.draft_vocab_size].sort().values
    weights["d2t"] = chosen - torch.arange(config.draft_vocab_size)
    weights["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    return weights


def random_drafter(config: DraftConfig = CONFIG, seed: int = 0) -> Drafter:
    g = torch.Generator().manual_seed(seed + 1)
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=g)
    return Drafter(config, random_weights(config, seed), embed)
