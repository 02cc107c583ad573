"""How large a drafter is, in its file and in training, and what one trained token costs. Arithmetic on a config."""

from __future__ import annotations

import math

from pipeline.eagle3.config import DraftConfig, expected_shapes


def bytes_per_token(hidden_size: int, layers: int) -> int:
    """Of stored hidden states in bf16, `layers` captures and the last one: 57,344 for Kimi-K2.5 (H 7168, three)."""
    return 2 * (layers + 1) * hidden_size


def parameters(config: DraftConfig) -> dict[str, int]:
    """Number of values of each floating tensor of an exported drafter."""
    return {name: math.prod(shape) for name, shape in expected_shapes(config).items() if name not in ("d2t", "t2d")}


def file_parameters(config: DraftConfig) -> int:
    """Of an exported drafter, its head included: 1,190.9 M for Kimi-K2.5 with a draft vocabulary of 32,000."""
    return sum(parameters(config).values())


def training_parameters(config: DraftConfig) -> int:
    """Held in memory by a trainer: the file's, the target's embedding, and the rows of the target's head that make the
    teacher. 2,594.7 M for Kimi-K2.5."""
    head = parameters(config)["lm_head.weight"]
    return file_parameters(config) + config.vocab_size * config.hidden_size + head


def flops_per_token(config: DraftConfig, steps: int) -> int:
    """Of one trained response token with `steps` guesses, matrix products only, attention scores left out: two for each
    weight forward, and for those trained twice as many again backward. `fc` and the first keys and values count once,
    everything else at every guess; the head is frozen and gets no gradient of its own."""
    sizes = parameters(config)
    head, once = sizes["lm_head.weight"], sizes["fc.weight"]
    layer = sum(n for name, n in sizes.items() if name.startswith("midlayer") and "norm" not in name)
    return 6 * once + steps * (6 * layer + 4 * head)
