"""Prompts to train on, and two held-out sets to measure on: what the model writes itself, and what people wrote.

The model writes prompts by sampling the user's turn of its own chat template, through the server: the template is
rendered up to where the user's text would stand, and the model goes on from there. People's prompts ship with the
project.

inputs    model (the target's directory: its template and tokenizer)
settings  base_url, concurrency, self_written, held_self (of those), held_people, seeds (use the shipped training
          prompts), temperature, max_tokens, seed; sources: see `take`, and `pipeline.stages.sources`
output    train.jsonl, held_self.jsonl, held_people.jsonl   {"id", "source", "messages"}
          ready.jsonl       rows with a response of the target's own: they skip *generate*
          tokenized.jsonl   rows with input_ids and loss_mask: they skip *tokenize*, too
          budgets.json      {source: response tokens that *generate* may still make for it}
          raw.jsonl         every text that the model wrote, with why it was left out
          quarantine.jsonl  rows of sources that cannot be used: {"source", "file", "row", "reason"}
No training prompt shares 13 consecutive tokens with a held-out one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.frozen import target_config
from pipeline.stages.client import Client, Rejected, Unreachable, connect, each, run_async
from pipeline.stages.generate import seed_of
from pipeline.stages.protocol import JsonlAppender, Stage, main, write_json, write_jsonl
from pipeline.stages.shipped_prompts import HELD_OUT, SEEDS
from pipeline.stages.sources import Item, choose, items

N = 13
ATTEMPTS_PER_PROMPT = 4  # texts sampled, at most, for each one wanted
MARK = "\x1frigbook\x1f"
SHORTEST_ANSWER = 16  # response tokens: of a source with a token budget no more prompts are taken than could be needed


def run(stage: Stage) -> dict[str, Any]:
    settings = stage.settings
    chat = Chat(stage.inputs["model"])
    wanted, held_count = int(settings["self_written"]), int(settings["held_self"])
    if held_count >= wanted > 0:
        stage.refuse("prompts.held", f"held_self ({held_count}) must be smaller than self_written ({wanted})")
    people = [row("people", i, text) for i, text in enumerate(HELD_OUT[: int(settings["held_people"])])]
    taken = take_all(stage, chat)
    people += taken.held
    seeds = [row("seed", i, text) for i, text in enumerate(SEEDS)] if settings.get("seeds", True) else []
    raw = JsonlAppender(stage.out / "raw.jsonl")
    try:
        written, reasons = run_async(_write(stage, chat, raw, wanted)) if wanted else ([], {})
    finally:
        raw.close()
    if len(written) < wanted:
        stage.warn("prompts.few", f"the model wrote {len(written)} usable prompts of {wanted} wanted")
    if wanted and len(written) <= held_count:
        stage.refuse("prompts.few", f"the model wrote only {len(written)} usable prompts; {held_count} are held out")
    # By digest, so that which ones are held out depends on nothing but what they are.
    ordered = sorted(written, key=lambda r: hashlib.sha256(r["messages"][0]["content"].encode()).digest())
    held, rest = ordered[:held_count], ordered[held_count:]
    grams = {gram for r in (*held, *people) for gram in ngrams(chat, r)}

    def clean(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [r for r in rows if not any(gram in grams for gram in ngrams(chat, r))]

    kept, ready = clean([*seeds, *rest, *taken.prompts]), clean(taken.ready)
    if not kept and not ready and not taken.tokenized:
        stage.refuse("prompts.none", "there is nothing to train on: no prompt was written, shipped or read")
    written_rows = {"train": kept, "held_self": held, "held_people": people, "ready": ready}
    for name, rows in (written_rows | {"tokenized": taken.tokenized, "quarantine": taken.quarantine}).items():
        rows.sort(key=lambda r: str(r.get("id", "")))
        write_jsonl(stage.out / f"{name}.jsonl", rows)
        stage.artifact(name, stage.out / f"{name}.jsonl", rows=len(rows))
    write_json(stage.out / "budgets.json", taken.budgets)
    stage.artifact("budgets", stage.out / "budgets.json")
    stage.artifact("raw", stage.out / "raw.jsonl")
    out = len(kept) + len(held) + len(people) + len(ready) + len(taken.tokenized)
    everything = len(raw.rows) + len(seeds) + len(people) - len(taken.held) + taken.read
    errors = len(taken.quarantine)
    overlap = len(seeds) + len(rest) + len(taken.prompts) - len(kept) + len(taken.ready) - len(ready)
    return {
        "rows": {"in": everything, "out": out, "errors": errors, "skipped": everything - out - errors},
        "train": len(kept),
        "ready": len(ready),
        "tokenized": len(taken.tokenized),
        "sources": taken.counts,
        "held_self": len(held),
        "held_people": len(people),
        "left_out": reasons | {"overlap": overlap},
    }


@dataclass
class Taken:
    """What the sources gave."""

    prompts: list[dict[str, Any]] = field(default_factory=list)
    ready: list[dict[str, Any]] = field(default_factory=list)
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    held: list[dict[str, Any]] = field(default_factory=list)
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    budgets: dict[str, int] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    read: int = 0


def take_all(stage: Stage, chat: Chat) -> Taken:
    """The rows of every source that the settings name."""
    taken = Taken()
    vocab_size = int(target_config(stage.inputs["model"])["vocab_size"])
    sources = list(stage.settings.get("sources") or [])
    names = [str(source["name"]) for source in sources]
    if twice := {name for name in names if names.count(name) > 1 or name in ("self", "seed", "people")}:
        stage.refuse("prompts.source-name", f"two sources would be called {', '.join(sorted(twice))}")
    for source in sources:
        take(stage, chat, source, vocab_size, taken)
    return taken


def take(stage: Stage, chat: Chat, source: dict[str, Any], vocab_size: int, taken: Taken) -> None:
    """One source: name, path, format; rows (at most so many, chosen by digest; 0: all), tokens (response tokens to
    train on from it; 0: no limit), held (so many of its prompts are for measuring), own_answers."""
    name, budget = str(source["name"]), int(source.get("tokens", 0))
    bad = 0

    def usable() -> Iterator[tuple[int, Item]]:
        nonlocal bad
        form, own = str(source.get("format", "auto")), bool(source.get("own_answers", False))
        for number, (place, found) in enumerate(items(Path(str(source["path"])), form, own, vocab_size), 1):
            taken.read += 1
            if isinstance(found, Item):
                yield number, found
            else:
                bad += 1
                reason = {"source": name, "file": place.file, "row": place.number, "reason": str(found)}
                taken.quarantine.append(reason)
            if number % 1000 == 0:
                stage.progress(number, number, f"{name} rows read")

    limit = int(source.get("rows", 0)) or (budget // SHORTEST_ANSWER if budget else 0)
    chosen = choose(usable(), limit, f"{stage.settings.get('seed', 0)}:{name}")
    rows = [(found.kind, {"id": f"{name}-{number:07d}", "source": name, **found.fields}) for number, found in chosen]
    prompts = [row for kind, row in rows if kind == "prompt"]
    by_digest = sorted(prompts, key=lambda r: hashlib.sha256(str(r["messages"]).encode()).digest())
    held = by_digest[: int(source.get("held", 0))]
    apart = {row["id"] for row in held}
    tokens, kept = 0, {"prompt": taken.prompts, "ready": taken.ready, "tokenized": taken.tokenized}
    counts = dict.fromkeys(("prompt", "ready", "tokenized"), 0)
    for kind, row in rows:
        if row["id"] in apart or (budget and tokens >= budget):
            continue
        tokens += (
            sum(row["loss_mask"]) if kind == "tokenized" else _response_tokens(chat, row) if kind == "ready" else 0
        )
        kept[kind].append(row)
        counts[kind] += 1
    taken.held += held
    if budget:
        taken.budgets[name] = max(0, budget - tokens)
    taken.counts[name] = {**counts, "held": len(held), "bad": bad, "response_tokens": tokens}
    if not rows:
        stage.refuse("prompts.source", f"the source {name} has no usable row ({bad} were set aside: quarantine.jsonl)")
    if len(held) < int(source.get("held", 0)):
        stage.warn(
            "prompts.held", f"the source {name} has {len(held)} prompts to hold out, {source['held']} were wanted"
        )
    if bad:
        last = taken.quarantine[-1]
        stage.warn(
            "prompts.quarantine",
            f"{bad} rows of {name} cannot be used, see quarantine.jsonl; the last: {last['file']} row {last['row']}: "
            f"{last['reason']}",
        )


def _response_tokens(chat: Chat, row: dict[str, Any]) -> int:
    return len(row["output_ids"]) if row.get("output_ids") else len(chat.encode(row["response"]))


async def _write(
    stage: Stage, chat: Chat, raw: JsonlAppender, wanted: int
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Sample until enough are usable. Returns (rows, how many were left out for which reason)."""
    settings = stage.settings
    prefix, stop = user_turn(chat)
    body = {"text": prefix}
    concurrency = int(settings["concurrency"])

    async def one(i: int) -> None:
        name = f"self-{i:05d}"
        sampling = {
            "temperature": float(settings["temperature"]),
            "max_new_tokens": int(settings["max_tokens"]),
            "stop": [stop],
            "sampling_seed": seed_of(int(settings.get("seed", 0)), name),
        }
        try:
            answer = await client.post("/generate", body | {"sampling_params": sampling}, int(settings["max_tokens"]))
        except Rejected as error:
            stage.refuse("prompts.refused", f"the server does not complete raw text: {error}")
        except Unreachable as error:
            stage.refuse("prompts.server-gone", f"the server no longer answers: {error}")
        finish = answer["meta_info"]["finish_reason"] or {}
        raw.append({"id": name, "text": answer["text"], "finish": finish.get("type")})
        stage.progress(len(raw.rows), asked + more, "texts")

    if len(select(raw.rows, wanted)[0]) >= wanted:
        return select(raw.rows, wanted)
    asked = more = 0
    client: Client
    async with connect(settings["base_url"], concurrency) as client:
        while True:
            usable, reasons = select(raw.rows, wanted)
            asked = len(raw.rows)
            if len(usable) >= wanted or asked >= ATTEMPTS_PER_PROMPT * wanted:
                return usable, reasons
            # At the share that was usable so far, and a little over: a second wave of few is slow.
            share = len(usable) / asked if asked else 0.8
            more = min(int((wanted - len(usable)) / max(share, 0.25) * 1.1) + 4, ATTEMPTS_PER_PROMPT * wanted - asked)
            missing = (i for i in range(asked + more + concurrency) if f"self-{i:05d}" not in raw.done)
            await each([next(missing) for _ in range(more)], concurrency, one)


def user_turn(chat: Chat) -> tuple[str, str]:
    """The template's text before the user's words, and the special token that ends them."""
    before, _, after = chat.render([{"role": "user", "content": MARK}]).partition(MARK)
    ids = chat.encode(after.lstrip())
    if not before or not ids:
        raise ValueError("the chat template does not show where the user's turn begins and ends")
    return before, chat.decode(ids[:1])


def select(raw: Sequence[dict[str, Any]], wanted: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """The usable ones in the order of their ids, at most `wanted`, and the count of each reason for the others."""
    rows: list[dict[str, Any]] = []
    reasons: dict[str, int] = {}
    seen = {normal(text) for text in (*SEEDS, *HELD_OUT)}
    for item in sorted(raw, key=lambda r: str(r["id"])):
        text = str(item["text"]).strip()
        reason = unusable(text, item["finish"]) or ("repeated" if normal(text) in seen else None)
        if reason is None and len(rows) >= wanted:
            reason = "not needed"
        if reason is not None:
            reasons[reason] = reasons.get(reason, 0) + 1
            continue
        seen.add(normal(text))
        rows.append({"id": item["id"], "source": "self", "messages": [{"role": "user", "content": text}]})
    return rows, reasons


def unusable(text: str, finish: str | None) -> str | None:
    """Why a text is no prompt, or None."""
    words = text.split()
    if finish != "stop":
        return "cut off"
    if len(words) < 4 or len(text) < 16:
        return "too short"
    if "<|" in text or "\ufffd" in text or not all(c.isprintable() or c in "\n\t" for c in text):
        return "debris"
    if sum(c.isalpha() for c in text) < len(text) / 2:
        return "not words"
    if len({w.lower() for w in words}) < len(words) / 2 and len(words) > 8:
        return "loops"
    return None


def normal(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


def row(source: str, i: int, text: str) -> dict[str, Any]:
    return {"id": f"{source}-{i:05d}", "source": source, "messages": [{"role": "user", "content": text}]}


def ngrams(chat: Chat, prompt: dict[str, Any]) -> Iterator[tuple[int, ...]]:
    for message in prompt["messages"]:
        ids = chat.encode(message["content"])
        yield from (tuple(ids[i : i + N]) for i in range(len(ids) - N + 1))


if __name__ == "__main__":
    main(run)
