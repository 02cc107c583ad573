"""Shuffle the training rows, without what the held-out ones would recognise.

inputs    rows (rows.jsonl of `tokenize`), model, held_self and held_people (rows.jsonl of `generate`)
settings  seed
output    rows.jsonl: the rows kept, shuffled; dropped.jsonl: the others, each with the reason

A row is dropped if one of its texts shares 13 consecutive tokens with a held-out prompt or response, if its prompt is
a held-out one (many are shorter than that), or if it repeats an earlier row.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from pipeline.eagle3.chat import Chat
from pipeline.stages.protocol import Stage, main, read_jsonl, write_jsonl

N = 13
FEW = 40  # changes of source, below which chance alone may halve them


def run(stage: Stage) -> dict[str, Any]:
    chat = Chat(stage.inputs["model"])
    held = [row for name in ("held_self", "held_people") for row in read_jsonl(stage.inputs[name])]
    grams: set[tuple[int, ...]] = set()
    prompts: set[str] = set()
    for row in held:
        prompts.add(fingerprint(m["content"] for m in row["messages"]))
        for text in (*(m["content"] for m in row["messages"]), row["response"]):
            grams.update(ngrams(chat.encode(text)))

    rows = list(read_jsonl(stage.inputs["rows"]))
    kept: list[dict[str, Any]] = []
    dropped: list[dict[str, Any]] = []
    seen: set[tuple[int, ...]] = set()
    for done, row in enumerate(rows, 1):
        reason = None
        # A row that came as ids has no texts: its ids are looked through as they are.
        pieces = [chat.encode(text) for text in row["texts"]] or [row["input_ids"]]
        if row["texts"] and fingerprint(row["texts"][:-1]) in prompts:
            reason = "held-out prompt"
        elif any(gram in grams for ids in pieces for gram in ngrams(ids)):
            reason = f"shares {N} tokens with a held-out row"
        elif tuple(row["input_ids"]) in seen:
            reason = "repeats another row"
        if reason is None:
            seen.add(tuple(row["input_ids"]))
            kept.append({name: row[name] for name in ("id", "source", "input_ids", "loss_mask")})
        else:
            dropped.append({"id": row["id"], "reason": reason})
        stage.progress(done, len(rows), "rows")
    if not kept:
        stage.refuse("mix.nothing-left", f"all {len(rows)} rows overlap with held-out ones")
    if len(dropped) > len(rows) / 4:
        stage.warn("mix.overlap", f"{len(dropped)} of {len(rows)} rows dropped: prompts may be too much alike")
    random.Random(int(stage.settings.get("seed", 0))).shuffle(kept)
    changes, expected = interleaving([row["source"] for row in kept])
    if expected >= FEW and changes < expected / 2:
        # Merged data that was believed to be shuffled was not (speculators #644): look at the rows, not at the call.
        stage.refuse("mix.order", f"the source changes {changes} times from row to row, by chance {expected:.0f} times")
    write_jsonl(stage.out / "rows.jsonl", kept)
    write_jsonl(stage.out / "dropped.jsonl", dropped)
    stage.artifact("rows", stage.out / "rows.jsonl")
    return {
        "rows": {"in": len(rows), "out": len(kept), "errors": 0, "skipped": len(dropped)},
        "dropped": dict(Counter(row["reason"] for row in dropped)),
        "sources": dict(Counter(row["source"] for row in kept)),
        "response_tokens": sum(sum(row["loss_mask"]) for row in kept),
        "source_changes": changes,
        "source_changes_by_chance": expected,
        "held_out_ngrams": len(grams),
    }


def interleaving(sources: Sequence[str]) -> tuple[int, float]:
    """(how often a row has another source than the one before, how often it would in a random order)."""
    n = len(sources)
    same = sum(count * (count - 1) for count in Counter(sources).values())
    expected = (n - 1) * (1 - same / (n * (n - 1))) if n > 1 else 0.0
    return sum(a != b for a, b in pairwise(sources)), expected


def ngrams(ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return (tuple(ids[i : i + N]) for i in range(len(ids) - N + 1))


def fingerprint(texts: Any) -> str:
    """A prompt, whatever its case and white space."""
    return "\n".join(" ".join(text.casefold().split()) for text in texts)


if __name__ == "__main__":
    main(run)
