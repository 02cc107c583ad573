"""Training's checkpoint: everything that a killed run needs to go on exactly where it was.

state-<step>.safetensors   weights (fp32), both moments of the optimiser, capture RMS; metadata: plan and history
newest wins; the one before is kept, in case the machine lost power while the newest went to disk.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

KEEP = 2


@dataclass
class State:
    """`meta` is JSON: what the trainer planned (number of steps, settings) and its loss history."""

    step: int  # optimiser steps done
    tensors: dict[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)


def path_of(directory: Path, step: int) -> Path:
    return directory / f"state-{step:08d}.safetensors"


def to_bytes(state: State) -> bytes:
    return save(state.tensors, metadata={"step": str(state.step), "meta": json.dumps(state.meta)})


def newest(directory: Path) -> State | None:
    """The newest readable checkpoint, or None. One that is torn or truncated is passed over, never half used."""
    for path in sorted(directory.glob("state-*.safetensors"), reverse=True):
        try:
            with safe_open(path, framework="pt") as file:
                meta = file.metadata()
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (SafetensorError, OSError):
            continue
        return State(int(meta["step"]), tensors, json.loads(meta["meta"]))
    return None


def prune(directory: Path, step: int) -> None:
    """Of the checkpoints up to `step` removes all but the newest two. A newer one is never touched: whoever went back
    to an older state may want it yet."""
    for path in sorted(p for p in directory.glob("state-*.safetensors") if p <= path_of(directory, step))[:-KEEP]:
        path.unlink()
