"""Rows packed into one batch: N tokens of whole rows one after another, no padding, M of them response tokens.

`gather` copies rows out of their mapped files, on the CPU (into page-locked memory where a GPU is to fetch it);
`to_batch` does the arithmetic where training computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.eagle3.attention import Spans, make_spans
from pipeline.eagle3.losses import Dense, Teacher, Top
from pipeline.eagle3.shards import Row


@dataclass
class Taught(Row):
    """A row with its teacher, at each of its M response tokens."""

    teacher_ids: Tensor  # [M, K] draft-vocabulary ids, likeliest first, int32
    teacher_probs: Tensor  # [M, K] fp16
    whole: Tensor | None = None  # [M] fp32: log of the sum over the target's whole vocabulary, where `Dense` is wanted


@dataclass
class Gathered:
    """One batch as it lies on disk."""

    tokens: Tensor  # [N] int64
    aux: Tensor  # [N, 3H] bf16
    rows: list[tuple[int, int, int, int]]  # per row: tokens from, to (exclusive), queries from, to
    response: Tensor  # [M] int64: where in [N] the response tokens are
    positions: Tensor  # [N] int64, within the row
    left: Tensor  # [M] int64: response tokens after this one within its row's span
    ids: Tensor  # [M, K] int32
    probs: Tensor  # [M, K] fp16
    last: Tensor | None  # [M, H] bf16: final states at the response tokens, where somebody asked for them
    whole: Tensor | None  # [M] fp32
    spans: Spans | None


@dataclass
class Batch:
    """Compute dtype for floats."""

    tokens: Tensor  # [N] int64
    captures: Tensor  # [N, 3H], each dimension divided by its RMS over the data
    rows: list[tuple[int, int, int, int]]
    response: Tensor  # [M] int64
    positions: Tensor  # [N] int64
    teacher: Teacher  # the target's guess for the token after each response token
    left: Tensor  # [M] int64
    spans: Spans | None = None  # for attention in one call; None: row by row


def span_left(mask: Tensor) -> Tensor:
    """For each response token [M] of mask [T] (of rows one after another: a row's first token is never a response
    token), how many more follow it without a gap: a row may hold several answers."""
    at = torch.arange(len(mask))
    ends = torch.where(mask, len(mask), at).flip(0).cummin(0).values.flip(0)  # the next token that is not a response
    return (ends - at - 1)[mask]


def judged_counts(mask: Tensor, steps: int) -> Tensor:
    """[steps] int64: of a row's response tokens, how many guess k is judged at."""
    left = span_left(mask)
    return (left.unsqueeze(1) > torch.arange(steps)).sum(0)


def joined(tensors: list[Tensor], pinned: bool) -> Tensor:
    """torch.cat, into page-locked memory where asked for: a GPU fetches from there while it computes."""
    if not pinned:
        return torch.cat(tensors)
    size = sum(len(tensor) for tensor in tensors)
    return torch.cat(tensors, out=torch.empty(size, *tensors[0].shape[1:], dtype=tensors[0].dtype, pin_memory=True))


def gather(rows: Sequence[Taught], *, with_last: bool, with_spans: bool, pinned: bool = False) -> Gathered:
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.cat([row.mask for row in rows])
    ends = lengths.cumsum(0)
    before = torch.cat((torch.zeros(1, dtype=torch.long), mask.cumsum(0)))
    a, b = (ends - lengths).tolist(), ends.tolist()
    layout = list(zip(a, b, before[a].tolist(), before[b].tolist(), strict=True))
    response = mask.nonzero().flatten()
    whole = [row.whole for row in rows if row.whole is not None]
    made = Gathered(
        tokens=joined([row.tokens for row in rows], pinned),
        aux=joined([row.aux for row in rows], pinned),
        rows=layout,
        response=response,
        positions=torch.arange(len(mask)) - (ends - lengths).repeat_interleave(lengths),
        left=span_left(mask),
        ids=joined([row.teacher_ids for row in rows], pinned),
        probs=joined([row.teacher_probs for row in rows], pinned),
        last=joined([row.last[row.mask] for row in rows], pinned) if with_last else None,
        whole=torch.cat(whole) if whole else None,
        spans=make_spans(layout, response) if with_spans else None,
    )
    if pinned:
        made = moved(made, lambda t: t if t.numel() == 0 or t.is_pinned() else t.pin_memory())
    return made


def moved(g: Gathered, move: Callable[[Tensor], Tensor]) -> Gathered:
    """The same, each tensor through `move`."""

    def maybe(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else move(tensor)

    spans = g.spans
    if spans is not None:
        spans = replace(
            spans, cu_q=move(spans.cu_q), cu_k=move(spans.cu_k), keep=move(spans.keep), spread=maybe(spans.spread)
        )
    return replace(
        g,
        tokens=move(g.tokens),
        aux=move(g.aux),
        response=move(g.response),
        positions=move(g.positions),
        left=move(g.left),
        ids=move(g.ids),
        probs=move(g.probs),
        last=maybe(g.last),
        whole=maybe(g.whole),
        spans=spans,
    )


def to_batch(g: Gathered, rms: Tensor, dtype: torch.dtype, head: Tensor | None = None) -> Batch:
    """`rms` [3H] divides the captures. head [Vd, H]: of the target; the teacher is then its whole distribution over
    the draft vocabulary (g.last and g.whole must be there), else its likeliest tokens."""
    teacher: Teacher
    if head is None:
        teacher = Top(g.ids.long(), g.probs.float())
    else:
        if g.last is None or g.whole is None:
            raise ValueError("a dense teacher needs the final states and their normaliser")
        teacher = Dense(dense_teacher(g.last, g.whole, head))
    return Batch(
        tokens=g.tokens,
        captures=(g.aux.float() / rms).to(dtype),
        rows=g.rows,
        response=g.response,
        positions=g.positions,
        teacher=teacher,
        left=g.left,
        spans=g.spans,
    )


@torch.no_grad()
def dense_teacher(last: Tensor, whole: Tensor, head: Tensor) -> Tensor:
    """[M, Vd] in the head's dtype: the target's probabilities, from its final states [M, H]."""
    probs = torch.empty(len(last), len(head), dtype=head.dtype, device=head.device)
    for first in range(0, len(last), 4096):
        at = slice(first, first + 4096)
        probs[at] = torch.exp((last[at].to(head.dtype) @ head.t()).float() - whole[at].unsqueeze(1)).to(head.dtype)
    return probs


def pack(rows: Sequence[Taught], rms: Tensor, dtype: torch.dtype) -> tuple[Batch, Tensor]:
    """Rows -> (batch for attention row by row, final normed hidden states at the response tokens [M, H])."""
    gathered = gather(rows, with_last=True, with_spans=False)
    assert gathered.last is not None
    return to_batch(gathered, rms, dtype), gathered.last
