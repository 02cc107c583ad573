"""What training says while it runs: history, curve, progress, checkpoints."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3 import checkpoint
from pipeline.eagle3.draft import config_as_json
from pipeline.eagle3.share import Item
from pipeline.eagle3.train import MEASURE_TO, Trainer, learning_rate
from pipeline.eagle3.world import World
from pipeline.stages.protocol import Stage, write_bytes

CHECKPOINT_SECONDS = 15.0
CHECKPOINT_SHARE = 0.05  # of the time at most: a large drafter's takes seconds
READ_EVERY = 10  # steps: how often a GPU is waited for, to read what the steps since came to
EVALUATIONS = 10  # on held-out rows, over the run


class Log:
    """All of it on rank 0; the others only count."""

    def __init__(
        self,
        stage: Stage,
        group: World,
        trainer: Trainer,
        state: checkpoint.State | None,
        began: float,
        pieces: int,
    ) -> None:
        self.stage, self.group, self.trainer, self.began, self.pieces = stage, group, trainer, began, pieces
        meta = state.meta if state is not None else {"total": None, "history": [], "seconds": 0.0}
        self.total: int | None = meta["total"]
        self.history: list[dict[str, Any]] = meta["history"]
        self.spent: float = meta["seconds"]
        self.responses: int = meta.get("responses", 0)
        self.tokens: int = sum(entry["tokens"] for entry in self.history)
        self.entered = self.measured = self.saved = time.monotonic()
        self.save_took = 0.0
        self._pending: list[tuple[Item, Tensor]] = []

    def note(self, item: Item) -> None:
        """A step is done, or on its way: its figures are copied on the device."""
        self._pending.append((item, self.trainer.figures.clone()))

    def read(self) -> None:
        """Wait for the device and write down the steps since the last time."""
        if not self._pending:
            return
        figures = torch.stack([f for _, f in self._pending]).tolist()
        steps = self.trainer.settings.ttt_steps
        for (item, _), (loss, *rest) in zip(self._pending, figures, strict=True):
            if not math.isfinite(loss):
                self.stage.refuse(
                    "train.not-finite",
                    f"loss is {loss} at step {len(self.history)}; lower pipeline.train.lr (now "
                    f"{self.trainer.settings.lr:g})",
                )
            self.responses += item.responses
            self.tokens += item.tokens
            self.history.append(
                {
                    "step": len(self.history) + 1,
                    "tokens": item.tokens,
                    "loss": round(loss, 5),
                    "losses": [round(x, 5) for x in rest[:steps]],
                    "hits": [round(x, 4) for x in rest[steps : 2 * steps]],
                    "accept_length": round(1.0 + sum(rest[2 * steps :]), 4),
                }
            )
            if self.group.leads:
                self._curve()
        self._pending.clear()
        if self.group.leads:
            self._progress()

    def _curve(self) -> None:
        """At most some hundreds of points over a run."""
        step, total = len(self.history), self.total or MEASURE_TO
        if step % max(25, total // 200) == 0 or step == self.total:
            accept, loss = self.recent()
            rate = learning_rate(self.trainer.settings, step - 1, self.total)
            hits = self.history[-1]["hits"]
            self.stage.metric("train.loss", loss, step=step, accept_length=accept, hits=hits, lr=rate)

    def recent(self) -> tuple[float, float]:
        recent = self.history[-25:]
        accept = sum(e["accept_length"] for e in recent) / len(recent)
        return accept, sum(e["loss"] for e in recent) / len(recent)

    def _progress(self) -> None:
        accept, loss = self.recent()
        done = self.tokens
        whole = (self.total or MEASURE_TO) * done / len(self.history)
        ended = len(self.history) == self.total
        self.stage.progress(
            done, done if ended else max(done + 1, whole), "tokens", step=len(self.history), loss=loss, accept=accept
        )

    def evaluation_due(self) -> bool:
        """After each tenth of the steps: a number of steps, not a time, so that a resumed run evaluates at the same."""
        if self.total is None:
            return False
        done = [EVALUATIONS * n // self.total for n in (max(0, len(self.history) - self._stride()), len(self.history))]
        return done[0] != done[1]

    def _stride(self) -> int:
        return 1 if self.trainer.device.type == "cpu" else READ_EVERY

    def held(self, length: float | None) -> None:
        if length is not None:
            self.history[-1]["held_accept_length"] = round(length, 4)
            self.stage.metric("train.held_accept_length", length, step=len(self.history))

    def checkpoint_due(self) -> bool:
        if self.total is not None and self.trainer.steps_done >= self.total:
            return False
        return time.monotonic() - self.saved > max(CHECKPOINT_SECONDS, self.save_took / CHECKPOINT_SHARE)

    def save(self) -> None:
        began = time.monotonic()
        meta = {
            "total": self.total,
            "history": self.history,
            "seconds": self.seconds(),
            "responses": self.responses,
            "pieces": self.pieces,
            "own_head": "head" in self.trainer.shapes,
            "config": config_as_json(self.trainer.config),
        }
        state = self.trainer.state(meta)
        folder = self.stage.out / "checkpoints"
        write_bytes(checkpoint.path_of(folder, state.step), checkpoint.to_bytes(state))
        checkpoint.prune(folder, state.step)
        self.saved = time.monotonic()
        self.save_took = self.saved - began

    def seconds(self) -> float:
        return self.spent + time.monotonic() - self.began
