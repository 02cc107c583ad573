"""Tokenize: ids as generated, masks that decode to the response, rows accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.eagle3.chat import Chat
from pipeline.stages.protocol import Refused, write_jsonl
from tests.lab.stage_run import rows, run_stage, warnings
from tests.lab.tiny_model import EOS, make_tiny_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def row(id: str, response: str, **more: Any) -> dict[str, Any]:
    made = {"id": id, "source": "self", "messages": [{"role": "user", "content": "say it"}], "response": response}
    return made | {"finish_reason": "stop"} | more


def tokenize(tmp_path: Path, model: Path, given: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    write_jsonl(tmp_path / "given.jsonl", given)
    return run_stage("tokenize", tmp_path / "out", {"rows": tmp_path / "given.jsonl", "model": model}, settings)


def masked(row: dict[str, Any]) -> list[int]:
    return [id for id, flag in zip(row["input_ids"], row["loss_mask"], strict=True) if flag]


@pytest.mark.training_report(14)
def test_the_masked_span_is_the_response_and_its_end_token(tmp_path: Path, model: Path) -> None:
    tokenize(tmp_path, model, [row("a", "hello there"), row("b", "cut off", finish_reason="length")])
    chat = Chat(model)
    a, b = rows(tmp_path / "out/rows.jsonl")
    assert masked(a)[-1] == EOS and chat.decode(masked(a)[:-1]) == "hello there"
    assert EOS not in masked(b) and chat.decode(masked(b)) == "cut off"
    prompt = [id for id, flag in zip(a["input_ids"], a["loss_mask"], strict=True) if not flag]
    assert chat.decode(prompt) == "<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\n"


def test_the_servers_own_ids_are_kept_even_where_encoding_the_text_gives_others(tmp_path: Path, model: Path) -> None:
    chat = Chat(model)
    word = next(f" w{i}" for i in range(100) if chat.tokenizer.token_to_id(f"Ġw{i}") is not None)
    whole = chat.tokenizer.token_to_id("Ġ" + word.strip())
    assert chat.encode(word) != [whole]  # without merges the text is spelt byte by byte
    tokenize(tmp_path, model, [row("a", word * 3, output_ids=[whole] * 3 + [EOS])])
    assert masked(rows(tmp_path / "out/rows.jsonl")[0]) == [whole] * 3 + [EOS]


def test_ids_that_do_not_decode_to_the_text_are_set_aside_and_many_of_them_refused(tmp_path: Path, model: Path) -> None:
    good = [row(f"g{i}", f"text number {i}") for i in range(99)]
    wrong = row("wrong", "something else", output_ids=Chat(model).encode("not this"))
    result = tokenize(tmp_path, model, [*good, wrong])
    assert result["rows"] == {"in": 100, "out": 99, "errors": 1, "skipped": 0}
    assert [r["id"] for r in rows(tmp_path / "out/errors.jsonl")] == ["wrong"]
    (tmp_path / "more").mkdir()
    with pytest.raises(Refused, match="cannot be used"):
        tokenize(tmp_path / "more", model, [*good[:3], wrong])


@pytest.mark.training_report(15)
def test_an_empty_mask_is_refused_and_a_single_empty_row_is_counted(tmp_path: Path, model: Path) -> None:
    result = tokenize(tmp_path, model, [row("a", "fine text"), row("b", "")])
    assert result["rows"] == {"in": 2, "out": 1, "errors": 0, "skipped": 1}
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match="every loss mask is empty"):
        tokenize(tmp_path / "empty", model, [row("a", ""), row("b", "")])


@pytest.mark.training_report(16)
def test_tokens_counted_by_the_server_but_missing_in_the_row_are_an_error(tmp_path: Path, model: Path) -> None:
    # A reasoning field that was renamed leaves `response` empty; training would look healthy without it.
    given = [row(f"g{i}", "text") for i in range(60)] + [row("lost", "", completion_tokens=40)]
    assert tokenize(tmp_path, model, given)["rows"]["errors"] == 1


@pytest.mark.training_report(17)
def test_long_rows_are_cut_and_unfinished_ones_told(tmp_path: Path, model: Path) -> None:
    result = tokenize(tmp_path, model, [row("a", "x" * 300, finish_reason="length")], max_len=100)
    made = rows(tmp_path / "out/rows.jsonl")[0]
    assert len(made["input_ids"]) == len(made["loss_mask"]) == 100 and result["cut"] == 1
    assert set(warnings(tmp_path / "out")) == {"tokenize.cut", "tokenize.unfinished"}
    assert sum(result["response_histogram"].values()) == 1


def test_samples_show_the_masked_span(tmp_path: Path, model: Path) -> None:
    tokenize(tmp_path, model, [row("a", "hello there")])
    assert "assistant\n⟦hello there<|im_end|>⟧" in (tmp_path / "out/samples.txt").read_text()
