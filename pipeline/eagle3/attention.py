"""Attention of packed rows in training-time test: true slots of one's own row, and one's own guesses.

A query of guess k sees the slots of its row up to its own (keys and values of guess 0, the same for every guess) and,
of guesses 1..k, only itself. `attend_rows` goes row by row: on a processor, whose caches like it. `attend_spans` takes
all rows in one call: the past by a flash kernel over rows of any length, the few keys of its own beside it, and the two
merged by their log-sum-exp. Backward needs no second softmax: a flash backward kernel only wants the output and the
log-sum-exp of the *whole* softmax to make the gradient of its own part (as ring attention does it).

Shapes: N tokens, M queries, A heads, G kv heads, P = A/G, hd head size, R rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

Own = list[tuple[Tensor, Tensor]]  # (k, v) [M, G, hd] of guesses 1..k
Ranges = Sequence[tuple[int, int, int, int]]  # per row: tokens from, to (exclusive), queries from, to
DENSE_BYTES = 1 << 31  # of scores at a time, where no flash kernel is


def causal_masks(rows: Ranges, response: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Per row [queries, tokens]: a query sees the slots up to its own, which is the one before its response token."""
    masks = []
    for a, b, c, d in rows:
        slots = response[c:d] - 1 - a
        seen = torch.arange(b - a, device=slots.device) <= slots.unsqueeze(1)
        masks.append(torch.zeros(seen.shape, dtype=dtype, device=slots.device).masked_fill_(~seen, float("-inf")))
    return masks


def attend_rows(q: Tensor, k0: Tensor, v0: Tensor, own: Own, rows: Ranges, masks: list[Tensor]) -> Tensor:
    """q [M, A, hd]; k0, v0 [N, G, hd]; masks: per row [queries, tokens], 0 or -inf. Returns [M, A * hd]."""
    groups, hd = k0.shape[1], k0.shape[2]
    per = q.shape[1] // groups
    scale = 1 / math.sqrt(hd)
    outs = []
    for (a, b, c, d), mask in zip(rows, masks, strict=True):
        m = d - c
        grouped = (q[c:d] * scale).view(m, groups, per, hd).permute(1, 2, 0, 3)  # [G, P, m, hd]
        keys, values = k0[a:b].permute(1, 2, 0), v0[a:b].transpose(0, 1)  # [G, hd, t], [G, t, hd]
        scores = (grouped.reshape(groups, per * m, hd) @ keys).view(groups, per, m, b - a) + mask
        if own:
            # [G, 1, m, hd] each
            own_k = [k[c:d].transpose(0, 1).unsqueeze(1) for k, _ in own]
            own_v = [v[c:d].transpose(0, 1).unsqueeze(1) for _, v in own]
            diagonal = [(grouped * k).sum(-1, keepdim=True) for k in own_k]  # [G, P, m, 1]
            p = torch.softmax(torch.cat((scores, *diagonal), -1), -1)
            past = p[..., : b - a]
            out = (past.reshape(groups, per * m, b - a) @ values).view(groups, per, m, hd)
            for i, v in enumerate(own_v):
                out = out + p[..., b - a + i : b - a + i + 1] * v
        else:
            p = torch.softmax(scores, -1)
            out = (p.view(groups, per * m, b - a) @ values).view(groups, per, m, hd)
        outs.append(out.permute(2, 0, 1, 3).reshape(m, -1))
    return torch.cat(outs)


@dataclass
class Spans:
    """Where queries and the keys that they may see lie, for kernels that take rows of any length. Such a kernel aligns
    the last query with the last key, so keys after a row's last query are left out, and queries are those of *every*
    slot between a row's first and last: where a row holds several answers the gap is filled with queries of nobody."""

    q_lengths: list[int]  # per row
    k_lengths: list[int]
    cu_q: Tensor  # [R + 1] int32
    cu_k: Tensor  # [R + 1] int32
    keep: Tensor  # [K'] int64: the slots in [N] that are keys
    spread: Tensor | None  # [M] int64: the place of each query among the kernel's; None where they are the same


def make_spans(rows: Ranges, response: Tensor) -> Spans:
    """On the CPU: it needs the numbers."""
    q_lengths, k_lengths, keep, spread = [], [], [], []
    total = 0
    for a, _, c, d in rows:
        slots = response[c:d] - 1
        first, last = (int(slots[0]), int(slots[-1])) if d > c else (a, a - 1)
        q_lengths.append(last - first + 1)
        k_lengths.append(last - a + 1)
        keep.append(torch.arange(a, last + 1))
        spread.append(slots - first + total)
        total += last - first + 1
    places = torch.cat(spread)
    cu = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (q_lengths, k_lengths)]
    return Spans(q_lengths, k_lengths, cu[0], cu[1], torch.cat(keep), None if total == len(response) else places)


def attend_spans(q: Tensor, k: Tensor, v: Tensor, own: Own, spans: Spans, ops: Merge) -> Tensor:
    """q [M, A, hd]; k, v [K', G, hd] (at `spans.keep`). Returns [M, A * hd]."""
    flat = [tensor for pair in own for tensor in pair]
    out: Tensor = _Merged.apply(q, k, v, spans, ops, *flat)  # type: ignore[no-untyped-call]
    return out.reshape(len(q), -1)


class Merge(NamedTuple):
    """`merge` and `merge_backward`, or the same two compiled."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, list[Tensor]]]


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, spans: Spans, ops: Merge, *own: Tensor) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1])
        ctx.kernel = use_flash(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])
        full = q if spans.spread is None else q.new_zeros(sum(spans.q_lengths), *q.shape[1:])
        if spans.spread is not None:
            full[spans.spread] = q
        past, lse_past, ctx.rest = (flash_forward if ctx.kernel else dense_forward)(full, k, v, spans, scale)
        out, lse = past, lse_past  # [M', A, hd], [A, M'] fp32
        if own:
            if spans.spread is not None:
                past, lse_past = past[spans.spread], lse_past[:, spans.spread]
            merged, lse_own = ops.forward(q, past, lse_past.t(), list(own[0::2]), list(own[1::2]), scale)
            if spans.spread is None:
                out, lse = merged, lse_own.t().contiguous()
            else:
                out, lse = out.clone(), lse.clone()
                out[spans.spread], lse[:, spans.spread] = merged, lse_own.t()
        ctx.save_for_backward(q, k, v, out, lse, *own)
        ctx.spans, ctx.ops, ctx.scale = spans, ops, scale
        return out if spans.spread is None else out[spans.spread]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *own = ctx.saved_tensors
        spans, scale = ctx.spans, ctx.scale
        d_out = grads[0].contiguous()
        full, d_full = q, d_out
        if spans.spread is not None:
            full, d_full = torch.zeros_like(out), torch.zeros_like(out)
            full[spans.spread], d_full[spans.spread] = q, d_out
        backward = flash_backward if ctx.kernel else dense_backward
        dq, dk, dv = backward(d_full, full, k, v, out, lse, ctx.rest, spans, scale)
        if spans.spread is not None:
            dq, out, lse = dq[spans.spread], out[spans.spread], lse[:, spans.spread]
        if not own:
            return dq, dk, dv, None, None
        dq_own, d_own = ctx.ops.backward(d_out, q, out, lse.t(), own[0::2], own[1::2], scale)
        return dq + dq_own, dk, dv, None, None, *d_own


def merge(
    q: Tensor, past: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the past (past [M, A, hd], lse [M, A]) and to one's own keys, as one softmax: (out, lse)."""
    m, groups, hd = keys[0].shape
    grouped = q.view(m, groups, -1, hd).float()
    scores = [(grouped * k.unsqueeze(2).float()).sum(-1).view(m, -1) * scale for k in keys]  # [M, A] each
    whole = torch.stack((lse, *scores)).logsumexp(0)
    out = past.float() * torch.exp(lse - whole).unsqueeze(-1)
    for score, v in zip(scores, values, strict=True):
        weight = torch.exp(score - whole).view(m, groups, -1, 1)
        out = out + (weight * v.unsqueeze(2).float()).view(m, -1, hd)
    return out.to(q.dtype), whole


def merge_backward(
    d_out: Tensor, q: Tensor, out: Tensor, lse: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float
) -> tuple[Tensor, list[Tensor]]:
    """The part of one's own keys: (dq [M, A, hd], [dk, dv of each guess] [M, G, hd])."""
    m, groups, hd = keys[0].shape
    grouped, d_grouped = q.view(m, groups, -1, hd).float(), d_out.view(m, groups, -1, hd).float()
    delta = (d_grouped * out.view(m, groups, -1, hd).float()).sum(-1)  # [M, G, P]
    dq, own = torch.zeros_like(grouped), []
    for k, v in zip(keys, values, strict=True):
        wide_k, wide_v = k.unsqueeze(2).float(), v.unsqueeze(2).float()
        p = torch.exp((grouped * wide_k).sum(-1) * scale - lse.reshape(m, groups, -1))  # [M, G, P]
        d_score = (p * ((d_grouped * wide_v).sum(-1) - delta) * scale).unsqueeze(-1)
        dq += d_score * wide_k
        own += [(d_score * grouped).sum(2).to(k.dtype), (p.unsqueeze(-1) * d_grouped).sum(2).to(v.dtype)]
    return dq.view(q.shape).to(q.dtype), own


PLAIN = Merge(merge, merge_backward)


# --- the past: a flash kernel, or scores in full ----------------------------------------------------------------------


def flash_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor, Any]:
    """(out [M', A, hd], lse [A, M'] fp32, what the backward kernel wants of the forward one)."""
    k, v = k.contiguous(), v.contiguous()
    out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
        q.contiguous(), k, v, spans.cu_q, spans.cu_k, max(spans.q_lengths), max(spans.k_lengths), 0.0, True, False,
        scale=scale,
    )  # fmt: skip
    return out, lse, (state, unused)


def flash_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Any, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        d_out.contiguous(), q.contiguous(), k.contiguous(), v.contiguous(), out.contiguous(), lse.contiguous(),
        spans.cu_q, spans.cu_k, max(spans.q_lengths), max(spans.k_lengths), 0.0, True, *rest, scale=scale,
    )  # fmt: skip
    return made


def groups_of_rows(spans: Spans, heads: int) -> list[tuple[int, int]]:
    """Runs of rows whose padded scores fit into DENSE_BYTES, one row at least."""
    runs, first, longest_q, longest_k = [], 0, 0, 0
    for i, (m, t) in enumerate(zip(spans.q_lengths, spans.k_lengths, strict=True)):
        wider_q, wider_k = max(longest_q, m), max(longest_k, t)
        if i > first and (i + 1 - first) * wider_q * wider_k * heads * 4 > DENSE_BYTES:
            runs.append((first, i))
            first, wider_q, wider_k = i, m, t
        longest_q, longest_k = wider_q, wider_k
    return [*runs, (first, len(spans.q_lengths))]


def padded(lengths: list[int], start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(places [R, L] in the packed tensor, which of them are real [R, L]) of rows one after another from `start`."""
    n = torch.tensor(lengths)
    at = torch.arange(max(1, int(n.max())))
    real = at < n.unsqueeze(1)
    firsts = start + n.cumsum(0) - n
    return torch.where(real, firsts.unsqueeze(1) + at, 0).to(device), real.to(device)


def scores_of(
    q: Tensor, k: Tensor, places: tuple[Tensor, Tensor], m: list[int], t: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(q [R, G, P, Lq, hd], k [R, G, Lk, hd], scores [R, G, P, Lq, Lk], -inf where not seen), all fp32."""
    groups, hd = k.shape[1:]
    padded_q = q[places[0]].float().view(*places[0].shape, groups, -1, hd).permute(0, 2, 3, 1, 4)
    padded_k = k[places[1]].float().transpose(1, 2)
    scores = padded_q @ padded_k.unsqueeze(2).transpose(-1, -2) * scale
    row, column = torch.arange(places[0].shape[1], device=q.device), torch.arange(places[1].shape[1], device=q.device)
    shift = (torch.tensor(t) - torch.tensor(m)).to(q.device).view(-1, 1, 1)  # the last query sees the last key
    seen = column <= row.unsqueeze(1) + shift  # [R, Lq, Lk]
    return padded_q, padded_k, scores.masked_fill_(~seen[:, None, None], float("-inf"))


def dense_forward(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor, Any]:
    """`flash_forward` in plain operations, for dtypes and devices that have no kernel."""
    out, lse = torch.zeros_like(q), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)
    a = c = 0
    for first, last in groups_of_rows(spans, q.shape[1]):
        m, t = spans.q_lengths[first:last], spans.k_lengths[first:last]
        (at_q, real), (at_k, _) = padded(m, a, q.device), padded(t, c, q.device)
        _, _, scores = scores_of(q, k, (at_q, at_k), m, t, scale)
        whole = scores.logsumexp(-1)  # [R, G, P, Lq]
        made = torch.exp(scores - whole.unsqueeze(-1)) @ v[at_k].float().transpose(1, 2).unsqueeze(2)
        out[at_q[real]] = made.permute(0, 3, 1, 2, 4).flatten(2, 3)[real].to(q.dtype)
        lse[:, at_q[real]] = whole.permute(0, 3, 1, 2).flatten(2)[real].t()
        a, c = a + sum(m), c + sum(t)
    return out, lse, ()


def dense_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rest: Any, spans: Spans, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    groups = k.shape[1]
    delta = (d_out.float() * out.float()).sum(-1)  # [M', A]
    a = c = 0
    for first, last in groups_of_rows(spans, q.shape[1]):
        m, t = spans.q_lengths[first:last], spans.k_lengths[first:last]
        (at_q, real_q), (at_k, real_k) = padded(m, a, q.device), padded(t, c, q.device)
        rows, width = at_q.shape

        def grouped(x: Tensor, at: Tensor = at_q, shape: tuple[int, int] = (rows, width)) -> Tensor:
            return x[at].float().view(*shape, groups, -1, x.shape[-1]).permute(0, 2, 3, 1, 4)  # [R, G, P, Lq, .]

        padded_q, padded_k, scores = scores_of(q, k, (at_q, at_k), m, t, scale)
        p = torch.exp(scores - grouped(lse.t().unsqueeze(-1))).masked_fill_(~real_q[:, None, None, :, None], 0)
        d_grouped, padded_v = grouped(d_out), v[at_k].float().transpose(1, 2)
        d_scores = p * (d_grouped @ padded_v.unsqueeze(2).transpose(-1, -2) - grouped(delta.unsqueeze(-1))) * scale
        made_q = d_scores @ padded_k.unsqueeze(2)
        made_k, made_v = (d_scores.transpose(-1, -2) @ padded_q).sum(2), (p.transpose(-1, -2) @ d_grouped).sum(2)
        dq[at_q[real_q]] = made_q.permute(0, 3, 1, 2, 4).flatten(2, 3)[real_q].to(q.dtype)
        dk[at_k[real_k]] = made_k.transpose(1, 2)[real_k].to(k.dtype)
        dv[at_k[real_k]] = made_v.transpose(1, 2)[real_k].to(v.dtype)
        a, c = a + sum(m), c + sum(t)
    return dq, dk, dv


@cache
def use_flash(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the flash kernel is there and computes what `dense_forward` and `dense_backward` do: tried once, on
    random numbers. Kernels are called by torch's inner names, which may change: then training is slower, not wrong."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        return flash_difference(device, dtype, heads, kv_heads, head_dim) < 0.03
    except (RuntimeError, TypeError, AttributeError, ValueError):
        return False


def flash_difference(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> float:
    """Largest relative difference (by norm) between the two, over the output, the log-sum-exp and the gradients."""
    g = torch.Generator().manual_seed(0)
    rows = [(0, 70, 0, 37), (70, 110, 37, 60)]
    spans = make_spans(rows, torch.cat((torch.arange(30, 67), torch.arange(80, 103))))
    spans.cu_q, spans.cu_k = spans.cu_q.to(device), spans.cu_k.to(device)
    shapes = [(sum(spans.q_lengths), heads), *[(sum(spans.k_lengths), kv_heads)] * 2]
    q, k, v = (torch.randn(*shape, head_dim, generator=g).to(device, dtype) for shape in shapes)
    d_out, scale = torch.randn(q.shape, generator=g).to(device, dtype), 1 / math.sqrt(head_dim)
    made: list[list[Tensor]] = []
    for forward, backward in ((flash_forward, flash_backward), (dense_forward, dense_backward)):
        out, lse, rest = forward(q, k, v, spans, scale)
        if lse.shape != (heads, len(q)):
            raise RuntimeError(f"log-sum-exp is {tuple(lse.shape)}")
        made.append([out, lse, *backward(d_out, q, k, v, out, lse, rest, spans, scale)])
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*made, strict=True))
