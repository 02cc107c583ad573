"""The whole pipeline on one real GPU, driven by rigbook's own commands on the `local` route, and written down.

    python benchmarks/real_run.py --dir RIG --model DIR --serve-python PYTHON --serve-path PATH --out DIR
                                  [--size full|short|small] [--from STEP] [--until STEP] [--skip STEP]

A small real model is the target: SGLang writes prompts and responses, its patched prefill (or torch) gives the hidden
states, the drafter is trained, exported, audited, its accept length predicted, and SGLang serves it with EAGLE3 against
plain decoding. Each step is one command, with its time; one that fails ends the run, and the same call goes on from
there. DIR gets what is worth keeping, at most eight files: the project file, the log of the commands, the stages'
manifests and events, the training curve, the benchmark as JSON, the book as Markdown. Paths are replaced.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.real_run_project import SIZES, project_file

REPO = Path(__file__).resolve().parent.parent

STEPS: dict[str, list[list[str]]] = {
    "responses": [["run", "prompts", "generate", "held_self", "held_people"], ["serve", "stop", "baseline"]],
    "rows": [["run", "tokenize", "mix", "vocab"]],
    "states": [["run", "hidden"]],
    "training": [["run", "train", "export", "audit", "predict"]],
    "serving": [["serve", "start", "eagle3"], ["serve", "status", "eagle3"], ["serve", "stop", "eagle3"]],
    "benchmark": [["--yes", "bench", "run", "baseline", "eagle3"]],
    "book": [["gpus"], ["clean"], ["status"]],
}


class Run:
    """One project folder and the log of what was asked of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.root: Path = args.dir.resolve()
        self.began = time.monotonic()
        self.log: list[str] = []
        self.seconds: dict[str, float] = {}

    def rigbook(self, *words: str) -> int:
        """One command, its talk passed on and kept."""
        began = time.monotonic()
        self.say(f"$ rigbook {' '.join(words)}")
        argv = [sys.executable, "-m", "tui.cli.main", "-C", str(self.root), *words]
        env = {**self.environment(), "COLUMNS": "120"}
        process = subprocess.Popen(argv, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        for line in process.stdout:
            self.say(line.decode("utf-8", "replace").rstrip("\n"))
        code = process.wait()
        self.say(f"# exit code {code}, {time.monotonic() - began:.1f} s")
        return code

    def environment(self) -> dict[str, str]:
        paths = ":".join(filter(None, [str(REPO), os.environ.get("PYTHONPATH", "")]))
        return {**os.environ, "PYTHONPATH": paths}

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self.began:7.1f}  {text}"
        print(line, flush=True)
        self.log.append(line)

    def step(self, name: str) -> bool:
        began = time.monotonic()
        good = all(self.rigbook(*words) in (0, 6) for words in STEPS[name])
        self.seconds[name] = round(time.monotonic() - began, 1)
        return good

    def collect(self, out: Path) -> None:
        """What is worth keeping, without this machine's paths."""
        out.mkdir(parents=True, exist_ok=True)
        work = self.root / "work"
        manifests: dict[str, Any] = {}
        for path in sorted(work.glob("*/manifest.json")):
            manifest = json.loads(path.read_text())
            manifests[path.parent.name] = {key: manifest[key] for key in ("settings", "result", "started", "ended")}
        self.write(out / "manifests.json", json.dumps({"seconds": self.seconds, "stages": manifests}, indent=1))
        self.write(out / "commands.log", "\n".join(self.log) + "\n")
        self.write(out / "rigbook.toml", (self.root / "rigbook.toml").read_text())
        for name, path in (
            ("curve.jsonl", work / "train/history.jsonl"),
            ("predict.json", work / "predict/predict.json"),
        ):
            if path.exists():
                self.write(out / name, path.read_text())
        for name, words in (("bench.json", ["--json", "bench", "list"]), ("book.md", ["book", "show"])):
            argv = [sys.executable, "-m", "tui.cli.main", "-C", str(self.root), *words]
            done = subprocess.run(argv, cwd=REPO, env=self.environment(), capture_output=True, text=True)
            self.write(out / name, done.stdout or done.stderr)

    def write(self, path: Path, text: str) -> None:
        for real, shown in ((str(self.root), "RIG"), (str(REPO), "REPO"), (str(self.args.model), "MODEL")):
            text = text.replace(real, shown)
        text = re.sub(r"GPU-[0-9a-f-]{36}", "GPU-11111111-2222-3333-4444-555555555555", text)
        path.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="the project's folder")
    parser.add_argument("--out", type=Path, required=True, help="what is worth keeping goes here")
    parser.add_argument("--model", type=Path, required=True, help="the target, a Hugging Face directory")
    parser.add_argument("--engine", choices=("sglang", "reference"), default="sglang")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--python", default=sys.executable, help="the Python that the stages run with")
    parser.add_argument("--serve-python", default=sys.executable, help="the Python that the server runs with")
    parser.add_argument("--serve-path", default="", help="its PYTHONPATH")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--skip", choices=tuple(STEPS), action="append", default=[])
    parser.add_argument("--from", dest="first", choices=tuple(STEPS), default=next(iter(STEPS)))
    parser.add_argument("--until", choices=tuple(STEPS), default=list(STEPS)[-1])
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    (args.dir / "rigbook.toml").write_text(project_file(args))
    run = Run(args)
    names = list(STEPS)
    good = True
    for name in names[names.index(args.first) : names.index(args.until) + 1]:
        if name in args.skip:
            continue
        if not run.step(name):
            run.say(f"! {name} failed")
            good = False
            break
    run.collect(args.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
