"""What the target thinks, on disk: captures, final hidden states and its likeliest next tokens, for every row.

inputs    rows (rows.jsonl of `mix`), vocab (vocab.safetensors), model
settings  layers: whose inputs to capture (empty: 2, half, third from last); dtype; batch_tokens: of one forward pass
output    shard-00000.safetensors …: see `pipeline.eagle3.shards`; captures.json: {"layers", "teacher_tokens"}

Resumes by shard: one is written under another name and renamed when it is whole, so a file that is there is whole.
One row in a hundred (one a shard at least) is computed again, alone, and compared: batching that leaks between rows
has cost others weeks.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from pipeline.eagle3.draft import default_aux_layers
from pipeline.eagle3.frozen import Vocab, read_vocab
from pipeline.eagle3.shards import Row, read_shard, shard_bytes
from pipeline.eagle3.target import Target, TargetError
from pipeline.stages.protocol import Stage, main, read_jsonl, write_bytes, write_json

SHARD_ROWS = 64
TEACHER_TOKENS = 64
SPOT_EVERY = 100  # and at least one row of each shard
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Of the RMS of the state. bf16 products depend on the batch's shape; a leak or a shift by one is near 1.
TOLERANCE = {"bfloat16": 0.05, "float32": 1e-3}


def run(stage: Stage) -> dict[str, Any]:
    s = stage.settings
    rows = list(read_jsonl(stage.inputs["rows"]))
    vocab, dtype = read_vocab(stage.inputs["vocab"]), str(s.get("dtype", "bfloat16"))
    target = load_target(stage, DTYPES[dtype], max(len(row["input_ids"]) for row in rows))
    layers = tuple(int(i) for i in s.get("layers") or default_aux_layers(target.config.layers))
    if bad := [i for i in layers if not 0 <= i < target.config.layers]:
        stage.refuse("hidden.layers", f"the target has {target.config.layers} layers, there is no input of {bad}")
    if vocab.target_size != target.config.vocab_size:
        stage.refuse("hidden.vocab", f"the map is for {vocab.target_size} tokens, the target has another vocabulary")
    tokens = [len(row["input_ids"]) for row in rows]
    check_disk(stage, sum(tokens), sum(sum(row["loss_mask"]) for row in rows), target.config.hidden_size, len(layers))
    write_json(stage.out / "captures.json", {"layers": list(layers), "teacher_tokens": TEACHER_TOKENS})
    stage.artifact("captures", stage.out / "captures.json")

    head = target.head[vocab.target_ids].contiguous()
    batch_tokens = int(s.get("batch_tokens", 2048))
    done, worst, written = 0, 0.0, 0
    for number, first in enumerate(range(0, len(rows), SHARD_ROWS)):
        chunk = rows[first : first + SHARD_ROWS]
        path = stage.out / f"shard-{number:05d}.safetensors"
        if not is_whole(path, [row["id"] for row in chunk]):
            made: dict[str, Row] = {}
            for batch in by_length(chunk, batch_tokens):
                for row in states(target, head, vocab, batch, layers):
                    check_row(stage, row)
                    made[row.id] = row
                done += sum(len(row["input_ids"]) for row in batch)
                stage.progress(done, sum(tokens), "tokens", shard=number)
            for checked in chunk[::SPOT_EVERY]:
                worst = max(worst, spot_check(stage, target, head, vocab, checked, layers, made[checked["id"]], dtype))
            write_bytes(path, shard_bytes([made[row["id"]] for row in chunk]))
            written += 1
        else:
            done += sum(len(row["input_ids"]) for row in chunk)
        stage.artifact(path.stem, path)
    shards = sorted(stage.out.glob("shard-*.safetensors"))
    return {
        "rows": {"in": len(rows), "out": len(rows), "errors": 0, "skipped": 0},
        "tokens": sum(tokens),
        "response_tokens": sum(sum(row["loss_mask"]) for row in rows),
        "layers": list(layers),
        "shards": len(shards),
        "shards_written_now": written,
        "bytes": sum(path.stat().st_size for path in shards),
        "worst_spot_difference": worst,
    }


def load_target(stage: Stage, dtype: torch.dtype, positions: int | None = None) -> Target:
    """The input `model`, or a refusal in one sentence."""
    try:
        return Target.load(stage.inputs["model"], dtype, positions)
    except TargetError as error:
        stage.refuse("target.unsupported", str(error))


def check_disk(stage: Stage, tokens: int, responses: int, hidden: int, layers: int) -> None:
    """Before, not after: the sum is known exactly."""
    have = sum(path.stat().st_size for path in stage.out.glob("shard-*.safetensors"))
    need = tokens * (2 * layers * hidden + 5) + responses * (2 * hidden + 6 * TEACHER_TOKENS) - have
    free = shutil.disk_usage(stage.out).free
    if need > free:
        stage.refuse("hidden.disk", f"hidden states need {need / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free")


def is_whole(path: Path, ids: list[str]) -> bool:
    """Whether the shard is there and holds exactly these rows; anything else is made again."""
    try:
        return [row.id for row in read_shard(path)] == ids
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return False


def by_length(rows: list[dict[str, Any]], batch_tokens: int) -> Iterator[list[dict[str, Any]]]:
    """Batches of rows of about the same length: padding is computed as well, and thrown away."""
    batch: list[dict[str, Any]] = []
    for row in sorted(rows, key=lambda row: len(row["input_ids"])):
        if batch and len(row["input_ids"]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


@torch.inference_mode()
def states(
    target: Target, head: Tensor, vocab: Vocab, batch: list[dict[str, Any]], layers: tuple[int, ...]
) -> Iterator[Row]:
    """The rows of one batch. head [Vd, H]: the target's, for the draft vocabulary."""
    longest = max(len(row["input_ids"]) for row in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for i, row in enumerate(batch):
        # Padding comes after the row: a causal model does not see it.
        ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
    hidden = target.forward(ids, captures=layers)
    assert hidden.captures is not None
    for i, row in enumerate(batch):
        length = len(row["input_ids"])
        mask = torch.tensor(row["loss_mask"], dtype=torch.bool)
        mask[0] = False  # nothing stands before the first token, so nobody could guess it
        last = hidden.final[i, :length][mask]
        logits = target.logits(last)  # [M, V]
        candidates = logits[:, vocab.target_ids].float().topk(min(TEACHER_TOKENS, len(head)), -1)
        whole = logits.float().logsumexp(-1, keepdim=True)
        yield Row(
            id=row["id"],
            tokens=ids[i, :length].clone(),
            mask=mask,
            aux=hidden.captures[i, :length].clone(),
            last=last,
            teacher_ids=candidates.indices,
            teacher_probs=(candidates.values - whole).exp(),
        )


def check_row(stage: Stage, row: Row) -> None:
    if not len(row.tokens) == len(row.aux) == len(row.mask) or int(row.mask.sum()) != len(row.last):
        raise RuntimeError(f"row {row.id}: {len(row.tokens)} tokens but {len(row.aux)} states")
    if not (row.aux.isfinite().all() and row.last.isfinite().all() and row.teacher_probs.isfinite().all()):
        stage.refuse("hidden.not-finite", f"row {row.id}: the target's states are not finite")


def spot_check(
    stage: Stage,
    target: Target,
    head: Tensor,
    vocab: Vocab,
    row: dict[str, Any],
    layers: tuple[int, ...],
    made: Row,
    dtype: str,
) -> float:
    """Relative difference between a row's states in its batch and alone; refuses what rounding cannot explain."""
    (alone,) = states(target, head, vocab, [row], layers)
    difference = max(relative(alone.aux, made.aux), relative(alone.last, made.last))
    if difference > TOLERANCE[dtype]:
        stage.refuse(
            "hidden.batch-leak",
            f"row {row['id']}: states in a batch differ from those alone by {difference:.1%}: something leaks",
        )
    return difference


def relative(a: Tensor, b: Tensor) -> float:
    """Mean over positions of |a - b| / |a|: per position, because the first one is hundreds of times larger."""
    a, b = a.float(), b.float()
    return float(((a - b).norm(dim=-1) / a.norm(dim=-1)).mean())


if __name__ == "__main__":
    main(run)
