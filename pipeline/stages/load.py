"""Ask a server for answers and measure: the load generator, run on the server's own host.

inputs    prompts (a prompts file), model (for the chat template)
settings  base_url, limit (prompts to ask, from the top), max_tokens, temperature, concurrency, warmup (requests before
          the clock starts), ignore_eos
output    rows.jsonl: a row a request: id, prompt tokens, output_ids, seconds, accept counters; errors too

Requests go to /generate with the ids of the rendered chat, so that the server cannot format them otherwise. Seconds are
from the first request sent to the last answer read: all that a user waits for. Counters are each request's own
(`meta_info`), never a server's lifetime average, which would hold warm-up and whatever ran before.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import aiohttp

from pipeline.eagle3.chat import Chat
from pipeline.stages.protocol import Stage, log, main, read_jsonl, write_jsonl

SECONDS_A_TOKEN = 2.0  # a request that takes longer than this for each token it may write is given up
SECONDS_AT_LEAST = 60.0


def run(stage: Stage) -> dict[str, Any]:
    s = stage.settings
    chat = Chat(stage.inputs["model"])
    prompts = list(read_jsonl(stage.inputs["prompts"]))[: s["limit"] or None]
    if not prompts:
        stage.refuse("load.no-prompts", f"there is no prompt in {stage.inputs['prompts']}")
    bodies = [(p["id"], body(chat, p["messages"], s)) for p in prompts]
    rows, seconds = asyncio.run(ask_all(stage, bodies))
    write_jsonl(stage.out / "rows.jsonl", rows)
    stage.artifact("rows.jsonl", stage.out / "rows.jsonl")
    return summary(rows, seconds)


def body(chat: Chat, messages: list[dict[str, str]], settings: dict[str, Any]) -> dict[str, Any]:
    """The /generate request of one conversation."""
    return {
        "input_ids": chat.encode(chat.render(messages, add_generation_prompt=True)),
        "sampling_params": {
            "max_new_tokens": settings["max_tokens"],
            "temperature": settings["temperature"],
            "ignore_eos": settings["ignore_eos"],
        },
    }


async def ask_all(stage: Stage, bodies: list[tuple[str, dict[str, Any]]]) -> tuple[list[dict[str, Any]], float]:
    """Every request once, `concurrency` at a time, after the warm-up. Returns the rows in order, and wall seconds."""
    s = stage.settings
    gate = asyncio.Semaphore(s["concurrency"])
    timeout = aiohttp.ClientTimeout(total=max(SECONDS_AT_LEAST, s["max_tokens"] * SECONDS_A_TOKEN))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(s["base_url"], timeout=timeout, connector=connector) as session:
        for _ in range(s["warmup"]):
            await ask(session, *bodies[0])
        done = 0

        async def one(id: str, request: dict[str, Any]) -> dict[str, Any]:
            nonlocal done
            async with gate:
                row = await ask(session, id, request)
            done += 1
            stage.progress(done, len(bodies), "requests")
            return row

        began = time.perf_counter()
        rows = await asyncio.gather(*(one(*item) for item in bodies))
        return rows, time.perf_counter() - began


async def ask(session: aiohttp.ClientSession, id: str, request: dict[str, Any]) -> dict[str, Any]:
    """One request. What went wrong is a row too: it counts as an error and is never asked again."""
    began = time.perf_counter()
    row: dict[str, Any] = {"id": id, "prompt_tokens": len(request["input_ids"])}
    try:
        async with session.post("/generate", json=request) as response:
            if response.status != 200:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:300]}")
            answer = await response.json()
            meta = answer["meta_info"]
            reason = meta["finish_reason"]
            row |= {
                "output_ids": answer["output_ids"],
                "completion_tokens": meta["completion_tokens"],
                "finish": reason["type"] if isinstance(reason, dict) else reason,
                "verify_steps": meta.get("spec_verify_ct"),
                "histogram": meta.get("spec_correct_drafts_histogram"),
                # SGLang 0.5.6 called it spec_accept_token_num; 0.5.14 and later say correct and proposed drafts.
                "accepted": meta.get("spec_num_correct_drafts", meta.get("spec_accept_token_num")),
                "proposed": meta.get("spec_num_proposed_drafts", meta.get("spec_draft_token_num")),
            }
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        row["error"] = f"{type(error).__name__}: {error}"
        log(f"load: {id}: {row['error']}")
    row["seconds"] = time.perf_counter() - began
    return row


def summary(rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Totals over all requests. Accept figures are absent, not zero, where the server did not speculate."""
    good = [row for row in rows if "error" not in row]
    tokens = sum(row["completion_tokens"] for row in good)
    result: dict[str, Any] = {
        "rows": {"in": len(rows), "out": len(good), "errors": len(rows) - len(good), "skipped": 0},
        "requests": len(rows),
        "errors": len(rows) - len(good),
        "output_tokens": tokens,
        "seconds": seconds,
        "tok_s": tokens / seconds if tokens else None,
        "finish": dict(Counter(row["finish"] for row in good)),
    }
    counted = [row for row in good if row["verify_steps"]]
    if not counted:
        return result
    steps = sum(row["verify_steps"] for row in counted)
    accepted, proposed = (sum(row[key] or 0 for row in counted) for key in ("accepted", "proposed"))
    width = max(len(row["histogram"] or []) for row in counted)
    histogram = [0] * width
    for row in counted:
        for accepted_drafts, count in enumerate(row["histogram"] or []):
            histogram[accepted_drafts] += count
    return result | {
        "verify_steps": steps,
        "accepted_drafts": accepted,
        "proposed_drafts": proposed,
        "accept_len": 1 + accepted / steps,
        "accept_histogram": histogram,
        # How often the draft at each position was accepted: steps that accepted at least that many.
        "per_position": [sum(histogram[i + 1 :]) for i in range(width - 1)],
    }


if __name__ == "__main__":
    main(run)
