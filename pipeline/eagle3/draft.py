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

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of one drafter; those of a layer of its target unless somebody chose otherwise."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    target_layers: int
    aux_layers: tuple[int, ...]  # the target layers whose inputs are captured
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None, hash=False)

    @property
    def capture_size(self) -> int:
        return len(self.aux_layers) * self.hidden_size


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose inputs SGLang captures when a drafter does not say: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


def text_config(target: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config.json; multimodal ones (Kimi-K2.5, Llama 4) nest it."""
    nested = target.get("text_config")
    return target if nested is None else {**nested}


def config_for_target(target: dict[str, Any], aux_layers: tuple[int, ...], draft_vocab_size: int) -> DraftConfig:
    """The drafter that fits a target, from its config.json: one plain layer of the target's widths.

    A target with latent attention (MLA: DeepSeek, Kimi) gets plain attention with the size of its value heads, as
    published drafters for them have. Raises ValueError where a width is not said.
    """
    text = text_config(target)
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        inner, vocab, layers = (int(text[n]) for n in ("intermediate_size", "vocab_size", "num_hidden_layers"))
        context = int(text["max_position_embeddings"])
    except KeyError as error:
        raise ValueError(f"the target's config.json has no {error.args[0]}") from None
    latent = text.get("kv_lora_rank") is not None
    theta, scaling = read_rope(text)
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int((text["v_head_dim"] if latent else text.get("head_dim")) or hidden // heads),
        vocab_size=vocab,
        draft_vocab_size=draft_vocab_size,
        max_position_embeddings=context,
        target_layers=layers,
        aux_layers=tuple(aux_layers) or default_aux_layers(layers),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-5)),
        rope_theta=theta,
        rope_scaling=plain_scaling(scaling),
    )


# DeepSeek's own additions to YaRN: engines apply them in its attention only, transformers in every model. Without them
# all agree on a drafter's cos and sin, and a drafter learns with whatever it is given.
MLA_ONLY = ("mscale", "mscale_all_dim")


def plain_scaling(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """A target's rope scaling as its drafter takes it over."""
    if scaling is None:
        return None
    kind = str(scaling.get("rope_type") or scaling.get("type"))
    if "yarn" not in kind:
        return scaling
    kept = {key: value for key, value in scaling.items() if key not in (*MLA_ONLY, "type", "rope_type")}
    return {"rope_type": "yarn", **kept}


def read_rope(config: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling or None) of a config.json, in the old schema (rope_theta, rope_scaling) or the new
    (rope_parameters). Losing either silently costs acceptance, so a file that has neither is refused."""
    new = config.get("rope_parameters")
    if new is None and "rope_theta" not in config:
        raise ValueError("config.json has neither rope_parameters nor rope_theta")
    merged = dict(config.get("rope_scaling") or {}) | dict(new or {})
    theta = float(merged.pop("rope_theta", config.get("rope_theta", 10000.0)))
    kind = merged.get("rope_type") or merged.get("type") or "default"
    return theta, None if kind == "default" else merged


def write_config(config: DraftConfig) -> dict[str, Any]:
    """config.json of the SGLang layout. Rope goes in under both schemas, because old and new engines each read one."""
    scaling = config.rope_scaling
    eagle: dict[str, Any] = {"use_aux_hidden_state": True}
    if config.aux_layers != default_aux_layers(config.target_layers):
        # SGLang counts explicit ids as outputs of layers (it adds one); ours are inputs. Engines disagree on this key,
        # but not on what to capture when it is absent, so the default layers are left unsaid.
        eagle["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in config.aux_layers]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, **(scaling or {})},
        "tie_word_embeddings": False,  # true makes engines take the head from the embeddings, of another size
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "eagle_config": eagle,
        # For ourselves; engines ignore it.
        "captures": {"inputs_of_layers": list(config.aux_layers), "target_layers": config.target_layers},
    }


def read_config(directory: Path) -> DraftConfig:
    """The config of an exported drafter. Raises ValueError when it is not one of ours."""
    raw = json.loads((directory / "config.json").read_text())
    if raw.get("architectures") != [ARCHITECTURE]:
        raise ValueError(f"{directory}: architectures is {raw.get('architectures')}, expected [{ARCHITECTURE!r}]")
    theta, scaling = read_rope(raw)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: int(raw[name]) for name in (*names, "vocab_size", "draft_vocab_size", "max_position_embeddings")}
    captures = raw.get("captures")
    if captures is None:
        raise ValueError(f"{directory}: config.json does not say what was captured (key captures)")
    return DraftConfig(
        **sizes,
        target_layers=int(captures["target_layers"]),
        aux_layers=tuple(int(i) for i in captures["inputs_of_layers"]),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
    )


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of an exported drafter and its shape; nothing else may be in the file."""
    h, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "fc.weight": (h, config.capture_size),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (inner, h),
        "midlayer.mlp.up_proj.weight": (inner, h),
        "midlayer.mlp.down_proj.weight": (h, inner),
        "norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }


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


def config_as_json(config: DraftConfig) -> dict[str, Any]:
    """For checkpoints: what `DraftConfig(**it)` takes back (a list in place of the tuple is fine)."""
    return asdict(config) | {"aux_layers": list(config.aux_layers)}


def config_from_json(raw: dict[str, Any]) -> DraftConfig:
    return DraftConfig(**(raw | {"aux_layers": tuple(raw["aux_layers"])}))
