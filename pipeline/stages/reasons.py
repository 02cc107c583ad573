"""Whether the target thinks before it answers, and whether its server tells us what it thought.

A server without its reasoning parser, a renamed field, a switch in the template: the thinking is missing, the rows look
fine, and the drafter never sees the half of what the target says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# Opening and closing token of the thinking, by family: most; Kimi-VL; Mistral.
MARKS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"), ("[THINK]", "[/THINK]"))


@dataclass(frozen=True)
class Thinking:
    """`sure`: every answer holds reasoning. Else it may (a template of a model with a switch)."""

    opening: str
    closing: str
    opened: bool  # the prompt ends in the opening token
    sure: bool


def thinking(model: Path | None, declared: Literal["auto", "yes", "no"]) -> Thinking | None:
    """What the project declares, or else what the chat template of the model's directory says. None: it does not."""
    if declared == "no":
        return None
    found = _of_template(model)
    if declared == "yes":
        base = found or Thinking(*MARKS[0], opened=False, sure=True)
        return Thinking(base.opening, base.closing, base.opened, sure=True)
    return found


def _of_template(model: Path | None) -> Thinking | None:
    if model is None:
        return None
    from pipeline.eagle3.chat import Chat, template_source  # the tokenizer is read only where there is one

    try:
        source = template_source(model)
    except ValueError:
        return None
    for opening, closing in MARKS:
        if closing in source or opening in source:
            break
    else:
        return None
    try:
        prompt = Chat(model).render([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    except ValueError:
        return Thinking(opening, closing, opened=False, sure=False)
    opened = prompt.rstrip().endswith(opening)
    return Thinking(opening, closing, opened=opened, sure=opened)
