"""Responses -> token ids and loss mask.

inputs    rows (rows.jsonl of `generate`), model; optional: ready and tokenized (of `prompts`)
settings  max_len: longer rows are cut there; special_tokens ({}): text -> id, which must hold
output    rows.jsonl: {"id", "source", "texts", "input_ids", "loss_mask"}; mask 1 = response token, the end token too
          errors.jsonl: rows set aside, with the reason; samples.txt: some rows with the masked span marked, to look at
          samples.jsonl: more of them, {"id", "source", "tokens": [[text, mask], …]}, for `rigbook run preview`

Ids are the ones that the model produced, where the server gave them: encoding its text again may give others. A mask
that is wrong trains a drafter that looks healthy, so each row must decode back to the response text.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.frozen import end_tokens
from pipeline.stages.protocol import Stage, main, read_jsonl, write_bytes, write_jsonl

MAX_BAD = 0.02  # more rows than this share that cannot be used mean a fault of the set-up, not of the rows
MANY_UNFINISHED = 0.5
SAMPLES = 5
PREVIEWS = 50


class Unusable(Exception):
    """A row that is set aside; the text is its reason."""


def run(stage: Stage) -> dict[str, Any]:
    try:
        chat = Chat(stage.inputs["model"])
    except ValueError as error:
        stage.refuse("tokenize.template", str(error))
    if wrong := wrong_ids(chat, stage.settings.get("special_tokens") or {}):
        stage.refuse("tokenize.special", "; ".join(wrong))
    ends, max_len = end_tokens(stage.inputs["model"]), int(stage.settings.get("max_len", 512))
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    empty, cut = 0, 0
    finished: Counter[str] = Counter()
    source = [
        row for name in ("rows", "ready", "tokenized") if name in stage.inputs for row in read_jsonl(stage.inputs[name])
    ]
    for done, row in enumerate(source, 1):
        try:
            made = as_it_came(row) if "input_ids" in row else tokenize_row(chat, row, ends)
        except Unusable as reason:
            errors.append({"id": row["id"], "reason": str(reason)})
            continue
        finished[str(row.get("finish_reason", "unknown"))] += 1
        cut += len(made["input_ids"]) > max_len
        made["input_ids"], made["loss_mask"] = made["input_ids"][:max_len], made["loss_mask"][:max_len]
        if sum(made["loss_mask"]) < 2:  # a drafter needs a token to start from and one to guess
            empty += 1
            continue
        rows.append(made)
        stage.progress(done, len(source), "rows")
    if not rows:
        stage.refuse("tokenize.empty-mask", "no row has a response to learn from: every loss mask is empty")
    write_jsonl(stage.out / "errors.jsonl", errors)
    if len(errors) > MAX_BAD * len(source):
        stage.refuse(
            "tokenize.rows",
            f"{len(errors)} of {len(source)} rows cannot be used; the first: {errors[0]['id']}: {errors[0]['reason']}",
        )
    if errors:
        stage.warn("tokenize.rows", f"{len(errors)} rows set aside, see errors.jsonl")
    if cut:
        stage.warn("tokenize.cut", f"{cut} of {len(source)} rows are longer than {max_len} tokens and were cut")
    unfinished = finished["length"] / max(1, sum(finished.values()))
    if unfinished > MANY_UNFINISHED:
        stage.warn("tokenize.unfinished", f"{unfinished:.0%} of the responses were stopped by max_tokens")

    write_jsonl(stage.out / "rows.jsonl", rows)
    stage.artifact("rows", stage.out / "rows.jsonl")
    write_bytes(stage.out / "samples.txt", "\n\n".join(marked(chat, row) for row in rows[:SAMPLES]).encode())
    every = max(1, len(rows) // PREVIEWS)
    write_jsonl(stage.out / "samples.jsonl", (sample(chat, row) for row in rows[::every][:PREVIEWS]))
    lengths, responses = [len(r["input_ids"]) for r in rows], [sum(r["loss_mask"]) for r in rows]
    return {
        "rows": {"in": len(source), "out": len(rows), "errors": len(errors), "skipped": empty},
        "tokens": sum(lengths),
        "response_tokens": sum(responses),
        "masked_share": sum(responses) / sum(lengths),
        "response_histogram": histogram(responses),
        "longest": max(lengths),
        "cut": cut,
        "finish_reasons": dict(finished),
    }


def as_it_came(row: dict[str, Any]) -> dict[str, Any]:
    """A row that held ids and mask already; `prompts` has checked them."""
    return {"texts": [], **{name: row[name] for name in ("id", "source", "input_ids", "loss_mask")}}


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


def tokenize_row(chat: Chat, row: dict[str, Any], ends: set[int]) -> dict[str, Any]:
    """One row, or `Unusable` with the reason."""
    messages, text = row["messages"], row["response"]
    try:
        prompt = chat.encode(chat.render(messages, add_generation_prompt=True))
    except ValueError as error:
        raise Unusable(str(error)) from error
    ids = list(row["output_ids"]) if row.get("output_ids") else chat.encode(text) if text else []
    if not ids and row.get("completion_tokens"):
        raise Unusable(f"the server counted {row['completion_tokens']} tokens, the response is empty")
    if ids and row.get("finish_reason") == "stop" and ends and ids[-1] not in ends:
        ids.append(min(ends))  # servers often keep the end token to themselves; it was generated all the same
    spoken = ids[:-1] if ids and ids[-1] in ends else ids
    if chat.decode(spoken, skip_special_tokens=True) != text:
        raise Unusable("the response tokens do not decode to the response text")
    texts = [*(m["content"] for m in messages), text]
    return {
        "id": row["id"],
        "source": row.get("source", "unknown"),
        "texts": texts,
        "input_ids": prompt + ids,
        "loss_mask": [0] * len(prompt) + [1] * len(ids),
    }


def marked(chat: Chat, row: dict[str, Any]) -> str:
    """The row as text, with what counts for the loss between ⟦ and ⟧."""
    start = row["loss_mask"].index(1)
    prompt, response = chat.decode(row["input_ids"][:start]), chat.decode(row["input_ids"][start:])
    return f"--- {row['id']}\n{prompt}⟦{response}⟧"


def sample(chat: Chat, row: dict[str, Any]) -> dict[str, Any]:
    """The row token by token, each with its mask. A token that is part of a character decodes to U+FFFD."""
    tokens = [[chat.decode([id]), mask] for id, mask in zip(row["input_ids"], row["loss_mask"], strict=True)]
    return {"id": row["id"], "source": row["source"], "tokens": tokens}


def histogram(lengths: list[int]) -> dict[str, int]:
    """Rows by response length, in powers of two: {"2-3": n, "4-7": n, …}."""
    counts = Counter(length.bit_length() for length in lengths)
    return {f"{2 ** (bits - 1)}-{2**bits - 1}": counts[bits] for bits in sorted(counts)}


if __name__ == "__main__":
    main(run)
