"""What a drafter borrows and never trains: the draft vocabulary, and the target's embeddings, head and last norm."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor


@dataclass(frozen=True)
class Vocab:
    """A subset of the target's vocabulary, in ascending order of target id.

    In files it is EAGLE-3's pair: d2t[i] = target id of draft id i, *minus i* (an offset, not an id), and t2d[v] =
    whether target id v is in. They say the same thing twice, so they can be checked: nonzero(t2d) == d2t + arange.
    """

    target_ids: Tensor  # [Vd] int64, ascending
    target_size: int

    @property
    def d2t(self) -> Tensor:
        return self.target_ids - torch.arange(len(self.target_ids))

    @property
    def t2d(self) -> Tensor:
        return torch.zeros(self.target_size, dtype=torch.bool).index_fill(0, self.target_ids, True)


def vocab_from_maps(d2t: Tensor, t2d: Tensor) -> Vocab:
    """Raises ValueError if the two maps contradict each other (a stale one, or ids in place of offsets)."""
    ids = d2t.long() + torch.arange(len(d2t))
    if t2d.dtype != torch.bool or t2d.dim() != 1:
        raise ValueError(f"t2d is {t2d.dtype} {tuple(t2d.shape)}, expected one bool per target token")
    if not torch.equal(t2d.nonzero().flatten(), ids):
        raise ValueError("d2t and t2d contradict each other: nonzero(t2d) != d2t + arange")
    return Vocab(ids, len(t2d))


def read_vocab(path: Path) -> Vocab:
    maps = load_file(path)
    return vocab_from_maps(maps["d2t"], maps["t2d"])


def vocab_bytes(vocab: Vocab) -> bytes:
    return save({"d2t": vocab.d2t, "t2d": vocab.t2d})


@dataclass(frozen=True)
class Borrowed:
    embed: Tensor  # [V, H]
    head: Tensor  # [V, H]; the embeddings where the target ties them
    final_norm: Tensor  # [H]


def borrow(model: Path) -> Borrowed:
    """From a Hugging Face directory, whatever its number of files; nothing else of it is read."""
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
    found: dict[str, Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                name = stored.removeprefix("language_model.")  # of a multimodal model
                if name in names:
                    found[name] = file.get_tensor(stored)
    if missing := {names[0], names[2]} - set(found):
        raise ValueError(f"{model} lacks {', '.join(sorted(missing))}")
    tied = bool(target_config(model).get("tie_word_embeddings"))
    if not tied and names[1] not in found:
        raise ValueError(f"{model} has no lm_head.weight, and its config does not tie it to the embeddings")
    return Borrowed(found[names[0]], found[names[0]] if tied else found[names[1]], found[names[2]])


def target_config(model: Path) -> dict[str, Any]:
    """config.json, what a multimodal model nests for its language model laid over the rest."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return {**config, **(config.get("text_config") or {})}


def end_tokens(model: Path) -> set[int]:
    """Ids that end a response: those of generation_config.json, else of config.json."""
    path = model / "generation_config.json"
    ends = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ends = target_config(model).get("eos_token_id") if ends is None else ends
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}
