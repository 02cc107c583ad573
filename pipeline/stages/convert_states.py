"""Hidden states of another trainer into our layout, or ours into another's.

inputs    states (the folder), model; rows (rows.jsonl of `mix`: from speculators only, for ids and loss masks)
settings  from, to: "specforge", "speculators", "rigbook", one of them rigbook; layers: physical outputs that the
          foreign files hold, in their order (they do not say themselves; `match` tells whether it is true)
output    shard-*.safetensors and index.json (`pipeline.eagle3.shards`), or states/ in the other's layout
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.eagle3.config import text_config
from pipeline.eagle3.layouts import read_specforge, read_speculators, write_specforge, write_speculators
from pipeline.eagle3.shards import Index, Row, index_json, read_index, read_shards
from pipeline.stages.hidden import SHARD_BYTES, Writer
from pipeline.stages.protocol import Stage, main, read_jsonl, write_json

OURS = "rigbook"


def run(stage: Stage) -> dict[str, Any]:
    came, goes = str(stage.settings["from"]), str(stage.settings["to"])
    if (came == OURS) == (goes == OURS):
        stage.refuse("convert.ways", f"from {came!r} to {goes!r}: one of the two, and one only, is {OURS!r}")
    try:
        return give(stage, goes) if came == OURS else take(stage, came)
    except ValueError as error:
        stage.refuse("convert.states", str(error))


def take(stage: Stage, came: str) -> dict[str, Any]:
    """Another's files into shards and an index."""
    layers = tuple(int(layer) for layer in stage.settings["layers"])
    source = stage.inputs["states"]
    rows: Iterator[Row]
    if came == "specforge":
        rows = read_specforge(source, len(layers))
    else:
        norm, eps = last_norm(stage)
        rows = read_speculators(source, len(layers), list(read_jsonl(stage.inputs["rows"])), norm, eps)
    files = sum(1 for pattern in ("data_*.ckpt", "hs_*.safetensors") for _ in source.rglob(pattern))
    counts: list[int] = []
    tokens = responses = width = 0
    with Writer(stage) as writer:
        chunk: list[Row] = []
        size = 0
        for row in rows:
            chunk.append(row)
            size += row.aux.nbytes + row.last.nbytes
            tokens, responses, width = tokens + len(row), responses + int(row.mask.sum()), row.last.shape[-1]
            if size >= SHARD_BYTES[0]:
                writer.write(len(counts), chunk)
                counts.append(len(chunk))
                chunk, size = [], 0
                stage.progress(sum(counts), files, "rows")
        if chunk:
            writer.write(len(counts), chunk)
            counts.append(len(chunk))
    index = Index(
        layers=layers,
        hidden_size=width,
        target={"model": stage.digest("model")},
        source=came,
        rows=sum(counts),
        tokens=tokens,
        response_tokens=responses,
        shards=[{**writer.shards[n], "rows": count} for n, count in enumerate(counts)],
    )
    write_json(stage.out / "index.json", index_json(index))
    stage.artifact("index", stage.out / "index.json")
    return done(index.rows, index.tokens)


def give(stage: Stage, goes: str) -> dict[str, Any]:
    """Ours in another's layout, a row a file."""
    index, rows = read_index(stage.inputs["states"]), read_shards(stage.inputs["states"])
    norm = last_norm(stage)[0] if goes == "speculators" else None
    tokens = 0
    for number, row in enumerate(rows):
        if norm is None:
            write_specforge([row], stage.out / "states", number)
        else:
            write_speculators([row], stage.out / "states", number, norm)
        tokens += len(row)
        stage.progress(tokens, index.tokens, "tokens")
    return done(len(rows), tokens)


def done(rows: int, tokens: int) -> dict[str, Any]:
    return {"rows": {"in": rows, "out": rows, "errors": 0, "skipped": 0}, "tokens": tokens}


def last_norm(stage: Stage) -> tuple[Tensor, float]:
    """The weight [H] of the target's last norm, and its eps. Raises ValueError where the folder has none."""
    model = stage.inputs["model"]
    eps = float(text_config(json.loads((model / "config.json").read_text())).get("rms_norm_eps", 1e-6))
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                if key == "model.norm.weight" or key.endswith(".model.norm.weight"):
                    return file.get_tensor(key).to(torch.float32), eps
    raise ValueError(f"{model} has no tensor model.norm.weight: the last norm is needed for speculators' states")


if __name__ == "__main__":
    main(run)
