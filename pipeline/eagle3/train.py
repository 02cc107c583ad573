"""Training the drafter: fp32 master weights, products in bf16 (or fp32), AdamW, a number of steps fixed early.

All trained tensors live in one flat vector, with its gradient and a copy in the compute dtype beside it: the optimiser
is one fused pass, and a checkpoint is three vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3.checkpoint import State
from pipeline.eagle3.draft import DraftConfig
from pipeline.eagle3.ttt import Batch, Outcome, Tape, trained_shapes, ttt_loss

WARMUP = 20  # steps
MEASURE_FROM, MEASURE_TO = 5, 20  # the steps whose time decides how many steps fit; the first ones fill caches
RESERVE = 0.85  # of the budget: a run of minutes was 24 % slower a step than its first seconds had said


@dataclass(frozen=True)
class Settings:
    ttt_steps: int = 3
    lr: float = 1e-3
    dtype: torch.dtype = torch.bfloat16
    step_decay: float = 0.8  # weight of guess k is this to the power k
    betas: tuple[float, float] = (0.9, 0.95)


def learning_rate(settings: Settings, step: int, total: int | None) -> float:
    """Linear warm-up, then linearly down to zero at `total`. While the number of steps is not decided yet we are in
    the warm-up, where it does not matter: so the curve is the same whenever it was decided."""
    if step < WARMUP:
        return settings.lr * (step + 1) / WARMUP
    if total is None:
        raise ValueError(f"the number of steps must be decided before step {WARMUP}")
    return settings.lr * max(0.0, (total - step) / max(1, total - WARMUP))


def steps_that_fit(budget_s: float, spent_s: float, seconds_per_step: float) -> int:
    """Whole steps for the rest of a time budget, on top of MEASURE_TO that are done."""
    return max(WARMUP + 1, MEASURE_TO + int((budget_s * RESERVE - spent_s) / seconds_per_step))


class Trainer:
    """Weights, optimiser and one step. `start`: the TRAINED tensors, fp32. embed [V, H], head [Vd, H]: frozen."""

    def __init__(
        self, config: DraftConfig, start: dict[str, Tensor], embed: Tensor, head: Tensor, settings: Settings
    ) -> None:
        self.config, self.settings = config, settings
        self.embed, self.head = embed.to(settings.dtype), head.to(settings.dtype)
        self.flat = torch.nn.Parameter(torch.cat([start[name].flatten() for name in trained_shapes(config)]))
        self.flat.grad = torch.zeros_like(self.flat)
        self.shadow = self.flat.detach().to(settings.dtype)
        self.compute = {name: view.requires_grad_() for name, view in self.views(self.shadow).items()}
        self.gradients = self.views(self.flat.grad)
        self.optimizer = torch.optim.AdamW([self.flat], lr=0.0, betas=settings.betas, weight_decay=0.0, fused=True)
        self.tape = Tape()
        self.steps_done = 0

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The TRAINED tensors as views of a flat vector."""
        shapes = trained_shapes(self.config)
        parts = torch.split(flat.detach(), [math.prod(shape) for shape in shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    def weights(self) -> dict[str, Tensor]:
        """The trained tensors, fp32; views, not copies."""
        return self.views(self.flat)

    def step(self, batch: Batch, total: int | None) -> Outcome:
        """One optimiser step. Raises FloatingPointError, weights untouched, if the loss is not finite."""
        s = self.settings
        outcome = ttt_loss(
            self.config, self.compute, self.embed, self.head, batch, s.ttt_steps, self.tape, s.step_decay
        )
        if not math.isfinite(float(outcome.loss.detach())):
            raise FloatingPointError(f"loss is {float(outcome.loss.detach())} at step {self.steps_done}")
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.tape.flush(lambda name, gradient: self.gradients[name].copy_(gradient))
            norm = self.compute["norm"]
            assert norm.grad is not None
            self.gradients["norm"].copy_(norm.grad)
            norm.grad = None
            self.optimizer.param_groups[0]["lr"] = learning_rate(s, self.steps_done, total)
            self.optimizer.step()
            self.shadow.copy_(self.flat)
        self.steps_done += 1
        return outcome

    def state(self, meta: dict[str, Any]) -> State:
        moments = self.optimizer.state[self.flat]
        tensors = {"weights": self.flat.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
        return State(self.steps_done, tensors, meta)

    def restore(self, state: State) -> None:
        """Continue from a checkpoint: the next step is what it would have been."""
        with torch.no_grad():
            self.flat.copy_(state.tensors["weights"])
            self.shadow.copy_(self.flat)
        self.optimizer.state[self.flat] = {
            "step": torch.tensor(float(state.step)),
            "exp_avg": state.tensors["exp_avg"].clone(),
            "exp_avg_sq": state.tensors["exp_avg_sq"].clone(),
        }
        self.steps_done = state.step


def skip(batches: Iterator[list[int]], count: int) -> Iterator[list[int]]:
    """`batches` without its first `count`: where a resumed run takes up the data."""
    for _ in range(count):
        next(batches)
    return batches
