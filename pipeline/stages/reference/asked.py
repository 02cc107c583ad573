"""Request bodies: what is asked, checked. A field that we would have to ignore is refused, not ignored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.decode import Request

# Values that change nothing, under the names that clients send anyway.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "top_k": (-1, 0, None),
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_tokens": (0, None),
    "min_new_tokens": (0, None),
    "logprobs": (False, None),
    "return_logprob": (False, None),
    "top_logprobs": (0, None),
    "logit_bias": ({}, None),
    "response_format": ({"type": "text"}, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "json_schema": (None,),
    "regex": (None,),
    "return_hidden_states": (False, None),
}
IGNORED = {"model", "user", "metadata", "rid", "stream_options", "store"}  # say nothing about the text
SAMPLING = {
    "temperature", "top_p", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "seed", "sampling_seed",
    "max_tokens", "max_new_tokens", "max_completion_tokens",
}  # fmt: skip


class BadRequest(ValueError):
    """The client's fault; the message goes back with status 400."""


@dataclass(eq=False)
class Asked:
    """A checked request: what to decode and how the text is to be shown."""

    request: Request
    stops: list[str] = field(default_factory=list)
    skip_special: bool = True
    stream: bool = False
    usage_in_stream: bool = False
    return_ids: bool = False
    arrived: float = 0.0
    first_token: float | None = None
    gone: bool = False  # the client hung up


@dataclass(frozen=True)
class Limits:
    context: int
    eos: frozenset[int]
    vocab: int


def chat_request(body: Any, chat: Chat, limits: Limits, default_seed: int) -> Asked:
    """From the body of /v1/chat/completions. Raises BadRequest."""
    body = _object(body)
    _known(body, SAMPLING | IGNORED | NEUTRAL.keys() | {"messages", "stream", "return_token_ids"})
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message")
    plain = [_message(i, message) for i, message in enumerate(messages)]
    try:
        prompt = chat.encode(chat.render(plain, add_generation_prompt=True))
    except ValueError as error:
        raise BadRequest(str(error)) from error
    given = body.get("max_completion_tokens") or body.get("max_tokens")
    most = given if given is not None else max(limits.context - len(prompt), 1)
    asked = _asked(prompt, most, body, chat, limits, default_seed)
    asked.stream = _flag(body, "stream")
    asked.usage_in_stream = bool((body.get("stream_options") or {}).get("include_usage"))
    asked.return_ids = _flag(body, "return_token_ids")
    return asked


def generate_request(body: Any, chat: Chat, limits: Limits, default_seed: int) -> Asked:
    """From the body of /generate: text or input_ids, and sampling_params. Raises BadRequest."""
    body = _object(body)
    _known(body, IGNORED | NEUTRAL.keys() | {"text", "input_ids", "sampling_params", "stream"})
    params = _object(body.get("sampling_params") or {})
    _known(params, SAMPLING | NEUTRAL.keys())
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("give either text or input_ids")
    if text is not None:
        if not isinstance(text, str):
            raise BadRequest("text must be one string: this engine takes no batches, send several requests")
        prompt = chat.encode(text)
    else:
        if not isinstance(ids, list) or not all(isinstance(i, int) and 0 <= i < limits.vocab for i in ids):
            raise BadRequest(f"input_ids must be a list of integers from 0 to {limits.vocab - 1}")
        prompt = ids
    most = params.get("max_new_tokens", params.get("max_tokens"))
    asked = _asked(prompt, 128 if most is None else most, params, chat, limits, default_seed)
    asked.stream = _flag(body, "stream")
    asked.return_ids = True
    return asked


def _asked(prompt: list[int], most: Any, params: dict[str, Any], chat: Chat, limits: Limits, seed: int) -> Asked:
    if not prompt:
        raise BadRequest("the prompt is empty")
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise BadRequest(f"max_tokens must be a positive integer, not {most!r}")
    if len(prompt) + most > limits.context:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {limits.context} tokens. "
            f"You requested a total of {len(prompt) + most} tokens: {len(prompt)} tokens from the input messages and "
            f"{most} tokens for the completion."
        )
    stops = params.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise BadRequest("stop must be a string or a list of strings")
    ids = params.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise BadRequest("stop_token_ids must be a list of integers")
    # A stop string that is one special token is found by its id: its text may never be shown.
    special = {s: chat.tokenizer.token_to_id(s) for s in stops}
    ids = ids + [i for i in special.values() if i is not None]
    eos: frozenset[int] = frozenset() if _flag(params, "ignore_eos") else limits.eos
    chosen_seed = params.get("sampling_seed", params.get("seed"))
    if chosen_seed is not None and (not isinstance(chosen_seed, int) or isinstance(chosen_seed, bool)):
        raise BadRequest(f"seed must be an integer, not {chosen_seed!r}")
    skip = params.get("skip_special_tokens")
    return Asked(
        Request(
            prompt=prompt,
            max_tokens=most,
            stop_ids=eos | frozenset(ids),
            temperature=_number(params, "temperature", 1.0, 0.0, 100.0),
            top_p=_number(params, "top_p", 1.0, 0.0, 1.0),
            seed=seed if chosen_seed is None else chosen_seed,
        ),
        stops=[s for s, i in special.items() if i is None],
        skip_special=True if skip is None else bool(skip),
    )


def _message(i: int, message: Any) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"messages[{i}] must be an object with a role and a content")
    content = message.get("content")
    if isinstance(content, list):  # parts; only text parts make sense to a text model
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRequest(f"messages[{i}].content: only parts of type text are supported")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRequest(f"messages[{i}].content must be a string")
    return {"role": message["role"], "content": content}


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest("expected a JSON object")
    return value


def _known(body: dict[str, Any], known: set[str]) -> None:
    for name, value in body.items():
        if name not in known:
            raise BadRequest(f"unknown field {name!r}")
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise BadRequest(f"{name}={value!r} is not supported by this engine")


def _number(params: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise BadRequest(f"{name} must be a number from {least:g} to {most:g}, not {value!r}")
    if name == "top_p" and value == 0:
        raise BadRequest("top_p must be above 0")
    return float(value)


def _flag(params: dict[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false, not {value!r}")
    return bool(value)
