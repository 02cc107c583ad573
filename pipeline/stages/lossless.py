"""Does speculation change the output? Greedy decoding in fp32 with and without the drafter, token for token.

inputs    model, drafter, prompts (a prompts file)
settings  limit (prompts, from the top), max_tokens, steps (drafts a verify step)
output    lossless.json: for each prompt the number of tokens compared, and where the two first differ if they do

In fp32, because in bf16 the result of a matrix product depends on how many rows it has, so near-ties fall either way
and the comparison would measure rounding. Each prompt is decoded alone: one row plain, steps + 1 rows in a verify.
"""

from __future__ import annotations

from typing import Any

import torch

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.decode import Request, decode
from pipeline.eagle3.draft import Drafter
from pipeline.eagle3.frozen import end_tokens
from pipeline.eagle3.target import Target
from pipeline.stages.protocol import Stage, main, read_jsonl, write_json


def run(stage: Stage) -> dict[str, Any]:
    s = stage.settings
    chat = Chat(stage.inputs["model"])
    stops = frozenset(end_tokens(stage.inputs["model"]))
    rows = list(read_jsonl(stage.inputs["prompts"]))[: s["limit"]]
    prompts = [chat.encode(chat.render(row["messages"], add_generation_prompt=True)) for row in rows]
    target = Target.load(stage.inputs["model"], torch.float32)
    drafter = Drafter.load(stage.inputs["drafter"], target.embed, torch.float32)
    compared = []
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=True), 1):
        plain = answer(target, prompt, s["max_tokens"], stops)
        speculative = answer(target, prompt, s["max_tokens"], stops, drafter, s["steps"])
        compared.append({"id": row["id"], "tokens": len(plain.output), **difference(plain.output, speculative.output)})
        stage.progress(number, len(rows), "prompts", identical=sum(c["identical"] for c in compared))
    write_json(stage.out / "lossless.json", {"dtype": "float32", "prompts": compared})
    stage.artifact("lossless.json", stage.out / "lossless.json")
    same = sum(c["identical"] for c in compared)
    if same < len(compared):
        stage.warn("lossless.differs", f"{len(compared) - same} of {len(compared)} greedy outputs differ in fp32")
    return {
        "checked": len(compared),
        "identical": same,
        "tokens": sum(c["tokens"] for c in compared),
        "dtype": "float32",
    }


def answer(
    target: Target,
    prompt: list[int],
    max_tokens: int,
    stops: frozenset[int],
    drafter: Drafter | None = None,
    steps: int = 3,
) -> Request:
    """One greedy answer, alone in its batch."""
    return next(decode(target, [Request(prompt, max_tokens, stops)], drafter, steps))


def difference(plain: list[int], speculative: list[int]) -> dict[str, Any]:
    """Whether two outputs are the same, and the first place where they are not."""
    if plain == speculative:
        return {"identical": True}
    shorter = min(len(plain), len(speculative))
    first = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    tails = {"plain": plain[first:][:3], "speculative": speculative[first:][:3]}
    return {"identical": False, "first_difference": first, **tails}


if __name__ == "__main__":
    main(run)
