"""A few rows of random hidden states for the tiny drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.eagle3.batch import Taught
from pipeline.eagle3.draft import DraftConfig
from pipeline.eagle3.ttt import trained_shapes
from tests.lab.tiny_drafter import CONFIG


def random_row(id: str, mask: list[int], seed: int, config: DraftConfig = CONFIG, teacher_tokens: int = 5) -> Taught:
    g = torch.Generator().manual_seed(seed)
    length, responses = len(mask), sum(mask)
    scores = torch.randn(responses, config.draft_vocab_size, generator=g)
    top = torch.softmax(scores, -1).topk(teacher_tokens, -1)
    return Taught(
        id=id,
        tokens=torch.randint(config.vocab_size, (length,), generator=g),
        mask=torch.tensor(mask, dtype=torch.bool),
        aux=torch.randn(length, config.capture_size, generator=g).bfloat16(),
        last=torch.randn(length, config.hidden_size, generator=g).bfloat16(),
        teacher_ids=top.indices.to(torch.int32),
        teacher_probs=(top.values * 0.9).half(),
    )


def rows() -> list[Taught]:
    """Different lengths, a second answer in one row, a row whose answer is one token only."""
    masks = [[0] * 4 + [1] * 7, [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1], [0] * 3 + [1], [0] * 2 + [1] * 9]
    return [random_row(f"r{i}", mask, i) for i, mask in enumerate(masks)]


def random_trained(config: DraftConfig = CONFIG, seed: int = 7) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in trained_shapes(config).items():
        made[name] = 1 + 0.2 * torch.randn(shape, generator=g) if name == "norm" else torch.randn(shape, generator=g)
        if name != "norm":
            made[name] /= shape[-1] ** 0.5
    return made
