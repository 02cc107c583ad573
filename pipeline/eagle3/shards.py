"""Hidden states on disk: what the `hidden` stage writes and training, the start and the prediction read.

A shard is one safetensors file of whole rows, packed (N tokens, A captured layers, H hidden):

    lengths        [R]      int64    tokens of each row
    tokens         [N]      int32
    mask           [N]      uint8    1 = response token (a row's first token is never one)
    aux            [N, A*H] bf16     outputs of the captured layers, side by side
    last           [N, H]   bf16     final hidden state after the target's last norm: what its head reads
    metadata       ids: JSON list of row ids

Bytes per token: 2 (A + 1) H, and 5 for the token and its mask. Files are mapped, not read: rows not in use cost no
memory. index.json beside the shards says what they are; layers in it are *physical*: 1 is the output of the second
layer of the target, which engines that count inputs call 2. It is written last: a folder without it is not finished.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

SCHEMA = 2


@dataclass
class Row:
    """One sample of T tokens."""

    id: str
    tokens: Tensor  # [T] int64
    mask: Tensor  # [T] bool
    aux: Tensor  # [T, A*H]
    last: Tensor  # [T, H]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Index:
    """What a folder of shards holds."""

    layers: tuple[int, ...]  # physical outputs, 0-based
    hidden_size: int
    target: dict[str, Any]  # digests of the model that the states are of, and the dtype that it computed in
    source: str  # "torch", or the server that gave them
    rows: int
    tokens: int
    response_tokens: int
    shards: list[dict[str, Any]] = field(default_factory=list)  # file, rows, tokens, bytes
    schema: int = SCHEMA


def shard_bytes(rows: Sequence[Row]) -> bytes:
    """The file for some rows."""
    tensors = {
        "lengths": torch.tensor([len(row) for row in rows]),
        "tokens": torch.cat([row.tokens for row in rows]).to(torch.int32),
        "mask": torch.cat([row.mask for row in rows]).to(torch.uint8),
        "aux": torch.cat([row.aux for row in rows]).to(torch.bfloat16),
        "last": torch.cat([row.last for row in rows]).to(torch.bfloat16),
    }
    return save(tensors, metadata={"ids": json.dumps([row.id for row in rows])})  # one key: several come in any order


def read_shard(path: Path) -> list[Row]:
    """The rows of one shard, as views of the mapped file."""
    with safe_open(path, framework="pt") as file:
        ids = json.loads(file.metadata()["ids"])
        t = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    rows, a = [], 0
    for id, length in zip(ids, t["lengths"].tolist(), strict=True):
        at = slice(a, a + length)
        rows.append(Row(id, t["tokens"][at].long(), t["mask"][at].bool(), t["aux"][at], t["last"][at]))
        a += length
    if not a == len(t["tokens"]) == len(t["mask"]) == len(t["aux"]) == len(t["last"]):
        raise ValueError(f"{path}: lengths sum to {a} tokens, the tensors hold another number")
    return rows


def read_shards(directory: Path) -> list[Row]:
    """All rows, in the order they were written."""
    return [row for path in sorted(directory.glob("shard-*.safetensors")) for row in read_shard(path)]


def index_json(index: Index) -> dict[str, Any]:
    return asdict(index) | {"layers": list(index.layers)}


def read_index(directory: Path) -> Index:
    """Raises ValueError where the folder has none, or one of another schema: its layers could mean anything."""
    try:
        raw = json.loads((directory / "index.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{directory} has no readable index.json: {error}") from error
    if raw.get("schema") != SCHEMA:
        raise ValueError(f"{directory}/index.json is of schema {raw.get('schema')}, expected {SCHEMA}: extract it anew")
    return Index(**(raw | {"layers": tuple(raw["layers"])}))


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
