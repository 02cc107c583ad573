"""The target's own responses to prompts, through any OpenAI-compatible server.

A drafter learns what its target says, so responses are generated anew, never taken from a data set. Rows are appended
as they come, in the order of completion, each durable before the next; a killed stage asks only for those that are
missing.

inputs    prompts (rows of `prompts`)
settings  base_url, max_tokens, temperature, concurrency; seed (0)
output    rows.jsonl    the prompt's row + response, output_ids (where the server tells them), finish_reason,
                        completion_tokens
          errors.jsonl  the rows that the server refused, each with its words; asked again by a resumed run
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

from pipeline.stages.client import Client, Rejected, Unreachable, connect, each, run_async
from pipeline.stages.protocol import JsonlAppender, Stage, main, read_jsonl, write_jsonl

GIVE_UP = 8  # rows in a row without an answer: the server is gone, asking on would only waste the night


def run(stage: Stage) -> dict[str, Any]:
    rows = list(read_jsonl(stage.inputs["prompts"]))
    ids = Counter(row["id"] for row in rows)
    if twice := [name for name, count in ids.items() if count > 1]:
        stage.refuse("generate.ids", f"prompt ids are not unique: {twice[:3]}")
    out = JsonlAppender(stage.out / "rows.jsonl")
    try:
        errors = run_async(_generate(stage, rows, out))
    finally:
        out.close()
    errors.sort(key=lambda row: str(row["id"]))
    write_jsonl(stage.out / "errors.jsonl", errors)
    if not out.rows:
        stage.refuse("generate.nothing", f"the server refused every prompt: {errors[0]['error'] if errors else '-'}")
    if errors:
        stage.warn("generate.errors", f"{len(errors)} of {len(rows)} prompts got no response: {errors[0]['error']}")
    finished = Counter(str(row["finish_reason"]) for row in out.rows)
    stage.artifact("rows", stage.out / "rows.jsonl")
    stage.artifact("errors", stage.out / "errors.jsonl")
    return {
        "rows": {"in": len(rows), "out": len(out.rows), "errors": len(errors), "skipped": 0},
        "response_tokens": sum(row["completion_tokens"] for row in out.rows),
        "finish_reasons": dict(sorted(finished.items())),
        "with_ids": sum("output_ids" in row for row in out.rows),
    }


async def _generate(stage: Stage, rows: list[dict[str, Any]], out: JsonlAppender) -> list[dict[str, Any]]:
    """Ask for what is missing. Returns the rows that failed."""
    errors: list[dict[str, Any]] = []
    silent = 0
    tokens = sum(row["completion_tokens"] for row in out.rows)
    concurrency = int(stage.settings["concurrency"])
    missing = [row for row in rows if row["id"] not in out.done]
    if not missing:
        return []
    ask = _Asker(stage.settings)

    async def one(row: dict[str, Any]) -> None:
        nonlocal silent, tokens
        try:
            response = await ask(client, row)
        except Rejected as error:
            errors.append(row | {"error": f"HTTP {error.status}: {error}"})
        except Unreachable as error:
            silent += 1
            errors.append(row | {"error": str(error)})
            if silent >= GIVE_UP:
                stage.refuse("generate.server-gone", f"the server no longer answers: {error}")
        else:
            silent = 0
            out.append(row | response)
            tokens += response["completion_tokens"]
        stage.progress(len(out.rows) + len(errors), len(rows), "responses", tokens=tokens)

    async with connect(stage.settings["base_url"], concurrency) as client:
        await each(missing, concurrency, one)
    return errors


class _Asker:
    """One chat completion. Token ids are asked for until the server says that it does not know the field."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.max_tokens = int(settings["max_tokens"])
        self.temperature = float(settings["temperature"])
        self.seed = int(settings.get("seed", 0))
        self.extra: dict[str, Any] = {"return_token_ids": True}

    async def __call__(self, client: Client, row: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": "default",
            "messages": row["messages"],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            # The row's own: an answer does not depend on which others were asked, or in what order.
            "seed": seed_of(self.seed, row["id"]),
        }
        extra = self.extra
        try:
            answer = await client.post("/v1/chat/completions", body | extra, self.max_tokens)
        except Rejected as error:
            if not extra or "return_token_ids" not in str(error):
                raise
            self.extra = {}
            answer = await client.post("/v1/chat/completions", body, self.max_tokens)
        choice = answer["choices"][0]
        response = {
            "response": choice["message"]["content"] or "",
            "finish_reason": choice["finish_reason"],
            "completion_tokens": answer["usage"]["completion_tokens"],
        }
        if choice.get("token_ids") is not None:
            response["output_ids"] = choice["token_ids"]
        return response


def seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:4], "big")


if __name__ == "__main__":
    main(run)
