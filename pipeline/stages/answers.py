"""What a server answers to a chat completion, in one shape: whole bodies, streams, and the ways in which both fail.

Pure functions. An answer is kept only when the server said that it is whole: a finish reason, and for a stream the
events after it. `reasoning` (vLLM, OpenRouter) and `reasoning_content` (SGLang, DeepSeek) are the same thing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

# Reasons that are no end of the text but an accident of the server's: asked again.
ACCIDENTS = {"abort", "error"}


class Malformed(ValueError):
    """The server said 200, and what it sent is no whole answer. Asking again may help."""


class Failure(Exception):
    """An error in the body of an answer with status 200 (OpenRouter, and SGLang in the middle of a stream)."""

    def __init__(self, code: int | None, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse(body: bytes) -> dict[str, Any]:
    """A row's fields from the body of a completion that was not streamed. Raises Malformed or Failure.

    Fields: response, reasoning (where there is any), finish_reason, completion_tokens, prompt_tokens, output_ids and
    prompt_ids (where the server tells them), usd (where it tells the price, OpenRouter's `usage.cost`).
    """
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise Malformed(f"the answer is not JSON: {error}") from None
    _raise_failure(answer)
    try:
        choice = answer["choices"][0]
        message = choice["message"]
        return _fields(
            content=message.get("content"),
            reasoning=message.get("reasoning") or message.get("reasoning_content"),
            finish=choice["finish_reason"],
            usage=answer["usage"],
            output_ids=choice.get("token_ids"),
            prompt_ids=answer.get("prompt_token_ids") or choice.get("prompt_token_ids"),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Malformed(f"the answer has another shape: {type(error).__name__} {error}") from None


class Streamed:
    """The same from the chunks of a stream, put together one by one."""

    def __init__(self) -> None:
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.output_ids: list[int] | None = None
        self.prompt_ids: list[int] | None = None
        self.finish: str | None = None
        self.usage: dict[str, Any] | None = None
        self.ended = False

    def add(self, data: bytes) -> None:
        """One event's data. Raises Malformed or Failure."""
        if data.strip() == b"[DONE]":
            self.ended = True
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise Malformed(f"an event of the stream is not JSON: {error}") from None
        _raise_failure(chunk)
        try:
            self.usage = chunk.get("usage") or self.usage
            self.prompt_ids = chunk.get("prompt_token_ids") or self.prompt_ids
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or {}
                self.content.append(delta.get("content") or "")
                self.reasoning.append(delta.get("reasoning") or delta.get("reasoning_content") or "")
                if choice.get("token_ids"):
                    self.output_ids = [*(self.output_ids or ()), *choice["token_ids"]]
                self.finish = choice.get("finish_reason") or self.finish
        except (TypeError, AttributeError) as error:
            raise Malformed(f"an event of the stream has another shape: {error}") from None

    def whole(self) -> dict[str, Any]:
        """The row's fields. Raises Malformed for a stream that ended before it said that it is at its end."""
        if self.finish is None or not self.ended:
            raise Malformed("the stream was cut off before its end")
        if self.usage is None:
            raise Malformed("the stream told no usage; stream_options.include_usage was asked for")
        try:
            return _fields(
                content="".join(self.content),
                reasoning="".join(self.reasoning),
                finish=self.finish,
                usage=self.usage,
                output_ids=self.output_ids,
                prompt_ids=self.prompt_ids,
            )
        except (KeyError, TypeError) as error:
            raise Malformed(f"the answer has another shape: {type(error).__name__} {error}") from None


async def events(blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of server-sent events, however the network cut them. A last event without its empty line is none."""
    pending = b""
    async for block in blocks:
        pending += block
        *lines, pending = pending.split(b"\n")
        for line in lines:
            # Every server we know sends one data line an event; comments (": OPENROUTER PROCESSING") keep it warm.
            if line.startswith(b"data:"):
                yield line[5:].strip()


def split_reasoning(fields: dict[str, Any], opening: str, closing: str, opened: bool) -> dict[str, Any]:
    """Reasoning that the server left inside of the text, taken out: before `closing`, without `opening`.

    `opened`: the template's prompt ends in the opening token, so the text begins inside of the reasoning. A text that
    ended (at its token limit) before the reasoning did is reasoning only.
    """
    text = fields["response"]
    if fields.get("reasoning") is not None:
        return fields
    before, found, after = text.partition(closing)
    begins = before.lstrip().startswith(opening)
    # Without a mark it is inside of the reasoning only where it was cut there: else the server's own parser took the
    # reasoning out, or the model did not think.
    cut = opened and fields["finish_reason"] == "length"
    if not (found or begins or cut):
        return fields
    if begins:
        before = before.lstrip()[len(opening) :]
    return fields | {"reasoning": before, "response": after}


def _fields(
    *,
    content: str | None,
    reasoning: str | None,
    finish: str | None,
    usage: dict[str, Any],
    output_ids: list[int] | None,
    prompt_ids: list[int] | None,
) -> dict[str, Any]:
    if finish is None:
        raise Malformed("the answer has no finish reason: it is not whole")
    if finish in ACCIDENTS:
        raise Malformed(f"the server gave up in the middle (finish_reason {finish})")
    fields: dict[str, Any] = {"response": _text(content), "finish_reason": str(finish)}
    if reasoning:
        fields["reasoning"] = _text(reasoning)
    fields["completion_tokens"] = int(usage["completion_tokens"])
    if usage.get("prompt_tokens") is not None:
        fields["prompt_tokens"] = int(usage["prompt_tokens"])
    if output_ids is not None:
        fields["output_ids"] = _ids(output_ids)
    if prompt_ids is not None:
        fields["prompt_ids"] = _ids(prompt_ids)
    if isinstance(usage.get("cost"), int | float):
        fields["usd"] = float(usage["cost"])
    return fields


def _text(value: Any) -> str:
    """A text, or Malformed. Half a surrogate pair is JSON and no text: it could be neither written nor tokenized."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise Malformed(f"the text is no text but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed("the text holds half of a surrogate pair") from None
    return value


def _ids(values: Iterable[Any]) -> list[int]:
    ids = list(values)
    if not all(type(i) is int for i in ids):
        raise Malformed("the token ids are no whole numbers")
    return ids


def _raise_failure(answer: Any) -> None:
    if not isinstance(answer, dict):
        raise Malformed(f"the answer is {type(answer).__name__}, not an object")
    error = answer.get("error")
    if not error:
        choices = answer.get("choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        error = first.get("error") if isinstance(first, dict) else None
    if not error:
        return
    if not isinstance(error, dict):
        raise Failure(None, str(error))
    code = error.get("code")
    raise Failure(code if isinstance(code, int) else None, str(error.get("message") or error))
