"""Training-time test: the drafter's loss over several chained guesses, and its gradient, at few FLOPs.

At guess 0 a slot sees true captures; at guess k it sees the drafter's own output of guess k-1, the embedding of the
token after, and for attention the true slots up to its own plus its own guesses 1..k. So training meets what decoding
will (EAGLE-3, section 3.2). The batch is packed: N tokens of whole rows one after another, no padding.

Where FLOPs are saved against a plain implementation, all of it exact:
- Only slots whose next token is a *response* token draft (M of N). Prompt slots are keys of guess 0, nothing more: they
  pass through fc and the k/v projections, not through q, o, the MLP or the head, and take no part in later guesses.
- q/k/v see [embedding ; hidden]. The embedding's part depends on the token alone, so it is computed once and shifted
  by k for guess k. Inputs that are data (embeddings, captures) get no gradient.
- The head is frozen (unless it is no copy of the target's): its gradient is not wanted. Loss and gradient of the logits
  are made chunk by chunk while they are in cache (`losses.py`); the [M, Vd] logits of a batch never exist in full.
- A weight's gradient is one matrix product over the inputs of all guesses (`Tape.flush`), not one for each.

Packed queries make shifts slices: query j belongs to response token j (its slot is the one before it). Guess k of
query j embeds response token j+k and is judged at j+k; where that runs into the next row its weight is 0.

Shapes: N tokens, M queries, H hidden, I intermediate, hd head size, A heads, G kv heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.attention import PLAIN as PLAIN_MERGE
from pipeline.eagle3.attention import Merge, attend_rows, attend_spans, causal_masks
from pipeline.eagle3.batch import Batch
from pipeline.eagle3.draft import DraftConfig, rope_table
from pipeline.eagle3.losses import chunk_rows, head_loss, shifted

# What is trained. Norms directly before a linear layer stay 1 (the layer absorbs any scale), and so does the head.
TRAINED = ("fc", "q_embed", "q_hidden", "kv_embed", "kv_hidden", "o", "gate_up", "down", "norm")


def trained_shapes(config: DraftConfig, *, head: bool = False) -> dict[str, tuple[int, ...]]:
    """Training's own layout: [q|k|v](2H) split by what they read, k and v together, gate and up together. `head`: with
    a head of the drafter's own, [Vd, H]."""
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
        **({"head": (config.draft_vocab_size, h)} if head else {}),
    }


def to_engine_layout(trained: dict[str, Tensor], capture_rms: Tensor) -> dict[str, Tensor]:
    """Training's tensors -> the engines' names (without d2t and t2d; with lm_head where it was trained). Captures were
    divided by `capture_rms` [3H] in training; engines do not do that, so `fc` does."""
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
        **({"lm_head.weight": trained["head"].clone()} if "head" in trained else {}),
    }


def from_engine_layout(engine: dict[str, Tensor], capture_rms: Tensor) -> dict[str, Tensor]:
    """The way back, fp32, without the head. Norms directly before a linear layer become part of it: the same layer."""
    t = {name.removeprefix("midlayer."): tensor.float() for name, tensor in engine.items()}
    h = t["fc.weight"].shape[0]
    embed, hidden = t["input_layernorm.weight"], t["hidden_norm.weight"]
    q, k, v = (t[f"self_attn.{name}_proj.weight"] for name in "qkv")
    gate_up = torch.cat((t["mlp.gate_proj.weight"], t["mlp.up_proj.weight"]))
    return {
        "fc": t["fc.weight"] * capture_rms,
        "q_embed": q[:, :h] * embed,
        "q_hidden": q[:, h:] * hidden,
        "kv_embed": torch.cat((k[:, :h], v[:, :h])) * embed,
        "kv_hidden": torch.cat((k[:, h:], v[:, h:])) * hidden,
        "o": t["self_attn.o_proj.weight"].clone(),
        "gate_up": gate_up * t["post_attention_layernorm.weight"],
        "down": t["mlp.down_proj.weight"].clone(),
        "norm": t["norm.weight"].clone(),
    }


class Tape:
    """Collects (input, output gradient) of each linear layer during backward; `flush` multiplies them once."""

    def __init__(self) -> None:
        self.pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self.whole: dict[str, list[Tensor]] = {}  # gradients that are made already, to be added up

    def flush(self, store: Callable[[str, Tensor], object]) -> None:
        for name, pairs in self.pairs.items():
            xs, dys = zip(*pairs, strict=True)
            x, dy = (xs[0], dys[0]) if len(xs) == 1 else (torch.cat(xs), torch.cat(dys))
            store(name, dy.t() @ x)
        for name, gradients in self.whole.items():
            store(name, torch.stack(gradients).sum(0) if len(gradients) > 1 else gradients[0])
        self.pairs.clear()
        self.whole.clear()


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


def rotate_packed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, hd] by cos/sin [T, 1, hd/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2I] -> [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rms_norm(x: Tensor, eps: float) -> Tensor:
    return _RmsNorm.apply(x, eps)  # type: ignore[no-untyped-call,no-any-return]


@dataclass(frozen=True)
class Ops:
    """The elementwise parts: what a GPU wants fused (`fused.gpu_ops`) and a processor does not."""

    norm: Callable[[Tensor, float], Tensor] = rms_norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate_packed
    swiglu: Callable[[Tensor], Tensor] = swiglu
    merge: Merge = PLAIN_MERGE  # where attention takes all rows in one call
    # (cos, sin) [positions, hd/2], made once; None: made for each batch
    rope: tuple[Tensor, Tensor] | None = None


PLAIN = Ops()


def guesses(
    config: DraftConfig, weights: dict[str, Tensor], embed: Tensor, batch: Batch, steps: int, tape: Tape, ops: Ops
) -> Iterator[Tensor]:
    """What the head is to judge after guess 0, 1 …: normed output [M, H] of every query. True tokens are embedded in
    place of guessed ones; for a chain of right guesses that is the same, and after a wrong one nobody counts."""
    c, w, eps = config, weights, config.rms_norm_eps

    def linear(x: Tensor, name: str) -> Tensor:
        return _Linear.apply(x, w[name], name, tape)  # type: ignore[no-untyped-call,no-any-return]

    def heads(x: Tensor) -> Tensor:
        return x.view(len(x), -1, c.head_dim)

    def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = rope_table(c, positions) if ops.rope is None else (t[positions] for t in ops.rope)
        return cos.unsqueeze(1).to(embed.dtype), sin.unsqueeze(1).to(embed.dtype)

    response, slots, spans = batch.response, batch.response - 1, batch.spans
    normed = ops.norm(F.embedding(batch.tokens, embed), eps)  # [N, H]
    q_embed, kv_embed = linear(normed[response], "q_embed"), linear(normed, "kv_embed")
    kv_own = kv_embed.index_select(0, response)
    kv_next = torch.cat((kv_embed[1:], kv_embed[-1:]))  # slot t embeds token t+1; a row's last slot is nobody's key
    masks = causal_masks(batch.rows, response, embed.dtype) if spans is None else []

    fused = linear(batch.captures, "fc")  # [N, H]
    fused_norm = ops.norm(fused, eps)
    k0, v0 = (heads(x) for x in (kv_next + linear(fused_norm, "kv_hidden")).chunk(2, -1))
    k0 = ops.rotate(k0, *angles(batch.positions))
    if spans is not None:
        k0, v0 = k0.index_select(0, spans.keep), v0.index_select(0, spans.keep)
    hidden, hidden_norm = fused.index_select(0, slots), fused_norm.index_select(0, slots)

    own: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        cos, sin = angles(batch.positions[slots] + step)
        q = ops.rotate(heads(shifted(q_embed, step) + linear(hidden_norm, "q_hidden")), cos, sin)
        if step:
            k, v = (heads(x) for x in (shifted(kv_own, step) + linear(hidden_norm, "kv_hidden")).chunk(2, -1))
            own.append((ops.rotate(k, cos, sin), v))
        if spans is None:
            attended = attend_rows(q, k0, v0, own, batch.rows, masks)
        else:
            attended = attend_spans(q, k0, v0, own, spans, ops.merge)
        hidden = hidden + linear(attended, "o")
        hidden = hidden + linear(ops.swiglu(linear(ops.norm(hidden, eps), "gate_up")), "down")
        hidden_norm = ops.norm(hidden, eps)  # of this guess: for the head now, and for the next guess's q/k/v
        yield hidden_norm * w["norm"]


@dataclass
class Outcome:
    loss: Tensor  # scalar, to call backward on: the weighted mean over guesses
    # [3, steps]: per guess the mean loss over what counted; the share of judged queries whose likeliest token is the
    # teacher's; the share of all queries for which that holds at every guess so far. Reading it waits for the device.
    numbers: Tensor

    @property
    def losses(self) -> list[float]:
        return self.numbers[0].tolist()

    @property
    def hits(self) -> list[float]:
        return self.numbers[1].tolist()

    @property
    def accept_length(self) -> float:
        return accept_length(self.numbers)


def accept_length(numbers: Tensor) -> float:
    """1 + chained hits: what greedy verification would accept, on training text. numbers: see `Outcome`."""
    return 1.0 + float(numbers[2].sum())


def ttt_loss(
    config: DraftConfig,
    weights: dict[str, Tensor],
    embed: Tensor,
    head: Tensor,
    batch: Batch,
    steps: int,
    tape: Tape,
    decay: float = 0.8,
    *,
    kind: str = "kl",
    counts: Sequence[int] | None = None,
    ops: Ops = PLAIN,
) -> Outcome:
    """The training-time-test loss of one batch. `weights`: the TRAINED tensors in compute dtype, requiring grad; with a
    "head" [Vd, H] among them that one is trained as well, else `head` is used and frozen, as embed [V, H] is. After
    loss.backward(), `tape.flush` has the gradients of all but `norm`, whose gradient is in weights["norm"].grad.
    Guess k counts decay**k. counts[k]: how many queries guess k is judged at, where the batch is a piece of a larger
    one (the pieces' losses then add up to the whole one's)."""
    if counts is None:
        counts = [int((batch.left > step).sum()) for step in range(steps)]
    sink = tape.whole.setdefault("head", []) if "head" in weights else None
    head = weights.get("head", head)
    total = embed.new_zeros((), dtype=torch.float32)
    alive = torch.ones_like(batch.left, dtype=torch.bool)
    numbers = []
    for step, made in enumerate(guesses(config, weights, embed, batch, steps, tape, ops)):
        judged = batch.left > step  # the token after response token j+step is a response token of the same row
        count = max(1, counts[step])
        loss, hits = head_loss(made, head, batch.teacher, judged.float() / count, kind, sink, step)
        total = total + loss * decay**step
        alive = alive & judged & (hits > 0)
        numbers.append(
            torch.stack((loss.detach(), (hits * judged).float().sum() / count, alive.sum() / max(1, counts[0])))
        )
    return Outcome(total / sum(decay**k for k in range(steps)), torch.stack(numbers, 1))


@torch.no_grad()
def accepted_everywhere(
    config: DraftConfig,
    weights: dict[str, Tensor],
    embed: Tensor,
    head: Tensor,
    target_ids: Tensor,
    batch: Batch,
    right: Tensor,
    steps: int,
    ops: Ops = PLAIN,
) -> Tensor:
    """[M]: how many guesses in a row are right, drafting behind each response token. target_ids [Vd]: the target's id
    of each draft token; right [M]: the token that the target wants after each response token. Guesses past the end of
    an answer do not count."""
    head = weights.get("head", head)
    alive = torch.ones_like(batch.left, dtype=torch.bool)
    accepted = torch.zeros_like(batch.left)
    for step, made in enumerate(guesses(config, weights, embed, batch, steps, Tape(), ops)):
        rows = chunk_rows(head)
        likeliest = torch.cat([(part @ head.t()).argmax(-1) for part in torch.split(made, rows)])
        alive = alive & (batch.left > step) & (target_ids[likeliest] == shifted(right, step))
        accepted += alive
    return accepted
