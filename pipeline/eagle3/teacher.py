"""What the target would say, for training: its likeliest tokens at each response token, from its stored states.

The states on disk are the target's alone; what the drafter is to learn from them depends on the draft vocabulary, so it
is made when training starts: one product with the target's head, of which the `TEACHER_TOKENS` likeliest draft tokens
are kept. Their probabilities are those in the target's *whole* vocabulary, so they sum to at most 1, and a position
where the target wants a token that the draft vocabulary lacks weighs little.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.eagle3.batch import Taught
from pipeline.eagle3.frozen import Vocab
from pipeline.eagle3.shards import Row

TEACHER_TOKENS = 64
CHUNK = {"cpu": 512, "cuda": 16384}  # response tokens at a time: [CHUNK, V] logits in fp32 exist at once


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
