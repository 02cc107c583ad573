"""What the drafter's guesses are judged by: loss and gradient of the logits, made chunk by chunk while at hand.

    kl         cross-entropy with the target's distribution (forward KL but for a constant), as in EAGLE-3
    lk-alpha   -log(acceptance)
    lk-lambda  lambda x KL + (1 - lambda) x (1 - acceptance), lambda = exp(-3 x acceptance), not differentiated through

Acceptance is what rejection sampling accepts: the sum over the vocabulary of min(p, q) (Samarin et al., "LK losses",
arXiv 2602.23881; 3 is their best). p are probabilities of the target's *whole* vocabulary, q sums to 1 over the draft
vocabulary; so where the target wants a token that the draft vocabulary lacks, acceptance is small whatever the drafter
does. KL and -log count such a position by the mass that is in reach; 1 - acceptance needs no such weight.

Shapes: M queries, H hidden, Vd draft vocabulary, K candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LOSSES = ("kl", "lk-alpha", "lk-lambda")
LAMBDA_RATE = 3.0
# Logits at a time. CPU: 192 rows x 8192 in bf16 are 3 MB and stay in cache, while the head is repacked once for many.
# GPU: products want many rows, and half a gigabyte is nothing there.
CPU_ROWS, GPU_BYTES = 192, 1 << 29


@dataclass
class Top:
    """The target's likeliest draft tokens."""

    ids: Tensor  # [M, K] int64, likeliest first, distinct within a row
    probs: Tensor  # [M, K] fp32, of the target's whole vocabulary (sums to at most 1)


@dataclass
class Dense:
    """The target's probability of every draft token."""

    probs: Tensor  # [M, Vd] compute dtype, of the target's whole vocabulary


Teacher = Top | Dense


def shifted(x: Tensor, k: int) -> Tensor:
    """Row j of the result is row j+k of x [M, ...]; the last k rows repeat the last (their weight is 0)."""
    return x if k == 0 else torch.cat((x[k:], x[-1:].expand(min(k, len(x)), *x.shape[1:])))[: len(x)]


def rows_from(x: Tensor, first: int, count: int) -> Tensor:
    """x[first : first + count]; rows past the end repeat the last (their weight is 0)."""
    part = x[first : first + count]
    missing = count - len(part)
    return part if not missing else torch.cat((part, x[-1:].expand(missing, *x.shape[1:])))


def chunk_rows(head: Tensor) -> int:
    if head.device.type == "cpu":
        return CPU_ROWS
    return max(1024, GPU_BYTES // (len(head) * head.element_size()))


class _HeadLoss(torch.autograd.Function):
    """Forward makes loss *and* gradient, so the logits can be dropped chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        teacher: Teacher,
        weight: Tensor,
        kind: str,
        sink: list[Tensor] | None,
        ahead: int,
    ) -> tuple[Tensor, Tensor]:
        mass = shifted(teacher.probs.sum(-1, keepdim=True, dtype=torch.float32), ahead)
        scale = (weight * mass.squeeze(-1)).unsqueeze(-1)  # [M, 1]
        grad = torch.empty_like(hidden)
        losses, hits = hidden.new_zeros(len(hidden), dtype=torch.float32), hidden.new_zeros(len(hidden))
        head_grad = torch.zeros_like(head, dtype=torch.float32) if sink is not None else None
        step = chunk_rows(head)
        for first in range(0, len(hidden), step):
            at = slice(first, first + step)
            q = torch.softmax(hidden[at] @ head.t(), -1)  # [C, Vd]
            p = rows_from(teacher.probs, first + ahead, len(q))
            if kind == "kl" and isinstance(teacher, Top):
                target = (p / mass[at].clamp_min(1e-9)).to(hidden.dtype)
                losses[at], hits[at], dlogits = kl_of_top(q, rows_from(teacher.ids, first + ahead, len(q)), target)
            else:
                if isinstance(teacher, Top):
                    p = spread(rows_from(teacher.ids, first + ahead, len(q)), p, q)
                losses[at], hits[at], dlogits = dense(q, p, mass[at], kind)
            grad[at] = dlogits @ head
            if head_grad is not None:
                head_grad += (dlogits * scale[at].to(dlogits.dtype)).t() @ hidden[at]
        ctx.sink, ctx.head_grad = sink, head_grad
        ctx.save_for_backward(grad.mul_(scale))
        ctx.mark_non_differentiable(hits)
        return (losses * scale.squeeze(-1)).sum(), hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        if ctx.sink is not None:
            ctx.sink.append(ctx.head_grad * grads[0])
        return grad * grads[0].to(grad.dtype), None, None, None, None, None, None


def kl_of_top(q: Tensor, ids: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [C], hit [C], gradient of the logits [C, Vd], in the memory of q). target [C, K] sums to 1."""
    picked = q.gather(1, ids)  # [C, K]
    loss = -(target.float() * picked.float().clamp_min(1e-30).log()).sum(-1)
    hit = (picked[:, 0] >= q.amax(-1)).to(q.dtype)
    return loss, hit, q.scatter_(1, ids, picked - target)  # (a row's candidates are distinct)


def spread(ids: Tensor, probs: Tensor, like: Tensor) -> Tensor:
    """The candidates' probabilities [C, K] at their places, zero elsewhere: [C, Vd]."""
    return torch.zeros_like(like).scatter_(1, ids, probs.to(like.dtype))


def dense(q: Tensor, p: Tensor, mass: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """As `kl_of_top`, from p [C, Vd] (sums to mass [C, 1]). Loss and gradient are for one unit of `weight x mass`."""
    hit = (q.gather(1, p.argmax(-1, keepdim=True)).squeeze(1) >= q.amax(-1)).to(q.dtype)
    room = mass.clamp_min(1e-9)
    target = (p.float() / room).to(q.dtype)
    if kind == "kl":
        return cross_entropy(q, target), hit, q - target
    # d(acceptance)/d(logit v) = q_v (1[q_v < p_v] - sum of q where q < p)
    below = (q < p).to(q.dtype)
    part = q * below
    wanted = part.float().sum(-1, keepdim=True)  # [C, 1]
    acceptance = torch.minimum(p, q).float().sum(-1, keepdim=True).clamp_min(1e-6)
    d_acceptance = part - q * wanted.to(q.dtype)
    if kind == "lk-alpha":
        return -acceptance.log().squeeze(-1), hit, d_acceptance * (-1 / acceptance).to(q.dtype)
    lam = torch.exp(-LAMBDA_RATE * acceptance)
    loss = lam.squeeze(-1) * cross_entropy(q, target) + ((1 - lam) * (1 - acceptance) / room).squeeze(-1)
    return loss, hit, (q - target) * lam.to(q.dtype) - d_acceptance * ((1 - lam) / room).to(q.dtype)


def cross_entropy(q: Tensor, target: Tensor) -> Tensor:
    """[C], of distributions [C, Vd]."""
    return -(target.float() * q.float().clamp_min(1e-30).log()).sum(-1)


def head_loss(
    hidden: Tensor,
    head: Tensor,
    teacher: Teacher,
    weight: Tensor,
    kind: str = "kl",
    sink: list[Tensor] | None = None,
    ahead: int = 0,
) -> tuple[Tensor, Tensor]:
    """Loss of softmax(hidden @ head.T) against the teacher `ahead` queries further on.

    hidden [M, H], head [Vd, H], weight [M]. Backward appends the head's gradient [Vd, H] (fp32) to `sink`, where there
    is one. Returns (loss summed over queries, hits [M]: 1 where the likeliest draft token is the teacher's).
    """
    loss, hits = _HeadLoss.apply(hidden, head, teacher, weight, kind, sink, ahead)  # type: ignore[no-untyped-call]
    return loss, hits
