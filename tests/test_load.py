"""The load generator and the losslessness check, against real engines of a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pipeline.eagle3.draft import config_for_target, write_config
from pipeline.stages.load import _row, summary
from tests.lab.engine import Engine, engine, free_port
from tests.lab.stages import prompts_file, result_of, rows_of, run_stage
from tests.lab.tiny_drafter import random_weights
from tests.lab.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of random weights with the target's own head: accepted now and then."""
    directory = tmp_path_factory.mktemp("draft")
    config = config_for_target(json.loads((model / "config.json").read_text()), (2, 4, 5), draft_vocab_size=384)
    (directory / "config.json").write_text(json.dumps(write_config(config)))
    weights = random_weights(config)
    weights["lm_head.weight"] = load_file(model / "model.safetensors")["model.embed_tokens.weight"].clone()
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def server(model: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = ["--dtype", "float32", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
    flags += ["--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"]
    with engine(model, tmp_path_factory.mktemp("engine") / "log", *flags) as running:
        yield running


def spec(tmp_path: Path, model: Path, url: str, **settings: Any) -> dict[str, Any]:
    return {
        "stage": "load",
        "out": str(tmp_path / "out"),
        "inputs": {"model": str(model), "prompts": str(prompts_file(tmp_path / "prompts.jsonl", 10))},
        "settings": {"base_url": url, "max_tokens": 24, "concurrency": 1, "ignore_eos": True, "limit": 8} | settings,
        "events": str(tmp_path / "events.jsonl"),
    }


@pytest.mark.parametrize("concurrency", [1, 4])
def test_counts_add_up(server: Engine, model: Path, tmp_path: Path, concurrency: int) -> None:
    wanted = spec(tmp_path, model, server.url, concurrency=concurrency)
    code, said = run_stage("load", wanted, tmp_path)
    assert code == 0, said
    got = result_of(wanted)
    rows = rows_of(tmp_path / "out" / "rows.jsonl")
    assert [r["id"] for r in rows] == [f"p{i:03d}" for i in range(8)]
    assert got["requests"] == 8 and got["errors"] == 0
    assert got["output_tokens"] == sum(len(r["output_ids"]) for r in rows) == 8 * 24
    assert got["tok_s"] == pytest.approx(got["output_tokens"] / got["seconds"])
    assert sum(got["accept_histogram"]) == got["verify_steps"] and len(got["accept_histogram"]) == 3
    assert got["proposed_drafts"] == 2 * got["verify_steps"]
    assert sum(got["per_position"]) == got["accepted_drafts"]
    assert got["per_position"] == sorted(got["per_position"], reverse=True)
    assert got["accept_len"] == pytest.approx(1 + got["accepted_drafts"] / got["verify_steps"])
    # Every token but a request's first comes out of a verify step.
    assert got["output_tokens"] == 8 + got["verify_steps"] + got["accepted_drafts"] - overshoot(rows)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert "warning" not in kinds and kinds.count("metric") == 2


def overshoot(rows: list[dict[str, Any]]) -> int:
    """Steps whose bonus token fell behind max_tokens: 1 + steps + accepted is then one more than was emitted."""
    return sum(1 + row["spec_verify_ct"] + row["spec_num_correct_drafts"] - row["completion_tokens"] for row in rows)


def test_somebody_else_on_the_server_is_noticed(server: Engine, model: Path, tmp_path: Path) -> None:
    wanted = spec(tmp_path, model, server.url, max_tokens=100, limit=8)
    body = {"text": "x", "sampling_params": {"max_new_tokens": 20, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        stop = False

        def intrude() -> None:
            while not stop:
                server.post("/generate", body)

        intruder = pool.submit(intrude)
        code, said = run_stage("load", wanted, tmp_path)
        stop = True
        intruder.result(30)
    assert code == 0 and "[load.shared]" in said


def test_no_server(model: Path, tmp_path: Path) -> None:
    code, said = run_stage("load", spec(tmp_path, model, f"http://127.0.0.1:{free_port()}"), tmp_path)
    assert code == 3 and "[server.unreachable]" in said and "Traceback" not in said


def test_a_server_that_refuses(server: Engine, model: Path, tmp_path: Path) -> None:
    code, said = run_stage("load", spec(tmp_path, model, server.url, max_tokens=5000), tmp_path)
    assert code == 3 and "maximum context length" in said


def test_without_speculation_there_is_no_accept_length() -> None:
    answered = [("stop", 5, 1.0), ("length", 7, 3.0)]
    rows = [{"finish_reason": why, "completion_tokens": n, "seconds": s} for why, n, s in answered]
    finish = {"stop": 1, "length": 1}
    expected = {"requests": 2, "output_tokens": 12, "seconds": 4.0, "tok_s": 3.0, "latency_p50": 2.0, "finish": finish}
    assert summary(rows, 4.0) == expected


def test_what_an_old_sglang_tells_is_read() -> None:
    meta = {"completion_tokens": 9, "finish_reason": "stop", "spec_verify_ct": 4, "spec_accept_token_num": 4,
            "spec_draft_token_num": 12}  # fmt: skip
    got = summary([_row("a", {"text": "", "output_ids": [1], "meta_info": meta}, 1.0)], 1.0)
    assert (got["accept_len"], got["accepted_drafts"], got["proposed_drafts"]) == (2.0, 4, 12)
    assert got["accept_histogram"] == got["per_position"] == []


# --- lossless ------------------------------------------------------------------------------------------------------


def lossless(tmp_path: Path, model: Path, draft: Path) -> dict[str, Any]:
    return {
        "stage": "lossless",
        "out": str(tmp_path / "out"),
        "inputs": {
            "model": str(model),
            "drafter": str(draft),
            "prompts": str(prompts_file(tmp_path / "prompts.jsonl", 6)),
        },
        "settings": {"limit": 4, "max_tokens": 30, "steps": 3, "threads": 1},
    }


def test_lossless(model: Path, draft: Path, tmp_path: Path) -> None:
    wanted = lossless(tmp_path, model, draft)
    assert run_stage("lossless", wanted, tmp_path)[0] == 0
    got = result_of(wanted)
    assert (got["checked"], got["identical"], got["dtype"]) == (4, 4, "float32")
    assert got["accept_len"] >= 1 and got["divergences"] == []


def test_a_difference_is_told(model: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that accepts any first draft is found out, with the place and the margin."""
    from pipeline.eagle3 import decode
    from pipeline.stages import lossless as stage
    from pipeline.stages.protocol import execute

    true_choose = decode.choose

    def gullible(logits: Any, requests: Any, places: Any) -> Any:
        chosen = true_choose(logits, requests, places)
        if len(chosen) == 4:  # a verify of three drafts
            chosen[0] = (chosen[0] + 1) % 384
        return chosen

    monkeypatch.setattr(decode, "choose", gullible)
    wanted = lossless(tmp_path, model, draft)
    assert execute(wanted, stage.run) == 0
    got = result_of(wanted)
    assert got["identical"] == 0
    first = got["divergences"][0]
    assert first["at"] == 1 and first["margin"] > 0 and first["plain"] != first["speculative"]


def test_lossless_refuses_a_broken_drafter(model: Path, draft: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((draft / "config.json").read_bytes())
    weights = load_file(draft / "model.safetensors")
    del weights["fc.weight"]
    save_file(weights, broken / "model.safetensors")
    code, said = run_stage("lossless", lossless(tmp_path, model, broken), tmp_path)
    assert code == 3 and "missing tensors: fc.weight" in said and "Traceback" not in said
