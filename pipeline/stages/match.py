"""Which layers of the target stored hidden states really are, whatever their index says.

inputs    hidden (a folder of `hidden`), model
settings  device, dtype (of the target; our own decoder must load it), rows: how many of them to compute again
output    match.json: {"slices": [{"slice", "expected", "best", "cosine", "difference", "norm_ratio", "stored",
          "computed"}], "holds"}

Engines and trainers count layers differently, store the last state before or after the final norm, and put captures
in another order. Each stored slice is compared with *every* state that the target has: its embedding, the output of
each layer, and the final state after the norm. The nearest by relative difference is what it is (a cosine alone does
not tell a state from its multiple). What differs from the index is a finding, not a failure: the stage's result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3.devices import DTYPES, device_of
from pipeline.eagle3.shards import Row, read_index, read_shards
from pipeline.eagle3.target import Target
from pipeline.stages.hidden import load_target
from pipeline.stages.protocol import Stage, main, write_json

ROWS = 8
POSITIONS = 512  # of a row; later states depend on the same weights
FAR = 0.2  # relative difference from which a slice is none of the target's states: bf16 kernels differ by 0.05
LEADING = 4  # values shown, for eyes
LAST = "last"


def run(stage: Stage) -> dict[str, Any]:
    s = stage.settings
    try:
        index = read_index(stage.inputs["hidden"])
    except ValueError as error:
        stage.refuse("match.states", str(error))
    rows = read_shards(stage.inputs["hidden"])
    if not rows:
        stage.refuse("match.states", f"{stage.inputs['hidden']} holds no row")
    wanted = min(int(s.get("rows", ROWS)), len(rows))
    sample = [rows[i * len(rows) // wanted] for i in range(wanted)]
    device, dtype = device_of(stage, s.get("device", "cpu")), DTYPES[s.get("dtype", "bfloat16")]
    target = load_target(stage, dtype, POSITIONS, device)
    if target.config.hidden_size != index.hidden_size:
        stage.refuse(
            "match.states",
            f"the states are {index.hidden_size} wide, the target's {target.config.hidden_size}: they are of another",
        )
    expected = [*map(str, index.layers), LAST]
    found = []
    for done, row in enumerate(sample, 1):
        found.append(compare(slices(row, index.hidden_size), every_state(target, row)))
        stage.progress(done, len(sample), "rows")
    table = [
        judged(target, expected[i], [each[i] for each in found], sample[0], index.hidden_size, i)
        for i in range(len(expected))
    ]
    for line in table:
        if line["difference"] > FAR:
            stage.warn(
                "match.far",
                f"slice {line['slice']}, said to be {line['expected']}, is none of the target's states: the nearest, "
                f"{line['best']}, differs by {line['difference']:.0%}. It was made by another model or number format",
            )
        elif line["best"] != line["expected"]:
            stage.warn(
                "match.layer",
                f"slice {line['slice']} is said to be {line['expected']} and is {line['best']} (differs by "
                f"{line['difference']:.1%}): correct the layers in index.json, or extract anew",
            )
    holds = all(line["best"] == line["expected"] and line["difference"] <= FAR for line in table)
    result = {"slices": table, "holds": holds}
    write_json(stage.out / "match.json", result)
    stage.artifact("match", stage.out / "match.json")
    return result


def slices(row: Row, width: int) -> Tensor:
    """[A + 1, T, H]: the captures, then the final state."""
    return torch.cat([row.aux.reshape(len(row), -1, width).transpose(0, 1), row.last.unsqueeze(0)])


def state_names(layers: int) -> list[str]:
    """Of what `every_state` gives. The last layer's output is the final state before the norm."""
    return ["embedding", *map(str, range(layers)), LAST]


@torch.inference_mode()
def every_state(target: Target, row: Row) -> Tensor:
    """[L + 2, T, H], T at most POSITIONS."""
    tokens = row.tokens[:POSITIONS].unsqueeze(0).to(target.embed.device)
    made = target.forward(tokens, captures=tuple(range(target.config.layers + 1)))
    assert made.captures is not None
    layers = made.captures[0].reshape(tokens.shape[1], -1, target.config.hidden_size).transpose(0, 1)
    return torch.cat([layers, made.final])


def compare(stored: Tensor, computed: Tensor) -> Tensor:
    """[A + 1, L + 2, 3]: relative difference, cosine and ratio of norms, means over the positions. The first one is
    left out: it is hundreds of times larger in most models and much the same in all layers."""
    out = torch.empty(len(stored), len(computed), 3)
    length = computed.shape[1]
    for i, given in enumerate(stored):
        a = given[1:length].to(computed.device).float()  # [T, H]
        for j, state in enumerate(computed):
            b = state[1:].float()
            norms = b.norm(dim=-1).clamp_min(1e-9)
            out[i, j, 0] = ((a - b).norm(dim=-1) / norms).mean()
            out[i, j, 1] = torch.nn.functional.cosine_similarity(a, b, dim=-1).mean()
            out[i, j, 2] = (a.norm(dim=-1) / norms).mean()
    return out


def judged(target: Target, expected: str, found: list[Tensor], row: Row, width: int, slice: int) -> dict[str, Any]:
    """One stored slice: which state it is nearest to. found: [L + 2, 3] of each row; `row`: whose values to show."""
    mean = torch.stack(found).mean(0)
    best = int(mean[:, 0].argmin())
    difference, cosine, ratio = mean[best].tolist()
    at = min(1, len(row) - 1)
    return {
        "slice": slice,
        "expected": expected,
        "best": state_names(target.config.layers)[best],
        "cosine": cosine,
        "difference": difference,
        "norm_ratio": ratio,
        "stored": slices(row, width)[slice, at, :LEADING].tolist(),
        "computed": every_state(target, row)[best, at, :LEADING].tolist(),
    }


if __name__ == "__main__":
    main(run)
