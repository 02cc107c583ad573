"""Prompts: the model's own and people's, held-out ones apart, nothing shared, a killed stage goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.eagle3.chat import Chat
from pipeline.stages.prompts import N, select, unusable, user_turn
from pipeline.stages.shipped_prompts import HELD_OUT, SEEDS
from tests.lab.engine import Engine, engine, free_port
from tests.lab.stages import result_of, rows_of, run_stage, start_stage
from tests.lab.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), positions=512)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine(model, tmp_path_factory.mktemp("engine") / "log", "--max-running-requests", "8") as running:
        yield running


def spec(tmp_path: Path, model: Path, url: str, **settings: Any) -> dict[str, Any]:
    defaults = {"base_url": url, "concurrency": 8, "self_written": 0, "held_self": 0, "held_people": 10,
                "seeds": True, "temperature": 1.0, "max_tokens": 24, "seed": 0}  # fmt: skip
    return {
        "stage": "prompts",
        "out": str(tmp_path / "out"),
        "inputs": {"model": str(model)},
        "settings": defaults | settings,
    }


def texts(tmp_path: Path, name: str) -> list[str]:
    return [row["messages"][0]["content"] for row in rows_of(tmp_path / "out" / f"{name}.jsonl")]


def test_shipped_prompts_alone_need_no_server(model: Path, tmp_path: Path) -> None:
    wanted = spec(tmp_path, model, f"http://127.0.0.1:{free_port()}")
    code, said = run_stage("prompts", wanted, tmp_path)
    assert code == 0, said
    assert texts(tmp_path, "held_people") == list(HELD_OUT[:10])
    assert set(texts(tmp_path, "train")) <= set(SEEDS)
    rows = result_of(wanted)["rows"]
    assert rows["in"] == len(SEEDS) + 10 == rows["out"] + rows["skipped"]


def test_shipped_prompts_are_distinct() -> None:
    words = [{w.strip(".,?!'\"").lower() for w in text.split() if len(w) > 4} for text in (*SEEDS, *HELD_OUT)]
    assert len(set(SEEDS)) == len(SEEDS) >= 60 and len(set(HELD_OUT)) == len(HELD_OUT) >= 24
    for i, a in enumerate(words):
        for b in words[i + 1 :]:
            assert len(a & b) <= max(2, len(a) // 2), f"too much alike: {a} {b}"


def test_a_killed_stage_goes_on(server: Engine, model: Path, tmp_path: Path) -> None:
    """A tiny model of random weights writes noise, so no text is usable: what is asked and kept is what counts."""
    wanted = spec(tmp_path, model, server.url, self_written=100, held_self=5)
    raw = tmp_path / "out" / "raw.jsonl"
    process = start_stage("prompts", wanted, tmp_path)
    deadline = time.monotonic() + 60
    while not raw.exists() or raw.read_bytes().count(b"\n") < 20:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate()
    kept = {row["id"]: row["text"] for row in rows_of(raw)}
    code, said = run_stage("prompts", wanted, tmp_path)
    assert code == 3 and "[prompts.few]" in said, "a sentence, not an empty training set"
    rows = rows_of(raw)
    assert len({row["id"] for row in rows}) == len(rows) == 400, "four texts at most for each prompt wanted"
    assert kept.items() <= {row["id"]: row["text"] for row in rows}.items()


def test_no_server(model: Path, tmp_path: Path) -> None:
    wanted = spec(tmp_path, model, f"http://127.0.0.1:{free_port()}", self_written=8, held_self=2)
    code, said = run_stage("prompts", wanted, tmp_path)
    assert code == 3 and "[server.unreachable]" in said and "Traceback" not in said


def test_more_held_out_than_written(model: Path, tmp_path: Path) -> None:
    code, said = run_stage("prompts", spec(tmp_path, model, "http://x", self_written=4, held_self=4), tmp_path)
    assert code == 3 and "held_self (4) must be smaller than self_written (4)" in said


def test_the_users_turn_is_found_in_the_template(model: Path) -> None:
    assert user_turn(Chat(model)) == ("<|im_start|>user\n", "<|im_end|>")


def test_overlap_with_held_out_prompts_is_dropped(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline.stages import prompts
    from pipeline.stages.protocol import execute

    copied = "Tell me " + HELD_OUT[0][:20] + " and so on"
    assert len(Chat(model).encode(HELD_OUT[0][:20])) >= N
    monkeypatch.setattr(prompts, "SEEDS", ("An innocent question about tea.", copied))
    wanted = spec(tmp_path, model, "http://x")
    assert execute(wanted, prompts.run) == 0
    assert texts(tmp_path, "train") == ["An innocent question about tea."]
    assert result_of(wanted)["left_out"] == {"overlap": 1}


def test_selection() -> None:
    raw = [
        {"id": "self-00003", "text": "What is the best way to cook rice?", "finish": "stop"},
        {"id": "self-00000", "text": " How do I paint a wooden fence? ", "finish": "stop"},
        {"id": "self-00001", "text": "how do i paint a wooden fence", "finish": "stop"},
        {"id": "self-00002", "text": SEEDS[0], "finish": "stop"},
        {"id": "self-00004", "text": "Which birds stay in the north all winter?", "finish": "stop"},
    ]
    rows, reasons = select(raw, 2)
    assert [r["id"] for r in rows] == ["self-00000", "self-00003"]
    assert rows[0] == {"id": "self-00000", "source": "self",
                       "messages": [{"role": "user", "content": "How do I paint a wooden fence?"}]}  # fmt: skip
    assert reasons == {"repeated": 2, "not needed": 1}


@pytest.mark.parametrize(
    ("text", "finish", "reason"),
    [
        ("What is the best way to cook rice?", "stop", None),
        ("What is the best way to cook rice?", "length", "cut off"),
        ("Hi there.", "stop", "too short"),
        ("What is <|im_start|> the best way?", "stop", "debris"),
        ("What is half a \ufffd character doing here?", "stop", "debris"),
        ("12 + 34 = 46 - 3 * 1 = ? ? ?", "stop", "not words"),
        ("the dog and the dog and the dog and the dog and the dog", "stop", "loops"),
    ],
)
def test_what_is_no_prompt(text: str, finish: str, reason: str | None) -> None:
    assert unusable(text, finish) == reason
