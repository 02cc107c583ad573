"""Training killed at any moment goes on to the same end: same curve, same weights, to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline.eagle3 import checkpoint
from pipeline.eagle3.train import MEASURE_TO, WARMUP, Settings, learning_rate, steps_that_fit
from pipeline.eagle3.trained import read_trained
from tests.lab.stage_run import rows, run_stage, stage_spec, warnings
from tests.lab.tiny_pipeline import up_to_hidden

SETTINGS = {"steps": 400, "batch_tokens": 160, "dtype": "bfloat16", "lr": 2e-3}
ENV = {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}
# A checkpoint at every step, so that there is one to kill after.
OFTEN = """
import pipeline.stages.train as t, pipeline.stages.train_log as log
log.CHECKPOINT_SECONDS, log.CHECKPOINT_SHARE = 0.0, 1e9
t.main(t.run)
"""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = up_to_hidden(tmp_path_factory.mktemp("resume"))
    return {name: made[name] for name in ("model", "vocab", "hidden")}


def start(out: Path, paths: dict[str, Path]) -> subprocess.Popen[bytes]:
    spec = out.parent / f"{out.name}.spec.json"
    spec.write_text(json.dumps(stage_spec("train", out, paths, SETTINGS)))
    return subprocess.Popen([sys.executable, "-c", OFTEN, "--spec", str(spec)], env=os.environ | ENV)


def last_step(out: Path) -> int:
    names = sorted(path.stem for path in (out / "checkpoints").glob("state-*.safetensors"))
    return int(names[-1].split("-")[1]) if names else 0


@pytest.mark.training_report(32)
def test_killed_twice_it_ends_where_an_undisturbed_run_ends(tmp_path: Path, paths: dict[str, Path]) -> None:
    whole = start(tmp_path / "whole", paths)
    assert whole.wait(120) == 0
    for wanted in (30, 150):
        process = start(tmp_path / "killed", paths)
        deadline = time.monotonic() + 120
        while last_step(tmp_path / "killed") < wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait(30) == -signal.SIGKILL
        assert not (tmp_path / "killed/manifest.json").exists()
    assert start(tmp_path / "killed", paths).wait(120) == 0
    history = rows(tmp_path / "killed/history.jsonl")
    assert [entry["step"] for entry in history] == list(range(1, 401))
    assert history == rows(tmp_path / "whole/history.jsonl")
    assert history[-1]["loss"] < history[0]["loss"]
    ours, theirs = (read_trained(tmp_path / name / "trained.safetensors").weights for name in ("killed", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "train.resumed" in warnings(tmp_path / "killed")
    assert not list((tmp_path / "killed/checkpoints").glob("*"))


def test_a_checkpoint_that_is_torn_gives_way_to_the_one_before(tmp_path: Path) -> None:
    for step in (3, 7):
        state = checkpoint.State(step, {"weights": torch.full((4,), float(step))}, {"total": 9})
        checkpoint.path_of(tmp_path, step).write_bytes(checkpoint.to_bytes(state))
    newest = checkpoint.newest(tmp_path)
    assert newest is not None and newest.step == 7
    path = checkpoint.path_of(tmp_path, 7)
    path.write_bytes(path.read_bytes()[:-3])
    before = checkpoint.newest(tmp_path)
    assert before is not None and before.step == 3 and before.meta == {"total": 9}
    assert torch.equal(before.tensors["weights"], torch.full((4,), 3.0))


def test_minutes_become_a_number_of_steps_and_the_rate_ends_at_zero_there(
    tmp_path: Path, paths: dict[str, Path]
) -> None:
    began = time.monotonic()
    settings = {"minutes": 0.1, "batch_tokens": 160, "dtype": "float32"}
    result = run_stage("train", tmp_path / "timed", paths, settings)
    assert result["steps"] > MEASURE_TO
    assert time.monotonic() - began < 30
    rates = [learning_rate(Settings(lr=1.0), step, 100) for step in range(100)]
    assert rates[0] < rates[WARMUP - 1] == max(rates) and rates[-1] < 0.02
    assert all(a > b for a, b in zip(rates[WARMUP:], rates[WARMUP + 1 :], strict=False))
    assert steps_that_fit(budget_s=100, spent_s=20, seconds_per_step=0.5) == MEASURE_TO + 130  # 85 s of 100
    assert steps_that_fit(budget_s=1, spent_s=20, seconds_per_step=0.5) > WARMUP
