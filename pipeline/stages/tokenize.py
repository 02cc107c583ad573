"""Responses -> token ids and loss mask.

inputs    rows (rows.jsonl of `generate`), model; optional: ready and tokenized (of `prompts`)
settings  max_len: longer rows are cut there; special_tokens ({}): text -> id, which must hold; reasoning (auto): as in
          `generate`; template ({}): chat_template_kwargs of the requests
output    rows.jsonl: {"id", "source", "texts", "input_ids", "loss_mask"}; mask 1 = response token: thoughts, answer and
          the end token
          errors.jsonl: rows set aside, with the reason; samples.txt: some rows with the masked span marked, to look at
          samples.jsonl: more of them, {"id", "source", "tokens": [[text, mask], …]}, for `rigbook run preview`
result    also `compared`: how often the server's ids are those that template and tokenizer give (`sequence`)

A mask that is wrong trains a drafter that looks healthy. It is never searched for in the text: it is the span of the
ids that were written, and these must decode back to the response. Rows go through one by one: only samples are held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.eagle3.chat import Chat
from pipeline.stages.protocol import Stage, main, read_jsonl, write_bytes, write_jsonl
from pipeline.stages.reasons import thinking
from pipeline.stages.sequence import Compared, Rules, Unusable, look_alikes, rules_of, sequence, wrong_ids

MAX_BAD = 0.02  # more rows than this share that cannot be used mean a fault of the set-up, not of the rows
MANY_UNFINISHED = 0.5
SAMPLES = 5
PREVIEWS = 50
COMPARE = 1000  # rows, evenly spread, of which both ways to the ids are gone
MAY_DIFFER = 0.02  # share of compared rows


@dataclass
class Tally:
    """What the rows so far add up to."""

    total: int
    done: int = 0
    out: int = 0
    empty: int = 0
    cut: int = 0
    thought: int = 0
    spoken: int = 0  # rows that did not come as ids
    rebuilt: int = 0  # of these, without ids of the server
    tokens: int = 0
    longest: int = 0
    lengths: Counter[int] = field(default_factory=Counter)  # response tokens -> rows
    finished: Counter[str] = field(default_factory=Counter)
    errors: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    compared: Compared = field(default_factory=Compared)

    @property
    def responses(self) -> int:
        return sum(length * rows for length, rows in self.lengths.items())


def run(stage: Stage) -> dict[str, Any]:
    model, settings = stage.inputs["model"], stage.settings
    try:
        thinks = thinking(model, settings.get("reasoning", "auto"))
        rules = rules_of(model, thinks, dict(settings.get("template") or {}))
    except ValueError as error:
        stage.refuse("tokenize.template", str(error))
    declared = settings.get("special_tokens") or {}
    twins = look_alikes(model)
    if wrong := wrong_ids(rules.chat, declared):
        said = [f"{text} stands in the tokenizer's files as {_and(twins[text])}" for text in declared if text in twins]
        stage.refuse("tokenize.special", "; ".join([*wrong, *said]))
    if undeclared := {text: ids for text, ids in twins.items() if text not in declared}:
        text, ids = next(iter(undeclared.items()))
        stage.warn(
            "tokenize.look-alike",
            f"{text} stands in the tokenizer's files as {_and(ids)}: find out which one the server uses, and declare "
            "it under target.special_tokens",
        )
    names = [name for name in ("rows", "ready", "tokenized") if name in stage.inputs]
    tally = Tally(sum(_lines(stage, name) for name in names))
    write_jsonl(stage.out / "rows.jsonl", made_rows(stage, rules, names, int(settings.get("max_len", 512)), tally))
    write_jsonl(stage.out / "errors.jsonl", tally.errors)
    _judge(stage, rules, tally)

    stage.artifact("rows", stage.out / "rows.jsonl")
    text = "\n\n".join(marked(rules.chat, row) for row in tally.samples[:SAMPLES])
    write_bytes(stage.out / "samples.txt", text.encode())
    write_jsonl(stage.out / "samples.jsonl", (sample(rules.chat, row) for row in tally.samples))
    return {
        "rows": {"in": tally.done, "out": tally.out, "errors": len(tally.errors), "skipped": tally.empty},
        "tokens": tally.tokens,
        "response_tokens": tally.responses,
        "masked_share": tally.responses / tally.tokens,
        "response_histogram": histogram(tally.lengths),
        "longest": tally.longest,
        "cut": tally.cut,
        "with_reasoning": tally.thought,
        "finish_reasons": dict(tally.finished),
        "compared": tally.compared.result(),
    }


def made_rows(stage: Stage, rules: Rules, names: list[str], max_len: int, tally: Tally) -> Iterator[dict[str, Any]]:
    """Every usable row, while `tally` counts all of them."""
    compare, preview = max(1, tally.total // COMPARE), max(1, tally.total // PREVIEWS)
    for row in (row for name in names for row in read_jsonl(stage.inputs[name])):
        tally.done += 1
        try:
            made = made_row(rules, row, tally, compare=tally.done % compare == 0)
        except Unusable as reason:
            tally.errors.append({"id": row["id"], "reason": str(reason)})
            continue
        tally.finished[str(row.get("finish_reason", "unknown"))] += 1
        length = len(made["input_ids"])
        tally.cut += length > max_len
        tally.longest = max(tally.longest, min(length, max_len))
        made["input_ids"], made["loss_mask"] = made["input_ids"][:max_len], made["loss_mask"][:max_len]
        response = sum(made["loss_mask"])
        stage.progress(tally.done, tally.total, "rows")
        if response < 2:  # a drafter needs a token to start from and one to guess
            tally.empty += 1
            continue
        tally.out += 1
        tally.tokens += len(made["input_ids"])
        tally.lengths[response] += 1
        if (tally.out - 1) % preview == 0 and len(tally.samples) < PREVIEWS:
            tally.samples.append(made)
        yield made


def made_row(rules: Rules, row: dict[str, Any], tally: Tally, compare: bool) -> dict[str, Any]:
    """One row, or Unusable with the reason. One that held ids and mask already was checked by `prompts`."""
    if "input_ids" in row:
        return {"texts": [], **{name: row[name] for name in ("id", "source", "input_ids", "loss_mask")}}
    made = tokenize_row(rules, row, tally.compared if compare else None)
    tally.spoken += 1
    tally.rebuilt += not row.get("output_ids")
    tally.thought += bool(row.get("reasoning"))
    return made


def tokenize_row(rules: Rules, row: dict[str, Any], compared: Compared | None = None) -> dict[str, Any]:
    """One row, or Unusable with the reason."""
    prompt, written = sequence(rules, row, compared)
    said = "\n".join(text for text in (row.get("reasoning"), row["response"]) if text)
    return {
        "id": row["id"],
        "source": row.get("source", "unknown"),
        "texts": [*(m["content"] for m in row["messages"]), said],
        "input_ids": prompt + written,
        "loss_mask": [0] * len(prompt) + [1] * len(written),
    }


def _judge(stage: Stage, rules: Rules, tally: Tally) -> None:
    """Refuse what would train a drafter that only looks healthy, and warn of the rest."""
    errors, compared = tally.errors, tally.compared
    if len(errors) > MAX_BAD * tally.done:
        stage.refuse(
            "tokenize.rows",
            f"{len(errors)} of {tally.done} rows cannot be used; the first: {errors[0]['id']}: {errors[0]['reason']}",
        )
    if not tally.out:
        stage.refuse("tokenize.empty-mask", "no row has a response to learn from: every loss mask is empty")
    if rules.thinking is not None and rules.thinking.sure and tally.spoken and not tally.thought:
        stage.refuse(
            "tokenize.no-reasoning",
            f"the target thinks before it answers, and none of {tally.spoken} rows holds any reasoning: answers alone "
            'train a drafter for text that it never writes alone; or say reasoning = "no" under [pipeline.generate]',
        )
    if errors:
        stage.warn("tokenize.rows", f"{len(errors)} rows set aside, see errors.jsonl")
    if tally.cut:
        longest = f"longer than {tally.longest} tokens"
        stage.warn("tokenize.cut", f"{tally.cut} of {tally.done} rows are {longest} and were cut")
    unfinished = tally.finished["length"] / max(1, sum(tally.finished.values()))
    if unfinished > MANY_UNFINISHED:
        stage.warn("tokenize.unfinished", f"{unfinished:.0%} of the responses were stopped by max_tokens")
    others = compared.prompts - compared.prompts_same
    if others > MAY_DIFFER * compared.prompts:
        stage.warn(
            "tokenize.prompt-ids",
            f"the server saw {others} of {compared.prompts} prompts with other ids than "
            f"template and tokenizer of the target's directory give (the first: {compared.first_prompt}); the server's "
            "are used: does it have another template, or were chat_template_kwargs sent?",
        )
    if tally.rebuilt and compared.rows - compared.same > MAY_DIFFER * compared.rows:
        stage.warn(
            "tokenize.rebuilt",
            f"{tally.rebuilt} rows have no ids of the server and were put together from their text; of {compared.rows} "
            f"rows that have ids this gives others for {compared.rows - compared.same}",
        )


def _lines(stage: Stage, name: str) -> int:
    with stage.inputs[name].open("rb") as file:
        return sum(1 for line in file if line.strip())


def _and(ids: list[int]) -> str:
    return " and ".join(map(str, ids))


def marked(chat: Chat, row: dict[str, Any]) -> str:
    """The row as text, with what counts for the loss between ⟦ and ⟧."""
    start = row["loss_mask"].index(1)
    prompt, response = chat.decode(row["input_ids"][:start]), chat.decode(row["input_ids"][start:])
    return f"--- {row['id']}\n{prompt}⟦{response}⟧"


def sample(chat: Chat, row: dict[str, Any]) -> dict[str, Any]:
    """The row token by token, each with its mask. A token that is part of a character decodes to U+FFFD."""
    tokens = [[chat.decode([id]), mask] for id, mask in zip(row["input_ids"], row["loss_mask"], strict=True)]
    return {"id": row["id"], "source": row["source"], "tokens": tokens}


def histogram(lengths: Counter[int]) -> dict[str, int]:
    """Rows by response length, in powers of two: {"2-3": n, "4-7": n, …}."""
    counts: Counter[int] = Counter()
    for length, rows in lengths.items():
        counts[length.bit_length()] += rows
    return {f"{2 ** (bits - 1)}-{2**bits - 1}": counts[bits] for bits in sorted(counts)}


if __name__ == "__main__":
    main(run)
