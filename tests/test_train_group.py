"""Several processes train as one does; a hang is noticed, told and ended; what was resumed goes on as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.eagle3 import checkpoint
from pipeline.eagle3.trained import read_trained
from pipeline.stage_runner import launcher
from pipeline.stages.protocol import Refused
from tests.lab.stage_run import rows, run_stage, stage_spec, warnings
from tests.lab.tiny_pipeline import up_to_hidden

SETTINGS: dict[str, Any] = {"steps": 40, "batch_tokens": 160, "pieces": 2, "dtype": "float32", "lr": 2e-3}
ENV = {"PYTHONPATH": ".", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = up_to_hidden(tmp_path_factory.mktemp("group"))
    return {name: made[name] for name in ("model", "vocab", "hidden")}


def start(out: Path, paths: dict[str, Path], settings: dict[str, Any], code: str = "") -> subprocess.Popen[bytes]:
    """The stage as the recipe starts it; with `code` run before it in each process."""
    wanted = stage_spec("train", out, paths, settings) | {"transient": ["processes"]}
    spec = out.parent / f"{out.name}.spec.json"
    spec.write_text(json.dumps(wanted))
    argv = [sys.executable, *launcher(wanted), "-m", "pipeline.stages.train", "--spec", str(spec)]
    if code:
        script = out.parent / f"{out.name}.py"
        script.write_text(
            f"import pipeline.stages.train as t\n{code}\nt.main(t.run) if t.world.rank() == 0 else t.follow(t.run)\n"
        )
        argv = [sys.executable, *launcher(wanted), str(script), "--spec", str(spec)]
    return subprocess.Popen(argv, env=os.environ | ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[bytes]) -> int:
    _, said = process.communicate(timeout=240)
    code = process.returncode
    if code:
        print(said.decode(errors="replace")[-3000:])
    return code


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = (out.parent / f"{out.name}.events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def losses(out: Path) -> list[float]:
    return [entry["loss"] for entry in rows(out / "history.jsonl")]


@pytest.mark.training_report(31)
def test_two_processes_make_the_curve_of_one(tmp_path: Path, paths: dict[str, Path]) -> None:
    settings = SETTINGS | {"held_rows": 3}
    run_stage("train", tmp_path / "one", paths, settings)
    assert ended(start(tmp_path / "two", paths, settings | {"processes": 2})) == 0
    one, two = rows(tmp_path / "one/history.jsonl"), rows(tmp_path / "two/history.jsonl")
    assert [e["step"] for e in two] == list(range(1, 41))
    assert [e["tokens"] for e in two] == [e["tokens"] for e in one]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-4)
    assert losses(tmp_path / "one")[-1] < losses(tmp_path / "one")[0]
    a, b = (read_trained(tmp_path / name / "trained.safetensors").weights for name in ("one", "two"))
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2e-3, atol=2e-4)
    held = [[e["held_accept_length"] for e in run if "held_accept_length" in e] for run in (one, two)]
    assert len(held[0]) == 10 and held[1] == pytest.approx(held[0], abs=0.2)
    assert len(events(tmp_path / "two", "result")) == 1  # one process speaks


def kill_after(out: Path, process: subprocess.Popen[bytes], step: int) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and not any((out / "checkpoints").glob(f"state-*{step:04d}.safetensors")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    ended(process)


# Checkpoints at every step, and a stop behind one: so that it is killed there, however fast it is.
STOPS_AT_15 = """
import threading
import pipeline.stages.train_log as log
log.CHECKPOINT_SECONDS, log.CHECKPOINT_SHARE = 0.0, 1e9
real = t.Trainer.finish
def finish(self, total):
    if self.steps_done == 15:
        threading.Event().wait()
    real(self, total)
t.Trainer.finish = finish
"""


@pytest.mark.training_report(32)
def test_a_run_goes_on_with_another_number_of_processes_if_that_divides_its_pieces(
    tmp_path: Path, paths: dict[str, Path]
) -> None:
    run_stage("train", tmp_path / "whole", paths, SETTINGS)
    out = tmp_path / "moved"
    kill_after(out, start(out, paths, SETTINGS | {"processes": 2}, STOPS_AT_15), 15)
    state = checkpoint.newest(out / "checkpoints")
    assert state is not None and state.step == 15 and state.meta["pieces"] == 2
    assert ended(start(out, paths, SETTINGS | {"processes": 3})) != 0
    assert "train.world-size" in [e.get("id") for e in events(out, "error")]
    assert ended(start(out, paths, SETTINGS | {"processes": 1})) == 0
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=2e-4)
    (told,) = [e["message"] for e in events(out, "warning") if e["check"] == "train.resumed"]
    assert "after step 15 of 40" in told and "next 0.0016" in told and "number 30" in told


def test_a_step_worked_in_pieces_sees_the_same_rows_whoever_works_them(paths: dict[str, Path]) -> None:
    from pipeline.eagle3.share import Share
    from pipeline.eagle3.world import World
    from tests.lab.tiny_rows import random_row

    data = [random_row(f"r{i}", [0] * 3 + [1] * (4 + i % 5), i) for i in range(17)]
    share = Share(data, 3, 30, 4, seed=3)
    alone = share.items(0, World(0, 1))
    apart = [share.items(0, World(rank, 2)) for rank in range(2)]
    later = share.items(2, World(0, 1))
    for step in range(6):
        whole = [next(alone) for _ in range(4)]
        theirs = [[next(items) for _ in range(2)] for items in apart]
        assert [piece.rows for pair in zip(*theirs, strict=True) for piece in pair] == [piece.rows for piece in whole]
        assert len({tuple(piece.counts) for piece in [*whole, *theirs[0], *theirs[1]]}) == 1
        assert whole[0].counts[0] == sum(4 + i % 5 - 1 for piece in whole for i in piece.rows)
        if step >= 2:
            assert [next(later).rows for _ in range(4)] == [piece.rows for piece in whole]
    assert Share(data, 3, 30, 1, seed=3).steps_of(2.0) * 30 >= 2 * sum(len(row) for row in data) * 0.9


def test_processes_that_were_not_started_are_asked_for(tmp_path: Path, paths: dict[str, Path]) -> None:
    with pytest.raises(Refused, match=r"torch\.distributed\.run") as refusal:
        run_stage("train", tmp_path / "t", paths, SETTINGS | {"processes": 2})
    assert refusal.value.id == "train.processes"


HANGS = """
import threading
import pipeline.stages.heartbeat as heartbeat
heartbeat.LOOK_S = 0.05
real = t.Trainer.finish
def finish(self, total):
    if self.steps_done == 12:
        heartbeat.FLOOR_S = 0.4  # not before: a busy machine may well be that slow
        if t.world.rank() == WHO:
            planted_hang()
    real(self, total)
def planted_hang():
    threading.Event().wait()
t.Trainer.finish = finish
import pipeline.stages.train_log as log
log.CHECKPOINT_SECONDS = 0.0
"""


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.training_report(31)
def test_a_hang_leaves_the_stacks_of_every_process_and_ends_so_that_it_can_go_on(
    tmp_path: Path, paths: dict[str, Path], processes: int
) -> None:
    out = tmp_path / "hung"
    settings = SETTINGS | {"processes": processes}
    code = ended(start(out, paths, settings, HANGS.replace("WHO", str(processes - 1))))
    assert code != 0 and not (out / "manifest.json").exists()
    assert "train.stalled" in warnings(out)
    assert "train.hung" in [e.get("id") for e in events(out, "error")]
    stacks = [(out / f"stacks-{rank}.txt").read_text() for rank in range(processes)]
    assert "planted_hang" in stacks[-1]  # the one that hangs
    if processes == 2:
        assert "planted_hang" not in stacks[0] and "all_reduce" in stacks[0]  # the one that waits for it
    told = next(e["message"] for e in events(out, "warning") if e["check"] == "train.stalled")
    assert str(out / "stacks-") in told
    assert ended(start(out, paths, settings)) == 0
    run_stage("train", tmp_path / "whole", paths, SETTINGS)
    assert losses(out) == pytest.approx(losses(tmp_path / "whole"), rel=2e-4)


def test_a_slow_first_step_is_no_hang(tmp_path: Path) -> None:
    from pipeline.stages.heartbeat import FLOOR_S, LATE, Heartbeat

    heart = Heartbeat(tmp_path / "stacks", lambda *_: None, lambda *_: None)
    assert LATE * heart.usual() > FLOOR_S  # nothing is known yet: a compiler may run for minutes
    heart._distances.extend([0.1, 0.1, 30.0, 0.1])
    assert heart.usual() == pytest.approx(0.1)


@pytest.mark.training_report(33)
def test_going_back_to_an_older_state_leaves_the_newer_ones(tmp_path: Path) -> None:
    for step in (3, 7, 9, 20, 30):
        path = checkpoint.path_of(tmp_path, step)
        path.write_bytes(checkpoint.to_bytes(checkpoint.State(step, {"weights": torch.zeros(1)}, {})))
    checkpoint.prune(tmp_path, 9)
    assert [int(p.stem.split("-")[1]) for p in sorted(tmp_path.glob("*"))] == [7, 9, 20, 30]
