"""Prompts from files of every usual form: what a row is, which are taken, and that a bad one is set aside and told."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pipeline.eagle3.chat import Chat
from pipeline.stages.protocol import Refused
from pipeline.stages.sources import Bad, Item, choose, items, understand
from tests.lab.stage_run import rows, run_stage, warnings
from tests.lab.tiny_model import make_tiny_model

VOCAB = 384
USER = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
PROMPT = {"messages": [USER]}

GOOD: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "OpenAI": ({"messages": [USER]}, "prompt", PROMPT),
    "OpenAI, answered by another model": ({"messages": [USER, ANSWER]}, "prompt", PROMPT),
    "text in parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]}]},
        "prompt",
        PROMPT,
    ),
    "columns that are null": ({"messages": [USER], "conversations": None, "response": None}, "prompt", PROMPT),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        "prompt",
        PROMPT,
    ),
    "several turns": (
        {
            "conversations": [
                {"from": "human", "value": "Hm?"},
                {"from": "gpt", "value": "Ah."},
                {"from": "user", "value": "Why?"},
            ]
        },
        "prompt",
        {"messages": [{"role": "user", "content": "Hm?"}, {"role": "assistant", "content": "Ah."}, USER]},
    ),
    "ShareGPT's system turn": (
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Why?"}]},
        "prompt",
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    ),
    "Alpaca with input": (
        {"instruction": "Translate.", "input": "Guten Tag", "output": "Good day"},
        "prompt",
        {"messages": [{"role": "user", "content": "Translate.\n\nGuten Tag"}]},
    ),
    "Alpaca without": ({"instruction": "Why?", "input": ""}, "prompt", PROMPT),
    "prompt and system": (
        {"prompt": "Why?", "system": "Be brief."},
        "prompt",
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    ),
    "answered": ({"messages": [USER], "response": "So."}, "ready", {"messages": [USER], "response": "So."}),
    "answered, with thoughts and ids": (
        {"prompt": "Why?", "response": "So.", "reasoning": "Hm.", "output_ids": [5, 6]},
        "ready",
        {"messages": [USER], "response": "So.", "reasoning": "Hm.", "output_ids": [5, 6]},
    ),
    "tokenized": (
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, True]},
        "tokenized",
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
    ),
}


@pytest.mark.parametrize("case", GOOD)
def test_what_a_row_is(case: str) -> None:
    raw, kind, fields = GOOD[case]
    assert understand(raw, False, VOCAB) == Item(kind, fields)  # type: ignore[arg-type]


def test_answers_of_the_targets_own_are_kept_where_the_source_says_so() -> None:
    raw = {"messages": [USER, ANSWER]}
    assert understand(raw, True, VOCAB) == Item("ready", {"messages": [USER], "response": "Because."})


BAD: dict[str, tuple[Any, str]] = {
    "a list": ([1, 2], "no object"),
    "nothing known": ({"a": 1}, "no known key"),
    "an unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "unknown role 'wizard'"),
    "only an answer": ({"messages": [ANSWER]}, "no user turn"),
    "an empty turn": ({"messages": [{"role": "user", "content": " "}]}, "a turn is empty"),
    "an empty prompt": ({"prompt": "  "}, "empty"),
    "an empty response": ({"prompt": "Why?", "response": " "}, "response is empty"),
    "a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "no text"),
    "tool calls": ({"messages": [USER, {"role": "assistant", "tool_calls": [{}], "content": ""}]}, "tool calls"),
    "tools": ({"messages": [USER], "tools": [{"name": "f"}]}, "tool definitions"),
    "a turn that is a word": ({"conversations": ["hi"]}, "no object"),
    "ids without a mask": ({"input_ids": [1, 2]}, "loss_mask"),
    "another length": ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids, 1 entries"),
    "an id too large": ({"input_ids": [1, VOCAB], "loss_mask": [1, 1]}, "outside"),
    "an id that is no number": ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, "outside"),
    "an empty mask": ({"input_ids": [1, 2], "loss_mask": [0, 0]}, "mask is empty"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.training_report(20)
@pytest.mark.training_report(23)
def test_a_row_that_cannot_be_used_says_why(case: str) -> None:
    raw, words = BAD[case]
    with pytest.raises(Bad, match=words):
        understand(raw, False, VOCAB)


def write_jsonl(path: Path, found: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))


def write_gz(path: Path, found: list[Any]) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)


def write_parquet(path: Path, found: list[Any]) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path, row_group_size=2)


def write_arrow_stream(path: Path, found: list[Any]) -> None:
    table = pyarrow.Table.from_pylist(found)
    with pyarrow.OSFile(str(path), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)


def write_arrow_file(path: Path, found: list[Any]) -> None:
    table = pyarrow.Table.from_pylist(found)
    with pyarrow.OSFile(str(path), "wb") as out, pyarrow.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[Path, list[Any]], None]] = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_gz,
    "a.json": lambda path, found: path.write_text(json.dumps(found)) and None,
    "a.parquet": write_parquet,
    "data-00000-of-00001.arrow": write_arrow_stream,
    "b.arrow": write_arrow_file,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_every_form_gives_the_same_rows(tmp_path: Path, name: str, folder: bool) -> None:
    (tmp_path / "set" / "train").mkdir(parents=True)
    path = tmp_path / "set" / "train" / name
    WRITERS[name](path, [{"messages": [{"role": "user", "content": f"Question {i}"}]} for i in range(5)])
    (tmp_path / "set" / "dataset_info.json").write_text("{}")
    (tmp_path / "set" / "train" / "state.json").write_text("{}")
    found = list(items(tmp_path / "set" if folder else path, "auto", False, VOCAB))
    assert [place.number for place, _ in found] == [1, 2, 3, 4, 5]
    assert [item.fields["messages"][0]["content"] for _, item in found if isinstance(item, Item)] == [
        f"Question {i}" for i in range(5)
    ]


def test_plain_text_by_line_and_by_paragraph(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("One\n\nTwo\nstill two \xff\n\n\nThree".encode("latin-1"))

    def texts(form: str) -> list[str]:
        found = items(path, form, False, VOCAB)
        return [item.fields["messages"][0]["content"] for _, item in found if isinstance(item, Item)]

    assert texts("auto") == ["One", "Two", "still two \ufffd", "Three"]
    assert texts("paragraphs") == ["One", "Two\nstill two \ufffd", "Three"]


@pytest.mark.training_report(23)
def test_a_broken_line_does_not_stop_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "one"}\n{"prompt": \n\xff\xfe\n\n{"prompt": "two"}\n{"prompt": "torn')
    found = list(items(path, "auto", False, VOCAB))
    assert [type(item).__name__ for _, item in found] == ["Item", "Bad", "Bad", "Item", "Bad"]


@pytest.mark.parametrize("name", ["nowhere", "empty", "a.bin", "a.json", "a.parquet"])
def test_a_source_that_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    for broken in ("a.bin", "a.json", "a.parquet"):
        (tmp_path / broken).write_bytes(b"{not it")
    with pytest.raises(Refused) as refused:
        list(items(tmp_path / name, "auto", False, VOCAB))
    assert refused.value.id == "prompts.source" and name in str(refused.value)


def test_the_choice_depends_on_seed_and_number_alone() -> None:
    everything = [(n, f"row {n}") for n in range(1, 1001)]
    chosen = choose(everything, 50, "a")
    assert len(chosen) == 50 and chosen == sorted(chosen) and set(chosen) <= set(everything)
    assert choose(reversed(everything), 50, "a") == chosen, "not on the order of reading"
    assert choose(everything, 50, "b") != chosen and choose(everything, 0, "a") == everything
    assert choose(everything, 2000, "a") == everything
    assert 300 < sum(n for n, _ in chosen) / 50 < 700, "from all of it, not from its beginning"


# --- in the stage --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), positions=512)


def prompts(out: Path, model: Path, *sources: dict[str, Any], **more: Any) -> dict[str, Any]:
    settings = {"base_url": "", "concurrency": 1, "self_written": 0, "held_self": 0, "held_people": 2, "seeds": False}
    given = {**settings, "temperature": 1.0, "max_tokens": 8, "seed": 0, "sources": list(sources), **more}
    return run_stage("prompts", out, {"model": model}, given)


def test_rows_go_to_the_stage_that_they_still_need(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "a.jsonl"
    answered = [{"prompt": f"Asked {i}", "response": f"Answer {i}"} for i in range(3)]
    ids = [{"input_ids": [5, 6, 7 + i], "loss_mask": [0, 1, 1]} for i in range(2)]
    write_jsonl(path, [{"prompt": f"Number {i}"} for i in range(6)] + answered + ids + [{"x": 1}])
    result = prompts(tmp_path / "out", model, {"name": "mine", "path": str(path), "held": 2})
    assert result["rows"] == {"in": 14, "out": 13, "errors": 1, "skipped": 0}
    counts = result["sources"]["mine"]
    assert (counts["prompt"], counts["ready"], counts["tokenized"], counts["held"], counts["bad"]) == (4, 3, 2, 2, 1)
    train, held = rows(tmp_path / "out/train.jsonl"), rows(tmp_path / "out/held_people.jsonl")
    assert len(train) == 4 and len(held) == 4 and not {r["id"] for r in train} & {r["id"] for r in held}
    assert [r["response"] for r in rows(tmp_path / "out/ready.jsonl")] == ["Answer 0", "Answer 1", "Answer 2"]
    assert [r["input_ids"] for r in rows(tmp_path / "out/tokenized.jsonl")] == [[5, 6, 7], [5, 6, 8]]
    (bad,) = rows(tmp_path / "out/quarantine.jsonl")
    assert (bad["row"], bad["source"]) == (12, "mine") and "no known key" in bad["reason"]
    assert warnings(tmp_path / "out") == ["prompts.quarantine"]

    made = tmp_path / "generated.jsonl"
    write_jsonl(made, [{**train[0], "response": "generated", "finish_reason": "stop", "completion_tokens": 9}])
    inputs = {"rows": made, "model": model, **{n: tmp_path / f"out/{n}.jsonl" for n in ("ready", "tokenized")}}
    tokenized = run_stage("tokenize", tmp_path / "tok", inputs)
    assert tokenized["rows"] == {"in": 6, "out": 6, "errors": 0, "skipped": 0}
    by_id = {r["id"]: r for r in rows(tmp_path / "tok/rows.jsonl")}
    chat = Chat(model)
    answer = next(r for r in by_id.values() if r["texts"][-1:] == ["Answer 0"])
    spoken = [i for i, m in zip(answer["input_ids"], answer["loss_mask"], strict=True) if m]
    assert chat.decode(spoken, skip_special_tokens=True) == "Answer 0"
    assert by_id["mine-0000010"]["input_ids"] == [5, 6, 7]


def test_a_budget_of_tokens_is_kept_and_what_is_left_is_for_generating(tmp_path: Path, model: Path) -> None:
    answered, asked = tmp_path / "answered.jsonl", tmp_path / "asked.jsonl"
    write_jsonl(answered, [{"prompt": f"Asked {i}", "response": "x" * 10} for i in range(40)])  # ten byte tokens each
    write_jsonl(asked, [{"prompt": f"Question {i}"} for i in range(40)])
    result = prompts(
        tmp_path / "out",
        model,
        {"name": "full", "path": str(answered), "tokens": 95, "rows": 40},
        {"name": "open", "path": str(asked), "tokens": 160},
    )
    assert result["sources"]["full"]["response_tokens"] == 100, "whole rows until it is reached"
    assert result["sources"]["open"]["prompt"] == 10, "no more than could be needed: 16 tokens an answer at least"
    assert json.loads((tmp_path / "out/budgets.json").read_text()) == {"full": 0, "open": 160}
    assert result["rows"]["in"] == 82 == result["rows"]["out"] + result["rows"]["skipped"]


def test_a_training_row_that_shares_words_with_a_held_one_is_left_out(tmp_path: Path, model: Path) -> None:
    text = "a sentence that is long enough for thirteen tokens"
    held, mine = tmp_path / "held.txt", tmp_path / "mine.jsonl"
    held.write_text(text + "\n")
    turns = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "Hi"}]
    write_jsonl(
        mine,
        [
            {"messages": [*turns, {"role": "user", "content": f"Again, {text}?"}]},  # in a later turn
            {"prompt": text, "response": "an answer"},
            {"prompt": "something else"},
        ],
    )
    result = prompts(
        tmp_path / "out", model, {"name": "h", "path": str(held), "held": 1}, {"name": "m", "path": str(mine)}
    )
    assert (result["train"], result["ready"], result["left_out"]["overlap"]) == (1, 0, 2)


@pytest.mark.parametrize("names", [["a", "a"], ["self"]])
def test_names_that_would_mix_sources_are_refused(tmp_path: Path, model: Path, names: list[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    with pytest.raises(Refused, match="would be called"):
        prompts(tmp_path / "out", model, *({"name": name, "path": str(tmp_path / "a.jsonl")} for name in names))


def test_nothing_to_train_on_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(Refused, match="nothing to train on"):
        prompts(tmp_path / "out", model)
    write_jsonl(tmp_path / "a.jsonl", [{"x": 1}])
    with pytest.raises(Refused, match="no usable row"):
        prompts(tmp_path / "other", model, {"name": "a", "path": str(tmp_path / "a.jsonl")})
