"""Run one stage in this process, as its job would, and look at what it left."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from pipeline.stages import protocol


def run_stage(name: str, out: Path, inputs: dict[str, Path], settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The result; raises `protocol.Refused` when the stage refuses."""
    module = importlib.import_module(f"pipeline.stages.{name}")
    spec = stage_spec(name, out, inputs, settings)
    return protocol._run_once(protocol.Stage(spec), spec, module.run)


def stage_spec(name: str, out: Path, inputs: dict[str, Path], settings: dict[str, Any] | None = None) -> dict[str, Any]:
    events = out.parent / f"{out.name}.events.jsonl"
    texts = {key: str(value) for key, value in inputs.items()}
    return {"stage": name, "out": str(out), "inputs": texts, "settings": settings or {}, "events": str(events)}


def warnings(out: Path) -> list[str]:
    """Ids of the checks that the stage warned about."""
    lines = (out.parent / f"{out.name}.events.jsonl").read_text().splitlines()
    return [event["check"] for event in map(json.loads, lines) if event["kind"] == "warning"]


def rows(path: Path) -> list[dict[str, Any]]:
    return list(protocol.read_jsonl(path))
