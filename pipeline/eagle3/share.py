"""Which rows each step has, and which of its pieces are whose: known to every process beforehand."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from pipeline.eagle3.batch import Taught, judged_counts
from pipeline.eagle3.shards import draw_batches
from pipeline.eagle3.world import World


@dataclass(frozen=True)
class Item:
    """A piece of a step."""

    rows: list[int]
    counts: list[int]  # of the whole step: queries that guess k is judged at
    tokens: int  # of the whole step
    responses: int


class Share:
    """A pure function of the data and the seed."""

    def __init__(self, rows: Sequence[Taught], steps: int, piece_tokens: int, pieces: int, seed: int) -> None:
        self.lengths = [len(row) for row in rows]
        self.counts = [judged_counts(row.mask, steps) for row in rows]
        self.responses = [int(row.mask.sum()) for row in rows]
        self.piece_tokens, self.pieces, self.seed = piece_tokens, pieces, seed

    def items(self, steps_done: int, group: World) -> Iterator[Item]:
        drawn = draw_batches(self.lengths, self.piece_tokens, self.seed)
        for _ in range(steps_done * self.pieces):
            next(drawn)
        while True:
            step = [next(drawn) for _ in range(self.pieces)]
            every = [i for piece in step for i in piece]
            counts = torch.stack([self.counts[i] for i in every]).sum(0).tolist()
            tokens, responses = sum(self.lengths[i] for i in every), sum(self.responses[i] for i in every)
            for piece in step[group.rank :: group.size]:
                yield Item(piece, counts, tokens, responses)

    def steps_of(self, epochs: float) -> int:
        """Steps in which every row is seen `epochs` times."""
        drawn = draw_batches(self.lengths, self.piece_tokens, self.seed)
        wanted, seen, pieces = epochs * len(self.lengths), 0, 0
        while seen < wanted:
            seen += len(next(drawn))
            pieces += 1
        return max(1, math.ceil(pieces / self.pieces))
