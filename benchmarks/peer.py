"""speculators in its own environment: what every benchmark tells it, and how it is asked."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from pipeline.eagle3.draft import DraftConfig


def sizes(config: DraftConfig) -> dict[str, Any]:
    return {
        "hidden": config.hidden_size,
        "inner": config.intermediate_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
        "draft_vocab": config.draft_vocab_size,
        "eps": config.rms_norm_eps,
        "theta": config.rope_theta,
    }


def ask_speculators(python: str, told: dict[str, Any]) -> dict[str, Any]:
    """What `speculators_step.py` answers. Ends the benchmark, with its words, where it does not run."""
    script = Path(__file__).with_name("speculators_step.py")
    words = json.dumps({"lr": 1e-5, "decay": 1.0} | told)
    made = subprocess.run([python, str(script)], input=words, capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(f"speculators did not run:\n{made.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(made.stdout.strip().splitlines()[-1])
    return answer
