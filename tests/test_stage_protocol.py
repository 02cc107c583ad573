"""A stage's promises: resume, refusal of a changed configuration, row accounting, whole lines, clean endings."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages import protocol
from pipeline.stages.protocol import JsonlAppender, Stage, execute, read_json, read_jsonl


def spec(tmp_path: Path, **settings: object) -> dict[str, Any]:
    source = tmp_path / "in.txt"
    if not source.exists():
        source.write_text("one\n")
    return {
        "stage": "toy",
        "out": str(tmp_path / "out"),
        "inputs": {"text": str(source)},
        "settings": settings,
        "events": str(tmp_path / "events.jsonl"),
    }


def events(tmp_path: Path) -> list[dict[str, Any]]:
    return list(read_jsonl(tmp_path / "events.jsonl"))


def test_done_is_not_done_again(tmp_path: Path) -> None:
    calls = []

    def run(stage: Stage) -> dict[str, object]:
        calls.append(1)
        (stage.out / "a.txt").write_text("a")
        stage.artifact("a", stage.out / "a.txt")
        return {"n": 3}

    assert execute(spec(tmp_path, x=1), run) == 0
    assert execute(spec(tmp_path, x=1), run) == 0
    assert len(calls) == 1
    manifest = read_json(tmp_path / "out" / "manifest.json")
    assert manifest and manifest["complete"] and manifest["result"] == {"n": 3}
    assert manifest["artifacts"]["a"]["sha256"] == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb"
    assert [e["result"] for e in events(tmp_path) if e["kind"] == "result"] == [{"n": 3}, {"n": 3}]


@pytest.mark.parametrize("change", ["settings", "input"])
@pytest.mark.training_report(22)
@pytest.mark.training_report(27)
def test_changed_configuration_is_refused_by_name(tmp_path: Path, change: str) -> None:
    execute(spec(tmp_path, x=1), lambda stage: {})
    if change == "settings":
        second = spec(tmp_path, x=2)
    else:
        second = spec(tmp_path, x=1)
        (tmp_path / "in.txt").write_text("two\n")
    assert execute(second, lambda stage: {}) == protocol.REFUSED
    error = events(tmp_path)[-1]
    assert error["id"] == "stage.changed"
    assert ("settings.x from 1 to 2" if change == "settings" else "inputs.text") in str(error["message"])


def test_what_changed_is_told_with_both_values() -> None:
    old = {"settings": {"a": 1, "deep": {"b.c": "x", "same": 0}}, "inputs": {"rows": "00"}}
    new = {"settings": {"deep": {"b.c": "y" * 99, "same": 0}, "new": True}, "inputs": {"rows": "11"}}
    told = protocol.changes(old, new)
    assert told.startswith('inputs.rows, settings.a from 1 to null, settings.deep.b.c from "x" to "yyy')
    assert told.endswith("settings.new from null to true") and "same" not in told and len(told) < 200
    assert protocol.changes(old, old) == ""


def test_the_time_left_is_told_by_effort_where_rows_are_not_equally_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 tokens/s. Short answers ended first: 50 of 60 rows are done, and 9,000 of 10,000 tokens are left."""
    clock = [1000.0]
    monkeypatch.setattr(protocol.time, "time", lambda: clock[0])
    stage = Stage(spec(tmp_path))
    for second in range(11):
        clock[0] = 1000.0 + second
        stage.progress(5 * second, 60, "responses", (100.0 * second, 10_000.0 - 100 * second))
    last = events(tmp_path)[-1]
    assert last["rate"] == 5 and last["eta"] == pytest.approx(90), "by rows it would be 2 seconds"
    clock[0] += 2
    other = Stage(spec(tmp_path))
    other.progress(3, 60, "responses", (0.0, 100.0))
    assert events(tmp_path)[-1]["eta"] is None, "unknown, not zero"


def test_a_transient_setting_may_change_and_only_that(tmp_path: Path) -> None:
    """Half done, asked to go on elsewhere: it goes on; what was done stays done. With other content it is refused."""

    def spec_at(url: str, x: int) -> dict[str, Any]:
        return spec(tmp_path, x=x, url=url) | {"transient": ["url"]}

    def broken(stage: Stage) -> dict[str, object]:
        raise OSError(28, "No space left on device")

    assert execute(spec_at("a", 1), broken) == protocol.REFUSED
    assert execute(spec_at("b", 2), lambda stage: {}) == protocol.REFUSED
    assert "settings.x" in str(events(tmp_path)[-1]["message"])
    assert execute(spec_at("b", 1), lambda stage: {"url": stage.settings["url"]}) == 0
    assert execute(spec_at("c", 1), broken) == 0, "done is done"
    manifest = read_json(tmp_path / "out" / "manifest.json")
    assert manifest and manifest["result"] == {"url": "b"} and manifest["settings"]["url"] == "b"
    assert protocol.lasting(manifest) == protocol.lasting(spec_at("c", 1)) == {"x": 1}


DAMAGE = {
    "manifest.json": ['{"schema": 1, "comp', "", "[]"],
    "begun.json": ['{"key"', "null"],
    "rows.jsonl": ['{"id": 0}\n{"id\n{"id": 2}\n', "\0\0\n", '{"id": 0}\n{"id": 0}\n', "[1]\n", '{"no": 0}\n'],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in DAMAGE.items() for text in texts])
def test_a_damaged_file_is_named_and_not_guessed_at(tmp_path: Path, name: str, text: str) -> None:
    def run(stage: Stage) -> dict[str, Any]:
        rows = JsonlAppender(stage.out / "rows.jsonl")
        rows.append(*({"id": n} for n in range(3) if n not in rows.done))
        return {}

    assert execute(spec(tmp_path), run) == 0
    if name == "rows.jsonl":
        (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / name).write_text(text)
    assert execute(spec(tmp_path), run) == protocol.REFUSED
    error = events(tmp_path)[-1]
    assert error["id"] == "stage.damaged" and name in str(error["message"])
    assert (tmp_path / "out" / name).read_text() == text


@pytest.mark.training_report(20)
def test_lost_rows_fail(tmp_path: Path) -> None:
    rows = {"in": 3, "out": 1, "errors": 1, "skipped": 0}
    assert execute(spec(tmp_path), lambda stage: {"rows": rows}) == protocol.FAILED
    assert read_json(tmp_path / "out" / "manifest.json") is None


def test_missing_input_is_a_sentence(tmp_path: Path) -> None:
    bad = spec(tmp_path)
    (tmp_path / "in.txt").unlink()
    assert execute(bad, lambda stage: {}) == protocol.REFUSED
    assert events(tmp_path)[-1]["id"] == "stage.input-missing"


def test_full_disk_is_a_sentence(tmp_path: Path) -> None:
    def run(stage: Stage) -> dict[str, object]:
        raise OSError(28, "No space left on device", str(stage.out / "big"))

    assert execute(spec(tmp_path), run) == protocol.REFUSED
    assert events(tmp_path)[-1]["id"] == "stage.disk"


def test_nan_is_kept_as_nan(tmp_path: Path) -> None:
    def run(stage: Stage) -> dict[str, object]:
        stage.metric("loss", float("nan"))
        return {"loss": float("inf")}

    assert execute(spec(tmp_path), run) == 0
    assert events(tmp_path)[0]["value"] == {"special": "nan"}
    assert events(tmp_path)[-1]["result"] == {"loss": {"special": "inf"}}


@pytest.mark.parametrize("tail", [b'{"id": "c", "x"', b"\xff\xfe", b'{"id": "c"}'])
def test_torn_tail_is_cut_and_the_next_row_is_whole(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": "a"}\n{"id": "b"}\n' + tail)
    rows = JsonlAppender(path)
    assert rows.done == {"a", "b"}
    rows.append({"id": "c", "x": 1})
    rows.close()
    assert [row["id"] for row in read_jsonl(path)] == ["a", "b", "c"]


SLOW = """
import sys, time
from pipeline.stages.protocol import JsonlAppender, main
def run(stage):
    rows = JsonlAppender(stage.out / "rows.jsonl")
    for i in range(40):
        if i not in rows.done:
            time.sleep(0.01)
            rows.append({"id": i})
    return {"rows": {"in": 40, "out": len(rows.rows), "errors": 0, "skipped": 0}}
main(run)
"""


@pytest.mark.training_report(28)
def test_killed_anywhere_it_continues(tmp_path: Path) -> None:
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    (tmp_path / "spec.json").write_text(json.dumps(spec(tmp_path)))
    repository = str(Path(__file__).parents[1])
    command = [sys.executable, str(program), "--spec", str(tmp_path / "spec.json")]
    rows = tmp_path / "out" / "rows.jsonl"
    for kill in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        before = rows.stat().st_size if rows.exists() else 0
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": repository}, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (rows.exists() and rows.stat().st_size > before + 20):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        process.send_signal(kill)
        assert process.wait(60) == (143 if kill == signal.SIGTERM else -9)
        assert read_json(tmp_path / "out" / "manifest.json") is None
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": repository}).returncode == 0
    assert [row["id"] for row in read_jsonl(rows)] == list(range(40))
