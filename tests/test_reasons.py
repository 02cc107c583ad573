"""Whether a target thinks, read from its chat template; and the thinking that a server left inside of the text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.stages.answers import split_reasoning
from pipeline.stages.reasons import Thinking, thinking
from tests.lab.tiny_model import make_tiny_model

USER = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PLAIN = USER + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
# The seeds' target: the prompt ends in the opening token, and the model begins inside of it.
OPENED = USER + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
# A model with a switch: earlier thinking is taken out of the history, and nothing says that there will be any.
HYBRID = USER.replace("m.content", "m.content.split('</think>')[-1]") + "{% if add_generation_prompt %}A:{% endif %}"
SWITCHED_OFF = USER + "{% if add_generation_prompt %}A:<think>\n\n</think>\n\n{% endif %}"
KIMI_VL = USER + "{% if add_generation_prompt %}A:◁think▷{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("template", "declared", "expected"),
    [
        (PLAIN, "auto", None),
        (PLAIN, "yes", Thinking("<think>", "</think>", opened=False, sure=True)),
        (OPENED, "auto", Thinking("<think>", "</think>", opened=True, sure=True)),
        (OPENED, "no", None),
        (HYBRID, "auto", Thinking("<think>", "</think>", opened=False, sure=False)),
        (HYBRID, "yes", Thinking("<think>", "</think>", opened=False, sure=True)),
        (SWITCHED_OFF, "auto", Thinking("<think>", "</think>", opened=False, sure=False)),
        (KIMI_VL, "auto", Thinking("◁think▷", "◁/think▷", opened=True, sure=True)),
    ],
)
def test_the_template_says_whether_it_thinks(model: Path, template: str, declared: Any, expected: Any) -> None:
    (model / "chat_template.jinja").write_text(template)
    assert thinking(model, declared) == expected


def test_without_a_template_only_a_declaration_counts(tmp_path: Path) -> None:
    assert thinking(None, "auto") is None and thinking(tmp_path, "auto") is None
    assert thinking(tmp_path, "yes") == Thinking("<think>", "</think>", opened=False, sure=True)


@pytest.mark.parametrize(
    ("text", "finish", "opened", "reasoning", "response"),
    [
        ("Hm.\n</think>\n\nFour.", "stop", True, "Hm.\n", "\n\nFour."),
        ("<think>\nHm.\n</think>\n\nFour.", "stop", False, "\nHm.\n", "\n\nFour."),
        ("<think>Hm, and on and", "length", False, "Hm, and on and", ""),
        ("Hm, and on and", "length", True, "Hm, and on and", ""),
        ("Four.", "stop", True, None, "Four."),
        ("Four, and on and", "length", False, None, "Four, and on and"),
        ("a </think> b </think> c", "stop", True, "a ", " b </think> c"),
    ],
)
def test_reasoning_inside_of_the_text(
    text: str, finish: str, opened: bool, reasoning: str | None, response: str
) -> None:
    fields = {"response": text, "finish_reason": finish}
    split = split_reasoning(fields, "<think>", "</think>", opened)
    assert (split.get("reasoning"), split["response"]) == (reasoning, response)
    told = fields | {"reasoning": "told"}
    assert split_reasoning(told, "<think>", "</think>", opened) == told, "what the server told stays as it is"
