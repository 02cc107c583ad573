"""`rigbook runs show` and `compare`: the course of what a run measured, and what differs between two."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from state.errors import USAGE
from state.events import RunFinished, RunStarted
from state.journal import Journal
from state.outline import journal_path
from tests.test_rig_commands import rigbook
from tui.chart import chart
from tui.cli.runs import curves, differences
from tui.look import ASCII, UNICODE


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rigbook.toml").write_text('[project]\nname = "x"\n')
    with Journal.open(journal_path(tmp_path)) as journal:
        for run, lr, loss in (("train-aa-1", 1e-3, 2.0), ("train-bb-1", 2e-3, 1.5)):
            settings = {"lr": lr, "seed": 0, "extra": {"clip": 0.5}}
            result: dict[str, Any] = {"loss": loss, "steps": 100}
            journal.append(
                RunStarted(run=run, what="stage", name="train", host="llm", job=run, key="k", settings=settings),
                RunFinished(run=run, status="done", exit=0, result=result, seconds=60.0),
            )
    return tmp_path


def says(root: Path, run: str, *events: dict[str, Any]) -> Path:
    path = root / ".rigbook" / "runs" / run / "events.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def loss(step: int, value: Any, accept: float) -> dict[str, Any]:
    return {"kind": "metric", "name": "train.loss", "value": value, "step": step, "accept_length": accept}


def test_a_run_is_shown_with_the_course_of_loss_and_accept_length(root: Path) -> None:
    says(root, "train-aa-1", *(loss(step, 10 / step, 1 + step / 50) for step in range(1, 101)))
    done = rigbook(root, "runs", "show", "train-aa")
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    assert "train.loss: 0.1 in the end" in text and "train.accept_length: 3 in the end" in text
    assert "lr" in text and "extra.clip" in text
    told = json.loads(rigbook(root, "--json", "runs", "show", "train-aa").stdout)
    assert told["curves"]["train.loss"][0] == [1, 10] and len(told["curves"]["train.accept_length"]) == 100
    assert rigbook(root, "runs", "show", "train").returncode == USAGE, "two begin so"


def test_a_resumed_run_has_each_step_once_and_what_is_no_number_leaves_a_gap(root: Path) -> None:
    steps = [(1, 5.0), (2, 4.0), (3, 3.0), (2, 4.0), (3, {"special": "nan"}), (4, 2.0)]
    path = says(root, "train-aa-1", *(loss(step, value, 1.0) for step, value in steps), {"kind": "other"})
    points = curves(path)["train.loss"]
    assert [step for step, _ in points] == [1, 2, 3, 4] and math.isnan(points[2][1])
    assert curves(root / "nowhere") == {}


def test_two_runs_are_told_apart_by_what_differs(root: Path) -> None:
    text = rigbook(root, "runs", "compare", "train-aa", "train-bb").stdout.decode()
    assert "0.001" in text and "0.002" in text and "+100.0%" in text and "-25.0%" in text
    assert "seed" not in text and "clip" not in text, "what is the same is left out"
    told = json.loads(rigbook(root, "--json", "runs", "compare", "train-aa", "train-bb").stdout)
    assert told["settings"] == {"lr": [0.001, 0.002]} and told["result"] == {"loss": [2.0, 1.5]} and not told["run"]
    assert "settings: the same" in rigbook(root, "runs", "compare", "train-aa", "train-aa").stdout.decode()


def test_differences_name_what_one_side_lacks() -> None:
    assert differences({"a": {"b": 1}, "c": []}, {"a": {"b": 2}, "d": 0}) == {
        "a.b": (1, 2),
        "c": ([], None),
        "d": (None, 0),
    }


def test_a_falling_curve_falls() -> None:
    points = [(float(x), float(-x)) for x in range(50)]
    drawn = chart(points, ASCII, width=10, height=5)
    at = [[i for i, cell in enumerate(line[4:]) if cell == "*"] for line in drawn[:5]]
    assert at == sorted(at) and at[0][0] == 0 and at[-1][-1] == 9, drawn
    assert drawn[0].startswith("  0 ") and drawn[4].startswith("-49 ") and drawn[-1].split() == ["0", "49"]


@pytest.mark.parametrize("look", [UNICODE, ASCII])
@pytest.mark.parametrize(
    "points",
    [
        [(0.0, 1.0)],
        [(0.0, 1.0), (1.0, 1.0)],
        [(0.0, math.nan), (1.0, 2.0), (2.0, math.inf), (3.0, -4.0)],
        [(1.0, 5.0), (1.0, 6.0)],
        [(0.0, 1.7e308), (1e9, -1.7e308)],
        [(0.0, 1e300), (1.0, 1e300)],
    ],
)
def test_odd_points_are_drawn_or_left_out(look: Any, points: list[tuple[float, float]]) -> None:
    drawn = chart(points, look, width=20, height=4)
    assert len(drawn) == 5 and all(len(line) < 80 for line in drawn)
    marks = "".join(drawn[:4]).replace(" ", "")
    assert any(0x2800 < ord(c) < 0x2900 for c in marks) if not look.ascii else "*" in marks


def test_nothing_finite_is_no_chart() -> None:
    assert chart([(0.0, math.nan)], UNICODE) == [] and chart([], ASCII) == []
