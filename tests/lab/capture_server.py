"""A stand-in for a patched SGLang: SGLang's two endpoints around our own decoder, with the real capture module.

Requests that wait together are computed side by side, as SGLang does, one row after another in one pass of N tokens.
`tamper` may change what the capture is given, to play a server that does wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from aiohttp import web

from pipeline.eagle3.target import Target
from pipeline.sglang_patches import capture

ARGS = {
    "disable_radix_cache": True, "chunked_prefill_size": -1, "disable_cuda_graph": True, "speculative_algorithm": None,
    "pp_size": 1, "enable_dp_attention": False, "enable_mixed_chunk": False, "enable_two_batch_overlap": False,
    "attn_cp_size": 1, "dtype": "float32", "tp_size": 1, "version": "0.5.15.post1",
}  # fmt: skip


class CaptureServer:
    def __init__(self, model: Path, folder: Path, layers: list[int]) -> None:
        self.target = Target.load(model, torch.float32)
        self.model, self.layers = self.target, layers
        self.args: dict[str, Any] = {**ARGS, "model_path": str(model)}
        self.tamper: Callable[[Any], None] = lambda batch: None
        self.waiting: list[tuple[dict[str, Any], asyncio.Future[None]]] = []
        self.passes: list[int] = []
        folder.mkdir(exist_ok=True)
        (folder / "capture.json").write_text(f'{{"layers": {layers}, "model": "{model}", "pid": 1}}')
        self.capture = capture.Capture(folder, layers)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if len(body["input_ids"]) > 200:
            return web.json_response({"error": {"message": "longer than the context"}}, status=400)
        assert body["sampling_params"]["max_new_tokens"] == 1
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append((body, done))
        await asyncio.sleep(0)  # others of the same moment join
        if self.waiting:
            batch, self.waiting = self.waiting, []
            self.prefill([body for body, _ in batch])
            for _, future in batch:
                future.set_result(None)
        await done
        return web.json_response({"output_ids": [1], "meta_info": {"id": body["rid"]}})

    @torch.inference_mode()
    def prefill(self, bodies: list[dict[str, Any]]) -> None:
        self.passes.append(len(bodies))
        aux, final = [], []
        for body in bodies:
            ids = torch.tensor([body["input_ids"]])
            made = self.target.forward(ids, captures=tuple(layer + 1 for layer in self.layers))
            aux.append(made.captures[0].unflatten(-1, (len(self.layers), -1)))  # [T, A, H]
            final.append(made.final[0])
        batch = SimpleNamespace(
            rids=[body["rid"] for body in bodies], lengths=[len(body["input_ids"]) for body in bodies],
            prefixes=[0] * len(bodies), ids=torch.tensor([id for body in bodies for id in body["input_ids"]]),
            aux=list(torch.cat(aux).unbind(1)), final=torch.cat(final),
        )  # fmt: skip
        self.tamper(batch)
        self.capture.take(batch.rids, batch.lengths, batch.prefixes, batch.ids, batch.aux, batch.final)

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(self.args)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": []})


@contextlib.contextmanager
def serving(server: CaptureServer) -> Iterator[str]:
    """The URL of a server in a thread of its own."""
    loop, ready, url = asyncio.new_event_loop(), threading.Event(), []

    async def start() -> web.AppRunner:
        app = web.Application()
        app.add_routes([
            web.post("/generate", server.generate), web.get("/server_info", server.info),
            web.get("/v1/models", server.models),
        ])  # fmt: skip
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def work() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.capture.close()
