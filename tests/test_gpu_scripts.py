"""The scripts for a machine with a GPU, run on one that stands in: they must work when the real one is at hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.lab.gpu_machine import REPO, fake_gpu, gpu_machine


@pytest.mark.parametrize(
    "only",
    [
        "baseline,pool,attribution",
        pytest.param("deaf,forked,cost,side_by_side,scheduler,detokenizer,parent", marks=pytest.mark.slow),
    ],
)
def test_they_hold_on_the_stand_in(tmp_path: Path, only: str) -> None:
    with gpu_machine([fake_gpu()]) as machine:
        script = str(REPO / "tests/gpu/run_all.py")
        argv = [sys.executable, script, "--out", str(machine.folder / "out"), "--stand-in", "--only", only]
        # Not through pipes, which what it leaves behind would hold open.
        with (tmp_path / "said").open("wb") as said:
            done = machine.popen(argv, stdout=said, stderr=said)
            done.wait(200)
        summary = json.loads((machine.folder / "out" / "summary.json").read_text())
        assert done.returncode == 0, (
            json.dumps(summary["scenarios"], indent=1) + (tmp_path / "said").read_text()[-3000:]
        )
        assert {name: result["result"] for name, result in summary["scenarios"].items()} == dict.fromkeys(
            only.split(","), "held"
        )
        text = "".join(path.read_text() for path in (machine.folder / "out").iterdir())
        assert str(machine.folder) not in text and "GPU-00000000" not in text
        assert len(list((machine.folder / "out").iterdir())) <= 8
