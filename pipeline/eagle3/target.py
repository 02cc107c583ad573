"""The target: a Llama decoder in plain torch, the model that the drafter drafts for.

Everything a drafter needs from its target, and nothing else: greedy-exact decoding with a static key/value cache whose
rows may stand at different positions (continuous batching, and verifying drafts), the final normed hidden states, and
the three EAGLE-3 captures. Weights come from a Hugging Face directory through one strict table of keys.

Letters in shape comments: B rows, T new tokens a row, S positions seen so far, H hidden size, D head size, N query
heads, K key/value heads, G = N // K query heads that share one key/value head, V vocabulary, F feed-forward size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor


class TargetError(ValueError):
    """The model directory is not what the decoder can load; the message is one sentence for the user."""


@dataclass(frozen=True)
class TargetConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool  # the output head is the embedding matrix
    bos: int | None
    eos: tuple[int, ...]

    @property
    def capture_layers(self) -> tuple[int, int, int]:
        """The layers whose *inputs* EAGLE-3 reads: SGLang's default."""
        return (2, self.layers // 2, self.layers - 3)


def read_config(directory: Path) -> TargetConfig:
    """The directory's config.json; `TargetError` for anything but a plain Llama."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TargetError(f"cannot read {path}: {error}") from error
    if raw.get("model_type") != "llama":
        raise TargetError(f"{path}: model_type is {raw.get('model_type')!r}, the reference engine decodes 'llama' only")
    rope = raw.get("rope_parameters") or {}  # transformers >= 5 nests what was flat before
    scaling = raw.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise TargetError(f"{path}: scaled rotary embeddings are not supported")
    if raw.get("attention_bias") or raw.get("mlp_bias") or raw.get("hidden_act", "silu") != "silu":
        raise TargetError(f"{path}: biases and activations other than silu are not supported")
    eos = raw.get("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.exists():  # what ends a chat answer is said here when the two differ
        eos = json.loads(generation.read_text()).get("eos_token_id", eos)
    heads = raw["num_attention_heads"]
    return TargetConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=heads,
        kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        norm_eps=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0),
        max_positions=raw["max_position_embeddings"],
        tied=bool(raw.get("tie_word_embeddings", False)),
        bos=raw.get("bos_token_id"),
        eos=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )


def key_table(config: TargetConfig) -> dict[str, tuple[int, ...]]:
    """Every key of the checkpoint and its shape. A key beside these, or one missing, is an error and never silence."""
    c = config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    table: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tied:
        table["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for i in range(c.layers):
        table |= {
            f"model.layers.{i}.input_layernorm.weight": (c.hidden_size,),
            f"model.layers.{i}.post_attention_layernorm.weight": (c.hidden_size,),
            f"model.layers.{i}.self_attn.q_proj.weight": (q, c.hidden_size),
            f"model.layers.{i}.self_attn.k_proj.weight": (kv, c.hidden_size),
            f"model.layers.{i}.self_attn.v_proj.weight": (kv, c.hidden_size),
            f"model.layers.{i}.self_attn.o_proj.weight": (c.hidden_size, q),
            f"model.layers.{i}.mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            f"model.layers.{i}.mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            f"model.layers.{i}.mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
    return table


def read_weights(
    directory: Path, config: TargetConfig, dtype: torch.dtype, device: torch.device | None = None
) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise TargetError(f"no .safetensors file in {directory}")
    weights: dict[str, Tensor] = {}
    for path in files:
        with safe_open(path, framework="pt") as reader:
            for key in reader.keys():  # noqa: SIM118  (safe_open is no mapping)
                weights[key] = reader.get_tensor(key).to(device, dtype)
    if config.tied:
        weights.pop("lm_head.weight", None)  # some writers store the tied matrix twice
    check_keys(weights, key_table(config), str(directory))
    return weights


def check_keys(weights: Mapping[str, Tensor], table: Mapping[str, tuple[int, ...]], where: str) -> None:
    missing, unknown = sorted(table.keys() - weights.keys()), sorted(weights.keys() - table.keys())
    if missing or unknown:
        raise TargetError(f"{where}: missing keys {missing[:5]}, unknown keys {unknown[:5]}")
    for key, shape in table.items():
        if tuple(weights[key].shape) != shape:
            raise TargetError(f"{where}: {key} has shape {tuple(weights[key].shape)}, expected {shape}")


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor  # [H]
    qkv: Tensor  # [(N + 2K) * D, H]: one product instead of three
    out: Tensor  # [H, N * D]
    mlp_norm: Tensor  # [H]
    gate_up: Tensor  # [2F, H]
    down: Tensor  # [H, F]


class Cache:
    """Keys and values of `rows` sequences of at most `positions` tokens.

    Row b holds `lengths[b]` tokens that count. A forward writes its T new tokens after them and leaves `lengths` alone:
    the caller advances it by as many as it keeps. What lies beyond (padding, rejected drafts) is masked, then
    overwritten.
    """

    def __init__(self, config: TargetConfig, rows: int, positions: int, dtype: torch.dtype) -> None:
        shape = (config.layers, rows, positions, 2, config.kv_heads, config.head_dim)
        self.kv = lazy_zeros(shape, dtype)
        self.layers = list(self.kv.unbind(0))
        self.lengths = [0] * rows
        self.rows, self.positions = rows, positions

    def move(self, source: int, destination: int) -> None:
        """Row `source` becomes row `destination`, so that the rows in use stay side by side."""
        n = self.lengths[source]
        self.kv[:, destination, :n] = self.kv[:, source, :n]
        self.lengths[destination] = n
        self.lengths[source] = 0


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system hands out page by page as it is written; `torch.zeros` writes it all at once."""
    count = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(*shape)


@dataclass(frozen=True)
class Hidden:
    final: Tensor  # [B, T, H] after the final norm: what the head reads
    captures: Tensor | None  # [B, T, 3H] inputs of the capture layers, side by side


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight. The mean is taken in fp32: bf16 has 8 bits and H squares to add up."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope_tables(config: TargetConfig, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and *signed* sin [positions, 1, D]: rope(x) = x * cos + swap_halves(x) * sin."""
    inverse = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)  # [positions, D/2]
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


class Target:
    """A loaded model. `forward` gives hidden states, `logits` turns those of chosen positions into logits."""

    def __init__(self, config: TargetConfig, weights: Mapping[str, Tensor], positions: int | None = None) -> None:
        """`positions`: the longest sequence to prepare for, at most (and by default) `config.max_positions`."""
        self.config = config
        self.positions = positions or config.max_positions
        self.embed = weights["model.embed_tokens.weight"]  # [V, H]
        self.head = self.embed if config.tied else weights["lm_head.weight"]  # [V, H]
        self.norm = weights["model.norm.weight"]  # [H]
        self.dtype = self.embed.dtype
        self.cos, self.sin = (t.to(self.embed.device) for t in rope_tables(config, self.positions, self.dtype))
        self.layers = []
        for i in range(config.layers):
            w = {key: weights[f"model.layers.{i}.{key}.weight"] for key in (
                "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj",
                "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}  # fmt: skip
            self.layers.append(Layer(
                attention_norm=w["input_layernorm"],
                qkv=torch.cat((w["self_attn.q_proj"], w["self_attn.k_proj"], w["self_attn.v_proj"])),
                out=w["self_attn.o_proj"],
                mlp_norm=w["post_attention_layernorm"],
                gate_up=torch.cat((w["mlp.gate_proj"], w["mlp.up_proj"])),
                down=w["mlp.down_proj"],
            ))  # fmt: skip

    @classmethod
    def load(
        cls,
        directory: Path,
        dtype: torch.dtype = torch.bfloat16,
        positions: int | None = None,
        device: torch.device | None = None,
    ) -> Target:
        """On a GPU, `forward` without a cache is what works: decoding is the CPU's (and a real engine's) business."""
        config = read_config(directory)
        return cls(config, read_weights(directory, config, dtype, device), positions)

    def new_cache(self, rows: int = 1, positions: int | None = None) -> Cache:
        return Cache(self.config, rows, positions or self.positions, self.dtype)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, cache: Cache | None = None, first_row: int = 0, captures: Sequence[int] = ()
    ) -> Hidden:
        """Hidden states of new tokens [B, T].

        With a cache, token t of row b stands at position `cache.lengths[first_row + b] + t`, sees what the row holds
        and the new tokens up to itself, and is written to the cache; without one, each row starts at position 0.
        `captures`: the layers whose inputs to keep (`config.capture_layers`, or none); one past the last layer means
        what the final norm reads.
        """
        c = self.config
        B, T = tokens.shape
        N, K, D = c.heads, c.kv_heads, c.head_dim
        view = _View(self, cache, first_row, B, T)
        kept: dict[int, Tensor] = {}
        x = F.embedding(tokens, self.embed)  # [B, T, H]
        for i, layer in enumerate(self.layers):
            if i in captures:
                kept[i] = x
            h = rms_norm(x, layer.attention_norm, c.norm_eps)
            qkv = F.linear(h, layer.qkv).view(B, T, N + 2 * K, D)
            qk = qkv[:, :, : N + K]  # queries and keys are rotated together, in place
            swapped = qk.roll(D // 2, -1)
            qk.mul_(view.cos).addcmul_(swapped, view.sin)
            h = view.attend(i, qkv)  # [B, T, N * D]
            x = x + F.linear(h, layer.out)
            h = rms_norm(x, layer.mlp_norm, c.norm_eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, -1)  # [B, T, F] each
            x = x + F.linear(F.silu(gate) * up, layer.down)
        if len(self.layers) in captures:
            kept[len(self.layers)] = x
        final = rms_norm(x, self.norm, c.norm_eps)
        return Hidden(final, torch.cat([kept[i] for i in captures], -1) if captures else None)

    @torch.inference_mode()
    def logits(self, final: Tensor) -> Tensor:
        """[..., H] -> [..., V]; give it only the positions wanted: the head is a fifth of the work."""
        return F.linear(final, self.head)


class _View:
    """Where one forward's tokens stand: rotary tables, mask and cache slices, made once for all layers."""

    def __init__(self, target: Target, cache: Cache | None, first_row: int, B: int, T: int) -> None:
        c = target.config
        self.B, self.T = B, T
        self.N, self.K, self.D = c.heads, c.kv_heads, c.head_dim
        self.G = c.heads // c.kv_heads
        self.cache = cache
        self.mask: Tensor | None = None
        if cache is None:
            self.cos, self.sin = target.cos[:T], target.sin[:T]  # [T, 1, D]
            return
        self.rows = slice(first_row, first_row + B)
        lengths = cache.lengths[self.rows]
        self.seen = max(lengths) + T  # S
        if self.seen > cache.positions:
            raise ValueError(f"{self.seen} tokens in a cache of {cache.positions}")
        self.same = min(lengths) == max(lengths)
        if self.same:  # always so at batch 1: slices cost nothing, indices do
            start = lengths[0]
            self.cos, self.sin = target.cos[start : start + T], target.sin[start : start + T]
            self.span = slice(start, start + T)
            if T == 1:
                return  # one new token sees everything
            at = torch.arange(start, start + T).unsqueeze(0)  # [1, T]
        else:
            at = torch.tensor(lengths).unsqueeze(1) + torch.arange(T)  # [B, T]
            self.cos, self.sin = target.cos[at], target.sin[at]  # [B, T, 1, D]
            self.row_index = torch.arange(self.rows.start, self.rows.stop).unsqueeze(1)  # [B, 1]
            self.at = at
        hidden = torch.arange(self.seen) > at.unsqueeze(-1)  # [B or 1, T, S]
        mask = torch.zeros(hidden.shape, dtype=target.dtype).masked_fill_(hidden, float("-inf"))
        if T > 1:  # query g * T + t of a key/value head is token t
            mask = mask.repeat(1, self.G, 1)
        self.mask = mask.unsqueeze(1)  # [B or 1, 1, G * T or 1, S]

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        """Attention of rotated queries; keys and values join the cache. [B, T, N + 2K, D] -> [B, T, N * D]"""
        B, T, N, K, G, D = self.B, self.T, self.N, self.K, self.G, self.D
        if self.cache is None:
            q, k, v = torch.split(qkv.transpose(1, 2), [N, K, K], 1)  # [B, heads, T, D]
            h = F.scaled_dot_product_attention(
                q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), is_causal=True)  # fmt: skip
            return h.transpose(1, 2).reshape(B, T, N * D)
        store = self.cache.layers[layer]  # [rows, positions, 2, K, D]
        new = qkv[:, :, N:].view(B, T, 2, K, D)
        if self.same:
            store[self.rows, self.span] = new
        else:
            store[self.row_index, self.at] = new
        k, v = store[self.rows, : self.seen].permute(2, 0, 3, 1, 4).unbind(0)  # [B, K, S, D] each, views
        # The G query heads that share a key/value head become G * T queries of that one head: nothing is repeated.
        q = qkv[:, :, :N].view(B, T, K, G, D).permute(0, 2, 3, 1, 4).reshape(B, K, G * T, D)
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return h.view(B, K, G, T, D).permute(0, 3, 1, 2, 4).reshape(B, T, N * D)
