"""The sizes of a drafter, its config.json and the names of its tensors. No torch: the controller reads it, too."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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


def config_as_json(config: DraftConfig) -> dict[str, Any]:
    """For checkpoints: what `DraftConfig(**it)` takes back (a list in place of the tuple is fine)."""
    return asdict(config) | {"aux_layers": list(config.aux_layers)}


def config_from_json(raw: dict[str, Any]) -> DraftConfig:
    return DraftConfig(**(raw | {"aux_layers": tuple(raw["aux_layers"])}))
