"""Training that goes on from a drafter somebody else trained: its directory, in any layout that `foreign` reads.

Strict: every tensor of the layer must be there in its shape, a name that no engine knows is refused, and so is a
drafter of another build (norms before fc, norm on what is fed forward). What is taken and what is not is told.

Its draft vocabulary is its own. Rows of its head are taken over by *target* id; ids that it lacks start with the
target's rows. Only where that gives the target's rows everywhere is the head a frozen copy; else it is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.eagle3.draft import DraftConfig, expected_shapes, plain_scaling, read_rope
from pipeline.eagle3.foreign import Found
from pipeline.eagle3.frozen import Vocab, vocab_from_maps
from pipeline.eagle3.said import said
from pipeline.eagle3.ttt import from_engine_layout

MAPS = ("d2t", "t2d", "lm_head.weight")


@dataclass(frozen=True)
class Start:
    config: DraftConfig  # the drafter's own widths
    weights: dict[str, Tensor]  # TRAINED tensors, fp32; with "head" where it differs from the target's
    notes: list[str]  # what was taken and what was not, in sentences


def config_of(found: Found, config: DraftConfig) -> DraftConfig:
    """`config` (what fits the target) with the widths and the rotary angles of the drafter. Raises ValueError where the
    drafter is not of a build that we train, or not for this target."""
    told = said(found.config)
    if told.kind != "eagle3":
        raise ValueError(f"it is {told.kind or 'of no known kind'}, not an EAGLE-3 drafter")
    if told.norm_before_fc or told.fc_norm or told.norm_output:
        raise ValueError("it has norms around fc (EAGLE-3.1: norm_before_fc, fc_norm or norm_output): not trained here")
    layer = told.layer
    if told.layout == "speculators" and "head_dim" not in layer and "num_attention_heads" not in layer:
        raise ValueError("its config.json does not say how many heads it has")
    heads = int(layer.get("num_attention_heads") or config.num_attention_heads)
    theta, scaling = read_rope(layer)
    made = replace(
        config,
        intermediate_size=int(layer.get("intermediate_size") or config.intermediate_size),
        num_attention_heads=heads,
        num_key_value_heads=int(layer.get("num_key_value_heads") or heads),
        head_dim=int(layer.get("head_dim") or config.hidden_size // heads),
        rms_norm_eps=float(layer.get("rms_norm_eps", config.rms_norm_eps)),
        rope_theta=theta,
        rope_scaling=plain_scaling(scaling),
    )
    for name in ("hidden_size", "vocab_size"):
        if layer.get(name) not in (None, getattr(config, name)):
            raise ValueError(f"its {name} is {layer[name]}, the target's is {getattr(config, name)}")
    return made


def from_drafter(found: Found, config: DraftConfig, vocab: Vocab, target_head: Tensor, capture_rms: Tensor) -> Start:
    """config: what fits the target and the captures in the store; target_head [V, H]; capture_rms [A*H]."""
    if unknown := sorted(name for name, ours in found.stored.items() if ours is None):
        raise ValueError(f"it holds tensors that no engine knows: {', '.join(unknown)}")
    own = config_of(found, config)
    expected = {name: shape for name, shape in expected_shapes(own).items() if name not in MAPS}
    present = found.names()
    if extra := sorted(set(present) - set(expected) - set(MAPS) - {"embed_tokens.weight"}):
        raise ValueError(f"it holds tensors of another build: {', '.join(extra)}")
    if missing := sorted(set(expected) - set(present)):
        raise ValueError(f"it lacks {', '.join(missing)}")
    for name, shape in expected.items():
        if found.shape(name) != shape:
            raise ValueError(f"{present[name]} is {found.shape(name)}, expected {shape}")
    notes = [f"taken: {len(expected)} tensors of the layer, {sum(found.tensor(n).numel() for n in expected):,} values"]
    notes += _layers(found, config)
    if "embed_tokens.weight" in present:
        notes.append("not taken: embed_tokens, the target's own are used")
    weights = from_engine_layout({name: found.tensor(name) for name in expected}, capture_rms)
    head, note = head_rows(found, vocab, target_head)
    notes.append(note)
    return Start(own, weights if head is None else weights | {"head": head}, notes)


def head_rows(found: Found, vocab: Vocab, target_head: Tensor) -> tuple[Tensor | None, str]:
    """(head [Vd, H] fp32 for our draft vocabulary, or None where it is the target's, a sentence)."""
    mine = target_head[vocab.target_ids].float()
    if "lm_head.weight" not in found.names():
        return None, "not taken: it has no lm_head, the target's rows are used"
    theirs = found.tensor("lm_head.weight").float()
    if theirs.dim() != 2 or theirs.shape[1] != mine.shape[1]:
        raise ValueError(f"lm_head.weight is {tuple(theirs.shape)}, expected rows of {mine.shape[1]}")
    if "d2t" in found.names() and "t2d" in found.names():
        ids = vocab_from_maps(found.tensor("d2t"), found.tensor("t2d")).target_ids
    elif len(theirs) == vocab.target_size:
        ids = torch.arange(vocab.target_size)
    else:
        raise ValueError(f"its head has {len(theirs)} rows, and no d2t and t2d say which tokens they are")
    if len(ids) != len(theirs):
        raise ValueError(f"d2t has {len(ids)} entries, lm_head {len(theirs)} rows")
    if len(ids) and int(ids.max()) >= vocab.target_size:
        raise ValueError(f"d2t names token {int(ids.max())}, the target has {vocab.target_size}")
    row_of = torch.full((vocab.target_size,), -1).index_put_((ids,), torch.arange(len(ids)))
    rows = row_of[vocab.target_ids]
    head = mine.clone()
    head[rows >= 0] = theirs[rows[rows >= 0]]
    common = int((rows >= 0).sum())
    told = f"lm_head: {common:,} of {len(rows):,} rows taken by target id, the others start as the target's"
    # Copies of the target's rows went through bf16, at most.
    if torch.allclose(head, mine, rtol=2**-7, atol=1e-6):
        return None, f"{told}; all of them are the target's own"
    return head, f"{told}; they differ from the target's, so the head is trained too"


def _layers(found: Found, config: DraftConfig) -> list[str]:
    """Which layers it was trained on, as far as it says: trainers count inputs or outputs, nobody says which."""
    ids = said(found.config).layer_ids
    if ids is None:
        return []
    inputs = tuple(config.aux_layers)
    outputs = tuple(layer - 1 for layer in inputs)
    if ids in (inputs, outputs):
        return [f"captures: its layer ids {list(ids)} fit the stored outputs of layers {list(outputs)}"]
    return [f"captures: it says layers {list(ids)}, the states are outputs of layers {list(outputs)}: another choice"]
