"""Pure functions of tensors, compiled for a GPU after a trial, or left as they are.

torch.compile makes one pass over the data out of five. Where it cannot (no Triton, no compiler), or gives something
else than the plain function on random numbers, the plain one is used: training is slower then, not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
DIFFERENCE = 0.02  # of the norm: bf16 rounds elsewhere in a fused pass


def compiled(plain: Function, trials: Callable[[int], Sequence[Any]]) -> Function:
    """`trials(n)`: arguments of the real sizes but for n rows. Two of them, so that rows become a size that varies and
    nothing else does. Where the first argument wants a gradient, that is compared as well."""
    made: Function = torch.compile(plain)
    try:
        for n in (96, 160):
            if difference(made, plain, trials(n)) > DIFFERENCE:
                return plain
    except Exception:  # whatever the compiler's chain of tools raises: training goes on without it
        return plain
    return made


def difference(made: Function, plain: Function, arguments: Sequence[Any]) -> float:
    """Largest relative difference (by norm) of the results, and of the first argument's gradient."""
    results: list[list[Tensor]] = []
    for function in (made, plain):
        first = arguments[0].detach().clone().requires_grad_(arguments[0].requires_grad)
        outs = flat(function(first, *arguments[1:]))
        if first.requires_grad:
            sum(out.float().square().sum() for out in outs).backward()  # type: ignore[union-attr]
            assert first.grad is not None
            outs.append(first.grad)
        results.append([out.detach().float() for out in outs])
    return max(float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in zip(*results, strict=True))


def flat(made: Any) -> list[Tensor]:
    if isinstance(made, Tensor):
        return [made]
    return [tensor for part in made for tensor in flat(part)]
