"""Where a stage computes, and in which number format."""

from __future__ import annotations

import torch

from pipeline.stages.protocol import Stage

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def device_of(stage: Stage, wanted: str) -> torch.device:
    """The device of a setting: cpu, cuda (cuda:1 …), or auto. Refuses a GPU that torch does not see: hours on the CPU
    by mistake are worse than a sentence."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        stage.refuse(
            "stage.no-gpu",
            f'{stage.name} is to run on {wanted}, and torch {torch.__version__} sees no GPU: set device = "cpu", or '
            "install a torch with CUDA in the env",
        )
    return torch.device(wanted)
