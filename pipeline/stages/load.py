"""The load generator: asks a running server a file of prompts and measures what comes back.

It runs on the server's own host, through SGLang's /generate with the ids of the rendered chat: the server cannot format
them otherwise, and it tells token ids and draft counters for each request (never a lifetime average, which would hold
the warm-up). A request is asked once: a repeated one would spoil the time. A measurement is whole or it is nothing: a
killed one starts again from its first request.

inputs    model (the target's directory: template and tokenizer), prompts (rows of `prompts`)
settings  base_url, max_tokens, temperature (0), concurrency (1), ignore_eos (false), limit (0 = every prompt),
          warmup (requests before the clock starts), seed (0)
output    rows.jsonl: {"id", "output_ids", "finish_reason", "completion_tokens", "seconds", and its counters},
          or {"id", "error"}
result    requests, errors, output_tokens, seconds (first request sent to last answer), tok_s (output_tokens / seconds),
          latency_p50 (s), finish (counts); for a server that speculates also
          verify_steps, accepted_drafts, proposed_drafts, accept_len (1 + accepted / verify),
          accept_histogram (verify steps with 0, 1, … accepted drafts), per_position (steps whose draft 1, 2, … held)
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from typing import Any

from pipeline.eagle3.chat import Chat
from pipeline.stages.client import Client, Rejected, Unreachable, connect, each, run_async
from pipeline.stages.generate import seed_of
from pipeline.stages.protocol import Stage, log, main, read_jsonl, write_jsonl

# Server-side counters that must agree with what the answers say; names with and without a label set.
COUNTED = {"generated": "sglang:generation_tokens_total", "verified": "sglang:spec_verify_calls_total"}


def run(stage: Stage) -> dict[str, Any]:
    chat = Chat(stage.inputs["model"])
    prompts = list(read_jsonl(stage.inputs["prompts"]))
    if limit := int(stage.settings.get("limit") or 0):
        prompts = prompts[:limit]
    if not prompts:
        stage.refuse("load.empty", f"there are no prompts in {stage.inputs['prompts']}")
    encoded = [(p["id"], chat.encode(chat.render(p["messages"], add_generation_prompt=True))) for p in prompts]
    rows, errors, seconds = run_async(_measure(stage, encoded))
    write_jsonl(stage.out / "rows.jsonl", sorted((*rows, *errors), key=lambda row: str(row["id"])))
    stage.artifact("rows.jsonl", stage.out / "rows.jsonl")
    if not rows:
        stage.refuse("load.nothing", f"no request was answered: {errors[0]['error']}")
    if errors:
        stage.warn("load.errors", f"{len(errors)} of {len(prompts)} requests failed: {errors[0]['error']}")
    result = summary(rows, seconds) | {
        "requests": len(prompts),
        "errors": len(errors),
        "rows": {"in": len(prompts), "out": len(rows), "errors": len(errors), "skipped": 0},
    }
    stage.metric("tok_s", result["tok_s"])
    if "accept_len" in result:
        stage.metric("accept_len", result["accept_len"])
    return result


async def _measure(
    stage: Stage, prompts: list[tuple[str, list[int]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], float]:
    """(rows, errors, seconds from the first request to the last answer)."""
    settings = stage.settings
    concurrency = int(settings.get("concurrency", 1))
    max_tokens = int(settings["max_tokens"])
    rows: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []

    async def ask(prompt: tuple[str, list[int]]) -> dict[str, Any]:
        name, ids = prompt
        sampling = {
            "max_new_tokens": max_tokens,
            "temperature": float(settings.get("temperature", 0.0)),
            "ignore_eos": bool(settings.get("ignore_eos", False)),
        }
        if sampling["temperature"]:
            sampling["sampling_seed"] = seed_of(int(settings.get("seed", 0)), name)
        began = time.perf_counter()
        answer = await client.post("/generate", {"input_ids": ids, "sampling_params": sampling}, max_tokens, attempts=1)
        return _row(name, answer, time.perf_counter() - began)

    async def one(prompt: tuple[str, list[int]]) -> None:
        try:
            rows.append(await ask(prompt))
        except (Rejected, Unreachable) as error:
            errors.append({"id": prompt[0], "error": str(error)})
        tokens = sum(row["completion_tokens"] for row in rows)
        stage.progress(len(rows) + len(errors), len(prompts), "requests", tokens=tokens)

    async with connect(settings["base_url"], concurrency) as client:
        for i in range(int(settings.get("warmup", 1))):
            try:
                await ask(prompts[i % len(prompts)])
            except (Rejected, Unreachable) as error:
                stage.refuse("load.refused", f"the server does not answer the first request: {error}")
        await _forget(client)
        before = await counters(client)
        began = time.perf_counter()
        await each(prompts, concurrency, one)
        seconds = time.perf_counter() - began
        after = await counters(client)
    for name, said in (("generated", "completion_tokens"), ("verified", "spec_verify_ct")):
        grown = after[name] - before[name] if name in after and name in before else None
        told = sum(row.get(said) or 0 for row in rows)
        if grown is not None and grown != told and not errors:
            # More than ours: somebody else used the server, and the speed is not what it says.
            stage.warn("load.shared", f"the server counted {grown:g} {name} tokens or steps, its answers say {told}")
    return rows, errors, seconds


# Counters of one request, by what 0.5.14 and later call them, and what 0.5.6 did.
SPEC = {
    "spec_verify_ct": ("spec_verify_ct",),
    "spec_num_correct_drafts": ("spec_num_correct_drafts", "spec_accept_token_num"),
    "spec_num_proposed_drafts": ("spec_num_proposed_drafts", "spec_draft_token_num"),
    "spec_correct_drafts_histogram": ("spec_correct_drafts_histogram",),
}


def _row(name: str, answer: dict[str, Any], seconds: float) -> dict[str, Any]:
    meta = answer["meta_info"]
    reason = meta.get("finish_reason")
    row = {
        "id": name,
        "output_ids": answer.get("output_ids"),
        "finish_reason": reason["type"] if isinstance(reason, dict) else reason,
        "completion_tokens": meta["completion_tokens"],
        "seconds": seconds,
    }
    for key, names in SPEC.items():
        told = [meta[n] for n in names if meta.get(n) is not None]
        if told:
            row[key] = told[0]
    return row


def summary(rows: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """Totals of the answered requests. Accept figures are absent, not zero, where the server did not speculate."""
    tokens = sum(row["completion_tokens"] for row in rows)
    result: dict[str, Any] = {
        "requests": len(rows),
        "output_tokens": tokens,
        "seconds": seconds,
        "tok_s": tokens / seconds,
        "latency_p50": statistics.median(row["seconds"] for row in rows),
        "finish": dict(Counter(str(row["finish_reason"]) for row in rows)),
    }
    counted = [row for row in rows if row.get("spec_verify_ct")]
    if not counted:
        return result
    verify, proposed, correct = (
        sum(row.get(key) or 0 for row in counted)
        for key in ("spec_verify_ct", "spec_num_proposed_drafts", "spec_num_correct_drafts")
    )
    histogram = [0] * (round(proposed / verify) + 1)  # a chain proposes as many drafts at every step
    for row in counted:
        for accepted, count in enumerate(row.get("spec_correct_drafts_histogram") or []):
            histogram[accepted] += count
    return result | {
        "verify_steps": verify,
        "accepted_drafts": correct,
        "proposed_drafts": proposed,
        "accept_len": 1 + correct / verify,
        # An old server tells no histogram; then these are absent.
        "accept_histogram": histogram if any(histogram) else [],
        "per_position": [sum(histogram[i:]) for i in range(1, len(histogram))] if any(histogram) else [],
    }


async def _forget(client: Client) -> None:
    """Drop the server's prefix cache, where it has one: the warm-up must not have read the prompts for us."""
    try:
        await client.get("/flush_cache")
    except (Rejected, Unreachable) as error:
        log(f"load: the server's cache was not flushed: {error}")


async def counters(client: Client) -> dict[str, float]:
    """The server's own totals, summed over label sets; what it does not tell is absent."""
    try:
        text = (await client.get("/metrics")).decode(errors="replace")
    except (Rejected, Unreachable):
        return {}
    out: dict[str, float] = {}
    for name, metric in COUNTED.items():
        values = re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)", text, re.MULTILINE)
        if values:
            out[name] = sum(map(float, values))
    return out


if __name__ == "__main__":
    main(run)
