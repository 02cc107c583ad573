"""The HTTP face: SGLang's endpoints and OpenAI's chat completions, over one model thread."""

from __future__ import annotations

import asyncio
import json
import platform
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from pipeline.stages.reference.arguments import Arguments
from pipeline.stages.reference.asked import Asked, BadRequest, chat_request, generate_request
from pipeline.stages.reference.counters import prometheus, stamped
from pipeline.stages.reference.model_thread import Model, ModelThread

VERSION = "0.1.0"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Routes and the bookkeeping of open requests. `model` and `thread` are set when the model is loaded."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.started = time.time()
        self.model: Model | None = None
        self.thread: ModelThread | None = None
        self.events: dict[int, asyncio.Event] = {}  # id(asked) -> there is news
        self.loop = asyncio.get_running_loop()
        self.seeds = arguments.random_seed << 32

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._around], client_max_size=16 << 20)
        app.add_routes([
            web.get("/health", self.health),
            web.get("/health_generate", self.health_generate),
            web.get("/v1/models", self.models),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/metrics", self.metrics),
            web.route("*", "/flush_cache", self.flush_cache),
            web.post("/generate", self.generate),
            web.post("/v1/chat/completions", self.chat),
        ])  # fmt: skip
        return app

    # --- around every request ---------------------------------------------------------------------------------------

    @web.middleware
    async def _around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self.model is None and request.path != "/server_info":
            return _error(503, "the model is loading", "ServiceUnavailable")
        try:
            response = await handler(request)
        except BadRequest as error:
            response = _error(400, str(error), "BadRequestError")
        except web.HTTPException as error:
            response = _error(error.status, error.reason, "NotFoundError" if error.status == 404 else error.reason)
        if self.model is not None:
            known = request.match_info.route.resource  # unknown paths must not fill the table of counters
            if known is not None:
                self.model.counters.http[request.path, request.method] += 1
        if request.path not in ("/metrics", "/health"):  # asked every second by somebody
            stamped(f'INFO:     {request.remote} - "{request.method} {request.path} HTTP/1.1" {response.status}')
        return response

    # --- decoding ---------------------------------------------------------------------------------------------------

    def deliver(self, asked: Sequence[Asked]) -> None:
        """Called by the model thread."""
        if asked:
            self.loop.call_soon_threadsafe(self._wake, [id(a) for a in asked])

    def _wake(self, ids: list[int]) -> None:
        for i in ids:
            if event := self.events.get(i):
                event.set()

    async def news(self, asked: Asked) -> AsyncIterator[None]:
        """Submit, then yield whenever there are new tokens (only at the end unless it streams)."""
        assert self.thread is not None
        event = self.events[id(asked)] = asyncio.Event()
        self.thread.submit(asked)
        try:
            while asked.request.finish is None:
                await event.wait()
                event.clear()
                if self.thread.failure is not None:
                    raise web.HTTPInternalServerError(reason="the model thread has failed; see the log")
                yield
        finally:
            asked.gone = asked.request.finish is None
            del self.events[id(asked)]

    def next_seed(self) -> int:
        self.seeds += 1
        return self.seeds

    async def chat(self, request: web.Request) -> web.StreamResponse:
        assert self.model is not None
        asked = chat_request(await _json(request), self.model.chat, self.model.limits, self.next_seed())
        head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": self.arguments.served_model_name}
        if asked.stream:
            return await self._chat_stream(request, asked, head)
        async for _ in self.news(asked):
            pass
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text(asked)[0], "reasoning_content": None,
                        "tool_calls": None},
            "logprobs": None,
            "finish_reason": asked.request.finish,
            "matched_stop": self.matched(asked),
        }  # fmt: skip
        if asked.return_ids:
            choice["token_ids"] = asked.request.output
        return web.json_response(head | {
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(asked),
            "metadata": {"weight_version": "default"},
        })  # fmt: skip

    async def _chat_stream(self, request: web.Request, asked: Asked, head: dict[str, Any]) -> web.StreamResponse:
        response = await _open_stream(request)
        head |= {"object": "chat.completion.chunk"}

        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            return head | {"choices": [choice], "usage": None}

        await _send(response, chunk({"role": "assistant", "content": ""}))
        sent = 0
        async for _ in self.news(asked):
            text, safe = self.text(asked)
            if safe > sent:
                await _send(response, chunk({"content": text[sent:safe]}))
                sent = safe
        await _send(response, chunk({}, asked.request.finish))
        if asked.usage_in_stream:
            await _send(response, head | {"choices": [], "usage": usage(asked)})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def generate(self, request: web.Request) -> web.StreamResponse:
        assert self.model is not None
        asked = generate_request(await _json(request), self.model.chat, self.model.limits, self.next_seed())
        name = uuid.uuid4().hex
        if not asked.stream:
            async for _ in self.news(asked):
                pass
            return web.json_response(self.generated(asked, name))
        response = await _open_stream(request)
        async for _ in self.news(asked):
            await _send(response, self.generated(asked, name))  # each chunk holds the whole text so far
        await response.write(b"data: [DONE]\n\n")
        return response

    def generated(self, asked: Asked, name: str) -> dict[str, Any]:
        text, safe = self.text(asked)
        request = asked.request
        now = time.monotonic()
        finish: dict[str, Any] | None = None
        if request.finish == "stop":
            finish = {"type": "stop", "matched": self.matched(asked)}
        elif request.finish == "length":
            finish = {"type": "length", "length": request.max_tokens}
        elif request.finish is not None:
            finish = {"type": request.finish}
        meta: dict[str, Any] = {
            "id": name,
            "finish_reason": finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": 0,
            "weight_version": "default",
            "e2e_latency": now - asked.arrived,
        }
        steps = self.arguments.speculative_num_steps
        if steps and request.accepted:
            verify, correct = len(request.accepted), sum(request.accepted)
            histogram = [0] * (max(request.accepted) + 1)
            for n in request.accepted:
                histogram[n] += 1
            meta |= {
                "spec_accept_rate": correct / (verify * steps),
                "spec_accept_length": len(request.output) / verify,
                "spec_num_correct_drafts": correct,
                "spec_num_proposed_drafts": verify * steps,
                "spec_verify_ct": verify,
                "spec_correct_drafts_histogram": histogram,
            }
        return {"text": text[:safe], "output_ids": list(request.output), "meta_info": meta}

    def text(self, asked: Asked) -> tuple[str, int]:
        """The text so far, cut at a stop string, and how much of it cannot change any more."""
        assert self.model is not None
        request = asked.request
        ids = list(request.output)
        finished = request.finish is not None
        if finished and ids and ids[-1] in request.stop_ids:
            ids.pop()
        text = self.model.chat.decode(ids, asked.skip_special)
        found = [at for stop in asked.stops if (at := text.find(stop)) >= 0]
        if found:
            text = text[: min(found)]
            return text, len(text)
        if finished:
            return text, len(text)
        safe = len(text.rstrip("\ufffd"))  # half a character: its other bytes are still to come
        for stop in asked.stops:
            for n in range(min(len(stop) - 1, safe), 0, -1):
                if text[:safe].endswith(stop[:n]):
                    safe -= n
                    break
        return text, safe

    def matched(self, asked: Asked) -> int | str | None:
        """What ended it: a token id, a stop string, or nothing."""
        request = asked.request
        if request.finish != "stop":
            return None
        if request.output[-1] in request.stop_ids:
            return request.output[-1]
        assert self.model is not None
        text = self.model.chat.decode(request.output)
        return next((stop for stop in asked.stops if stop in text), None)

    # --- looking ----------------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.StreamResponse:
        assert self.thread is not None
        if self.thread.ended.is_set():
            return _error(503, "the model thread has ended", "ServiceUnavailable")
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.StreamResponse:
        assert self.model is not None
        asked = generate_request(
            {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}},
            self.model.chat, self.model.limits, 0)  # fmt: skip
        async for _ in self.news(asked):
            pass
        return web.Response()

    async def models(self, request: web.Request) -> web.StreamResponse:
        assert self.model is not None
        name = self.arguments.served_model_name
        card = {
            "id": name, "object": "model", "created": int(self.started), "owned_by": "rigbook",
            "root": self.arguments.model_path, "parent": None, "max_model_len": self.model.context,
        }  # fmt: skip
        return web.json_response({"object": "list", "data": [card]})

    async def model_info(self, request: web.Request) -> web.StreamResponse:
        path = self.arguments.model_path
        return web.json_response({
            "model_path": path, "tokenizer_path": path, "is_generation": True, "preferred_sampling_params": None,
            "weight_version": "default", "has_image_understanding": False, "has_audio_understanding": False,
            "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        })  # fmt: skip

    async def server_info(self, request: web.Request) -> web.StreamResponse:
        info = self.arguments.as_info() | {
            "version": VERSION,
            "status": "loading" if self.model is None else "ready",
            "engine": "reference",
            "device": "cpu",
            "torch": torch.__version__,
            "cpu": cpu_name(),
        }
        if self.model is not None:
            c = self.model.counters
            info["context_length"] = self.model.context
            info["max_total_num_tokens"] = c.capacity
            state: dict[str, Any] = {
                "last_gen_throughput": c.throughput,
                "memory_usage": {
                    "weight": round(self.model.weight_bytes / 1e9, 2),
                    "kvcache": round(self.model.decoder.cache.kv.nbytes / 1e9, 2),
                    "token_capacity": c.capacity,
                    "graph": 0.0,
                },
                "effective_max_running_requests_per_dp": self.arguments.max_running_requests,
            }
            if c.lifetime_verify:
                state["avg_spec_accept_length"] = 1 + c.lifetime_accepted / c.lifetime_verify
            info["internal_states"] = [self.arguments.as_info() | state]
        return web.json_response(info)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        assert self.model is not None
        text = prometheus(self.model.counters, self.arguments.served_model_name, self.model.context)
        return web.Response(text=text, content_type="text/plain")

    async def flush_cache(self, request: web.Request) -> web.StreamResponse:
        """There is no prefix cache; as in SGLang the lifetime acceptance counters start again."""
        assert self.model is not None and self.thread is not None
        if self.thread.busy:
            return web.Response(status=400, text="Flush cache failed: requests are running or waiting.\n")
        self.model.counters.lifetime_verify = self.model.counters.lifetime_accepted = 0
        return web.Response(text="Cache flushed.\n")


def usage(asked: Asked) -> dict[str, Any]:
    prompt, completion = len(asked.request.prompt), len(asked.request.output)
    return {
        "prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
        "prompt_tokens_details": None, "reasoning_tokens": 0,
    }  # fmt: skip


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


async def _json(request: web.Request) -> Any:
    try:
        value = json.loads(await request.read())
        json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text to tokenize
        return value
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def _open_stream(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def _send(response: web.StreamResponse, value: dict[str, Any]) -> None:
    await response.write(f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode())


def _error(status: int, message: str, kind: str) -> web.Response:
    inner = {"message": message, "type": kind, "param": None, "code": status}
    # OpenAI's clients look under `error`, SGLang's at the top.
    return web.json_response({"object": "error", **inner, "error": inner}, status=status)
