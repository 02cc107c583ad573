"""The thread that owns the model: it takes requests from a queue, decodes them together, and hands out tokens.

One thread, because torch already uses every core inside a product. The HTTP loop never touches the model, and this
thread never touches a connection: they meet in `submit` (HTTP to model) and in the callback (model to HTTP).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.decode import Decoder, positions_needed
from pipeline.eagle3.draft import Drafter
from pipeline.eagle3.target import Target, read_config
from pipeline.stages.reference.arguments import Arguments
from pipeline.stages.reference.asked import Asked, Limits
from pipeline.stages.reference.counters import Counters, stamped

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Model:
    """The loaded model. Raises ValueError (a sentence) where target, drafter and arguments do not fit together."""

    def __init__(self, arguments: Arguments) -> None:
        torch.set_num_threads(arguments.threads)
        began = time.monotonic()
        stamped("Load weight begin.")
        directory, dtype = Path(arguments.model_path), DTYPES[arguments.dtype]
        self.chat = Chat(directory)
        config = read_config(directory)
        self.context = arguments.context_length or config.max_positions
        if self.context > config.max_positions:
            raise ValueError(f"--context-length {self.context} is beyond the model's {config.max_positions} positions")
        steps = arguments.speculative_num_steps
        positions = positions_needed(0, self.context, steps)
        self.target = Target.load(directory, dtype, positions)
        self.weight_bytes = sum(p.nbytes for layer in self.target.layers for p in vars(layer).values())
        self.weight_bytes += self.target.embed.nbytes
        stamped(
            f"Load weight end. elapsed={time.monotonic() - began:.2f} s, type=LlamaForCausalLM, dtype={dtype}, "
            f"mem usage={self.weight_bytes / 1e9:.2f} GB."
        )
        self.drafter: Drafter | None = None
        if arguments.speculative_draft_model_path:
            self.drafter = load_drafter(Path(arguments.speculative_draft_model_path), self.target)
            stamped(f"Load draft weight end. type=LlamaForCausalLMEagle3, dtype={dtype}.")
        self.decoder = Decoder(self.target, arguments.max_running_requests, positions, self.drafter, steps)
        self.limits = Limits(self.context, frozenset(config.eos), config.vocab_size)
        self.counters = Counters(steps, arguments.max_running_requests * positions)
        stamped(
            f"KV Cache is allocated. #tokens: {self.counters.capacity}, "
            f"size: {self.decoder.cache.kv.nbytes / 1e9:.2f} GB (touched as it fills)"
        )


def load_drafter(directory: Path, target: Target) -> Drafter:
    """Raises ValueError unless the drafter fits the target."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"there is no drafter at {directory}")
    drafter = Drafter.load(directory, target.embed, target.dtype)
    for name, of_draft, of_target in (
        ("hidden_size", drafter.config.hidden_size, target.config.hidden_size),
        ("vocab_size", drafter.config.vocab_size, target.config.vocab_size),
        ("layers", drafter.config.target_layers, target.config.layers),
    ):
        if of_draft != of_target:
            raise ValueError(f"the drafter was made for another target: {name} {of_draft} there, {of_target} here")
    return drafter


class ModelThread(threading.Thread):
    """Decodes until `stop`. `deliver` is called on this thread with the requests that have news."""

    def __init__(self, model: Model, deliver: Callable[[Sequence[Asked]], None]) -> None:
        super().__init__(name="model", daemon=True)
        self.model, self.deliver = model, deliver
        self.counters = model.counters
        self.inbox: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()
        self.waiting: list[Asked] = []
        self.running: dict[int, Asked] = {}  # id(request) -> who asked
        self.failure: BaseException | None = None
        self.ended = threading.Event()

    def submit(self, asked: Asked) -> None:
        asked.arrived = time.monotonic()
        self.inbox.put(asked)

    def stop(self) -> None:
        self.inbox.put(None)

    def run(self) -> None:
        try:
            while self._receive():
                self._admit()
                self._step()
        except BaseException as error:
            self.failure = error
        self.ended.set()

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or not self.inbox.empty())

    def _receive(self) -> bool:
        """Take what came in; wait for it when there is nothing to do. False: stop."""
        idle = not self.running and not self.waiting
        if idle:
            self.counters.used_tokens = 0
        while True:
            try:
                asked = self.inbox.get(block=idle)
            except queue.Empty:
                break
            if asked is None:
                return False
            if idle:
                self.counters.idle()
            idle = False
            self.waiting.append(asked)
        stay = [a for a in self.waiting if not a.gone]
        self.counters.aborted += len(self.waiting) - len(stay)
        self.waiting = stay
        self.counters.queued = len(self.waiting)
        return True

    def _admit(self) -> None:
        decoder = self.model.decoder
        new = self.waiting[: decoder.free_rows]
        if not new:
            return
        self.waiting = self.waiting[len(new) :]
        for asked in new:
            self.running[id(asked.request)] = asked
        decoder.admit([asked.request for asked in new])
        self._count()
        self.counters.prefill(len(new), sum(len(a.request.prompt) for a in new))
        now = time.monotonic()
        for asked in new:
            asked.first_token = now
            self.counters.first_token.observe(now - asked.arrived)
        self._hand_out(new)

    def _step(self) -> None:
        decoder = self.model.decoder
        for request in decoder.active:
            if self.running[id(request)].gone:
                request.finish = "abort"
                self.counters.aborted += 1
        for request in decoder.retire():
            self.running.pop(id(request))
        self._count()
        if not decoder.active:
            return
        rows = list(decoder.active)
        before = [len(r.output) for r in rows]
        decoder.step()
        tokens = sum(len(r.output) for r in rows) - sum(before)
        accepted = sum(r.accepted[-1] for r in rows) if decoder.steps else 0
        self._count()
        self.counters.decoded(tokens, len(rows) if decoder.steps else 0, accepted)
        self._hand_out([self.running[id(r)] for r in rows])

    def _hand_out(self, asked: Sequence[Asked]) -> None:
        """Find stop strings, retire what is finished, and tell the HTTP loop."""
        for one in asked:
            if one.stops and one.request.finish is None:
                text = self.model.chat.decode(one.request.output)
                if any(stop in text for stop in one.stops):
                    one.request.finish = "stop"
        now = time.monotonic()
        for request in self.model.decoder.retire():
            done = self.running.pop(id(request))
            self.counters.requests += 1
            self.counters.whole_request.observe(now - done.arrived)
        self._count()
        self.deliver([a for a in asked if a.stream or a.request.finish is not None])

    def _count(self) -> None:
        self.counters.running = len(self.running)
        self.counters.queued = len(self.waiting)
        self.counters.used_tokens = sum(self.model.decoder.cache.lengths) or self.counters.used_tokens
