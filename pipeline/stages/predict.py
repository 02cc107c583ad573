"""Predict the accept length on held-out responses, without a server.

inputs    drafter (folder of `export`), model, held_self and held_people (rows.jsonl of `generate` at temperature 0)
settings  steps: drafted tokens a verify step; dtype
output    predict.json: {"self": {...}, "people": {...}}

The responses are the target's own greedy ones, so verification can be played: the target reads the whole text once for
its captures, the drafter guesses `steps` tokens on from every place, and a walk along the text takes what greedy
verification would take (accepted guesses and one token of the target's own). The drafter is the exported file in the
class that decodes, not training's code, so this also checks one against the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3.devices import DTYPES
from pipeline.eagle3.draft import DraftCache, Drafter
from pipeline.eagle3.target import Target
from pipeline.stages.hidden import load_target
from pipeline.stages.protocol import Stage, main, read_jsonl, write_json
from pipeline.stages.reasons import thinking
from pipeline.stages.sequence import Unusable, rules_of
from pipeline.stages.tokenize import tokenize_row


def run(stage: Stage) -> dict[str, Any]:
    steps, dtype = int(stage.settings.get("steps", 3)), DTYPES[stage.settings.get("dtype", "bfloat16")]
    model = stage.inputs["model"]
    thinks = thinking(model, stage.settings.get("reasoning", "auto"))
    rules = rules_of(model, thinks, dict(stage.settings.get("template") or {}))
    target = load_target(stage, dtype)
    drafter = Drafter.load(stage.inputs["drafter"], target.embed, dtype)
    results: dict[str, Any] = {}
    for kind in ("self", "people"):
        rows, errors = [], 0
        for row in read_jsonl(stage.inputs[f"held_{kind}"]):
            try:
                made = tokenize_row(rules, row)
            except Unusable as reason:
                errors += 1
                stage.warn("predict.row", f"{row['id']}: {reason}")
                continue
            rows.append((torch.tensor(made["input_ids"]), made["loss_mask"].index(1) if 1 in made["loss_mask"] else 0))
        walks = []
        for done, (ids, first) in enumerate(rows, 1):
            if len(ids) - first >= 2 and first >= 1:
                walks.append(walk(accepted_everywhere(target, drafter, ids, first, steps), steps))
            stage.progress(done, len(rows), f"{kind} rows")
        results[kind] = summary(walks, steps) | {"rows": len(rows), "rows_unusable": errors}
        results[kind]["draft_vocab_coverage"] = coverage(drafter, [ids[first:] for ids, first in rows])
        stage.metric(f"predict.{kind}.accept_length", results[kind]["accept_len"])
    write_json(stage.out / "predict.json", results)
    stage.artifact("predict", stage.out / "predict.json")
    return results


@torch.inference_mode()
def accepted_everywhere(target: Target, drafter: Drafter, ids: Tensor, first: int, steps: int) -> list[int]:
    """How many guesses would be accepted, drafting right after each response token but the last.

    ids [T], the response starts at `first`. Entry j drafts when the target has just written response token j: from slot
    first + j - 1. Guesses past the end of the text do not count.
    """
    captures = target.forward(ids.unsqueeze(0), captures=drafter.config.aux_layers).captures
    assert captures is not None
    slots = len(ids) - 1  # the last token has no token after it
    cache = drafter.new_cache(1, slots)
    after, positions = ids[1:].unsqueeze(0), torch.arange(slots).unsqueeze(0)
    hidden = drafter(after, drafter.fuse(captures[:, :slots]), positions, cache)[0]  # [slots, H]

    # From here on each window is a row of its own, with the true slots as its past and its guesses behind them.
    at = torch.arange(first - 1, slots - 1)  # windows: the slots of response tokens 0 .. M-2
    windows = len(at)
    keys, values = (t.new_zeros(windows, t.shape[1], slots + steps, t.shape[3]) for t in (cache.keys, cache.values))
    keys[:, :, :slots], values[:, :, :slots] = cache.keys, cache.values
    own = DraftCache(keys, values)
    hidden = hidden[at].unsqueeze(1)  # [W, 1, H]
    accepted, alive = torch.zeros(windows, dtype=torch.long), torch.ones(windows, dtype=torch.bool)
    for step in range(steps):
        guess = drafter.to_target(drafter.logits(hidden)[:, 0].argmax(-1))  # [W]
        truth = at + 2 + step  # where in the text this guess belongs
        inside = truth < len(ids)
        alive = alive & inside & (guess == ids[truth.clamp(max=len(ids) - 1)])
        accepted += alive
        if step + 1 < steps:
            # A window that has failed goes on with its own guess; nothing is counted there any more.
            hidden = drafter(guess.unsqueeze(1), hidden, (at + 1 + step).unsqueeze(1), own)
    counts: list[int] = accepted.tolist()
    return counts


def walk(accepted: list[int], steps: int) -> list[int]:
    """Accepted guesses of each verify step on the way along one response: each moves on by what it emits."""
    taken, at = [], 0
    while at < len(accepted):
        taken.append(min(accepted[at], steps))
        at += taken[-1] + 1
    return taken


def summary(walks: list[list[int]], steps: int) -> dict[str, Any]:
    """Raw counters, and what they make. per_position[k]: share of verify steps whose first k+1 guesses were taken."""
    taken = [n for one in walks for n in one]
    verify = len(taken)
    histogram = [taken.count(n) for n in range(steps + 1)]
    return {
        "accept_len": (sum(taken) + verify) / verify if verify else None,
        "verify_steps": verify,
        "accepted": sum(taken),
        "proposed": verify * steps,
        "histogram": histogram,
        "per_position": [sum(histogram[k + 1 :]) / verify if verify else None for k in range(steps)],
        "responses": len(walks),
    }


def coverage(drafter: Drafter, responses: list[Tensor]) -> float | None:
    """Share of the response tokens that the draft vocabulary has: what no training can exceed."""
    tokens = torch.cat(responses) if responses else torch.zeros(0, dtype=torch.long)
    return float(drafter.w("t2d")[tokens].float().mean()) if len(tokens) else None


if __name__ == "__main__":
    main(run)
