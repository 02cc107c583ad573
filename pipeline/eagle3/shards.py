"""Hidden states on disk: what the `hidden` stage writes and training, the start and the prediction read.

A shard is one safetensors file of whole rows, packed (N tokens, M of them response tokens, H hidden, K candidates):

    lengths        [R]      int64    tokens of each row
    tokens         [N]      int32
    mask           [N]      uint8    1 = response token (a row's first token is never one)
    aux            [N, 3H]  bf16     the inputs of the three capture layers
    last           [M, H]   bf16     final normed hidden state at each response token (the head's input)
    teacher_ids    [M, K]   int32    draft-vocabulary ids, likeliest first
    teacher_probs  [M, K]   fp16     their probabilities in the target's whole vocabulary (sum at most 1)
    metadata       ids: JSON list of row ids

Bytes per token: 6H + 1 for each, and 2H + 6K more for a response token. Files are mapped, not read: rows not in use
cost no memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from pipeline.eagle3.ttt import Batch


@dataclass
class Row:
    """One sample: T tokens, M response tokens."""

    id: str
    tokens: Tensor  # [T] int64
    mask: Tensor  # [T] bool
    aux: Tensor  # [T, 3H]
    last: Tensor  # [M, H]
    teacher_ids: Tensor  # [M, K]
    teacher_probs: Tensor  # [M, K]

    def __len__(self) -> int:
        return len(self.tokens)


def shard_bytes(rows: Sequence[Row]) -> bytes:
    """The file for some rows."""
    tensors = {
        "lengths": torch.tensor([len(row) for row in rows]),
        "tokens": torch.cat([row.tokens for row in rows]).to(torch.int32),
        "mask": torch.cat([row.mask for row in rows]).to(torch.uint8),
        "aux": torch.cat([row.aux for row in rows]).to(torch.bfloat16),
        "last": torch.cat([row.last for row in rows]).to(torch.bfloat16),
        "teacher_ids": torch.cat([row.teacher_ids for row in rows]).to(torch.int32),
        "teacher_probs": torch.cat([row.teacher_probs for row in rows]).to(torch.float16),
    }
    return save(tensors, metadata={"ids": json.dumps([row.id for row in rows])})  # one key: several come in any order


def read_shard(path: Path) -> list[Row]:
    """The rows of one shard, as views of the mapped file."""
    with safe_open(path, framework="pt") as file:
        ids = json.loads(file.metadata()["ids"])
        t = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    lengths = t["lengths"].tolist()
    rows, a, c = [], 0, 0
    for id, length in zip(ids, lengths, strict=True):
        mask = t["mask"][a : a + length].bool()
        m = int(mask.sum())
        rows.append(
            Row(
                id=id,
                tokens=t["tokens"][a : a + length].long(),
                mask=mask,
                aux=t["aux"][a : a + length],
                last=t["last"][c : c + m],
                teacher_ids=t["teacher_ids"][c : c + m],
                teacher_probs=t["teacher_probs"][c : c + m],
            )
        )
        a, c = a + length, c + m
    if a != len(t["tokens"]) or c != len(t["last"]):
        raise ValueError(f"{path}: lengths sum to {a} tokens and {c} response tokens, the tensors hold others")
    return rows


def read_shards(directory: Path) -> list[Row]:
    """All rows, in the order they were written."""
    return [row for path in sorted(directory.glob("shard-*.safetensors")) for row in read_shard(path)]


def span_left(mask: Tensor) -> Tensor:
    """For each response token of a row [M], how many more follow it without a gap (a row may hold several answers)."""
    left, run = [], 0
    for flag in reversed(mask.tolist()):
        run = run + 1 if flag else 0
        if flag:
            left.append(run - 1)
    return torch.tensor(left[::-1], dtype=torch.long)


def pack(rows: Sequence[Row], rms: Tensor, dtype: torch.dtype) -> tuple[Batch, Tensor]:
    """Rows -> (batch for `ttt_loss`, final normed hidden states [M, H]). `rms` [3H] divides the captures."""
    layout, responses, positions, a, c = [], [], [], 0, 0
    for row in rows:
        where = row.mask.nonzero().flatten()
        layout.append((a, a + len(row), c, c + len(where)))
        responses.append(where + a)
        positions.append(torch.arange(len(row)))
        a, c = a + len(row), c + len(where)
    captures = torch.cat([row.aux for row in rows])
    batch = Batch(
        tokens=torch.cat([row.tokens for row in rows]),
        captures=(captures.float() / rms).to(dtype),
        rows=layout,
        response=torch.cat(responses),
        positions=torch.cat(positions),
        teacher_ids=torch.cat([row.teacher_ids for row in rows]).long(),
        teacher_probs=torch.cat([row.teacher_probs for row in rows]).float(),
        left=torch.cat([span_left(row.mask) for row in rows]),
    )
    return batch, torch.cat([row.last for row in rows])


def draw_batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Row numbers of batch after batch, for ever: each pass over the data in a new order, whole rows until the next one
    would exceed `batch_tokens`. A pure function of its arguments, so that batch n is the same after a resume."""
    generator = torch.Generator().manual_seed(seed)
    batch: list[int] = []
    size = 0
    while True:
        for row in torch.randperm(len(lengths), generator=generator).tolist():
            if batch and size + lengths[row] > batch_tokens:
                yield batch
                batch, size = [], 0
            batch.append(row)
            size += lengths[row]
