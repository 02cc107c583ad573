"""Audit a drafter directory that anybody made: everything that engines would swallow in silence.

inputs    drafter; optional: model (the target's directory), against (another drafter)
settings  engine ("sglang", "vllm"), engine_version ("" = newest), context (tokens to be served; 0: the target's)
output    audit.json: {"findings": [{"check", "severity", "text", "fix"}], "checked", "unchecked", "against"}

Nothing in the directory is executed. Findings do not fail the stage: they are its result. What needs the target and has
none to look at stands in `unchecked`, never among what is in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3.draft import default_aux_layers, plain_scaling, read_rope, text_config
from pipeline.eagle3.foreign import LAYER, Found, Unreadable, read_drafter
from pipeline.eagle3.frozen import Borrowed, borrow, target_config, vocab_from_maps
from pipeline.eagle3.said import Said, said
from pipeline.stages.audit_checks import AUDIT
from pipeline.stages.protocol import Stage, main, write_json

# From which version on an engine reads what (notes of its sources; SGLang's LlamaForCausalLMEagle3).
SGLANG_LAYERS_N = (0, 5, 14)  # module `layers.N`, fc_norm and norm_output; before: `midlayer`, none of them
NEWEST = (9999,)


@dataclass(frozen=True)
class Case:
    """Everything that a check may look at. `target` and `borrowed` are None where no model was given."""

    found: Found
    said: Said
    engine: str
    version: tuple[int, ...]
    context: int
    target: dict[str, Any] | None
    borrowed: Borrowed | None

    @property
    def hidden(self) -> int:
        return int(self.said.layer["hidden_size"])


Problems = Iterator[tuple[str, str]]  # (severity, sentence)


class Unchecked(Exception):
    """The check needs something that is not there; the text says what."""


def run(stage: Stage) -> dict[str, Any]:
    report = inspect(
        stage.inputs["drafter"],
        stage.inputs.get("model"),
        engine=str(stage.settings.get("engine", "sglang")),
        version=str(stage.settings.get("engine_version", "")),
        context=int(stage.settings.get("context", 0)),
    )
    if "against" in stage.inputs:
        report["against"] = compare(stage.inputs["drafter"], stage.inputs["against"])
    for finding in report["findings"]:
        stage.warn(finding["check"], finding["text"])
    write_json(stage.out / "audit.json", report)
    stage.artifact("audit", stage.out / "audit.json")
    return report


def inspect(
    drafter: Path, model: Path | None, *, engine: str = "sglang", version: str = "", context: int = 0
) -> dict[str, Any]:
    """{"findings", "checked", "unchecked"}; see the module. Never raises for what is wrong with the drafter."""
    try:
        found = read_drafter(drafter)
        words = said(found.config)
    except (Unreadable, ValueError) as error:
        return {"findings": [_finding("audit.readable", "error", str(error))], "checked": [], "unchecked": []}
    if missing := [name for name in ("hidden_size", "num_attention_heads", "vocab_size") if name not in words.layer]:
        text = f"config.json does not say {', '.join(missing)}"
        return {"findings": [_finding("audit.config", "error", text)], "checked": [], "unchecked": []}
    case = Case(
        found=found,
        said=words,
        engine=engine,
        version=tuple(int(n) for n in version.split(".") if n.isdigit()) or NEWEST,
        context=context,
        target=target_config(model) if model else None,
        borrowed=borrow(model) if model else None,
    )
    findings: list[dict[str, Any]] = []
    checked: list[str] = []
    unchecked: list[dict[str, str]] = []
    for check, look in CHECKS.items():
        try:
            for severity, text in look(case):
                findings.append(_finding(check, severity, text))
            checked.append(check)
        except Unchecked as reason:
            unchecked.append({"check": check, "text": str(reason)})
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            findings.append(_finding(check, "error", f"cannot be judged: {type(error).__name__}: {error}"))
    return {"findings": findings, "checked": checked, "unchecked": unchecked}


def _finding(check: str, severity: str, text: str) -> dict[str, Any]:
    return {"check": check, "severity": severity, "text": text, "fix": AUDIT[check][2]}


# --- the checks ----------------------------------------------------------------------------------------------------


def check_algorithm(case: Case) -> Problems:
    fc = case.found.shape("fc.weight")
    if case.said.kind != "eagle3":
        if fc is not None and len(fc) == 2 and fc[1] >= 3 * case.hidden:
            yield (
                "error",
                f"fc takes {fc[1] // case.hidden} states of {case.hidden}, as EAGLE-3 has it, but config.json calls it "
                f"{case.said.kind or 'nothing'}: run as such it gets no captures, and the accept length is 1.0",
            )
        else:
            yield "error", f"it is no EAGLE-3 drafter: config.json calls it {case.said.kind or 'nothing'}"


def check_names(case: Case) -> Problems:
    unknown = sorted(name for name, ours in case.found.stored.items() if ours is None)
    if unknown:
        yield "error", f"tensors that engines skip in silence: {', '.join(unknown[:5])} ({len(unknown)} in all)"
    old = case.engine == "sglang" and case.version < SGLANG_LAYERS_N
    numbered = sorted(name for name in case.found.stored if "layers.0." in name)
    if old and numbered:
        yield (
            "error",
            f"SGLang {_dots(case.version)} loads `midlayer.` only and drops {numbered[0]} and its like in silence",
        )
    if case.engine == "vllm" and case.said.layout == "speculators" and not numbered:
        yield (
            "error",
            "config.json is of speculators' layout, whose names are `layers.0.`, and the file has `midlayer.`",
        )


def check_missing(case: Case) -> Problems:
    have = set(case.found.names())
    need = {"fc.weight", "norm.weight", *(f"midlayer.{part}.weight" for part in LAYER)}
    if missing := sorted(need - have):
        yield "error", f"missing, which engines leave at random values: {', '.join(missing)}"
    if "lm_head.weight" not in have and case.said.draft_vocab_size is not None:
        yield (
            "error",
            "lm_head is missing: the draft head would be random, the server would answer with accept length 1.0",
        )


def check_shapes(case: Case) -> Problems:
    layer, h = case.said.layer, case.hidden
    heads = int(layer["num_attention_heads"])
    groups = int(layer.get("num_key_value_heads") or heads)
    size = int(layer.get("head_dim") or h // heads)
    inner = layer.get("intermediate_size")
    vocab = case.said.draft_vocab_size or int(layer["vocab_size"])
    wanted: dict[str, tuple[int, ...]] = {
        "norm.weight": (h,),
        "lm_head.weight": (vocab, h),
        "embed_tokens.weight": (int(layer["vocab_size"]), case.said.target_hidden_size or h),
        **{f"midlayer.{name}.weight": (h,) for name in LAYER[:3]},
        "midlayer.self_attn.q_proj.weight": (heads * size, 2 * h),
        "midlayer.self_attn.k_proj.weight": (groups * size, 2 * h),
        "midlayer.self_attn.v_proj.weight": (groups * size, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, heads * size),
    }
    if inner is not None:
        wanted |= {f"midlayer.mlp.{name}_proj.weight": (int(inner), h) for name in ("gate", "up")}
        wanted["midlayer.mlp.down_proj.weight"] = (h, int(inner))
    for name, shape in wanted.items():
        have = case.found.shape(name)
        if have is not None and have != shape:
            yield "error", f"{case.found.names()[name]} is {list(have)}, config.json asks for {list(shape)}"


def check_captures(case: Case) -> Problems:
    fc = case.found.shape("fc.weight")
    if fc is None:
        return
    width = case.said.target_hidden_size or case.hidden
    count = len(case.said.layer_ids) if case.said.layer_ids else 3
    if fc != (case.hidden, count * width):
        yield (
            "error",
            f"fc is {list(fc)}: {count} captures of {width} need [{case.hidden}, {count * width}]; "
            "the engine would crash, or feed it other states than it was trained on",
        )
    if case.target is not None and width != int(case.target["hidden_size"]):
        yield "error", f"it was trained on states {width} wide, the target's are {case.target['hidden_size']}"


def check_values(case: Case) -> Problems:
    for name, stored in case.found.names().items():
        tensor = case.found.load(stored)
        if name in ("d2t", "t2d"):
            continue
        if not tensor.is_floating_point():
            yield "error", f"{stored} is {_type(tensor)}, expected floating point"
        elif not bool(tensor.isfinite().all()):
            yield "error", f"{stored} holds values that are not finite"
        elif not bool(tensor.any()):
            yield "error", f"{stored} is all zero"
        elif tensor.dtype not in (torch.bfloat16, torch.float16):
            yield "warning", f"{stored} is {_type(tensor)}: engines cast it, and training's last bits are not served"


def check_vocabulary(case: Case) -> Problems:
    have, draft = case.found.names(), case.said.draft_vocab_size
    total = int(case.said.layer["vocab_size"])
    if case.target is not None and total != int(case.target["vocab_size"]):
        yield "error", f"config.json says {total} target tokens, the target has {case.target['vocab_size']}"
    if draft is None or draft == total:
        return
    if missing := [name for name in ("d2t", "t2d") if name not in have]:
        severity = "error" if "d2t" in missing else "warning"
        yield severity, f"{' and '.join(missing)} missing: draft ids would be taken for target ids"
        if "d2t" in missing:
            return
    d2t = case.found.tensor("d2t").flatten()
    if d2t.is_floating_point():
        yield "error", f"d2t is {_type(d2t)}, expected whole numbers"
        return
    ids = d2t.long() + torch.arange(len(d2t))
    if len(d2t) != draft:
        yield "error", f"d2t has {len(d2t)} entries, config.json says {draft}"
    elif "t2d" in have:
        mask = case.found.tensor("t2d")
        if bool(mask.any()) and torch.equal(mask.nonzero().flatten(), d2t.long()):
            yield (
                "error",
                "d2t holds target ids; engines add the draft id to each, so every guess would be another token",
            )
            return
        try:
            vocab_from_maps(d2t, mask)
        except ValueError as error:
            yield "error", str(error)
    if len(set(ids.tolist())) != len(ids) or not bool(((ids >= 0) & (ids < total)).all()):
        yield (
            "error",
            f"d2t names tokens twice or outside of 0 to {total - 1}: it is stale, or holds ids and not offsets",
        )


def check_embeddings(case: Case) -> Problems:
    if "embed_tokens.weight" not in case.found.names():
        return
    if case.borrowed is None:
        raise Unchecked("embeddings are in the file; whether they are the target's needs the target (--model)")
    own = case.found.tensor("embed_tokens.weight")
    theirs = case.borrowed.embed
    if own.shape != theirs.shape:
        yield "error", f"embed_tokens is {list(own.shape)}, the target's {list(theirs.shape)}"
        return
    likeness = _cosine(own, theirs)
    if likeness < 0.5:
        yield "error", f"embed_tokens has nothing to do with the target's (cosine {likeness:.2f}): exported at random?"
    elif likeness < 0.999:
        yield "warning", f"embed_tokens differs from the target's (cosine {likeness:.3f}): trained, or of another model"


def check_head(case: Case) -> Problems:
    have = case.found.names()
    if case.borrowed is None:
        raise Unchecked("whether lm_head is the target's rows needs the target (--model)")
    if "lm_head.weight" not in have:
        return
    own, rows = case.found.tensor("lm_head.weight"), case.borrowed.head
    if "d2t" in have:
        ids = case.found.tensor("d2t").long() + torch.arange(len(case.found.tensor("d2t")))
        if not bool(((ids >= 0) & (ids < len(rows))).all()):
            return  # told by the check of the vocabulary
        rows = rows[ids]
    if own.shape != rows.shape:
        return
    likeness = _cosine(own, rows)
    if likeness < 0.5:
        yield "warning", f"lm_head is far from the target's rows (cosine {likeness:.2f}): random, or in another order"


def check_tied(case: Case) -> Problems:
    if case.said.tied is not False and case.said.draft_vocab_size not in (None, case.said.layer["vocab_size"]):
        value = "true" if case.said.tied else "not said (some engines take that for true)"
        yield (
            "error" if case.said.tied else "warning",
            f"tie_word_embeddings is {value}, with a smaller draft vocabulary",
        )


def check_context(case: Case) -> Problems:
    drafts = case.said.layer.get("max_position_embeddings")
    wants = case.context or (int(case.target["max_position_embeddings"]) if case.target else 0)
    if not wants:
        raise Unchecked("the served context is not known (--context, or --model)")
    if drafts is None:
        yield "warning", "config.json does not say max_position_embeddings: engines assume 2,048"
    elif int(drafts) < wants:
        yield (
            "error",
            f"it knows {int(drafts):,} positions, {wants:,} are served: beyond, acceptance collapses or it crashes",
        )


def check_rope(case: Case) -> Problems:
    layer = case.said.layer
    old: dict[str, Any] = {name: layer[name] for name in ("rope_theta", "rope_scaling") if name in layer}
    try:
        own = read_rope(layer)
    except ValueError as error:
        yield "error", f"{error}: engines would assume theta 10,000"
        return
    if "rope_theta" in old and "rope_parameters" in layer and read_rope(old) != read_rope(_only_new(layer)):
        yield "error", f"rope_theta/rope_scaling say {read_rope(old)}, rope_parameters {read_rope(_only_new(layer))}"
    if case.target is None:
        raise Unchecked("whether the rope is the target's needs the target (--model)")
    theta, scaling = read_rope(text_config(case.target))
    if own[0] != theta or (own[1] is None) != (scaling is None):
        wanted = (theta, plain_scaling(scaling))
        yield "warning", f"its rope is {own}, the target's {wanted}: right only if it was trained with its own"


def check_layers(case: Case) -> Problems:
    ids = case.said.layer_ids
    if ids is None:
        return
    if list(ids) != sorted(set(ids)):
        yield "error", f"layer ids {list(ids)} are not ascending: captures would be in another order than in training"
    if ids[0] not in (1, 2):
        yield (
            "warning",
            f"layer ids {list(ids)} begin with neither 1 (outputs of layers) nor 2 (inputs): engines guess by the "
            "first one which is meant",
        )
    if case.target is not None:
        count = int(case.target["num_hidden_layers"])
        if max(ids) > count:
            yield "error", f"layer {max(ids)} is asked for, the target has {count}"
        usual = default_aux_layers(count)
        if list(ids) not in (list(usual), [layer - 1 for layer in usual]):
            yield (
                "warning",
                f"layer ids {list(ids)} are not EAGLE-3's usual {list(usual)}: make sure the engine reads them",
            )


def check_norms(case: Case) -> Problems:
    have = set(case.found.names())
    fc_norms = {name for name in have if name.startswith("fc_norm")}
    if case.said.fc_norm != bool(fc_norms):
        yield "error", f"config.json says fc_norm {case.said.fc_norm}, the file has {len(fc_norms)} such tensors"
    if "input_norm.weight" in have and not case.said.norm_before_fc:
        yield "error", "input_norm is in the file, and config.json does not say norm_before_fc: it would not be applied"
    flags = [name for name in ("fc_norm", "norm_output", "norm_before_fc") if getattr(case.said, name)]
    if case.engine == "sglang":
        if case.version < SGLANG_LAYERS_N and (ignored := [name for name in flags if name != "norm_before_fc"]):
            yield "error", f"SGLang {_dots(case.version)} ignores {', '.join(ignored)}: low acceptance, and no message"
        if "norm_before_fc" in flags and "input_norm.weight" in have:
            yield "error", "SGLang's EAGLE-3 layer has no input_norm: it would be skipped without a word"


CHECKS: dict[str, Callable[[Case], Problems]] = {
    "audit.algorithm": check_algorithm,
    "audit.names": check_names,
    "audit.missing": check_missing,
    "audit.shapes": check_shapes,
    "audit.captures": check_captures,
    "audit.values": check_values,
    "audit.vocabulary": check_vocabulary,
    "audit.embeddings": check_embeddings,
    "audit.head": check_head,
    "audit.tied": check_tied,
    "audit.context": check_context,
    "audit.rope": check_rope,
    "audit.layers": check_layers,
    "audit.norms": check_norms,
}


# --- one against another -------------------------------------------------------------------------------------------


def compare(one: Path, other: Path) -> dict[str, Any]:
    """What differs between two drafters, by our names: tensors (shape, largest difference, cosine) and config keys."""
    try:
        a, b = read_drafter(one), read_drafter(other)
    except Unreadable as error:
        return {"unreadable": str(error)}
    mine, theirs = a.names(), b.names()
    tensors: dict[str, Any] = {}
    for name in sorted(set(mine) & set(theirs)):
        if a.shape(name) != b.shape(name):
            tensors[name] = {"shape": list(a.shape(name) or ()), "other": list(b.shape(name) or ())}
            continue
        x, y = a.tensor(name), b.tensor(name)
        if not torch.equal(x, y):
            gap = float((x.double() - y.double()).abs().max())
            tensors[name] = {"largest_difference": gap, "cosine": _cosine(x, y)}
    config = sorted(key for key in set(a.config) | set(b.config) if a.config.get(key) != b.config.get(key))
    return {
        "only_here": sorted(set(mine) - set(theirs)),
        "only_there": sorted(set(theirs) - set(mine)),
        "tensors": tensors,
        "same_tensors": len(set(mine) & set(theirs)) - len(tensors),
        "config": {key: [a.config.get(key), b.config.get(key)] for key in config},
    }


def _cosine(a: Tensor, b: Tensor) -> float:
    x, y = a.flatten().float(), b.flatten().float()
    norm = float(x.norm() * y.norm())
    return float(x @ y) / norm if norm and math.isfinite(norm) else 0.0


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _only_new(layer: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": layer["rope_parameters"]}


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


if __name__ == "__main__":
    main(run)
