"""What the target thinks, on disk: captures and final hidden states of every token of every row.

inputs    rows (rows.jsonl of `mix`), model
settings  how: "torch" (our own decoder), "transformers" (that library: other architectures) or "sglang" (a patched
          server, see `hidden_server`; then base_url and folder)
          layers: whose outputs to capture, physical, 0-based (empty: 1, half - 1, fourth from last, which is EAGLE-3's
          choice); dtype; device ("cpu", "cuda", "auto"); batch_tokens: of one forward pass (0: what suits the device)
output    shard-00000.safetensors …, index.json: see `pipeline.eagle3.shards`

Resumes by shard: one is written under another name and renamed when it is whole, so a file that is there is whole.
One row in a hundred (one a shard at least) is computed again, alone, and compared: batching that leaks between rows
has cost others weeks. Writing happens in threads of its own, so that neither the disk nor the target waits.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from pipeline.eagle3.config import default_aux_layers, text_config
from pipeline.eagle3.devices import DTYPES, device_of
from pipeline.eagle3.shards import Index, Row, index_json, read_shard, shard_bytes
from pipeline.eagle3.sizes import bytes_per_token
from pipeline.eagle3.target import Target, TargetError
from pipeline.stages.hidden_server import ServerStates
from pipeline.stages.hidden_transformers import transformers_forward
from pipeline.stages.protocol import Stage, digest_file, main, read_jsonl, write_bytes, write_json

SHARD_BYTES = (64 << 20, 1 << 30)  # least and most: a resume repeats one, and 3.5 TB should not be 55,000 files
SHARDS = 256  # how many we like
BATCH_TOKENS = {"cpu": 2048, "cuda": 65536}
WRITERS = max(2, min(8, (os.cpu_count() or 2) // 2))  # on a GPU two of them were what all waited for
FLOOR = 2 << 30  # bytes that must stay free on the disk while we write
SPOT_EVERY = 100  # and at least one row of each shard
# Of the RMS of the state. bf16 products depend on the batch's shape; a leak or a shift by one is near 1.
TOLERANCE = {"bfloat16": 0.05, "float32": 1e-3}

Rows = list[dict[str, Any]]


def run(stage: Stage) -> dict[str, Any]:
    s = stage.settings
    rows, dtype = list(read_jsonl(stage.inputs["rows"])), str(s.get("dtype", "bfloat16"))
    count, width = sizes_of(stage)
    layers = tuple(int(i) for i in s.get("layers") or (layer - 1 for layer in default_aux_layers(count)))
    if bad := [i for i in layers if not 0 <= i < count - 1]:
        stage.refuse(
            "hidden.layers", f"the target has {count} layers (0 to {count - 1}), the last is kept anyway: {bad}"
        )
    extractor = source_of(stage, layers, dtype, max(len(row["input_ids"]) for row in rows))
    per_token = bytes_per_token(width, len(layers)) + 5
    plan = plan_shards(rows, per_token)
    whole = {n: is_whole(shard_path(stage, n), [row["id"] for row in chunk]) for n, chunk in enumerate(plan)}
    tokens = [len(row["input_ids"]) for row in rows]
    missing = [row for number, chunk in enumerate(plan) if not whole[number] for row in chunk]
    check_disk(stage, per_token * sum(len(row["input_ids"]) for row in missing))

    done, worst = 0, 0.0
    with Writer(stage) as writer:
        for number, chunk in enumerate(plan):
            if whole[number]:
                writer.keep(number)
                done += sum(len(row["input_ids"]) for row in chunk)
                continue
            made: dict[str, Row] = {}
            for batch in by_length(chunk, extractor.batch_tokens):
                made |= {row.id: row for row in extractor(batch)}
                done += sum(len(row["input_ids"]) for row in batch)
                stage.progress(done, sum(tokens), "tokens", shard=number)
            for checked in chunk[::SPOT_EVERY]:
                worst = max(worst, spot_check(stage, extractor, checked, made[checked["id"]], dtype))
            writer.write(number, [made[row["id"]] for row in chunk])
    index = Index(
        layers=layers,
        hidden_size=width,
        target={"model": stage.digest("model"), **extractor.about},
        source=extractor.source,
        rows=len(rows),
        tokens=sum(tokens),
        response_tokens=sum(sum(row["loss_mask"]) for row in rows),
        shards=[{**writer.shards[n], "rows": len(chunk)} for n, chunk in enumerate(plan)],
    )
    write_json(stage.out / "index.json", index_json(index))
    stage.artifact("index", stage.out / "index.json")
    return {
        "rows": {"in": len(rows), "out": len(rows), "errors": 0, "skipped": 0},
        "tokens": index.tokens,
        "response_tokens": index.response_tokens,
        "layers": list(layers),
        "shards": len(plan),
        "shards_written_now": sum(not there for there in whole.values()),
        "bytes": sum(shard["bytes"] for shard in index.shards),
        "worst_spot_difference": worst,
    }


class States(Protocol):
    """Where states come from. Rows of a batch may come back in any order."""

    batch_tokens: int
    source: str  # for index.json
    about: dict[str, Any]  # what of the computation the states depend on, for index.json

    def __call__(self, batch: Rows) -> Iterator[Row]: ...


def source_of(stage: Stage, layers: tuple[int, ...], dtype: str, positions: int) -> States:
    """What the settings name. `positions`: tokens of the longest row."""
    s = stage.settings
    if s.get("how", "torch") == "sglang":
        return ServerStates(stage, layers, str(s["base_url"]), Path(s["folder"]))
    device = device_of(stage, s.get("device", "cpu"))
    if s.get("how") == "transformers":
        forward = transformers_forward(stage, stage.inputs["model"], layers, DTYPES[dtype], device)
    else:
        forward = own_forward(load_target(stage, DTYPES[dtype], positions, device), layers)
    states = TorchStates(stage, forward, int(s.get("batch_tokens") or BATCH_TOKENS[device.type]))
    states.source, states.about = str(s.get("how", "torch")), {"dtype": dtype}
    return states


def sizes_of(stage: Stage) -> tuple[int, int]:
    """Layers of the target and its width, from its config.json."""
    path = stage.inputs["model"] / "config.json"
    try:
        text = text_config(json.loads(path.read_text()))
        return int(text["num_hidden_layers"]), int(text["hidden_size"])
    except (OSError, ValueError, KeyError) as error:
        stage.refuse("target.unsupported", f"cannot read {path}: {error}")


def shard_path(stage: Stage, number: int) -> Path:
    return stage.out / f"shard-{number:05d}.safetensors"


def load_target(
    stage: Stage, dtype: torch.dtype, positions: int | None = None, device: torch.device | None = None
) -> Target:
    """The input `model`, or a refusal in one sentence."""
    try:
        return Target.load(stage.inputs["model"], dtype, positions, device)
    except TargetError as error:
        stage.refuse("target.unsupported", str(error))


def plan_shards(rows: Rows, per_token: int) -> list[Rows]:
    """Whole rows, in order, until a shard is large enough; a pure function of the rows, so a resume finds the same."""
    total = per_token * sum(len(row["input_ids"]) for row in rows)
    size = max(SHARD_BYTES[0], min(SHARD_BYTES[1], total // SHARDS))
    plan: list[Rows] = []
    room = 0
    for row in rows:
        need = per_token * len(row["input_ids"])
        if not plan or need > room:
            plan.append([])
            room = size
        plan[-1].append(row)
        room -= need
    return plan


def check_disk(stage: Stage, need: int) -> None:
    """Before, not after: the sum is known exactly."""
    free = shutil.disk_usage(stage.out).free
    if need > free:
        stage.refuse(
            "hidden.disk",
            f"hidden states need {need / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free: make room, or train on less",
        )


class Writer:
    """Shards to disk in threads; at most `WRITERS` of them are in memory beside the one being made."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.shards: dict[int, dict[str, Any]] = {}
        self.pool = ThreadPoolExecutor(WRITERS)
        self.waiting: list[Future[None]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            while kind is None and self.waiting:
                self.waiting.pop(0).result()
        finally:
            self.pool.shutdown(cancel_futures=True)

    def write(self, number: int, rows: list[Row]) -> None:
        while len(self.waiting) >= WRITERS:
            self.waiting.pop(0).result()
        if shutil.disk_usage(self.stage.out).free < FLOOR:
            self.stage.refuse(
                "hidden.floor",
                f"less than {FLOOR / 1e9:.0f} GB are free in {self.stage.out}: make room, start again, it goes on here",
            )
        self.waiting.append(self.pool.submit(self._write, number, rows))

    def _write(self, number: int, rows: list[Row]) -> None:
        data = shard_bytes(rows)
        write_bytes(shard_path(self.stage, number), data)
        self._note(number, hashlib.sha256(data).hexdigest(), len(data), sum(map(len, rows)))

    def keep(self, number: int) -> None:
        """A shard that is there already."""
        path = shard_path(self.stage, number)
        self._note(number, digest_file(path), path.stat().st_size, sum(map(len, read_shard(path))))

    def _note(self, number: int, digest: str, size: int, tokens: int) -> None:
        path = shard_path(self.stage, number)
        self.stage.artifact(path.stem, path, digest=digest)
        self.shards[number] = {"file": path.name, "tokens": tokens, "bytes": size}


def is_whole(path: Path, ids: list[str]) -> bool:
    """Whether the shard is there and holds exactly these rows; anything else is made again."""
    try:
        return [row.id for row in read_shard(path)] == ids
    except (OSError, SafetensorError, ValueError, KeyError, TypeError):
        return False


def by_length(rows: Rows, batch_tokens: int) -> Iterator[Rows]:
    """Batches of rows of about the same length: padding is computed as well, and thrown away."""
    batch: Rows = []
    for row in sorted(rows, key=lambda row: len(row["input_ids"])):
        if batch and len(row["input_ids"]) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


Forward = Callable[[Tensor], tuple[Tensor, Tensor]]  # ids [B, T] -> captures [B, T, A*H], final states [B, T, H]


def own_forward(target: Target, layers: tuple[int, ...]) -> Forward:
    inputs = tuple(layer + 1 for layer in layers)  # the output of a layer is the input of the next

    def forward(ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = target.forward(ids.to(target.embed.device), captures=inputs)
        assert hidden.captures is not None
        return hidden.captures, hidden.final

    return forward


class TorchStates:
    """States that are computed here, a batch at a time."""

    source: str
    about: dict[str, Any]

    def __init__(self, stage: Stage, forward: Forward, batch_tokens: int) -> None:
        self.stage, self.forward, self.batch_tokens = stage, forward, batch_tokens

    @torch.inference_mode()
    def __call__(self, batch: Rows) -> Iterator[Row]:
        longest = max(len(row["input_ids"]) for row in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        for i, row in enumerate(batch):
            # Padding comes after the row: a causal model does not see it.
            ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
        captures, states = self.forward(ids)
        if not (captures.isfinite().all() & states.isfinite().all()):
            self._refuse_not_finite(batch, captures, states)
        aux, final = (t.to(torch.bfloat16).cpu() for t in (captures, states))
        for i, row in enumerate(batch):
            length = len(row["input_ids"])
            mask = torch.tensor(row["loss_mask"], dtype=torch.bool)
            mask[0] = False  # nothing stands before the first token, so nobody could guess it
            yield Row(row["id"], ids[i, :length], mask, aux[i, :length], final[i, :length])

    def _refuse_not_finite(self, batch: Rows, captures: Tensor, final: Tensor) -> None:
        """Padding may be anything; a row may not."""
        for i, row in enumerate(batch):
            length = len(row["input_ids"])
            if not (captures[i, :length].isfinite().all() and final[i, :length].isfinite().all()):
                self.stage.refuse("hidden.not-finite", f"row {row['id']}: the target's states are not finite")


def spot_check(stage: Stage, extractor: States, row: dict[str, Any], made: Row, dtype: str) -> float:
    """How much a row's states in its batch and alone differ; refuses more than rounding can make."""
    (alone,) = extractor([row])
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
