"""The drafter's training loss as one would write it first: dense, padded, autograd throughout.

The measure for `pipeline.eagle3.ttt`: its gradients must be these (tests), and its speed is told as a multiple of this
(`train_speed.py`). Every slot of every row drafts at every guess, the logits exist in full, and nothing is shared
between guesses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.batch import Taught, span_left
from pipeline.eagle3.draft import DraftConfig, rms_norm, rope_table, rotate


def plain_loss(
    config: DraftConfig,
    weights: dict[str, Tensor],
    embed: Tensor,
    head: Tensor,
    rows: Sequence[Taught],
    rms: Tensor,
    steps: int,
    decay: float = 0.8,
) -> tuple[Tensor, list[float]]:
    """(loss, loss of each guess). `weights` in training's layout, requiring grad; compute dtype is theirs."""
    c, eps, dtype = config, config.rms_norm_eps, weights["fc"].dtype
    longest, batch = max(len(row) for row in rows), len(rows)
    tokens = torch.zeros(batch, longest, dtype=torch.long)
    captures = torch.zeros(batch, longest, c.capture_size, dtype=dtype)
    teacher = torch.zeros(batch, longest, len(head))  # the target's guess for the token after each
    left = torch.full((batch, longest), -1)  # of a response token: how many follow it
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row.tokens
        captures[i, : len(row)] = (row.aux.float() / rms).to(dtype)
        where = row.mask.nonzero().flatten()
        teacher[i].index_put_((where.unsqueeze(1), row.teacher_ids.long()), row.teacher_probs.float())
        left[i, where] = span_left(row.mask)
    one = torch.ones(c.hidden_size, dtype=dtype)
    q_w = torch.cat((weights["q_embed"], weights["q_hidden"]), 1)
    kv_w = torch.cat((weights["kv_embed"], weights["kv_hidden"]), 1)
    per_group = c.num_attention_heads // c.num_key_value_heads

    def shift(x: Tensor, by: int) -> Tensor:
        """Column t of the result is column t + by of x [B, T, ...]; zeros behind."""
        return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)

    def heads(x: Tensor) -> Tensor:
        return x.view(batch, longest, -1, c.head_dim).transpose(1, 2)

    hidden = F.linear(captures, weights["fc"])
    keys, values, losses, total = [], [], [], torch.zeros(())
    causal = torch.full((longest, longest), float("-inf")).triu(1)
    diagonal = torch.full((longest, longest), float("-inf")).fill_diagonal_(0)
    for step in range(steps):
        x = torch.cat((rms_norm(F.embedding(shift(tokens, 1 + step), embed), one, eps), rms_norm(hidden, one, eps)), -1)
        cos, sin = rope_table(c, torch.arange(longest) + step)
        k, v = F.linear(x, kv_w).chunk(2, -1)
        keys.append(rotate(heads(k), cos, sin).repeat_interleave(per_group, 1))
        values.append(heads(v).repeat_interleave(per_group, 1))
        q = rotate(heads(F.linear(x, q_w)), cos, sin)
        scores = q @ torch.cat(keys, 2).transpose(2, 3) / math.sqrt(c.head_dim)  # [B, A, T, (step + 1) T]
        scores = scores + torch.cat([causal] + [diagonal] * step, 1).to(dtype)
        attended = torch.softmax(scores, -1) @ torch.cat(values, 2)
        hidden = hidden + F.linear(attended.transpose(1, 2).reshape(batch, longest, -1), weights["o"])
        gate, up = F.linear(rms_norm(hidden, one, eps), weights["gate_up"]).chunk(2, -1)
        hidden = hidden + F.linear(F.silu(gate) * up, weights["down"])
        logits = F.linear(rms_norm(hidden, weights["norm"], eps), head).float()  # [B, T, Vd]
        # Slot t guesses token t+2+step; the response token it starts from is t+1, the teacher stands at t+1+step.
        wanted = shift(teacher, 1 + step)
        mass = wanted.sum(-1)
        judged = (shift(left + 1, 1) > step + 1).float()
        loss = -(wanted * torch.log_softmax(logits, -1)).sum(-1)  # mass x cross-entropy of the normalised teacher
        assert mass.shape == loss.shape
        loss = (loss * judged).sum() / judged.sum().clamp_min(1)
        losses.append(float(loss.detach()))
        total = total + loss * decay**step
    return total / sum(decay**k for k in range(steps)), losses
