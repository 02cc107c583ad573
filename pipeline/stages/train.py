"""Train the drafter on cached hidden states.

inputs    hidden (folder of shards), vocab (vocab.safetensors), model
settings  ttt_steps, minutes, batch_tokens, lr, dtype, seed; steps (instead of minutes: an exact number)
output    trained.safetensors (see `pipeline.eagle3.trained`)
          history.jsonl: one line a step; checkpoints/ while it runs

The time budget becomes a number of steps after the first seconds, and the learning rate falls to zero exactly at that
step: only an annealed drafter is worth measuring. The number is in the checkpoint, so a resumed run ends at the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from pipeline.eagle3 import checkpoint
from pipeline.eagle3.batch import pack
from pipeline.eagle3.devices import DTYPES
from pipeline.eagle3.draft import config_for_target
from pipeline.eagle3.frozen import borrow, read_vocab, target_config
from pipeline.eagle3.shards import draw_batches, read_index, read_shards
from pipeline.eagle3.start import capture_rms, ridge_start
from pipeline.eagle3.teacher import teach
from pipeline.eagle3.train import MEASURE_FROM, MEASURE_TO, Settings, Trainer, skip, steps_that_fit
from pipeline.eagle3.trained import Trained, trained_bytes
from pipeline.eagle3.ttt import trained_shapes
from pipeline.stages.protocol import Stage, main, write_bytes, write_jsonl

CHECKPOINT_SECONDS = 15.0


def run(stage: Stage) -> dict[str, Any]:
    s = stage.settings
    began = time.monotonic()
    try:
        index = read_index(stage.inputs["hidden"])
    except ValueError as error:
        stage.refuse("train.states", str(error))
    stored = read_shards(stage.inputs["hidden"])
    lengths = [len(row) for row in stored]
    batch_tokens, seed = int(s.get("batch_tokens", 512)), int(s.get("seed", 0))
    settings = Settings(int(s.get("ttt_steps", 3)), float(s.get("lr", 1e-3)), DTYPES[s.get("dtype", "bfloat16")])
    if not stored:
        stage.refuse("train.no-data", "there is no row to train on")
    if max(lengths) > batch_tokens:
        stage.warn(
            "train.long-row", f"the longest row has {max(lengths)} tokens: more than batch_tokens {batch_tokens}"
        )

    vocab = read_vocab(stage.inputs["vocab"])
    borrowed = borrow(stage.inputs["model"])
    inputs = tuple(layer + 1 for layer in index.layers)  # the output of a layer is the input of the next
    config = config_for_target(target_config(stage.inputs["model"]), inputs, len(vocab.target_ids))
    embed, head = borrowed.embed, borrowed.head[vocab.target_ids]
    rows = teach(stored, borrowed.head.to(settings.dtype), vocab)

    rms = capture_rms((row.aux for row in rows), config.capture_size)
    state = checkpoint.newest(stage.out / "checkpoints")
    if state is None:
        chunks = (rows[i : i + 16] for i in range(0, len(rows), 16))
        packed = (pack(chunk, rms, settings.dtype) for chunk in chunks)
        start = ridge_start(config, packed, embed, borrowed.final_norm, seed)
        trainer = Trainer(config, start, embed, head, settings)
        total, history, spent = s.get("steps"), [], 0.0
    else:
        nothing = {name: torch.zeros(shape) for name, shape in trained_shapes(config).items()}
        trainer = Trainer(config, nothing, embed, head, settings)
        trainer.restore(state)
        total, history, spent = state.meta["total"], state.meta["history"], state.meta["seconds"]
        stage.warn("train.resumed", f"continuing after step {state.step} of {total or 'a number not yet decided'}")
    budget = 60.0 * float(s.get("minutes", 4.0))
    batches = skip(draw_batches(lengths, batch_tokens, seed), trainer.steps_done)
    saved, measured = time.monotonic(), time.monotonic()
    while total is None or trainer.steps_done < total:
        if trainer.steps_done == MEASURE_FROM:
            measured = time.monotonic()
        if total is None and trainer.steps_done == MEASURE_TO:
            now = time.monotonic()
            total = steps_that_fit(budget, now - began, (now - measured) / (MEASURE_TO - MEASURE_FROM))
            stage.fact("training.steps", total)
        chosen = [rows[i] for i in next(batches)]
        batch, _ = pack(chosen, rms, settings.dtype)
        try:
            outcome = trainer.step(batch, total)
        except FloatingPointError as error:
            stage.refuse("train.not-finite", f"{error}; lower pipeline.train.lr (now {settings.lr:g})")
        entry = {
            "step": trainer.steps_done,
            "tokens": len(batch.tokens),
            "loss": round(float(outcome.loss.detach()), 5),
            "losses": [round(x, 5) for x in outcome.losses],
            "hits": [round(x, 4) for x in outcome.hits],
            "accept_length": round(outcome.accept_length, 4),
        }
        history.append(entry)
        _report(stage, history, total)
        if time.monotonic() - saved > CHECKPOINT_SECONDS and (total is None or trainer.steps_done < total):
            meta = {"total": total, "history": history, "seconds": spent + time.monotonic() - began}
            _save(stage.out / "checkpoints", trainer.state(meta))
            saved = time.monotonic()

    seconds = spent + time.monotonic() - began
    path = stage.out / "trained.safetensors"
    write_bytes(path, trained_bytes(Trained(config, trainer.weights(), rms, vocab)))
    write_jsonl(stage.out / "history.jsonl", history)
    stage.artifact("trained", path)
    stage.artifact("history", stage.out / "history.jsonl")
    for old in (stage.out / "checkpoints").glob("*"):
        old.unlink()
    last = history[-min(50, len(history)) :]
    tokens = sum(entry["tokens"] for entry in history)
    return {
        "steps": trainer.steps_done,
        "tokens_seen": tokens,
        "passes": tokens / sum(lengths),
        "rows_used": len(rows),
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "loss": sum(e["loss"] for e in last) / len(last),
        "hits": [sum(e["hits"][k] for e in last) / len(last) for k in range(settings.ttt_steps)],
        "train_accept_length": sum(e["accept_length"] for e in last) / len(last),
    }


def _save(directory: Path, state: checkpoint.State) -> None:
    write_bytes(checkpoint.path_of(directory, state.step), checkpoint.to_bytes(state))
    checkpoint.prune(directory)


def _report(stage: Stage, history: list[dict[str, Any]], total: int | None) -> None:
    recent = history[-25:]
    accept = sum(e["accept_length"] for e in recent) / len(recent)
    loss = sum(e["loss"] for e in recent) / len(recent)
    mean = sum(e["tokens"] for e in history) / len(history)
    done, whole = sum(e["tokens"] for e in history), (total or MEASURE_TO) * mean
    stage.progress(
        done, max(done + (len(history) != total), whole), "tokens", step=len(history), loss=loss, accept=accept
    )
    if len(history) % 25 == 0 or len(history) == total:
        stage.metric("train.loss", loss, step=len(history), accept_length=accept, hits=recent[-1]["hits"])


if __name__ == "__main__":
    main(run)
