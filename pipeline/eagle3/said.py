"""What a drafter's config.json says, whichever trainer wrote it: flat as SGLang's, or nested as speculators'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


@dataclass(frozen=True)
class Said:
    """None where the config does not say it."""

    kind: str  # "eagle3", "eagle" (1 or 2: no captures), or what it calls itself
    layer: dict[str, Any]  # the transformer layer's own keys
    draft_vocab_size: int | None
    target_hidden_size: int | None
    layer_ids: tuple[int, ...] | None
    tied: bool | None
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    layout: str  # "sglang" or "speculators"


def said(config: dict[str, Any]) -> Said:
    """Raises ValueError where a value is of a kind that no engine could use."""
    nested = config.get("transformer_layer_config")
    layer = dict(nested) if isinstance(nested, dict) else config
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise ValueError(f"architectures is {names!r}, expected a list")
    words = " ".join([str(config.get("speculators_model_type", "")), *map(str, names)]).lower()
    kind = "eagle3" if "eagle3" in words or "eagle-3" in words else "eagle" if "eagle" in words else words.strip()
    ids = eagle.get("eagle_aux_hidden_state_layer_ids", config.get("eagle_aux_hidden_state_layer_ids"))

    def flag(name: str, *others: str) -> bool:
        return any(bool(config.get(n) or eagle.get(n)) for n in (name, *others))

    def number(*places: Any) -> int | None:
        for value in places:
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ValueError(f"a size in config.json is {value!r}, expected a whole number above 0")
                return value
        return None

    for width in WIDTHS:
        number(layer.get(width))
    return Said(
        kind=kind,
        layer=layer,
        draft_vocab_size=number(config.get("draft_vocab_size")),
        target_hidden_size=number(config.get("target_hidden_size")),
        layer_ids=tuple(int(i) for i in ids) if isinstance(ids, list) and ids else None,
        tied=config.get("tie_word_embeddings", layer.get("tie_word_embeddings")),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm", "use_aux_norm"),
        norm_output=flag("norm_output"),
        layout="speculators" if nested is not None else "sglang",
    )
