"""Running a stage as the controller does: a spec file and a process, or `execute` in this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def start_stage(module: str, spec: dict[str, Any], folder: Path) -> subprocess.Popen[str]:
    path = folder / f"{module}.spec.json"
    path.write_text(json.dumps(spec))
    return subprocess.Popen(
        [sys.executable, "-m", f"pipeline.stages.{module}", "--spec", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_stage(module: str, spec: dict[str, Any], folder: Path) -> tuple[int, str]:
    process = start_stage(module, spec, folder)
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


def result_of(spec: dict[str, Any]) -> dict[str, Any]:
    manifest = json.loads((Path(spec["out"]) / "manifest.json").read_text())
    result: dict[str, Any] = manifest["result"]
    return result


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prompts_file(path: Path, count: int) -> Path:
    rows = [
        {"id": f"p{i:03d}", "source": "seed", "messages": [{"role": "user", "content": f"Say {i}"}]}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
