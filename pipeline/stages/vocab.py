"""Choose the draft vocabulary: the target tokens that the drafter may guess.

inputs    rows (rows.jsonl of `mix`), model
settings  size; mass_rows: rows of which the target's own probabilities are added up as well (0: counts only)
output    vocab.safetensors: d2t (offsets) and t2d (mask), see `pipeline.eagle3.frozen.Vocab`

Score of a token = its share of the response tokens + its mean probability where the target would write a response
token. The second part says which tokens that never came up in this data will come up in other text.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3.frozen import Vocab, end_tokens, target_config, vocab_bytes
from pipeline.stages.hidden import load_target
from pipeline.stages.protocol import Stage, main, read_jsonl, write_bytes


def run(stage: Stage) -> dict[str, Any]:
    rows = list(read_jsonl(stage.inputs["rows"]))
    target_size = int(target_config(stage.inputs["model"])["vocab_size"])
    size = min(int(stage.settings.get("size", 8192)), target_size)
    counts = torch.zeros(target_size, dtype=torch.float64)
    for row in rows:
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"], dtype=torch.float64)
        counts.index_add_(0, ids, mask)
    total = float(counts.sum())
    if total == 0:
        stage.refuse("vocab.empty", "no response token in any row")
    sample = rows[: int(stage.settings.get("mass_rows", 64))]
    score = counts / total + (probability_mass(stage, sample) if sample else 0)
    vocab = choose(score, size, end_tokens(stage.inputs["model"]))

    path = stage.out / "vocab.safetensors"
    write_bytes(path, vocab_bytes(vocab))
    stage.artifact("vocab", path)
    distinct, covered = int((counts > 0).sum()), float(counts[vocab.target_ids].sum())
    if distinct < size and not sample:
        stage.warn("vocab.few-tokens", f"the data has {distinct} distinct tokens, {size - distinct} were filled in")
    return {
        "size": size,
        "target_size": target_size,
        "distinct_in_data": distinct,
        "response_tokens": int(total),
        "coverage": covered / total,
        # Good-Turing: the share of tokens seen once estimates the share of other text that this data never saw.
        "unseen_estimate": float((counts == 1).sum()) / total,
    }


def choose(score: Tensor, size: int, always: set[int]) -> Vocab:
    """The `size` best tokens, and `always` among them. Equal scores: the lower id, which a BPE learned earlier."""
    score = score.clone()
    score[sorted(always)] = float("inf")
    best = torch.sort(score, descending=True, stable=True).indices[:size]
    return Vocab(best.sort().values, len(score))


@torch.inference_mode()
def probability_mass(stage: Stage, rows: list[dict[str, Any]]) -> Tensor:
    """Mean over the response tokens of `rows` of the target's probabilities for that place, [V] fp64."""
    target = load_target(stage, torch.bfloat16, max(len(row["input_ids"]) for row in rows))
    mass, count = torch.zeros(target.config.vocab_size, dtype=torch.float64), 0
    for done, row in enumerate(rows, 1):
        ids = torch.tensor([row["input_ids"]])
        before = torch.tensor([*row["loss_mask"][1:], 0], dtype=torch.bool)  # the places that write a response token
        final = target.forward(ids).final[0, before]
        mass += torch.softmax(target.logits(final).float(), -1).sum(0).double()
        count += len(final)
        stage.progress(done, len(rows), "rows")
    return mass / max(count, 1)


if __name__ == "__main__":
    main(run)
