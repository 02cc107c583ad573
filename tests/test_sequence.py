"""The sequence of a target that thinks: as it saw and wrote it, by the server's ids and by template and text alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.eagle3.chat import Chat
from pipeline.recipe import BY_NAME, spec
from pipeline.stages.protocol import Refused, write_jsonl
from state.project import loads
from tests.lab.stage_run import rows, run_stage, warnings
from tests.lab.tiny_model import EOS, make_tiny_model

# As Qwen3 writes turns: the prompt ends in the opening token and a line feed, thoughts stand on lines of their own.
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
# As DeepSeek-R1 does: whole turns leave the thoughts out.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PROMPT = "<|im_start|>user\nsay it<|im_end|>\n<|im_start|>assistant\n<think>\n"


def thinker(directory: Path, template: str = OPENED, *, special: bool = True) -> Path:
    """A tiny model whose tokenizer has the two marks as tokens, and whose template opens the thoughts."""
    make_tiny_model(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    for old, new in ((f"Ġw{i}", mark) for i, mark in enumerate(("<think>", "</think>"))):
        vocab[new] = vocab.pop(old)
        like = dict(tokenizer["added_tokens"][0])
        tokenizer["added_tokens"].append(like | {"id": vocab[new], "content": new, "special": special})
    path.write_text(json.dumps(tokenizer))
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    return directory


def row(id: str, response: str, **more: Any) -> dict[str, Any]:
    made = {"id": id, "source": "self", "messages": [{"role": "user", "content": "say it"}], "response": response}
    return made | {"finish_reason": "stop"} | more


def tokenize(base: Path, model: Path, given: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    base.mkdir(exist_ok=True)
    write_jsonl(base / "given.jsonl", given)
    return run_stage("tokenize", base / "out", {"rows": base / "given.jsonl", "model": model}, settings)


def parts(chat: Chat, row: dict[str, Any]) -> tuple[str, str]:
    """(prompt, what counts for the loss) as text."""
    pairs = list(zip(row["input_ids"], row["loss_mask"], strict=True))
    return chat.decode([id for id, flag in pairs if not flag]), chat.decode([id for id, flag in pairs if flag])


@pytest.mark.training_report(14)
@pytest.mark.parametrize("special", [True, False])
def test_thoughts_count_for_the_loss_whichever_way_the_ids_come(tmp_path: Path, special: bool) -> None:
    model = thinker(tmp_path / "model", special=special)
    chat = Chat(model)
    wrote = "let me see\n</think>\n\nhello there"
    told = {"response": "hello there", "reasoning": "let me see"}  # as parsers tell it: white space is gone
    ids = [*chat.encode(wrote), EOS]
    given = [
        row("by-server", **told, output_ids=ids, prompt_ids=chat.encode(PROMPT)),
        row("by-server-without-its-end", **told, output_ids=ids[:-1]),
        row("by-text", **told),
        row("split-by-us", "\n\nhello there", reasoning="let me see\n"),
    ]
    result = tokenize(tmp_path / "a", model, given)
    for made in rows(tmp_path / "a/out/rows.jsonl"):
        assert parts(chat, made) == (PROMPT, wrote + "<|im_end|>"), made["id"]
    assert result["with_reasoning"] == 4
    assert result["compared"] == {"rows": 2, "same": 1.0, "round_trip": 1.0, "prompts": 1, "prompts_same": 1.0}
    assert warnings(tmp_path / "a/out") == []


def test_a_template_that_forgets_thoughts_joins_what_was_told(tmp_path: Path) -> None:
    model = thinker(tmp_path / "model", FORGETFUL)
    tokenize(tmp_path / "a", model, [row("a", "hello", reasoning="let me see")])
    assert parts(Chat(model), rows(tmp_path / "a/out/rows.jsonl")[0])[1] == "let me see</think>hello<|im_end|>"


def test_an_answer_that_was_cut_while_it_thought_has_no_closing_token(tmp_path: Path) -> None:
    model = thinker(tmp_path / "model")
    tokenize(tmp_path / "a", model, [row("a", "", reasoning="let me", finish_reason="length")])
    assert parts(Chat(model), rows(tmp_path / "a/out/rows.jsonl")[0]) == (PROMPT, "let me")


@pytest.mark.training_report(16)
def test_a_target_that_thinks_and_no_thoughts_is_refused(tmp_path: Path) -> None:
    model = thinker(tmp_path / "model")
    with pytest.raises(Refused, match="thinks before it answers") as caught:
        tokenize(tmp_path / "a", model, [row("a", "hello"), row("b", "good day")])
    assert caught.value.id == "tokenize.no-reasoning"
    assert (
        tokenize(tmp_path / "b", model, [row("a", "hello"), row("b", "good day")], reasoning="no")["rows"]["out"] == 2
    )


@pytest.mark.training_report(14)
@pytest.mark.parametrize(
    ("written", "told", "says"),
    [
        ("let me see\n</think>\n\nhello", {"response": "hello", "reasoning": "quite other"}, "reasoning text"),
        ("let me see\n</think>\n\nhello", {"response": "hullo", "reasoning": "let me see"}, "response text"),
        ("let me see\n</think>\n\nhello", {"response": "hello"}, "reasoning text"),  # the field was lost on the way
        ("let me see, hello", {"response": "hello", "reasoning": "let me see"}, "no </think>"),
        (None, {"response": "hello", "completion_tokens": 60}, "is its reasoning missing"),
    ],
)
def test_ids_that_say_something_else_are_set_aside(
    tmp_path: Path, written: str | None, told: dict[str, Any], says: str
) -> None:
    model = thinker(tmp_path / "model")
    good = [row(f"g{i}", "fine", reasoning="well") for i in range(60)]
    wrong = row("wrong", **told, **({"output_ids": Chat(model).encode(written)} if written else {}))
    result = tokenize(tmp_path / "a", model, [*good, wrong])
    assert result["rows"] == {"in": 61, "out": 60, "errors": 1, "skipped": 0}
    assert says in rows(tmp_path / "a/out/errors.jsonl")[0]["reason"]


def test_a_server_with_another_template_is_told_and_its_ids_are_kept(tmp_path: Path) -> None:
    model = thinker(tmp_path / "model")
    seen = [1, *Chat(model).encode(PROMPT)]  # a token more at the beginning
    given = [row("a", "hello", reasoning="well", output_ids=Chat(model).encode("well</think>hello"), prompt_ids=seen)]
    result = tokenize(tmp_path / "a", model, given)
    made = rows(tmp_path / "a/out/rows.jsonl")[0]
    assert made["input_ids"][: len(seen)] == seen and made["loss_mask"][: len(seen)] == [0] * len(seen)
    assert warnings(tmp_path / "a/out") == ["tokenize.prompt-ids"] and result["compared"]["prompts_same"] == 0


def test_text_that_encodes_to_other_ids_is_told_where_rows_depend_on_it(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    whole = Chat(model).tokenizer.token_to_id("Ġw5")  # without merges its text is spelt byte by byte
    by_server = row("a", " w5 w5", output_ids=[whole, whole, EOS])
    result = tokenize(tmp_path / "a", model, [by_server])
    assert result["compared"]["same"] == result["compared"]["round_trip"] == 0
    assert warnings(tmp_path / "a/out") == []  # no row was put together from text
    tokenize(tmp_path / "b", model, [by_server, row("b", " w5")])
    assert warnings(tmp_path / "b/out") == ["tokenize.rebuilt"]


def test_the_end_token_is_the_one_that_the_template_writes(tmp_path: Path) -> None:
    """Two tokens end generation, as Kimi's [EOS] and <|im_end|> do; only one ends an answer."""
    model = make_tiny_model(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, EOS]}))
    tokenize(tmp_path / "a", model, [row("a", "hello")])
    assert rows(tmp_path / "a/out/rows.jsonl")[0]["input_ids"][-1] == EOS


@pytest.mark.training_report(18)
def test_a_special_token_with_two_ids_names_both(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    path = model / "tokenizer_config.json"
    twin = {"added_tokens_decoder": {"2": {"content": "<|im_end|>"}, "300": {"content": "<|im_end|>"}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | twin))
    tokenize(tmp_path / "a", model, [row("a", "hello")])
    assert warnings(tmp_path / "a/out") == ["tokenize.look-alike"]
    tokenize(tmp_path / "b", model, [row("a", "hello")], special_tokens={"<|im_end|>": EOS})
    assert warnings(tmp_path / "b/out") == []
    with pytest.raises(Refused, match="as 2 and 300"):
        tokenize(tmp_path / "c", model, [row("a", "hello")], special_tokens={"<|im_end|>": 300})


def test_what_requests_told_the_template_shapes_the_prompt_here_as_well(tmp_path: Path) -> None:
    model = thinker(tmp_path / "model")
    template = {"enable_thinking": False}
    tokenize(tmp_path / "a", model, [row("a", "hello")], template=template, reasoning="no")
    prompt, wrote = parts(Chat(model), rows(tmp_path / "a/out/rows.jsonl")[0])
    assert prompt.endswith("<think>\n\n</think>\n\n") and wrote == "hello<|im_end|>"


def test_the_recipe_tells_tokenize_and_predict_what_was_asked_of_the_server(tmp_path: Path) -> None:
    text = """
    [project]
    name = "x"
    [hosts.here]
    kind = "local"
    [envs.e]
    host = "here"
    python = "/usr/bin/python3"
    [target]
    path = "/models/t"
    [profiles.baseline]
    env = "e"
    engine = "sglang"
    port = 8000
    [pipeline]
    host = "here"
    env = "e"
    workdir = "/w"
    [pipeline.generate]
    reasoning = "no"
    extra = { chat_template_kwargs = { enable_thinking = false }, top_p = 0.9 }
    """
    project = loads(text, tmp_path)
    for name in ("tokenize", "predict"):
        settings = spec(project, BY_NAME[name])["settings"]
        assert settings["template"] == {"enable_thinking": False} and settings["reasoning"] == "no"
