"""Chat rendering agrees with transformers' on the same directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.eagle3.chat import Chat
from tests.lab.tiny_model import make_tiny_tokenizer

MESSAGES = [
    {"role": "user", "content": "Hi <b>there</b> — «ünïcode»"},
    {"role": "assistant", "content": "line one\n\nline two  "},
    {"role": "user", "content": "bye"},
]


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_ids_are_those_of_transformers(tmp_path: Path, generation_prompt: bool) -> None:
    from transformers import AutoTokenizer

    make_tiny_tokenizer(tmp_path, 384)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        MESSAGES, tokenize=True, add_generation_prompt=generation_prompt, return_dict=False
    )
    chat = Chat(tmp_path)
    assert chat.encode(chat.render(MESSAGES, generation_prompt)) == expected


def test_a_template_file_of_its_own_goes_first_and_a_refusal_is_a_sentence(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path, 384)
    (tmp_path / "chat_template.jinja").write_text(
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
    )
    with pytest.raises(ValueError, match="user first"):
        Chat(tmp_path).render([{"role": "system", "content": "x"}])


def test_a_directory_without_a_template_is_refused(tmp_path: Path) -> None:
    make_tiny_tokenizer(tmp_path, 384)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no chat template"):
        Chat(tmp_path)
