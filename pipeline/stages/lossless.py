"""Does speculation change the output? Greedy, in fp32, with and without the drafter, token by token.

In fp32 because the order of additions differs between a product of one row and one of four, and in bf16 that is enough
to turn near-ties around; what would be tested there is rounding, not the algorithm.

inputs    model, drafter (SGLang layout), prompts (rows of `prompts`)
settings  limit (prompts), max_tokens, steps (drafts per verify step), threads (0 = all)
output    lossless.json: one entry a prompt, with the first divergence where there is one
result    checked, identical, dtype, accept_len, plain_tok_s, speculative_tok_s, divergences
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.decode import Request, decode, positions_needed
from pipeline.eagle3.draft import Drafter
from pipeline.eagle3.target import Target, TargetError, read_config
from pipeline.stages.protocol import Stage, main, read_jsonl, write_json
from pipeline.stages.reference.arguments import default_threads


def run(stage: Stage) -> dict[str, Any]:
    settings = stage.settings
    torch.set_num_threads(int(settings.get("threads") or 0) or default_threads())
    steps, max_tokens = int(settings["steps"]), int(settings["max_tokens"])
    prompts = list(read_jsonl(stage.inputs["prompts"]))[: int(settings["limit"])]
    model = stage.inputs["model"]
    chat = Chat(model)
    encoded = {p["id"]: chat.encode(chat.render(p["messages"], add_generation_prompt=True)) for p in prompts}
    target, drafter = _load(stage, model, stage.inputs["drafter"], encoded, max_tokens, steps)
    entries: list[dict[str, Any]] = []
    seconds = {"plain": 0.0, "speculative": 0.0}
    tokens = {"plain": 0, "speculative": 0}
    accepted: list[int] = []
    for name, ids in encoded.items():
        outputs = {}
        for way, helper in (("plain", None), ("speculative", drafter)):
            request = Request(ids, max_tokens, frozenset(target.config.eos))
            began = time.perf_counter()
            (done,) = decode(target, [request], helper, steps)
            seconds[way] += time.perf_counter() - began
            tokens[way] += len(done.output)
            outputs[way] = done.output
            accepted += done.accepted
        entries.append({"id": name, "tokens": len(outputs["plain"]), **compare(target, chat, ids, outputs)})
        same = sum(e["identical"] for e in entries)
        stage.progress(len(entries), len(encoded), "prompts", identical=same)
    differing = [e for e in entries if not e["identical"]]
    if differing:
        stage.warn("lossless.differs", f"{len(differing)} of {len(entries)} outputs differ: {differing[0]}")
    write_json(stage.out / "lossless.json", {"prompts": entries})
    stage.artifact("lossless.json", stage.out / "lossless.json")
    return {
        "checked": len(entries),
        "identical": len(entries) - len(differing),
        "dtype": "float32",
        "tokens": tokens["plain"],
        "accept_len": 1 + sum(accepted) / len(accepted) if accepted else None,
        "plain_tok_s": tokens["plain"] / seconds["plain"],
        "speculative_tok_s": tokens["speculative"] / seconds["speculative"],
        "divergences": differing,
    }


def _load(
    stage: Stage, model: Path, draft: Path, prompts: dict[str, list[int]], max_tokens: int, steps: int
) -> tuple[Target, Drafter]:
    if not prompts:
        stage.refuse("lossless.empty", f"there are no prompts in {stage.inputs['prompts']}")
    longest = max(len(ids) for ids in prompts.values())
    limit = read_config(model).max_positions
    if longest + max_tokens > limit:
        stage.refuse("lossless.context", f"a prompt of {longest} and {max_tokens} tokens exceed the context of {limit}")
    try:
        target = Target.load(model, torch.float32, positions_needed(longest, max_tokens, steps))
        return target, Drafter.load(draft, target.embed, torch.float32)
    except (TargetError, ValueError) as error:
        stage.refuse("lossless.model", str(error))


def compare(target: Target, chat: Chat, prompt: list[int], outputs: dict[str, list[int]]) -> dict[str, Any]:
    """Identical or not; if not, where, which tokens, and how far apart the target's two best logits are there."""
    plain, speculative = outputs["plain"], outputs["speculative"]
    if plain == speculative:
        return {"identical": True}
    at = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
    if at is None:  # one is a prefix of the other
        return {"identical": False, "at": min(len(plain), len(speculative)), "lengths": [len(plain), len(speculative)]}
    hidden = target.forward(torch.tensor([prompt + plain[:at]]))
    best = target.logits(hidden.final[0, -1]).topk(2).values.tolist()
    return {
        "identical": False,
        "at": at,
        "plain": chat.decode([plain[at]]),
        "speculative": chat.decode([speculative[at]]),
        "margin": best[0] - best[1],  # a near-tie (1e-4, say) is rounding; more is a fault
    }


if __name__ == "__main__":
    main(run)
