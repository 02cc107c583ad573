"""Training-time test: the drafter's loss over several chained guesses, and its gradient, at few FLOPs.

At guess 0 a slot sees true captures; at guess k it sees the drafter's own output of guess k-1, the embedding of the
token after, and for attention the true slots up to its own plus its own guesses 1..k. So training meets what decoding
will (EAGLE-3, section 3.2). The batch is packed: N tokens of whole rows one after another, no padding.

Where FLOPs are saved against a plain implementation, all of it exact:
- Only slots whose next token is a *response* token draft (M of N). Prompt slots are keys of guess 0, nothing more: they
  pass through fc and the k/v projections, not through q, o, the MLP or the head, and take no part in later guesses.
- q/k/v see [embedding ; hidden]. The embedding's part depends on the token alone, so it is computed once and shifted
  by k for guess k. Inputs that are data (embeddings, captures) get no gradient.
- The head is frozen: its gradient is not wanted. Loss and gradient of the logits are made chunk by chunk while they
  are in cache (`head_kl`); the [M, Vd] logits of a batch never exist in full.
- A weight's gradient is one matrix product over the inputs of all guesses (`Tape.flush`), not one for each.

Packed queries make shifts slices: query j belongs to response token j (its slot is the one before it). Guess k of
query j embeds response token j+k and is judged at j+k; where that runs into the next row its weight is 0.

Shapes: N tokens, M queries, H hidden, I intermediate, hd head size, A heads, G kv heads, K teacher's candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.draft import DraftConfig, rope_table

# What is trained. Norms directly before a linear layer stay 1 (the layer absorbs any scale), and so does the head.
TRAINED = ("fc", "q_embed", "q_hidden", "kv_embed", "kv_hidden", "o", "gate_up", "down", "norm")


def trained_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Training's own layout: [q|k|v](2H) split by what they read, k and v together, gate and up together."""
    h, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "fc": (h, config.capture_size),
        "q_embed": (q, h),
        "q_hidden": (q, h),
        "kv_embed": (2 * kv, h),
        "kv_hidden": (2 * kv, h),
        "o": (h, q),
        "gate_up": (2 * inner, h),
        "down": (h, inner),
        "norm": (h,),
    }


def to_engine_layout(trained: dict[str, Tensor], capture_rms: Tensor) -> dict[str, Tensor]:
    """Training's tensors -> the engines' names (without lm_head, d2t, t2d). Captures were divided by `capture_rms` [3H]
    in training; engines do not do that, so `fc` does."""
    h = trained["o"].shape[0]
    ones = torch.ones(h)
    k_embed, v_embed = trained["kv_embed"].chunk(2)
    k_hidden, v_hidden = trained["kv_hidden"].chunk(2)
    gate, up = trained["gate_up"].chunk(2)
    return {
        "fc.weight": trained["fc"] / capture_rms,
        "midlayer.hidden_norm.weight": ones,
        "midlayer.input_layernorm.weight": ones.clone(),
        "midlayer.post_attention_layernorm.weight": ones.clone(),
        "midlayer.self_attn.q_proj.weight": torch.cat((trained["q_embed"], trained["q_hidden"]), 1),
        "midlayer.self_attn.k_proj.weight": torch.cat((k_embed, k_hidden), 1),
        "midlayer.self_attn.v_proj.weight": torch.cat((v_embed, v_hidden), 1),
        "midlayer.self_attn.o_proj.weight": trained["o"].clone(),
        "midlayer.mlp.gate_proj.weight": gate.clone(),
        "midlayer.mlp.up_proj.weight": up.clone(),
        "midlayer.mlp.down_proj.weight": trained["down"].clone(),
        "norm.weight": trained["norm"].clone(),
    }


@dataclass
class Batch:
    """Whole rows, packed. Compute dtype for floats."""

    tokens: Tensor  # [N] int64
    captures: Tensor  # [N, 3H], each dimension divided by its RMS over the data
    rows: list[tuple[int, int, int, int]]  # per row: tokens from, to (exclusive), queries from, to
    response: Tensor  # [M] int64: where in [N] the response tokens are
    positions: Tensor  # [N] int64, within the row
    teacher_ids: Tensor  # [M, K] int64 draft ids, likeliest first: the target's guess for the token after each
    teacher_probs: Tensor  # [M, K] fp32, of the target's whole vocabulary (sums to at most 1)
    left: Tensor  # [M] int64: response tokens after this one within its row's span


class Tape:
    """Collects (input, output gradient) of each linear layer during backward; `flush` multiplies them once."""

    def __init__(self) -> None:
        self.pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def flush(self, store: Callable[[str, Tensor], object]) -> None:
        for name, pairs in self.pairs.items():
            xs, dys = zip(*pairs, strict=True)
            x, dy = (xs[0], dys[0]) if len(xs) == 1 else (torch.cat(xs), torch.cat(dys))
            store(name, dy.t() @ x)
        self.pairs.clear()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, name: str, tape: Tape) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.name, ctx.tape = name, tape
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, w = ctx.saved_tensors
        ctx.tape.pairs.setdefault(ctx.name, []).append((x, grads[0]))
        return (grads[0] @ w if ctx.needs_input_grad[0] else None), None, None, None


class _RmsNorm(torch.autograd.Function):
    """x / rms(x), no weight, in fp32 inside."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        y = (x * scale).to(x.dtype)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        dy = grads[0].float()
        return ((dy - y * (dy * y).mean(-1, keepdim=True)) * scale).to(y.dtype), None


class _HeadKl(torch.autograd.Function):
    """Forward makes loss *and* gradient, so the logits can be dropped chunk by chunk."""

    CHUNK = 192  # rows: 192 x 8192 bf16 logits are 3 MB and stay in cache, while the head is repacked once for many

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        mass = probs.sum(-1, keepdim=True)
        target = (probs / mass.clamp_min(1e-9)).to(hidden.dtype)
        scale = (weight * mass.squeeze(-1)).unsqueeze(-1)  # [M, 1]
        grad = torch.empty_like(hidden)
        losses, hits = hidden.new_zeros(len(hidden), dtype=torch.float32), hidden.new_zeros(len(hidden))
        for first in range(0, len(hidden), _HeadKl.CHUNK):
            at = slice(first, first + _HeadKl.CHUNK)
            q = torch.softmax(hidden[at] @ head.t(), -1)  # [C, Vd]
            picked = q.gather(1, ids[at])  # [C, K]
            losses[at] = -(target[at].float() * picked.float().clamp_min(1e-30).log()).sum(-1)
            hits[at] = (picked[:, 0] >= q.amax(-1)).to(hidden.dtype)
            grad[at] = q.scatter_(1, ids[at], picked - target[at]) @ head  # (a row's candidates are distinct)
        ctx.save_for_backward(grad.mul_(scale))
        ctx.mark_non_differentiable(hits)
        return (losses * scale.squeeze(-1)).sum(), hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None, None


def head_kl(hidden: Tensor, head: Tensor, ids: Tensor, probs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of softmax(hidden @ head.T) against the teacher's candidates (a KL divergence but for a constant).

    hidden [M, H], head [Vd, H] (frozen), ids/probs [M, K], weight [M]. A position counts weight x (the teacher's mass
    inside the candidates): where the target wants a token that the draft vocabulary lacks there is little to learn.
    Returns (loss summed, hits [M]: 1 where the likeliest draft token is the teacher's).
    """
    loss, hits = _HeadKl.apply(hidden, head, ids, probs, weight)  # type: ignore[no-untyped-call]
    return loss, hits


def rotate_packed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, hd] by cos/sin [T, 1, hd/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def attend(
    q: Tensor, k0: Tensor, v0: Tensor, own: list[tuple[Tensor, Tensor]], batch: Batch, masks: list[Tensor]
) -> Tensor:
    """Guess k's attention. q [M, A, hd]; k0, v0 [N, G, hd] of guess 0; own: (k, v) [M, G, hd] of guesses 1..k, of which
    a query sees only its own. masks: per row [queries, tokens], 0 or -inf. Returns [M, A * hd]."""
    groups, hd = k0.shape[1], k0.shape[2]
    per = q.shape[1] // groups
    scale = 1 / math.sqrt(hd)
    outs = []
    for (a, b, c, d), mask in zip(batch.rows, masks, strict=True):
        m = d - c
        grouped = (q[c:d] * scale).view(m, groups, per, hd).permute(1, 2, 0, 3)  # [G, A/G, m, hd]
        keys, values = k0[a:b].permute(1, 2, 0), v0[a:b].transpose(0, 1)  # [G, hd, t], [G, t, hd]
        scores = (grouped.reshape(groups, per * m, hd) @ keys).view(groups, per, m, b - a) + mask
        if own:
            # [G, 1, m, hd] each
            own_k = [k[c:d].transpose(0, 1).unsqueeze(1) for k, _ in own]
            own_v = [v[c:d].transpose(0, 1).unsqueeze(1) for _, v in own]
            diagonal = [(grouped * k).sum(-1, keepdim=True) for k in own_k]  # [G, A/G, m, 1]
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


def causal_masks(batch: Batch, dtype: torch.dtype) -> list[Tensor]:
    """Per row [queries, tokens]: a query sees the slots up to its own, which is the one before its response token."""
    masks = []
    for a, b, c, d in batch.rows:
        slots = batch.response[c:d] - 1 - a
        seen = torch.arange(b - a, device=slots.device) <= slots.unsqueeze(1)
        masks.append(torch.zeros(seen.shape, dtype=dtype, device=slots.device).masked_fill_(~seen, float("-inf")))
    return masks


def shifted(x: Tensor, k: int) -> Tensor:
    """Row j of the result is row j+k of x [M, ...]; the last k rows repeat the last (their weight is 0)."""
    return x if k == 0 else torch.cat((x[k:], x[-1:].expand(k, *x.shape[1:])))


@dataclass
class Outcome:
    loss: Tensor  # scalar: the weighted mean over guesses
    losses: list[float]  # per guess, mean over what counted
    hits: list[float]  # per guess: share of judged queries whose likeliest token is the teacher's
    accept_length: float  # 1 + chained hits: what greedy verification would accept, on training text


def ttt_loss(
    config: DraftConfig,
    weights: dict[str, Tensor],
    embed: Tensor,
    head: Tensor,
    batch: Batch,
    steps: int,
    tape: Tape,
    decay: float = 0.8,
) -> Outcome:
    """The training-time-test loss of one batch. `weights`: the TRAINED tensors in compute dtype, requiring grad;
    embed [V, H] and head [Vd, H] are frozen. After loss.backward(), `tape.flush` has the gradients of all but `norm`,
    whose gradient is in weights["norm"].grad. Guess k counts decay**k."""
    c, w, eps = config, weights, config.rms_norm_eps

    def linear(x: Tensor, name: str) -> Tensor:
        return _Linear.apply(x, w[name], name, tape)  # type: ignore[no-untyped-call,no-any-return]

    def norm(x: Tensor) -> Tensor:
        return _RmsNorm.apply(x, eps)  # type: ignore[no-untyped-call,no-any-return]

    def heads(x: Tensor) -> Tensor:
        return x.view(len(x), -1, c.head_dim)

    response, slots = batch.response, batch.response - 1
    normed = norm(F.embedding(batch.tokens, embed))  # [N, H]
    q_embed, kv_embed = linear(normed[response], "q_embed"), linear(normed, "kv_embed")
    kv_own = kv_embed[response]
    kv_next = torch.cat((kv_embed[1:], kv_embed[-1:]))  # slot t embeds token t+1; a row's last slot is nobody's key
    cos_all, sin_all = (t.unsqueeze(1).to(embed.dtype) for t in rope_table(c, batch.positions))
    masks = causal_masks(batch, embed.dtype)

    fused = linear(batch.captures, "fc")  # [N, H]
    fused_norm = norm(fused)
    k0, v0 = (heads(x) for x in (kv_next + linear(fused_norm, "kv_hidden")).chunk(2, -1))
    k0 = rotate_packed(k0, cos_all, sin_all)
    hidden, hidden_norm = fused[slots], fused_norm[slots]

    own: list[tuple[Tensor, Tensor]] = []
    total = embed.new_zeros((), dtype=torch.float32)
    alive = torch.ones_like(batch.left, dtype=torch.bool)
    losses, hit_rates, length = [], [], 1.0
    starts = max(1, int((batch.left > 0).sum()))
    for step in range(steps):
        cos, sin = (t.unsqueeze(1).to(embed.dtype) for t in rope_table(c, batch.positions[slots] + step))
        q = rotate_packed(heads(shifted(q_embed, step) + linear(hidden_norm, "q_hidden")), cos, sin)
        if step:
            k, v = (heads(x) for x in (shifted(kv_own, step) + linear(hidden_norm, "kv_hidden")).chunk(2, -1))
            own.append((rotate_packed(k, cos, sin), v))
        hidden = hidden + linear(attend(q, k0, v0, own, batch, masks), "o")
        gate, up = linear(norm(hidden), "gate_up").chunk(2, -1)
        hidden = hidden + linear(F.silu(gate) * up, "down")
        hidden_norm = norm(hidden)  # of this guess's output: for the head now, and for the next guess's q/k/v

        judged = batch.left > step  # the token after response token j+step is a response token of the same row
        count = max(1, int(judged.sum()))
        ids, probs = shifted(batch.teacher_ids, step), shifted(batch.teacher_probs, step)
        loss, hits = head_kl(hidden_norm * w["norm"], head, ids, probs, judged.float() / count)
        total = total + loss * decay**step
        alive = alive & judged & (hits > 0)
        losses.append(float(loss.detach()))
        hit_rates.append(float((hits * judged).sum()) / count)
        length += int(alive.sum()) / starts
    return Outcome(total / sum(decay**k for k in range(steps)), losses, hit_rates, length)
