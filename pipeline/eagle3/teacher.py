"""What the target would say, for training: its likeliest tokens at each response token, from its stored states.

The states on disk are the target's alone; what the drafter is to learn from them depends on the draft vocabulary, so it
is made when training starts: one product with the target's head, of which the `TEACHER_TOKENS` likeliest draft tokens
are kept. Their probabilities are those in the target's *whole* vocabulary, so they sum to at most 1, and a position
where the target wants a token that the draft vocabulary lacks weighs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.eagle3.frozen import Vocab
from pipeline.eagle3.shards import Row
from pipeline.eagle3.ttt import Batch

TEACHER_TOKENS = 64
CHUNK = {"cpu": 512, "cuda": 16384}  # response tokens at a time: [CHUNK, V] logits in fp32 exist at once


@dataclass
class Taught(Row):
    """A row with its teacher, at each of its M response tokens."""

    teacher_ids: Tensor  # [M, K] draft-vocabulary ids, likeliest first, int32
    teacher_probs: Tensor  # [M, K] fp16


@torch.inference_mode()
def likeliest(last: Tensor, head: Tensor, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(draft ids [M, K] int32, probabilities [M, K] fp16) for states last [M, H]; head [V, H], target_ids [Vd]."""
    logits = last.to(head.dtype) @ head.t()  # [M, V]
    candidates = logits[:, target_ids].float().topk(min(TEACHER_TOKENS, len(target_ids)), -1)
    whole = logits.float().logsumexp(-1, keepdim=True)
    return candidates.indices.to(torch.int32), (candidates.values - whole).exp().half()


def teach(rows: Sequence[Row], head: Tensor, vocab: Vocab) -> list[Taught]:
    """Every row with its teacher. head [V, H] is the target's whole head, on the device that is to do it."""
    device = head.device
    target_ids = vocab.target_ids.to(device)
    taught: list[Taught] = []
    chunk: list[Row] = []
    size = 0

    def flush() -> None:
        last = torch.cat([row.last[row.mask] for row in chunk]).to(device)
        ids, probs = (t.cpu() for t in likeliest(last, head, target_ids))
        at = 0
        for row in chunk:
            m = int(row.mask.sum())
            taught.append(Taught(row.id, row.tokens, row.mask, row.aux, row.last, ids[at : at + m], probs[at : at + m]))
            at += m

    for row in rows:
        chunk.append(row)
        size += int(row.mask.sum())
        if size >= CHUNK[device.type]:
            flush()
            chunk, size = [], 0
    if chunk:
        flush()
    return taught


def span_left(mask: Tensor) -> Tensor:
    """For each response token of a row [M], how many more follow it without a gap (a row may hold several answers)."""
    left, run = [], 0
    for flag in reversed(mask.tolist()):
        run = run + 1 if flag else 0
        if flag:
            left.append(run - 1)
    return torch.tensor(left[::-1], dtype=torch.long)


def pack(rows: Sequence[Taught], rms: Tensor, dtype: torch.dtype) -> tuple[Batch, Tensor]:
    """Rows -> (batch for `ttt_loss`, final normed hidden states at the response tokens [M, H]). `rms` [3H] divides the
    captures."""
    layout, responses, positions, a, c = [], [], [], 0, 0
    for row in rows:
        where = row.mask.nonzero().flatten()
        layout.append((a, a + len(row), c, c + len(where)))
        responses.append(where + a)
        positions.append(torch.arange(len(row)))
        a, c = a + len(row), c + len(where)
    captures = torch.cat([row.aux for row in rows])
    batch = Batch(
        tokens=torch.cat([row.tokens for row in rows]),
        captures=(captures.float() / rms).to(dtype),
        rows=layout,
        response=torch.cat(responses),
        positions=torch.cat(positions),
        teacher_ids=torch.cat([row.teacher_ids for row in rows]).long(),
        teacher_probs=torch.cat([row.teacher_probs for row in rows]).float(),
        left=torch.cat([span_left(row.mask) for row in rows]),
    )
    return batch, torch.cat([row.last[row.mask] for row in rows])
