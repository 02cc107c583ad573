"""Hidden states from the server that serves the target: SGLang with our patch (`pipeline.sglang_patches.capture`).

For targets that our own decoder cannot load, in the number format, the kernels and on the GPUs that will serve them.
The server writes each row's states into a folder that this stage reads, so both run on the same host; states never
travel over HTTP. Each row is checked against what was asked for: its tokens, its length, its layers, finite numbers.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pipeline.eagle3.shards import Row
from pipeline.sglang_patches.capture import FOLDER, LAYERS, PREFIX, unfit
from pipeline.stages.client import Client, Rejected, Unreachable, connect, each, run_async
from pipeline.stages.protocol import Stage

BATCH_TOKENS = 131072  # asked for at once; the server makes its own batches
CONCURRENCY = 64
LATE = 120.0  # seconds after its answer that a row's file may take: 8 GiB may wait for the disk before it
LOOK = 0.01  # seconds between two looks for it


class ServerStates:
    """States by asking a patched SGLang. Refuses (hidden.server-…) a server whose states would not be the rows'."""

    def __init__(self, stage: Stage, layers: tuple[int, ...], base_url: str, folder: Path) -> None:
        self.stage, self.layers, self.base_url, self.folder = stage, layers, base_url, folder
        self.batch_tokens = BATCH_TOKENS
        info = run_async(self._info())
        if objections := unfit(info):
            stage.refuse(
                "hidden.server-flags",
                f"a server set up like {base_url} gives wrong states or none; start it with " + "; ".join(objections),
            )
        if list(layers) != sorted(set(layers)):
            stage.refuse("hidden.layers", f"a server gives layers in ascending order, once each: {list(layers)}")
        self._check_capture(info)
        self.source = f"sglang {info.get('version', 'of unknown version')}"
        self.about = {name: info.get(name) for name in ("dtype", "quantization", "kv_cache_dtype", "tp_size")}

    async def _info(self) -> dict[str, Any]:
        async with connect(self.base_url, 1) as client:
            try:
                info: dict[str, Any] = json.loads(await client.get("/server_info"))
            except (Rejected, Unreachable) as error:
                self.stage.refuse("hidden.server-gone", f"the server does not tell its arguments: {error}")
        return info

    def _check_capture(self, info: Mapping[str, Any]) -> None:
        """Whether the server is patched and keeps our layers, from what it wrote when it started."""
        path = self.folder / "capture.json"
        wanted = ",".join(map(str, self.layers))
        try:
            told = json.loads(path.read_text())
        except (OSError, ValueError):
            self.stage.refuse(
                "hidden.not-patched",
                f"there is no {path}: patch SGLang (python -m pipeline.sglang_patches.manage apply) and start it with "
                f"{FOLDER}={self.folder} and {LAYERS}={wanted}",
            )
        if tuple(told["layers"]) != self.layers or told["model"] != info.get("model_path", told["model"]):
            self.stage.refuse(
                "hidden.server-layers",
                f"{path} is of layers {told['layers']} of {told['model']}, wanted are {list(self.layers)} of "
                f"{info.get('model_path')}: start the server with {LAYERS}={wanted}",
            )

    def __call__(self, batch: list[dict[str, Any]]) -> Iterator[Row]:
        yield from run_async(self._ask(batch))

    async def _ask(self, batch: list[dict[str, Any]]) -> list[Row]:
        made: list[Row] = []
        async with connect(self.base_url, CONCURRENCY) as client:

            async def one(row: dict[str, Any]) -> None:
                made.append(await self._row(client, row))

            await each(batch, CONCURRENCY, one)
        return made

    async def _row(self, client: Client, row: dict[str, Any]) -> Row:
        rid = f"{PREFIX}{uuid.uuid4().hex}"  # a new one each time: what an earlier run left is never taken for ours
        body = {"rid": rid, "input_ids": row["input_ids"], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        try:
            await client.post("/generate", body, len(row["input_ids"]))
        except Rejected as error:
            self.stage.refuse("hidden.server-refused", f"row {row['id']}: the server will not compute it: {error}")
        except Unreachable as error:
            self.stage.refuse("hidden.server-gone", f"the server stopped answering: {error}; what is whole is kept")
        path, failed = self.folder / f"{rid}.safetensors", self.folder / f"{rid}.error"
        for _ in range(round(LATE / LOOK)):
            if path.exists():
                return await asyncio.to_thread(self._read, path, row)
            if failed.exists():
                why = failed.read_text()
                failed.unlink()
                self.stage.refuse("hidden.server-states", f"row {row['id']}: the server gave no states: {why}")
            await asyncio.sleep(LOOK)
        self.stage.refuse(
            "hidden.not-patched",
            f"row {row['id']}: answered, but {path} did not come within {LATE:.0f} s: the server that runs is not the "
            f"one that wrote {self.folder}/capture.json, or is not on this host",
        )

    def _read(self, path: Path, row: dict[str, Any]) -> Row:
        got = load_file(path)
        path.unlink()
        tokens, states = got["tokens"].long(), got["states"]  # [T], [A + 1, T, H]
        ids = torch.tensor(row["input_ids"])
        if not torch.equal(tokens, ids) or states.shape[:2] != (len(self.layers) + 1, len(ids)):
            self.stage.refuse(
                "hidden.server-states",
                f"row {row['id']}: states of shape {tuple(states.shape)} for {len(tokens)} tokens came back, asked for "
                f"were {len(self.layers) + 1} layers of {len(ids)}, and the same tokens",
            )
        if not states.isfinite().all():
            self.stage.refuse("hidden.not-finite", f"row {row['id']}: the target's states are not finite")
        states = states.to(torch.bfloat16)
        mask = torch.tensor(row["loss_mask"], dtype=torch.bool)
        mask[0] = False
        return Row(row["id"], ids, mask, states[:-1].transpose(0, 1).flatten(1), states[-1].clone())
