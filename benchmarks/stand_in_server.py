"""A stand-in for a very fast server: any chat completion is answered at once with text made beforehand. It is no model.

    python benchmarks/stand_in_server.py PORT TOKENS [DELAY]

Whole answers and streams of one token an event, as SGLang's; DELAY seconds pass before the end of each.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiohttp import web

PORT, TOKENS = int(sys.argv[1]), int(sys.argv[2])
DELAY = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
WORDS = [f" word{i % 97}" for i in range(TOKENS)]
USAGE = {"prompt_tokens": 20, "completion_tokens": TOKENS, "total_tokens": TOKENS + 20}
CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "".join(WORDS)},
    "finish_reason": "length",
    "token_ids": list(range(1000, 1000 + TOKENS)),
}
WHOLE = json.dumps({"object": "chat.completion", "choices": [CHOICE], "usage": USAGE}).encode()


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


CHUNKS = [event({"choices": [{"index": 0, "delta": {"content": w}, "finish_reason": None}]}) for w in WORDS]
CHUNKS.append(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
CHUNKS += [event({"choices": [], "usage": USAGE}), b"data: [DONE]\n\n"]


async def chat(request: web.Request) -> web.StreamResponse:
    asked = json.loads(await request.read())
    await asyncio.sleep(DELAY)
    if not asked.get("stream"):
        return web.Response(body=WHOLE, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for at in range(0, len(CHUNKS), 16):
        await response.write(b"".join(CHUNKS[at : at + 16]))
    return response


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "stand-in", "object": "model"}]})


application = web.Application()
application.add_routes([web.post("/v1/chat/completions", chat), web.get("/v1/models", models)])
web.run_app(application, host="127.0.0.1", port=PORT, print=None, access_log=None)
