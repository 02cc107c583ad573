"""Elementwise parts of training, fused for a GPU: each is one pass over its data instead of five.

torch.compile makes them; where it cannot (no Triton, no compiler) or gives something else than the plain function, the
plain one is used. Root mean square has a kernel of torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.eagle3.ttt import Ops, rotate_packed, swiglu


def kernel_norm(x: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), None, eps)


def gpu_ops(rope: tuple[Tensor, Tensor]) -> Ops:
    device = rope[0].device
    rotate = compiled(rotate_packed, device, (64, 4, 32), (64, 1, 16), (64, 1, 16))
    return Ops(kernel_norm, rotate, compiled(swiglu, device, (64, 96)), rope)


@cache
def compiled(plain: Callable[..., Tensor], device: torch.device, *shapes: tuple[int, ...]) -> Callable[..., Tensor]:
    """`plain`, compiled for inputs of any size, or `plain` itself where the compiled one fails on a trial or differs
    in its result or gradient."""
    made: Callable[..., Tensor] = torch.compile(plain, dynamic=True)
    try:
        results: list[list[Any]] = []
        for function in (made, plain):
            g = torch.Generator().manual_seed(0)
            inputs = [torch.randn(shape, generator=g).to(device, torch.bfloat16) for shape in shapes]
            inputs[0].requires_grad_()
            out = function(*inputs)
            out.float().square().sum().backward()  # type: ignore[no-untyped-call]
            results.append([out.detach(), inputs[0].grad])
        same = all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.1) for a, b in zip(*results, strict=True))
        return made if same else plain
    except Exception:  # whatever the compiler's chain of tools raises: training goes on without it
        return plain
