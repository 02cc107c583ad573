"""The accept length on rows that training does not see, from their stored states.

The text is walked as greedy verification would walk it: draft after the token just written, take the guesses that are
what the target would write there, and one token of the target's, go on from there. What it would write is the likeliest
token by its stored state and head. Where the text is the target's greedy one, this is what a server does at temperature
0; where it was sampled, the same along a text that now and then goes another way, which the drafter reads as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.eagle3.shards import Row


def held_out(rows: int, wanted: int, seed: int) -> list[int]:
    """Which rows are set aside: ascending, the same for a seed."""
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + 1))
    return sorted(order[:wanted].tolist())


@torch.no_grad()
def greedy_next(row: Row, head: Tensor) -> Tensor:
    """[M] target ids: what the target would write after each response token. head [V, H]: its whole head."""
    last = row.last[row.mask].to(head.device, head.dtype)
    return torch.cat([(part @ head.t()).argmax(-1) for part in torch.split(last, 512)])


def walk(accepted: Sequence[int], left: Sequence[int]) -> tuple[int, int]:
    """(verify steps, guesses accepted) over the answers of a batch. accepted[j]: guesses that are right in a row,
    drafting after response token j; left[j]: response tokens that follow it in its answer. Nothing is verified after an
    answer's last token."""
    verified = taken = at = 0
    while at < len(accepted):
        if left[at] == 0:
            at += 1
            continue
        verified += 1
        taken += accepted[at]
        at += min(accepted[at] + 1, left[at])
    return verified, taken


def accept_length(walks: Sequence[tuple[int, int]]) -> float | None:
    verified = sum(n for n, _ in walks)
    return 1.0 + sum(taken for _, taken in walks) / verified if verified else None
