"""The EAGLE-3 drafter: one decoder layer that guesses the target's next tokens from the target's own hidden states.

What a slot is. Slot t holds what is known after the target has read tokens 0..t and chosen token t+1:
the target's captures at t (the inputs of three of its layers, concatenated) and the embedding of token t+1.
The drafter's output at slot t predicts token t+2. Its rotary position is t. Drafting on from there, slot t+1
takes the embedding of the drafted token t+2 and, in place of captures, the drafter's own output at slot t.

    h  = fc(captures[t])                                    the first guess: `Drafter.fuse`
    h  = the drafter's output at slot t-1                   every further guess
    x  = [input_layernorm(embed(token t+1)) ; hidden_norm(h)]          2H
    r  = h + o(attention(q(x), k(x), v(x)))
    r  = r + mlp(post_attention_layernorm(r))
    r is what is fed forward; logits = lm_head(norm(r)) over the draft vocabulary.

This is the layer that SGLang (`LlamaForCausalLMEagle3`) and vLLM load, tensor for tensor; `expected_shapes` is the
table of names. Embeddings are the target's and are not in the file.

For whoever decodes with it (all tensors on one device, B rows, T slots, H the target's hidden size):

    drafter = Drafter.load(directory, embed=target_embedding_weight, dtype=torch.bfloat16)     # embed: [V, H]
    drafter.config.aux_layers               the layers whose *inputs* the target has to capture, e.g. (2, 15, 27)
    cache  = drafter.new_cache(batch=B, slots=S)
    hidden = drafter.fuse(captures)                                     # [B, T, 3H] -> [B, T, H]
    out    = drafter(token_ids, hidden, positions, cache)               # [B, T], [B, T, H], [B, T] -> [B, T, H]
    ids    = drafter.to_target(drafter.logits(out[:, -1]).argmax(-1))   # [B, Vd] -> target token ids [B]

`positions[b, i]` is the slot: rotary position and place in the cache are one number. A call writes its slots, and a
query at slot p sees slots 0..p, so nothing has to be erased when a draft is refused: write the true slots over it.
Rows may stand at different slots. Give padding a slot past every real one of its row (the last of the cache, say).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

# What is known of a drafter without torch, by the names that are used beside it.
from pipeline.eagle3.config import ARCHITECTURE as ARCHITECTURE
from pipeline.eagle3.config import DraftConfig as DraftConfig
from pipeline.eagle3.config import config_as_json as config_as_json
from pipeline.eagle3.config import config_for_target as config_for_target
from pipeline.eagle3.config import config_from_json as config_from_json
from pipeline.eagle3.config import default_aux_layers as default_aux_layers
from pipeline.eagle3.config import expected_shapes as expected_shapes
from pipeline.eagle3.config import plain_scaling as plain_scaling
from pipeline.eagle3.config import read_config as read_config
from pipeline.eagle3.config import read_rope as read_rope
from pipeline.eagle3.config import text_config as text_config
from pipeline.eagle3.config import write_config as write_config


def inverse_frequencies(config: DraftConfig) -> Tensor:
    """Rotary angles per position, [head_dim / 2], fp32. Raises ValueError for a scaling we do not know."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv = 1.0 / config.rope_theta**half
    scaling = config.rope_scaling
    if scaling is None:
        return inv
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind == "linear":
        return inv / float(scaling["factor"])
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        turns = float(scaling["original_max_position_embeddings"]) * inv / (2 * torch.pi)
        # Slow dimensions are stretched by the factor, fast ones left alone, those between interpolated.
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return inv * (keep + (1 - keep) / float(scaling["factor"]))
    if kind == "yarn":
        return _yarn(config, scaling, inv)
    raise ValueError(f"rope scaling {kind!r} is not supported by the built-in drafter")


def _yarn(config: DraftConfig, scaling: dict[str, Any], inv: Tensor) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): dimensions that turn more than beta_fast times within the original context
    are left alone, those that turn less than beta_slow times stretched by the factor, a ramp between."""
    size, original = config.head_dim, float(scaling["original_max_position_embeddings"])

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = dimension(float(scaling.get("beta_fast", 32))), dimension(float(scaling.get("beta_slow", 1)))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return inv * (1 - ramp) + inv / float(scaling["factor"]) * ramp


def attention_factor(config: DraftConfig) -> float:
    """What cos and sin are multiplied by: 1, but for YaRN (section 3.3: 0.1 ln(factor) + 1)."""
    scaling = config.rope_scaling
    if scaling is None or (scaling.get("rope_type") or scaling.get("type")) != "yarn":
        return 1.0
    return 0.1 * math.log(float(scaling["factor"])) + 1.0 if float(scaling["factor"]) > 1 else 1.0


def rope_table(config: DraftConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(cos, sin) of positions [...], each [..., head_dim / 2], fp32."""
    angles = positions.float().unsqueeze(-1) * inverse_frequencies(config).to(positions.device)
    factor = attention_factor(config)
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [..., head_dim], the two halves of a head being the pair (Llama's layout)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, the mean square in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def fast_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in one call, for decoding. (It rounds once, after the weight; training rounds before it as well.)"""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


@dataclass
class DraftCache:
    """Keys and values by slot: [B, KV heads, slots, head_dim]."""

    keys: Tensor
    values: Tensor


class Drafter(nn.Module):
    """The drafter for decoding. Training has its own forward pass (`ttt.py`) over the same tensors."""

    def __init__(self, config: DraftConfig, weights: dict[str, Tensor], embed: Tensor) -> None:
        """`weights` by the names of `expected_shapes`; all floating ones, and `embed` [V, H], of one dtype."""
        super().__init__()
        check_tensors(config, weights)
        self.config = config
        for name, tensor in weights.items():
            self.register_buffer(name.replace(".", "__"), tensor)
        self.register_buffer("embed", embed, persistent=False)
        self.register_buffer("target_ids", weights["d2t"] + torch.arange(config.draft_vocab_size), persistent=False)
        # Drafting one row is bound by the number of products and small operations, so what can be one is one.
        attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
        self.qkv = torch.cat([weights[f"{attention}{name}_proj.weight"] for name in "qkv"])  # [(N + 2K) * hd, 2H]
        self.gate_up = torch.cat([weights[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")])  # [2 * inner, H]
        cos, sin = rope_table(config, torch.arange(config.max_position_embeddings))
        # rotate(x) = x * cos + (halves of x swapped) * sin, with the sign in the table
        self.cos = torch.cat((cos, cos), -1).to(embed.dtype).unsqueeze(1)  # [positions, 1, hd]
        self.sin = torch.cat((-sin, sin), -1).to(embed.dtype).unsqueeze(1)

    @classmethod
    def load(cls, directory: Path | str, embed: Tensor, dtype: torch.dtype = torch.bfloat16) -> Drafter:
        """Reads an SGLang-layout directory. `embed` is the target's embedding matrix [V, H].
        Raises ValueError if a tensor is missing, unknown or of the wrong shape."""
        directory = Path(directory)
        config = read_config(directory)
        weights = load_file(directory / "model.safetensors")
        check_tensors(config, weights)
        cast_to = {k: v.to(dtype) if v.is_floating_point() else v for k, v in weights.items()}
        return cls(config, cast_to, embed.to(dtype)).eval()

    def w(self, name: str) -> Tensor:
        return cast(Tensor, getattr(self, name.replace(".", "__")))

    def new_cache(self, batch: int, slots: int) -> DraftCache:
        c, like = self.config, self.w("fc.weight")
        shape = (batch, c.num_key_value_heads, slots, c.head_dim)
        return DraftCache(like.new_zeros(shape), like.new_zeros(shape))

    def fuse(self, captures: Tensor) -> Tensor:
        """Captures [..., 3H] -> the hidden state of a first guess [..., H]."""
        return F.linear(captures, self.w("fc.weight"))

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache) -> Tensor:
        """token_ids [B, T] (the token *after* each slot), hidden [B, T, H], positions [B, T] -> output [B, T, H]."""
        c, mid = self.config, "midlayer."
        rows, slots = positions.shape
        heads, kv_heads, hd = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        x = F.embedding(token_ids, cast(Tensor, self.embed))
        x = torch.cat(
            (
                fast_norm(x, self.w(mid + "input_layernorm.weight"), c.rms_norm_eps),
                fast_norm(hidden, self.w(mid + "hidden_norm.weight"), c.rms_norm_eps),
            ),
            dim=-1,
        )  # [B, T, 2H]
        qkv = F.linear(x, self.qkv).view(rows, slots, heads + 2 * kv_heads, hd)
        qk = qkv[:, :, : heads + kv_heads]
        swapped = qk.roll(hd // 2, -1)
        qk.mul_(self.cos[positions]).addcmul_(swapped, self.sin[positions])
        mask: Tensor | None = None
        if rows == slots == 1:  # the usual call: one guess after another for one request
            slot = int(positions)
            used = slot + 1  # and it sees everything
            cache.keys[:, :, slot] = qkv[:, 0, heads : heads + kv_heads]
            cache.values[:, :, slot] = qkv[:, 0, heads + kv_heads :]
        else:
            row = torch.arange(rows, device=positions.device).unsqueeze(1)
            cache.keys[row, :, positions] = qkv[:, :, heads : heads + kv_heads]
            cache.values[row, :, positions] = qkv[:, :, heads + kv_heads :]
            used = int(positions.max()) + 1
            seen = torch.arange(used, device=positions.device) <= positions.unsqueeze(-1)  # [B, T, used]
            mask = seen.repeat(1, heads // kv_heads, 1).unsqueeze(1)  # [B, 1, G * T, used]
        # The query heads that share a key/value head are so many more queries of it: no key is repeated.
        q = qkv[:, :, :heads].view(rows, slots, kv_heads, -1, hd).permute(0, 2, 3, 1, 4)  # [B, KV, G, T, hd]
        attended = F.scaled_dot_product_attention(
            q.reshape(rows, kv_heads, -1, hd), cache.keys[:, :, :used], cache.values[:, :, :used], attn_mask=mask
        )
        merged = attended.view(rows, kv_heads, -1, slots, hd).permute(0, 3, 1, 2, 4).reshape(rows, slots, -1)
        hidden = hidden + F.linear(merged, self.w(mid + "self_attn.o_proj.weight"))
        x = fast_norm(hidden, self.w(mid + "post_attention_layernorm.weight"), c.rms_norm_eps)
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, self.w(mid + "mlp.down_proj.weight"))

    def logits(self, hidden: Tensor) -> Tensor:
        """Output [..., H] -> logits over the draft vocabulary [..., Vd]."""
        return F.linear(fast_norm(hidden, self.w("norm.weight"), self.config.rms_norm_eps), self.w("lm_head.weight"))

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary -> ids of the target's."""
        return cast(Tensor, self.target_ids)[draft_ids]


def check_tensors(config: DraftConfig, weights: dict[str, Tensor]) -> None:
    """Raises ValueError unless `weights` is exactly the table of `expected_shapes`. Engines skip what they do not know
    and leave what is missing random, without a word; here both are errors."""
    expected = expected_shapes(config)
    if unknown := sorted(set(weights) - set(expected)):
        raise ValueError(f"unknown tensors: {', '.join(unknown)}")
    if missing := sorted(set(expected) - set(weights)):
        raise ValueError(f"missing tensors: {', '.join(missing)}")
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(f"{name} is {tuple(weights[name].shape)}, expected {shape}")
