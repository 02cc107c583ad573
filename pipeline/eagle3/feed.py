"""Batches made ready beside training: rows are read from their mapped files by a thread, and copied to the GPU on a
stream of its own, while the step before computes.

`Feed` also knows how long training had to wait: `waited` (by the clock of the CPU, for the thread) and, on a GPU,
`stalled` (by the GPU's own clock, for the copy). Their sum over the time of the run is the share that data cost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3.batch import Batch, Gathered, moved

AHEAD = 3  # batches that are ready at most: each is as large as its hidden states


class Feed:
    """Iterates over the results of `made` of each item. On a processor (device cpu and no `ahead`) each is made when it
    is asked for: a thread would only take the time of those that compute."""

    def __init__(
        self,
        items: Iterator[Any],
        gathered: Callable[[Any], Gathered],
        to_batch: Callable[[Gathered], Batch],
        device: torch.device,
        ahead: int | None = None,
    ) -> None:
        self.items, self.gathered, self.to_batch, self.device = items, gathered, to_batch, device
        self.ahead = (0 if device.type == "cpu" else AHEAD) if ahead is None else ahead
        self.waited = 0.0
        self._stalls: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._stalled = 0.0
        self._stop = threading.Event()
        self._ready: queue.Queue[tuple[Any, Any]] = queue.Queue(max(1, self.ahead))
        self._thread = threading.Thread(target=self._work, name="feed", daemon=True) if self.ahead else None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._thread is not None:
            self._thread.start()

    def next(self) -> tuple[Any, Batch]:
        """(item, its batch). Raises what the thread raised."""
        began = time.monotonic()
        if self._thread is None:
            item = next(self.items)
            ready = self.gathered(item)
        else:
            item, ready = self._ready.get()
            if isinstance(ready, BaseException):
                raise ready
        self.waited += time.monotonic() - began
        return item, self.to_batch(self._arrived(ready))

    def _arrived(self, ready: Any) -> Gathered:
        """The batch on the device, in the order of the computing stream."""
        if self._stream is None:
            made: Gathered = ready
            return made
        there, copied = ready
        stream = torch.cuda.current_stream(self.device)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record(stream)
        stream.wait_event(copied)
        after.record(stream)
        self._stalls.append((before, after))

        def owned(tensor: Tensor) -> Tensor:
            tensor.record_stream(stream)  # its memory is not for the copying stream until this one is done with it
            return tensor

        return moved(there, owned)

    def _work(self) -> None:
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # else page-locked memory is asked of the first GPU, for all
            while not self._stop.is_set():
                item = next(self.items)
                ready: Any = self.gathered(item)
                if self._stream is not None:
                    with torch.cuda.stream(self._stream):
                        there = moved(ready, lambda t: t.to(self.device, non_blocking=True))
                        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                        copied.record(self._stream)
                    ready = (there, copied)
                self._put((item, ready))
        except BaseException as error:  # passed on to who asks for the next batch
            self._put((None, error))

    def _put(self, made: tuple[Any, Any]) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(made, timeout=0.2)
            except queue.Full:
                continue

    def stalled(self) -> float:
        """Seconds that the GPU waited for copies, of batches whose step is done."""
        while self._stalls and self._stalls[0][1].query():  # type: ignore[no-untyped-call]
            before, after = self._stalls.pop(0)
            self._stalled += before.elapsed_time(after) / 1e3
        return self._stalled

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10)
