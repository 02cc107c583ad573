"""A chat server whose answers a test writes: it stands in for a server that misbehaves, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from tests.lab.engine import free_port

Answer = Callable[[dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


@contextmanager
def chat_server(answer: Answer, port: int | None = None, metrics: Callable[[], str] | None = None) -> Iterator[str]:
    """Its base URL, for as long as it serves. `answer` is given each request's body."""
    port = port or free_port()
    loop = asyncio.new_event_loop()

    async def chat(request: web.Request) -> web.StreamResponse:
        return await answer(await request.json(), request)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def told(request: web.Request) -> web.Response:
        return web.Response(text=metrics()) if metrics else web.Response(status=404)

    async def up() -> web.AppRunner:
        app = web.Application()
        app.add_routes(
            [web.post("/v1/chat/completions", chat), web.get("/v1/models", models), web.get("/metrics", told)]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        return runner

    runner = loop.run_until_complete(up())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(10)  # sockets are closed a round later
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def good(text: str = "Hello.", tokens: int = 3, finish: str = "stop", **more: Any) -> web.Response:
    """A whole answer. `more`: fields of the message; `usage` and `top` are merged where they belong."""
    usage = {"prompt_tokens": 7, "completion_tokens": tokens} | more.pop("usage", {})
    top = more.pop("top", {})
    choice = {"message": {"content": text} | more, "finish_reason": finish}
    return web.json_response({"choices": [choice], "usage": usage} | top)


def refused(status: int, words: str, **headers: str) -> web.Response:
    body = {"error": {"message": words}}
    return web.json_response(body, status=status, headers={k.replace("_", "-"): v for k, v in headers.items()})


async def stream(request: web.Request, chunks: list[Any], cut: bool = False) -> web.StreamResponse:
    """Server-sent events, one for each chunk; a text is sent as it is. `cut`: the connection is lost after them."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        text = chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n"
        await response.write(text.encode())
    if cut:
        assert request.transport is not None
        request.transport.abort()
    return response


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields, "finish_reason": finish}]}
