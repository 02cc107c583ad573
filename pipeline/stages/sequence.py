"""The token sequence of a row, as the target saw and wrote it: prompt, thoughts, answer, end token.

Two ways lead to it. The server's own ids are the truth where a row has them. Else the text is put together again, as
the chat template writes a whole turn, and encoded. Where both are possible they are compared, on a share of the rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.frozen import end_tokens
from pipeline.stages.reasons import Thinking

MARK = "\x1frigbook\x1f"
# A server that counted more tokens than this, beside what the text has, kept some of the text to itself.
LOST_FACTOR, LOST_TOKENS = 2, 16


class Unusable(Exception):
    """A row that is set aside; the text is its reason."""


@dataclass(frozen=True)
class Rules:
    """What a target's directory, and what was asked of its server, say about sequences."""

    chat: Chat
    ends: set[int]  # tokens that end generation
    end: int | None  # the one of them that ends an answer in the chat template
    thinking: Thinking | None
    closing: int | None  # the token that ends the thoughts, where it is a single one
    variables: dict[str, Any]  # chat_template_kwargs of the requests: they shape the prompt


def rules_of(model: Path, thinking: Thinking | None, variables: dict[str, Any]) -> Rules:
    """Raises ValueError where the directory has no tokenizer or no template."""
    chat, ends = Chat(model), end_tokens(model)
    ids = chat.encode(thinking.closing) if thinking else []
    return Rules(chat, ends, _end_of_turn(chat, ends), thinking, ids[0] if len(ids) == 1 else None, variables)


def _end_of_turn(chat: Chat, ends: set[int]) -> int | None:
    # Kimi's generation_config ends at [EOS] and at <|im_end|>, and only the second ends an answer.
    try:
        turn = chat.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": MARK}])
    except ValueError:
        return min(ends, default=None)
    after = chat.encode(turn.partition(MARK)[2].lstrip())
    return after[0] if after and after[0] in ends else min(ends, default=None)


@dataclass
class Compared:
    """How often the two ways gave the same."""

    rows: int = 0  # with ids of the server, of which both ways were gone
    same: int = 0
    round_trips: int = 0  # ids that their own text gives again
    prompts: int = 0
    prompts_same: int = 0
    first_prompt: str = ""  # where they differed

    def result(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "same": self.same / self.rows if self.rows else None,
            "round_trip": self.round_trips / self.rows if self.rows else None,
            "prompts": self.prompts,
            "prompts_same": self.prompts_same / self.prompts if self.prompts else None,
        }


def sequence(rules: Rules, row: dict[str, Any], compared: Compared | None) -> tuple[list[int], list[int]]:
    """(prompt, written) ids of a row with `messages`, `response` and perhaps `reasoning`, `prompt_ids`, `output_ids`.
    `compared`: go the other way, too, and count. Raises Unusable."""
    chat = rules.chat
    try:
        prompt_text = chat.render(row["messages"], add_generation_prompt=True, **rules.variables)
    except ValueError as error:
        raise Unusable(str(error)) from error
    prompt = list(row.get("prompt_ids") or ())
    if not prompt:
        prompt = chat.encode(prompt_text)
    elif compared is not None:
        same = chat.encode(prompt_text) == prompt
        compared.prompts, compared.prompts_same = compared.prompts + 1, compared.prompts_same + same
        if not same:
            compared.first_prompt = compared.first_prompt or str(row["id"])

    ids = list(row.get("output_ids") or ())
    if not ids:
        ids = _ended(rules, row, _encoded(rules, row, prompt_text))
        _nothing_lost(row, len(ids))
    else:
        ids = _ended(rules, row, ids)
        if compared is not None:
            _compare(rules, row, prompt_text, ids, compared)
    _says_what_the_row_says(rules, row, ids)
    return prompt, ids


def _encoded(rules: Rules, row: dict[str, Any], prompt_text: str) -> list[int]:
    text = written_text(rules, row, prompt_text)
    return rules.chat.encode(text) if text else []


def written_text(rules: Rules, row: dict[str, Any], prompt_text: str) -> str:
    """What the target wrote, without the end token, put together from the parts that a server told. Raises Unusable."""
    response, reasoning = str(row["response"]), str(row.get("reasoning") or "")
    if not reasoning:
        return response
    marks = rules.thinking
    if marks is None:
        raise Unusable(
            'it has reasoning, and the chat template does not say how that is marked: say reasoning = "yes" under '
            "[pipeline.generate]"
        )
    opening = "" if marks.opened else marks.opening
    if not response and row.get("finish_reason") == "length":
        return opening + reasoning  # cut while it thought
    as_told = opening + reasoning + marks.closing + response
    if reasoning.strip() != reasoning or response.lstrip() != response:
        return as_told  # nobody took the white space off
    # SGLang's and vLLM's parsers strip both parts; how much white space was between, the template knows.
    turn = {"role": "assistant", "content": response, "reasoning_content": reasoning, "reasoning": reasoning}
    try:
        whole = rules.chat.render([*row["messages"], turn], **rules.variables)
    except ValueError:
        return as_told
    body = whole[len(prompt_text) :] if whole.startswith(prompt_text) else ""
    thoughts, closed, after = body.partition(marks.closing)
    if not closed or reasoning not in thoughts or response not in after:
        return as_told  # templates of many models leave the thoughts out
    return thoughts + closed + after[: after.index(response) + len(response)]


def _ended(rules: Rules, row: dict[str, Any], ids: list[int]) -> list[int]:
    # Servers often keep the end token to themselves; it was generated all the same.
    if ids and row.get("finish_reason") == "stop" and rules.end is not None and ids[-1] not in rules.ends:
        return [*ids, rules.end]
    return ids


def _nothing_lost(row: dict[str, Any], length: int) -> None:
    counted = int(row.get("completion_tokens") or 0)
    if counted and not length:
        raise Unusable(f"the server counted {counted} tokens, the response is empty")
    if counted > LOST_FACTOR * length + LOST_TOKENS:
        raise Unusable(f"the server counted {counted} tokens, the text has {length}: is its reasoning missing?")


def _compare(rules: Rules, row: dict[str, Any], prompt_text: str, ids: list[int], compared: Compared) -> None:
    compared.rows += 1
    spoken = ids[:-1] if ids[-1] in rules.ends else ids
    compared.round_trips += rules.chat.encode(rules.chat.decode(spoken)) == spoken
    try:
        compared.same += _ended(rules, row, _encoded(rules, row, prompt_text)) == ids
    except Unusable:
        return


def _says_what_the_row_says(rules: Rules, row: dict[str, Any], ids: list[int]) -> None:
    """The ids decode to the response, and the thoughts before it to the reasoning. Raises Unusable."""
    spoken = ids[:-1] if ids and ids[-1] in rules.ends else ids
    response, reasoning = str(row["response"]), str(row.get("reasoning") or "")
    if rules.thinking is None and not reasoning:
        if rules.chat.decode(spoken, skip_special_tokens=True) != response:
            raise Unusable("the response tokens do not decode to the response text")
        return
    thoughts, answer = _parts(rules, spoken, bool(reasoning), bool(response))
    # Parsers strip both parts, so white space at the seams is nobody's fault.
    if answer.strip() != response.strip():
        raise Unusable("the response tokens do not decode to the response text")
    if thoughts.strip() != reasoning.strip():
        raise Unusable("the tokens before the answer do not decode to the reasoning text")


def _parts(rules: Rules, spoken: list[int], thought: bool, answered: bool) -> tuple[str, str]:
    """(thoughts, answer) as text."""
    chat, marks = rules.chat, rules.thinking
    if marks is None:
        raise Unusable("it has reasoning, and the chat template does not say how that is marked")
    if rules.closing is not None and rules.closing in spoken:
        at = spoken.index(rules.closing)
        before, after = (chat.decode(part, skip_special_tokens=True) for part in (spoken[:at], spoken[at + 1 :]))
    else:
        text = chat.decode(spoken, skip_special_tokens=True)
        before, closed, after = text.partition(marks.closing)
        if not closed:
            if thought and answered:
                raise Unusable(f"it has reasoning and an answer, and no {marks.closing} is between them")
            before, after = (text, "") if thought else ("", text)
    return before.lstrip().removeprefix(marks.opening), after


# --- special tokens ------------------------------------------------------------------------------------------------


def wrong_ids(chat: Chat, declared: dict[str, int]) -> list[str]:
    """What does not hold of the declared special tokens. Converted tokenizers have given them ids of their own (tinker-
    cookbook #784), and some models have two tokens that look alike: what is written must be read as that one id."""
    found = []
    for text, id in declared.items():
        read, written = chat.encode(text), chat.decode([id])
        if read != [id]:
            found.append(f"{text} is declared as {id}, the tokenizer reads {read}")
        elif written != text:
            found.append(f"{text} is declared as {id}, the tokenizer writes that id as {written!r}")
    return found


def look_alikes(model: Path) -> dict[str, list[int]]:
    """Special tokens that the model's files give more than one id: {text: ids}. One of them is not what is served."""
    ids: defaultdict[str, set[int]] = defaultdict(set)
    for token in json.loads((model / "tokenizer.json").read_text()).get("added_tokens") or ():
        ids[str(token["content"])].add(int(token["id"]))
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    for id, token in (config.get("added_tokens_decoder") or {}).items():
        ids[str(token["content"])].add(int(id))
    return {text: sorted(found) for text, found in sorted(ids.items()) if len(found) > 1}
