"""What the target would say, for training, from its stored states.

The states on disk are the target's alone; what the drafter is to learn from them depends on the draft vocabulary, so it
is made when training starts: one product with the target's head, of which the `TEACHER_TOKENS` likeliest draft tokens
are kept. Their probabilities are those in the target's *whole* vocabulary, so they sum to at most 1, and a position
where the target wants a token that the draft vocabulary lacks weighs little. Where the loss wants every probability,
only the normaliser is kept, four bytes a token, and the rest made anew for each batch (`batch.dense_teacher`).

It lies in mapped files, one made by each process of a group: a resumed run finds them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from pipeline.eagle3.batch import Taught
from pipeline.eagle3.frozen import Vocab
from pipeline.eagle3.shards import Row
from pipeline.eagle3.world import World, meet
from pipeline.stages.protocol import write_bytes

TEACHER_TOKENS = 64
CPU_ROWS, GPU_BYTES = 512, 1 << 31  # response tokens at a time; bytes of their [., V] logits in fp32


@torch.inference_mode()
def likeliest(last: Tensor, head: Tensor, target_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(draft ids [M, k] int32, probabilities [M, k] fp16, log of the whole vocabulary's sum [M] fp32) for states last
    [M, H]; head [V, H], target_ids [Vd]."""
    logits = last.to(head.dtype) @ head.t()  # [M, V]
    whole = logits.float().logsumexp(-1)
    if k == 0:
        nothing = torch.empty(len(last), 0, device=last.device)
        return nothing.to(torch.int32), nothing.half(), whole
    candidates = logits[:, target_ids].float().topk(min(k, len(target_ids)), -1)
    return candidates.indices.to(torch.int32), (candidates.values - whole.unsqueeze(1)).exp().half(), whole


def chunks(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    """Runs of rows with about `size` response tokens."""
    chunk: list[Row] = []
    tokens = 0
    for row in rows:
        chunk.append(row)
        tokens += int(row.mask.sum())
        if tokens >= size:
            yield chunk
            chunk, tokens = [], 0
    if chunk:
        yield chunk


def part_bytes(rows: Sequence[Row], head: Tensor, vocab: Vocab, k: int, told: Callable[[int], None]) -> bytes:
    """The file for some rows. head [V, H]: the target's whole one, on the device that is to do it. `told` hears the
    tokens of each chunk when it is done."""
    device, target_ids = head.device, vocab.target_ids.to(head.device)
    size = CPU_ROWS if device.type == "cpu" else max(CPU_ROWS, GPU_BYTES // (4 * len(head)))
    parts: list[tuple[Tensor, ...]] = []
    for chunk in chunks(rows, size):
        last = torch.cat([row.last[row.mask] for row in chunk]).to(device)
        parts.append(tuple(t.cpu() for t in likeliest(last, head, target_ids, k)))
        told(sum(len(row) for row in chunk))
    counts = torch.tensor([int(row.mask.sum()) for row in rows], dtype=torch.long)
    if not parts:
        return save({"counts": counts})
    ids, probs, whole = (torch.cat(each) for each in zip(*parts, strict=True))
    return save({"counts": counts, "ids": ids, "probs": probs, "whole": whole})


def teach(
    rows: Sequence[Row],
    head: Tensor,
    vocab: Vocab,
    folder: Path,
    world: World,
    told: Callable[[int], None],
    *,
    dense: bool,
) -> list[Taught]:
    """Every row with its teacher; the processes of `world` make a part each."""
    k = 0 if dense else TEACHER_TOKENS
    paths = [folder / f"teacher-{part}-of-{world.size}.safetensors" for part in range(world.size)]
    if not paths[world.rank].exists():
        write_bytes(paths[world.rank], part_bytes(rows[world.rank :: world.size], head, vocab, k, told))
    meet(world)
    taught: list[Taught | None] = [None] * len(rows)
    for part, path in enumerate(paths):
        t, at = load_file(path), 0
        for number, m in zip(range(part, len(rows), world.size), t["counts"].tolist(), strict=True):
            row, here = rows[number], slice(at, at + m)
            taught[number] = Taught(
                row.id, row.tokens, row.mask, row.aux, row.last, t["ids"][here], t["probs"][here],
                t["whole"][here] if dense else None,
            )  # fmt: skip
            at += m
    return [row for row in taught if row is not None]
