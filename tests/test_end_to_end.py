"""The whole job in small, over SSH on played hosts: the real model, few prompts, seconds of training.

Every step of the demo, and what happens when it is killed in the middle. How good the drafter gets is not asked here:
that is what the demo itself measures.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.demo import STEPS
from pipeline.demo_project import prepare
from state import events
from state.journal import Journal
from state.project import journal_path, load

pytestmark = pytest.mark.timeout(900)  # a real model on a busy machine

REPOSITORY = Path(__file__).parents[1]
SMALL = {
    "prompts": {"self_written": "24", "held_self": "4", "held_people": "4", "max_tokens": "24", "seeds": "false"},
    "generate": {"max_tokens": "24", "concurrency": "16"},
    "vocab": {"size": "512"},
    "train": {"minutes": "0.2"},
    "bench": {"rounds": "2", "max_tokens": "16", "prompts": "2"},
}


def small_demo(directory: Path) -> Path:
    """A demo's folder with small numbers in its project file."""
    prepare(directory)
    path = directory / "rigbook.toml"
    text = path.read_text()
    for table, settings in SMALL.items():
        for key, value in settings.items():
            old = re.search(rf"(?m)^\[pipeline\.{table}\]\n(?:[a-z_]+ = .*\n)*?{key} = (.*)$", text)
            assert old is not None, (table, key)
            text = text[: old.start(1)] + value + text[old.end(1) :]
    path.write_text(text)
    return directory


def rigbook(*words: str) -> list[str]:
    return [sys.executable, "-m", "tui.cli.main", *words]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(home)}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def kill_when(command: list[str], home: Path, reached: Callable[[], bool]) -> None:
    """Start the demo, and kill it with SIGKILL when it has come this far."""
    process = subprocess.Popen(command, env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    told: list[bytes] = []
    reader = threading.Thread(target=lambda: told.extend(process.stderr or []))
    reader.start()
    deadline = time.monotonic() + 400
    while not reached():
        assert process.poll() is None, b"".join(told).decode()[-2000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    reader.join()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, home: Path) -> Iterator[tuple[Path, str]]:
    """A demo that was killed with SIGKILL twice while it worked, and then finished by the same command."""
    directory = small_demo(tmp_path_factory.mktemp("demo") / "rig")
    command = rigbook("demo", "--dir", str(directory))
    rows = Path(load(directory).target.path).parents[1] / "generate" / "rows.jsonl"  # type: ignore[union-attr]
    try:
        # In the middle of the answers, and between two launches of the benchmark.
        kill_when(command, home, lambda: rows.exists() and rows.stat().st_size > 0)
        kill_when(command, home, lambda: any((directory / ".rigbook" / "runs").glob("bench-*/launches.json")))
        done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        yield directory, done.stdout
    finally:
        subprocess.run(rigbook("demo", "--dir", str(directory), "--stop"), env=environment(home), timeout=60)


def recorded(directory: Path) -> list[events.Event]:
    journal = Journal.open(journal_path(directory), read_only=True)
    try:
        assert journal.verify().ok
        return [record.event for record in journal.records()]
    finally:
        journal.close()


def folder(directory: Path) -> Path:
    return Path(load(directory).pipeline.workdir)  # type: ignore[union-attr]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_row_was_lost_or_doubled_by_the_kill(finished: tuple[Path, str]) -> None:
    prompts = [r["id"] for r in rows_of(folder(finished[0]) / "prompts" / "train.jsonl")]
    answers = [r["id"] for r in rows_of(folder(finished[0]) / "generate" / "rows.jsonl")]
    assert sorted(answers) == sorted(prompts) and len(set(prompts)) == len(prompts) >= 15


def test_each_stage_is_in_the_book_as_done_once(finished: tuple[Path, str]) -> None:
    found = recorded(finished[0])
    names = {e.run: e.name for e in found if isinstance(e, events.RunStarted) and e.what == "stage"}
    done = [names[e.run] for e in found if isinstance(e, events.RunFinished) and e.run in names and e.status == "done"]
    stages = {"prompts", "generate", "held_self", "held_people", "tokenize", "mix", "vocab", "hidden", "train"}
    assert stages | {"export", "audit", "predict", "lossless"} <= set(done)
    assert len(done) == len(set(done))


def test_both_kinds_of_prompts_were_measured_apart_with_every_round(finished: tuple[Path, str]) -> None:
    records = [e.bench for e in recorded(finished[0]) if isinstance(e, events.BenchmarkRecorded)]
    assert sorted(r.dataset.kind for r in records) == ["people", "self"]
    for record in records:
        assert [len(arm.rounds) for arm in record.arms] == [2, 2]
        orders = [one.order for arm in record.arms for one in arm.rounds]
        assert sorted(orders) == [0, 1, 2, 3] and orders == [0, 3, 1, 2]  # A B, B A
        assert any("Interrupted" in note for note in record.notes)
        assert record.verdict is not None and record.verdict.kind != "INVALID", record.verdict
        assert record.break_even is not None and record.break_even > 0


def test_the_orphan_was_cleaned_and_proved(finished: tuple[Path, str]) -> None:
    found = recorded(finished[0])
    (plan,) = [e for e in found if isinstance(e, events.PlanMade)]
    (applied,) = [e for e in found if isinstance(e, events.PlanApplied)]
    assert applied.plan == plan.plan and applied.verified
    port = load(finished[0]).profile("eagle3").port
    assert any(port in item["ports"] for item in plan.items)
    assert port in applied.outcome["ports_free"]


def test_the_document_tells_it(finished: tuple[Path, str]) -> None:
    text = (finished[0] / "STATE.md").read_text()
    for heading in ("Goal", "Instructions", "Hosts and access", "Hardware", "Benchmarks", "Drafters and training"):
        assert re.search(rf"^## {heading}", text, re.M), heading
    assert "played" in text
    assert str(finished[0] / "STATE.md") in finished[1]


def test_again_it_redoes_nothing(finished: tuple[Path, str], home: Path) -> None:
    before = [e for e in recorded(finished[0]) if isinstance(e, events.RunStarted) and e.what in {"stage", "bench"}]
    command = rigbook("demo", "--dir", str(finished[0]), "--json")
    done = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[-1]["kind"] == "summary" and lines[-1]["failures"] == {}
    assert [e for e in lines if e["kind"] == "step" and e["number"]][-1]["number"] == len(STEPS)
    after = [e for e in recorded(finished[0]) if isinstance(e, events.RunStarted) and e.what in {"stage", "bench"}]
    assert len(after) == len(before)
