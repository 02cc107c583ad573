"""What differs between servers: how each is started. One row an engine; a new engine is a new row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Engine:
    """How one engine is launched and how its log says that it is ready."""

    module: str  # run as `python -m MODULE`
    ships: bool  # whether its source travels with the job (ours does; others are installed in the env)
    ready_line: str
    flags: Callable[[dict[str, Any]], list[str]]


def sglang_flags(server: dict[str, Any]) -> list[str]:
    """SGLang's own flag names, spelled in full: abbreviations were accepted once and are not any more."""
    flags = ["--model-path", server["model"], "--host", server["host"], "--port", str(server["port"])]
    speculative = server.get("speculative")
    if speculative:
        flags += [
            "--speculative-algorithm",
            speculative["algorithm"],
            "--speculative-draft-model-path",
            server["draft"],
            "--speculative-num-steps",
            str(speculative["steps"]),
            "--speculative-eagle-topk",
            str(speculative["topk"]),
            "--speculative-num-draft-tokens",
            str(speculative["draft_tokens"]),
        ]
    for name, value in server["args"].items():
        if value is False:
            continue
        flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags


READY = "The server is fired up and ready to roll!"

ENGINES: dict[str, Engine] = {
    "reference": Engine("pipeline.stages.reference_engine", ships=True, ready_line=READY, flags=sglang_flags),
    "sglang": Engine("sglang.launch_server", ships=False, ready_line=READY, flags=sglang_flags),
}
