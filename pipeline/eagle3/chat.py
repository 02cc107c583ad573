"""Text of a conversation, and its token ids, exactly as the target's own chat template and tokenizer make them.

Only `tokenizers` and `jinja2` (which torch brings along): stages run where transformers may not be installed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = dict[str, str]  # role and content; of an answer perhaps reasoning_content


class Chat:
    """A model directory's tokenizer and template. Raises ValueError where either is missing."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "tokenizer.json").is_file():
            raise ValueError(f"{directory} has no tokenizer.json")
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.source = template_source(directory)
        config = json.loads((directory / "tokenizer_config.json").read_text())
        self.special = {name: _text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        # The same environment as transformers': templates rely on its whitespace rules.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.template = environment.from_string(self.source)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **variables: Any) -> str:
        """`variables`: what requests call chat_template_kwargs (enable_thinking, say). Raises ValueError when the
        template does not take these messages (roles out of order, say)."""
        told = self.special | variables
        try:
            return self.template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **told)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text: special tokens are read where they are written, and none are added."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def template_source(directory: Path) -> str:
    """The chat template: a file of its own (transformers 5) or an entry of tokenizer_config.json."""
    own = directory / "chat_template.jinja"
    if own.is_file():
        return own.read_text()
    path = directory / "tokenizer_config.json"
    source = json.loads(path.read_text()).get("chat_template") if path.is_file() else None
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if not isinstance(source, str):
        raise ValueError(f"{directory} has no chat template")
    return source


def _text(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else token or ""


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
