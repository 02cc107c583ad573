"""The reference engine's arguments: SGLang's names, spelled in full, and only those that it honours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

USAGE = 2
ALGORITHMS = ("EAGLE3",)


@dataclass(frozen=True)
class Arguments:
    model_path: str
    host: str
    port: int
    dtype: str  # bfloat16 | float32
    max_running_requests: int  # rows of the cache
    context_length: int | None  # None: the model's
    served_model_name: str
    random_seed: int
    threads: int
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int = 0
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int = 0

    def as_info(self) -> dict[str, Any]:
        """For /server_info, under SGLang's names."""
        return asdict(self)


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Raises SystemExit (2) with a sentence for what cannot be served."""
    parser = argparse.ArgumentParser(
        prog="reference_engine",
        description="An OpenAI-compatible server on plain torch, with SGLang's endpoints, flags and metric names.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model-path", required=True, help="a Hugging Face directory (Llama)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="auto is bfloat16")
    add("--max-running-requests", type=_positive, default=64, help="decoded at once; more wait")
    add("--context-length", type=_positive, default=None, help="prompt and response; default: the model's")
    add("--served-model-name", default=None, help="default: the model's path")
    add("--random-seed", type=int, default=0, help="of requests that bring no seed of their own")
    add("--threads", type=_positive, default=None, help="default: OMP_NUM_THREADS, else every core")
    add("--speculative-algorithm", choices=ALGORITHMS, default=None)
    add("--speculative-draft-model-path", default=None)
    add("--speculative-num-steps", type=_positive, default=None, help="drafts per verify step")
    add("--speculative-eagle-topk", type=_positive, default=None, help="1: a chain is what this engine drafts")
    add("--speculative-num-draft-tokens", type=_positive, default=None, help="tokens verified at once: steps + 1")
    given = parser.parse_args(argv)
    _check_speculative(parser, given)
    return Arguments(
        model_path=given.model_path,
        host=given.host,
        port=given.port,
        dtype="bfloat16" if given.dtype == "auto" else given.dtype,
        max_running_requests=given.max_running_requests,
        context_length=given.context_length,
        served_model_name=given.served_model_name or given.model_path,
        random_seed=given.random_seed,
        threads=given.threads or default_threads(),
        speculative_algorithm=given.speculative_algorithm,
        speculative_draft_model_path=given.speculative_draft_model_path,
        speculative_num_steps=given.speculative_num_steps or 0,
        speculative_eagle_topk=given.speculative_eagle_topk,
        speculative_num_draft_tokens=given.speculative_num_draft_tokens or 0,
    )


def _check_speculative(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    knobs = {
        "--speculative-draft-model-path": given.speculative_draft_model_path,
        "--speculative-num-steps": given.speculative_num_steps,
        "--speculative-eagle-topk": given.speculative_eagle_topk,
        "--speculative-num-draft-tokens": given.speculative_num_draft_tokens,
    }
    if given.speculative_algorithm is None:
        if unused := [flag for flag, value in knobs.items() if value is not None]:
            parser.error(f"{unused[0]} has no effect without --speculative-algorithm")
        return
    if missing := [flag for flag, value in knobs.items() if value is None]:
        parser.error(f"--speculative-algorithm {given.speculative_algorithm} needs {', '.join(missing)}")
    if given.speculative_eagle_topk != 1:
        parser.error("--speculative-eagle-topk must be 1: this engine drafts a chain, not a tree")
    if given.speculative_num_draft_tokens != given.speculative_num_steps + 1:
        parser.error(
            f"--speculative-num-draft-tokens must be {given.speculative_num_steps + 1}: "
            f"a chain of {given.speculative_num_steps} steps and the token before it"
        )


def default_threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) else len(os.sched_getaffinity(0))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value
