"""How much of a GPU's memory training takes, from sizes alone: known before the first step, not found out by it.

Counted are the tensors that live at the worst moment (just before the gradients of the weights are multiplied), bf16
where training computes in bf16. `tests/test_train_memory.py` holds it against what autograd really keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.eagle3.draft import DraftConfig
from pipeline.eagle3.losses import GPU_BYTES
from pipeline.eagle3.ttt import trained_shapes

RESERVE = 1 << 30  # the CUDA context, kernels, cuBLAS
SLACK = 1.15  # blocks of the allocator that are free and too small


@dataclass(frozen=True)
class Need:
    """Bytes."""

    weights: int  # fp32 weights, gradient, both moments, the copy in the compute dtype, and what is borrowed
    each_token: float  # of a piece
    scratch: int

    def of(self, piece_tokens: int) -> int:
        return int((self.weights + self.each_token * piece_tokens + self.scratch) * SLACK) + RESERVE

    def tokens_that_fit(self, free: int) -> int:
        room = (free - RESERVE) / SLACK - self.weights - self.scratch
        return max(0, int(room / self.each_token))


def training_need(
    config: DraftConfig, *, responses: float, steps: int, own_head: bool, dense: bool, width: int = 2
) -> Need:
    """`responses`: share of the tokens that are response tokens. width: bytes of the compute dtype."""
    h, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    parameters = sum(_size(shape) for shape in trained_shapes(config, head=own_head).values())
    borrowed = (config.vocab_size + config.draft_vocab_size) * h
    head_gradient = 8 * config.draft_vocab_size * h * steps if own_head else 0
    return Need(
        weights=parameters * (4 * 4 + width) + borrowed * width + head_gradient,
        each_token=width * (slot_values(config.capture_size, h, kv) + responses * query_values(h, inner, q, kv, steps))
        + 2 * AHEAD_BATCHES * (config.capture_size + (responses * h if dense else 0))
        + (responses * width * config.draft_vocab_size if dense else 0),
        scratch=3 * GPU_BYTES,
    )


AHEAD_BATCHES = 4  # of `feed.AHEAD` waiting and the one in use, as they came from disk


def slot_values(captures: int, h: int, kv: int) -> float:
    """Values kept for each token: captures, embedding, fc's output and its norm; keys and values on their way."""
    return captures + 3 * h + 2 * kv * 5


def query_values(h: int, inner: int, q: int, kv: int, steps: int) -> float:
    """Values kept for each response token. A guess keeps its inputs of every product, and backward adds the gradients
    of every output, of all guesses at once, before they are multiplied; joining them copies the largest."""
    forward = 3 * q + 3 * 2 * kv + q + 5 * h + 4 * inner
    backward = q + 2 * kv + h + 2 * inner + h
    joined = h + 2 * inner
    return q + 2 * kv + 2 * h + steps * (forward + backward + joined)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
