"""What a patched SGLang runs to write hidden states: `pipeline.sglang_patches.manage` puts this file into the installed
package as `sglang/srt/rigbook_capture.py`. Needs torch and safetensors only; our stage imports its names and rules.

Two environment variables of the server switch it on:

    RIGBOOK_HIDDEN_DIR      folder for the states, on the server's host; tmpfs or a fast local disk
    RIGBOOK_HIDDEN_LAYERS   physical layers whose outputs to keep, counted from 0: "1,29,57"

A request to /generate whose `rid` begins with "rigbook-" then leaves, after its prefill, one file beside its answer:

    RID.safetensors         tokens [T] int32, states [A + 1, T, H] (the layers in ascending order, then the final
                            states after the model's last norm), in the model's own dtype
    RID.error               one sentence instead of it, where the states would not be those of the request

and capture.json says, from the start on, which layers are kept. Files are written under another name and renamed.

Where it hooks in, and why there: `LogitsProcessor.forward` is the one place that every model of SGLang passes with its
final states, its captures and the batch in hand, after all ranks have been reduced; `set_dflash_layers_to_capture` is
the one setter of captures that counts physical outputs in every model (the EAGLE-3 one adds 1 in deepseek_v2.py only
if the first layer is 1). States are the same on every tensor-parallel rank, so rank 0 alone writes.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER, LAYERS = "RIGBOOK_HIDDEN_DIR", "RIGBOOK_HIDDEN_LAYERS"
PREFIX = "rigbook-"
WRITERS = 2
WAITING = 8 << 30  # bytes of host memory that may wait for the disk before the model waits
FLOOR = 1 << 30  # bytes that must stay free in the folder

log = logging.getLogger(__name__)


# What a server must be told, and what happens otherwise: a sentence each (key of ServerArgs, wanted value, why).
RULES: tuple[tuple[str, Any, str], ...] = (
    (
        "disable_radix_cache",
        True,
        "--disable-radix-cache: a prefix found in the cache is not computed, so has no states",
    ),
    ("chunked_prefill_size", -1, "--chunked-prefill-size -1: a chunked prompt passes in pieces"),
    ("disable_cuda_graph", True, "--disable-cuda-graph: a replayed graph does not run the capture"),
    ("speculative_algorithm", None, "no speculation: a drafter decides itself which layers are captured"),
    ("pp_size", 1, "--pp-size 1: a pipeline rank sees its own layers only"),
    ("enable_dp_attention", False, "no --enable-dp-attention: ranks hold different requests"),
    ("enable_mixed_chunk", False, "no --enable-mixed-chunk: decoding requests ride along"),
    ("enable_two_batch_overlap", False, "no --enable-two-batch-overlap: its layers capture nothing"),
    ("attn_cp_size", 1, "no context parallelism: a rank holds a part of the positions"),
)


def unfit(args: Mapping[str, Any]) -> list[str]:
    """What of a server's arguments (ServerArgs, or /server_info) makes states wrong or missing; empty if nothing.
    A key that this version does not have is no objection."""
    return [why for key, wanted, why in RULES if key in args and args[key] != wanted]


@dataclass
class _Job:
    rid: str
    tokens: Tensor  # [T]
    states: Tensor  # [A + 1, T, H] on the host, perhaps still being copied
    copied: torch.cuda.Event | None


class Capture:
    """Takes states from the forward pass and writes them in threads of its own.

    Copies go to pinned memory on the model's own stream: at 57 KB a token that is a microsecond, while computing it
    takes fifty, and nothing needs to be kept alive on the GPU until a second stream has read it.
    """

    def __init__(self, folder: Path, layers: Sequence[int]) -> None:
        self.folder, self.layers = folder, tuple(layers)
        self.queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.room = threading.Condition()
        self.waiting = 0  # bytes
        self.threads = [threading.Thread(target=self._write_all, daemon=True) for _ in range(WRITERS)]
        for thread in self.threads:
            thread.start()

    def take(
        self,
        rids: Sequence[str],
        lengths: Sequence[int],
        prefixes: Sequence[int],
        tokens: Tensor,
        aux: Sequence[Tensor] | None,
        final: Tensor,
    ) -> None:
        """One prefill pass of N tokens: requests side by side; tokens [N], aux A times [N, H], final [N, H]. Never
        raises: the server answers for others as well. N may be larger than the lengths' sum where it was padded."""
        ours = [i for i, rid in enumerate(rids) if rid.startswith(PREFIX)]
        if not ours:
            return
        try:
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            captured = len(aux or ()) == len(self.layers)
            sizes = {len(part) for part in (tokens, final, *(aux or ()))}
            for i in ours:
                if not captured:
                    self._fail(rids[i], f"the model captured {len(aux or ())} layers, expected {len(self.layers)}")
                elif prefixes[i]:
                    self._fail(rids[i], f"{prefixes[i]} tokens of the prompt were in a cache, or in an earlier chunk")
                elif min(sizes) < sum(lengths):
                    self._fail(rids[i], f"{sum(lengths)} tokens were computed, this rank holds {min(sizes)} of them")
                else:
                    self._copy(rids[i], slice(starts[i], starts[i] + lengths[i]), tokens, (*(aux or ()), final))
        except Exception as error:
            log.exception("rigbook capture")
            for i in ours:
                self._fail(rids[i], f"{type(error).__name__}: {error}")

    def _copy(self, rid: str, at: slice, tokens: Tensor, layers: Sequence[Tensor]) -> None:
        cuda = layers[0].is_cuda
        shape = (len(layers), at.stop - at.start, layers[0].shape[-1])
        size = shape[0] * shape[1] * shape[2] * layers[0].element_size()
        with self.room:
            self.room.wait_for(lambda: not self.waiting or self.waiting + size <= WAITING)
            self.waiting += size
        states = torch.empty(shape, dtype=layers[0].dtype, pin_memory=cuda)
        for row, layer in zip(states, layers, strict=True):
            row.copy_(layer[at], non_blocking=cuda)
        ids = torch.empty(shape[1], dtype=torch.int64, pin_memory=cuda)
        ids.copy_(tokens[at], non_blocking=cuda)
        copied = None
        if cuda:
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()
        self.queue.put(_Job(rid, ids, states, copied))

    def _write_all(self) -> None:
        while (job := self.queue.get()) is not None:
            try:
                if job.copied is not None:
                    job.copied.synchronize()
                self._write(job)
            except Exception as error:
                self._fail(job.rid, f"cannot write: {error}")
            finally:
                with self.room:
                    self.waiting -= job.states.nbytes
                    self.room.notify_all()

    def _write(self, job: _Job) -> None:
        if shutil.disk_usage(self.folder).free < FLOOR + job.states.nbytes:
            return self._fail(job.rid, f"less than {FLOOR / 1e9:.0f} GB are free in {self.folder}")
        path = self.folder / f"{job.rid}.safetensors"
        temporary = self.folder / f".{job.rid}.tmp"
        save_file({"tokens": job.tokens.to(torch.int32), "states": job.states}, temporary)
        os.replace(temporary, path)

    def _fail(self, rid: str, why: str) -> None:
        temporary = self.folder / f".{rid}.error.tmp"
        try:
            temporary.write_text(why)
            os.replace(temporary, self.folder / f"{rid}.error")
        except OSError:
            log.exception("rigbook capture: %s: %s", rid, why)

    def close(self) -> None:
        """Write what was taken, end the threads."""
        for _ in self.threads:
            self.queue.put(None)
        for thread in self.threads:
            thread.join()


# --- the two places of SGLang that call us ----------------------------------------------------------------------------

_capture: Capture | None = None


def start(model: Any, server_args: Any, rank: int) -> None:
    """`ModelRunner.init_aux_hidden_state_capture`: tell the model what to capture. Does nothing without the variables.
    Raises RuntimeError, which ends the server's start, where the states could not be right."""
    global _capture
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    layers = sorted({int(layer) for layer in os.environ[LAYERS].split(",")})
    if objections := unfit(vars(server_args)):
        raise RuntimeError("rigbook: hidden states need " + "; ".join(objections))
    if not hasattr(model, "set_dflash_layers_to_capture"):
        raise RuntimeError(f"rigbook: {type(model).__name__} cannot capture layers in this version of SGLang")
    model.set_dflash_layers_to_capture(layers)
    if rank != 0:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    temporary = path / ".capture.json.tmp"
    temporary.write_text(json.dumps({"layers": layers, "pid": os.getpid(), "model": server_args.model_path}))
    os.replace(temporary, path / "capture.json")
    _capture = Capture(path, layers)


def take(final: Tensor, batch: Any, aux: Sequence[Tensor] | None) -> None:
    """`LogitsProcessor.forward`, before anything is thrown away. `batch`: SGLang's ForwardBatch, which has the token
    ids also where the model was given embeddings instead (general_mm_embed_routine, which Kimi-K2.5 goes through)."""
    if _capture is None or getattr(batch, "rids", None) is None or not batch.forward_mode.is_extend():
        return
    if batch.extend_seq_lens_cpu is None or batch.extend_prefix_lens_cpu is None:
        return
    lengths, prefixes = ([int(n) for n in t] for t in (batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu))
    _capture.take(batch.rids, lengths, prefixes, batch.input_ids, aux, final)
