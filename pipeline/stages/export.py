"""The trained drafter in the layout that SGLang and vLLM load.

inputs    checkpoint (folder of `train`), model
output    drafter/: config.json, model.safetensors (bf16; no embeddings: engines take the target's)
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import save

from pipeline.eagle3.draft import check_tensors, write_config
from pipeline.eagle3.frozen import borrow
from pipeline.eagle3.trained import read_trained
from pipeline.eagle3.ttt import to_engine_layout
from pipeline.stages.protocol import Stage, main, write_bytes, write_json


def run(stage: Stage) -> dict[str, Any]:
    trained = read_trained(stage.inputs["checkpoint"] / "trained.safetensors")
    head = borrow(stage.inputs["model"]).head[trained.vocab.target_ids]
    weights = {"lm_head.weight": head} | to_engine_layout(trained.weights, trained.capture_rms)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    tensors |= {"d2t": trained.vocab.d2t, "t2d": trained.vocab.t2d}
    check_tensors(trained.config, tensors)
    directory = stage.out / "drafter"
    write_json(directory / "config.json", write_config(trained.config))
    write_bytes(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    stage.artifact("drafter", directory)
    return {
        "parameters": sum(t.numel() for t in tensors.values() if t.is_floating_point()),
        "bytes": (directory / "model.safetensors").stat().st_size,
        "draft_vocab": trained.config.draft_vocab_size,
        "layers": list(trained.config.aux_layers),
        "config": json.loads((directory / "config.json").read_text()),
    }


if __name__ == "__main__":
    main(run)
