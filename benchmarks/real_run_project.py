"""The rigbook.toml of `real_run.py`: one machine, one small real model, as a user would write it."""

from __future__ import annotations

import argparse
import json
from typing import Any

# What each size asks of the stages: *full* is what is reported, *short* takes five minutes of a GPU, *small* is for
# trying the commands on a machine without one.
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "full": {
        "prompts": {"self_written": 24000, "held_self": 200, "held_people": 24},
        "generate": {"max_tokens": 512, "concurrency": 512, "temperature": 0.8},
        "tokenize": {"max_len": 768},
        "vocab": {"size": 16384},
        "train": {"epochs": 8, "batch_tokens": 16384, "held_rows": 128},
        "bench": {"rounds": 3, "max_tokens": 256, "prompts": 24},
    },
    "short": {
        "prompts": {"self_written": 6000, "held_self": 40, "held_people": 16},
        "generate": {"max_tokens": 256, "concurrency": 512, "temperature": 0.8},
        "tokenize": {"max_len": 512},
        "vocab": {"size": 16384},
        "train": {"epochs": 8, "batch_tokens": 8192, "held_rows": 64},
        "bench": {"rounds": 1, "max_tokens": 128, "prompts": 12},
    },
    "small": {
        "prompts": {"self_written": 40, "held_self": 6, "held_people": 4},
        "generate": {"max_tokens": 32, "concurrency": 32},
        "vocab": {"size": 512},
        "train": {"minutes": 0.2},
        "bench": {"rounds": 1, "max_tokens": 24, "prompts": 3},
    },
}
# What SGLang 0.5.15 needs on a machine without a compiler cache or network: nothing is built at start.
SGLANG_ARGS = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.3,
    "context-length": 2048,
    "max-running-requests": 512,
    "cuda-graph-max-bs": 512,
    "enable-metrics": True,
}
REFERENCE_ARGS = {"dtype": "float32", "max-running-requests": 32, "context-length": 512}


def project_file(args: argparse.Namespace) -> str:
    """TOML for the folder `args.dir`."""
    root, work = args.dir.resolve(), args.dir.resolve() / "work"
    sglang = args.engine == "sglang"
    serve_vars = {"PYTHONPATH": args.serve_path, "HF_HUB_OFFLINE": "1"} if args.serve_path else {}
    tables = "\n".join(
        f"[pipeline.{name}]\n{_table(values)}\n" for name, values in _stages(args.size, args.device).items()
    )
    return f"""[project]
name = "real-run"
goal = "A drafter for {args.model.name} that a real server loads and that drafts as well as it was predicted to."
instructions = ["No precision-cutting hacks.", "Don't game benchmark numbers."]

[hosts.gpu]
kind = "local"
state_dir = {_quoted(root / "state")}

[envs.serve]
host = "gpu"
python = {_quoted(args.serve_python)}
vars = {_inline(serve_vars)}
[envs.train]
host = "gpu"
python = {_quoted(args.python)}

[target]
path = {_quoted(args.model.resolve())}
special_tokens = {{ "<|im_start|>" = 1, "<|im_end|>" = 2 }}

[profiles.baseline]
env = "serve"
engine = "{args.engine}"
port = 31000
args = {_inline(SGLANG_ARGS if sglang else REFERENCE_ARGS)}
[profiles.eagle3]
extends = "baseline"
port = 31001
draft = {_quoted(work / "export" / "drafter")}
speculative = {{ algorithm = "EAGLE3", steps = 3, topk = 1, draft_tokens = 4 }}

[pipeline]
host = "gpu"
env = "train"
workdir = {_quoted(work)}
{tables}"""


def _stages(size: str, device: str) -> dict[str, dict[str, Any]]:
    tables = {name: dict(values) for name, values in SIZES[size].items()}
    for name in ("hidden", "train"):
        tables.setdefault(name, {})["device"] = device
    return tables


def _table(values: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())


def _inline(values: dict[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in values.items()) + " }"


def _quoted(value: object) -> str:
    return json.dumps(str(value))  # a JSON string is a TOML basic string
