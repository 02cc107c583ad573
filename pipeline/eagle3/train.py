"""Training the drafter: fp32 master weights, products in bf16 (or fp32), AdamW, a number of steps fixed early.

All trained tensors live in one flat vector, with its gradient and a copy in the compute dtype beside it: the optimiser
is one fused pass, a checkpoint is three vectors, and several processes need one all-reduce a step. The step's figures
ride at the end of the gradient.

A step's batch may be worked in pieces, one after another or on several processes: a piece's loss is divided by what
the *whole* batch is judged at (`counts`), so the pieces' gradients add up to the batch's own. Every process knows all
counts beforehand, from the loss masks, and works the same number of pieces: nobody ever waits for one that has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from pipeline.eagle3.batch import Batch
from pipeline.eagle3.checkpoint import State
from pipeline.eagle3.draft import DraftConfig
from pipeline.eagle3.ttt import PLAIN, Ops, Outcome, Tape, trained_shapes, ttt_loss

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
    loss: str = "kl"  # see `losses.LOSSES`
    warmup: int = WARMUP
    weight_decay: float = 0.0  # of everything but the norm
    clip: float = 0.0  # greatest norm of the gradient; 0: any


def learning_rate(settings: Settings, step: int, total: int | None) -> float:
    """Linear warm-up, then linearly down to zero at `total`. While the number of steps is not decided yet we are in
    the warm-up, where it does not matter: so the curve is the same whenever it was decided."""
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    if total is None:
        raise ValueError(f"the number of steps must be decided before step {settings.warmup}")
    return settings.lr * max(0.0, (total - step) / max(1, total - settings.warmup))


def steps_that_fit(budget_s: float, spent_s: float, seconds_per_step: float, warmup: int = WARMUP) -> int:
    """Whole steps for the rest of a time budget, on top of MEASURE_TO that are done."""
    return max(warmup + 1, MEASURE_TO + int((budget_s * RESERVE - spent_s) / seconds_per_step))


class Trainer:
    """Weights, optimiser and one step. `start`: the TRAINED tensors, fp32; with a "head" among them that is trained as
    well. embed [V, H], head [Vd, H]: frozen. All of it lives on the device of `embed`."""

    def __init__(
        self, config: DraftConfig, start: dict[str, Tensor], embed: Tensor, head: Tensor, settings: Settings
    ) -> None:
        device = embed.device
        self.config, self.settings, self.device = config, settings, device
        self.embed, self.head = embed.to(settings.dtype), head.to(device, settings.dtype)
        self.shapes = trained_shapes(config, head="head" in start)
        flat = torch.cat([start[name].flatten().float() for name in self.shapes]).to(device)
        # [gradient | loss, figures [3, steps]]
        self.reduced = torch.zeros(len(flat) + 1 + 3 * settings.ttt_steps, device=device)
        self.flat = torch.nn.Parameter(flat)
        self.flat.grad = self.reduced[: len(flat)]
        self.figures = self.reduced[len(flat) :]
        self.shadow = self.flat.detach().to(settings.dtype)
        self.compute = {name: view.requires_grad_() for name, view in self.views(self.shadow).items()}
        self.gradients = self.views(self.flat.grad)
        self.optimizer = torch.optim.AdamW(
            [self.flat], lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self.ops = device_ops(config, device, settings.dtype)
        self.tape = Tape()
        self.pieces = 0  # of the step under way
        self.steps_done = 0

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The TRAINED tensors as views of a flat vector."""
        parts = torch.split(flat.detach(), [math.prod(shape) for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def weights(self) -> dict[str, Tensor]:
        """The trained tensors, fp32; views, not copies."""
        return self.views(self.flat)

    def add(self, batch: Batch, counts: Sequence[int] | None = None) -> Outcome:
        """One piece of a step: adds its gradient and figures. On a processor raises FloatingPointError, weights
        untouched, if its loss is not finite; a GPU is not waited for, `step_is_finite` tells later."""
        s = self.settings
        outcome = ttt_loss(
            self.config, self.compute, self.embed, self.head, batch, s.ttt_steps, self.tape, s.step_decay,
            kind=s.loss, counts=counts, ops=self.ops,
        )  # fmt: skip
        if self.device.type == "cpu" and not math.isfinite(float(outcome.loss.detach())):
            self.tape, self.pieces = Tape(), 0
            raise FloatingPointError(f"loss is {float(outcome.loss.detach())} at step {self.steps_done}")
        outcome.loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.tape.flush(self._store)
            norm = self.compute["norm"]
            assert norm.grad is not None
            self._store("norm", norm.grad)
            norm.grad = None
            made = torch.cat((outcome.loss.detach().reshape(1), outcome.numbers.flatten()))
            self.figures.add_(made) if self.pieces else self.figures.copy_(made)
        self.pieces += 1
        return outcome

    def _store(self, name: str, gradient: Tensor) -> None:
        if self.pieces:
            self.gradients[name].add_(gradient)
        else:
            self.gradients[name].copy_(gradient)

    @torch.no_grad()
    def finish(self, total: int | None) -> None:
        """The optimiser's part of a step, after all its pieces. A step whose loss is not finite changes nothing."""
        s, optimizer = self.settings, self.optimizer
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.reduced)
        rate = learning_rate(s, self.steps_done, total)
        optimizer.param_groups[0]["lr"] = rate
        # The fused optimiser looks at both on the device: skip where it is 1, divide the gradient by it.
        if self.device.type != "cpu" or torch.distributed.is_initialized():
            optimizer.found_inf = (~torch.isfinite(self.figures[0])).float()  # type: ignore[attr-defined]
        if s.clip:
            assert self.flat.grad is not None
            optimizer.grad_scale = (self.flat.grad.norm() / s.clip).clamp_min(1.0)  # type: ignore[attr-defined]
        norm = self.weights()["norm"]
        before = norm.clone() if s.weight_decay else None
        optimizer.step()
        if before is not None:
            norm.add_(before, alpha=rate * s.weight_decay)
        self.shadow.copy_(self.flat)
        self.steps_done, self.pieces = self.steps_done + 1, 0

    def step(self, batch: Batch, total: int | None) -> Outcome:
        """One optimiser step of one piece. Raises FloatingPointError, weights untouched, if the loss is not finite."""
        outcome = self.add(batch)
        self.finish(total)
        return outcome

    def state(self, meta: dict[str, Any]) -> State:
        moments = self.optimizer.state[self.flat]
        tensors = {"weights": self.flat.detach(), "exp_avg": moments["exp_avg"], "exp_avg_sq": moments["exp_avg_sq"]}
        return State(self.steps_done, {name: tensor.cpu() for name, tensor in tensors.items()}, meta)

    def restore(self, state: State) -> None:
        """Continue from a checkpoint: the next step is what it would have been."""
        with torch.no_grad():
            self.flat.copy_(state.tensors["weights"])
            self.shadow.copy_(self.flat)
        self.optimizer.state[self.flat] = {
            "step": torch.tensor(float(state.step), device=self.device),
            "exp_avg": state.tensors["exp_avg"].to(self.device, copy=True),
            "exp_avg_sq": state.tensors["exp_avg_sq"].to(self.device, copy=True),
        }
        self.steps_done = state.step


def device_ops(config: DraftConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    """The elementwise parts for a device."""
    if device.type == "cpu":
        return PLAIN
    from pipeline.eagle3.fused import gpu_ops

    return gpu_ops(config, device, dtype)
