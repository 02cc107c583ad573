"""Where training starts: a drafter made by linear regression, which drafts before it has seen one training step.

The target's final normed hidden state at t+1 (which the frozen head turns into the guess for t+2) is regressed on what
slot t sees: the captures at t and the normed embedding of token t+1. `fc` takes the captures' part, and the residual
stream carries it to the head. The embedding's part goes through attention: q and k share a random projection, so a
slot attends to itself, and v and o are the two factors of the best approximation of that part at the rank that the
value heads have. The MLP starts by adding nothing.

Captures are divided by their root mean square per dimension first (raw ones have spikes of a thousand times the rest,
and an optimiser step that is small for the rest undoes the regression there); the export folds that back into `fc`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.batch import Batch
from pipeline.eagle3.draft import DraftConfig
from pipeline.eagle3.ttt import trained_shapes

RIDGE = 0.02  # of the mean diagonal
SHARPNESS = 14.0  # how much more a slot's score for itself is than for a slot that has nothing in common with it


def capture_rms(captures: Iterable[Tensor], size: int) -> Tensor:
    """Root mean square of each of the 3H capture dimensions over chunks [n, 3H]; 1 for a dimension never used."""
    total, count = torch.zeros(size, dtype=torch.float64), 0
    for chunk in captures:
        total = total.to(chunk.device) + chunk.double().square().sum(0)
        count += len(chunk)
    rms = (total / max(count, 1)).sqrt().float().cpu()
    return torch.where(rms > 1e-6, rms, torch.ones_like(rms))


def ridge_start(
    config: DraftConfig,
    batches: Iterable[tuple[Batch, Tensor]],
    embed: Tensor,
    final_norm: Tensor,
    seed: int = 0,
) -> dict[str, Tensor]:
    """The TRAINED tensors (see `ttt.py`), fp32, on the CPU. `batches`, on the device of embed [V, H]: each with the
    target's final normed hidden states [M, H] at its response tokens. final_norm [H]: the weight of the target's last
    norm."""
    h, size = config.hidden_size, config.capture_size
    device, count = embed.device, 0
    gram, moment = torch.zeros(size + h, size + h, device=device), torch.zeros(size + h, h, device=device)
    for batch, last in batches:
        slots = batch.response - 1
        seen = F.embedding(batch.tokens[batch.response], embed)
        x = torch.cat((batch.captures[slots], unit_rms(seen, config.rms_norm_eps)), 1)  # [M, 4H]
        # Without the norm's weight: the drafter's own norm, which starts as a copy of the target's, applies it.
        y = (last.float() / final_norm.to(device).float()).to(x.dtype)
        gram += (x.t() @ x).float()
        moment += (x.t() @ y).float()
        count += len(x)
    if count == 0:
        raise ValueError("no response tokens to start from")
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    solution = torch.linalg.solve(gram, moment).t()  # [H, 4H]
    from_captures, from_embed = solution[:, :size], solution[:, size:]

    shapes = trained_shapes(config)
    g = torch.Generator().manual_seed(seed)
    per_group = config.num_attention_heads // config.num_key_value_heads
    rank = min(config.num_key_value_heads * config.head_dim, h)
    # Reduced-rank regression: the directions in which this part of the prediction varies most.
    spread = from_embed @ gram[size:, size:] @ from_embed.t()
    main = torch.linalg.eigh(spread).eigenvectors[:, -rank:]  # [H, rank]
    values = torch.zeros(config.num_key_value_heads * config.head_dim, h, device=device)
    values[:rank] = main.t() @ from_embed
    heads = F.pad(main, (0, len(values) - rank)).view(h, config.num_key_value_heads, 1, config.head_dim)
    output = (heads / per_group).expand(-1, -1, per_group, -1).reshape(h, -1)

    # Scores are q.k / sqrt(hd); x has RMS 1 in both halves, so |Px|^2 = 2H x variance x hd.
    deviation = math.sqrt(SHARPNESS / (2 * h * math.sqrt(config.head_dim)))
    keys = (torch.randn(config.num_key_value_heads * config.head_dim, 2 * h, generator=g) * deviation).to(device)
    queries = keys.view(-1, 1, config.head_dim, 2 * h).expand(-1, per_group, -1, -1).reshape(-1, 2 * h)
    gate_up = torch.randn(shapes["gate_up"], generator=g) / math.sqrt(h)
    made = {
        "fc": from_captures.contiguous(),
        "q_embed": queries[:, :h].contiguous(),
        "q_hidden": queries[:, h:].contiguous(),
        "kv_embed": torch.cat((keys[:, :h], values)),
        "kv_hidden": torch.cat((keys[:, h:], torch.zeros_like(values))),
        "o": output.contiguous(),
        "gate_up": gate_up,
        "down": torch.zeros(shapes["down"]),
        "norm": final_norm.float().clone(),
    }
    return {name: tensor.cpu() for name, tensor in made.items()}


def random_start(config: DraftConfig, final_norm: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """The TRAINED tensors as trainers usually start: normal, by the square root of what each output sums over."""
    g = torch.Generator().manual_seed(seed)
    shapes = trained_shapes(config)
    made = {name: torch.randn(shape, generator=g) / math.sqrt(shape[-1]) for name, shape in shapes.items()}
    return made | {"norm": final_norm.float().clone()}


def unit_rms(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
