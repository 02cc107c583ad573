"""The probe: answers questions about the host that it runs on. Standard library and Python 3.9 syntax only.

It is never installed. The controller starts `python3 -I -S -u -c BOOT N NONCE`, writes N bytes of packed source to
stdin, and from then on frames go both ways: one JSON object on a line, and after it as many raw bytes as its `bytes`
says. Calls and streams share the channel; each has a thread, so one that waits keeps nobody else waiting.

    <- {"ready": NONCE, "v": 2, "pid": ..., "boot_id": ..., "python": ...}
    -> {"load": "host", "bytes": 4711} + packed source         a module, sent ahead of the first call that needs it
    -> {"id": 7, "call": "system", "args": {}}
    <- {"id": 7, "ok": true, "result": {...}, "wall": ..., "monotonic": ...}      seconds
    <- {"id": 8, "ok": false, "error": "PermissionError: ...", "type": "PermissionError"}
    -> {"id": 9, "stream": "follow", "args": {}}               then any number of frames, then an answer as above
    <- {"id": 9, "stream": "follow", ..., "bytes": 65536} + the bytes
    -> {"id": 9, "credit": 1048576}                            so many more bytes may be sent: a slow reader of one
    -> {"id": 9, "cancel": true}                               stream must not hold up the answers to others
    <- {"beat": 3, "wall": ..., "monotonic": ...}              every 5 s, also when nothing is asked
    -> {"beat": 1}                                             likewise

It ends at the end of stdin: a lost connection leaves nothing behind. A connection that is cut without a word gives
no end of stdin for a quarter of an hour; the missing beats do.
"""

import json
import os
import sys
import threading
import time
import zlib
from _queue import SimpleQueue
from typing import Any, Dict, List, Optional, Tuple

from remote.probe import procs

BEAT_S = 5.0
SILENCE_S = 60.0  # without a word from the controller: it is gone, or its machine sleeps; it will start another probe
WINDOW = 4 << 20  # bytes of one stream that may be under way
AT_ONCE = 64  # calls and streams together
MEMORY = 256 << 20  # bytes of data; the process table of a big machine takes about 10 MiB
NICE = 5

CALLS = {
    "clock": "procs.clock",
    "system": "host.system",
    "space": "host.space",
    "listeners": "host.listeners",
    "env": "host.env",
    "gpus": "host.gpus",
    "processes": "sampling.processes",
    "job": "jobdir.job",
    "jobs": "jobdir.jobs",
    "holders": "whose.all_holders",
    "reclaim": "reclaim.reclaim",
    "gpu_look": "gpulook.gpu_look",
    "nvml_load": "nvml.load",
}
STREAMS = {"follow": "tail.follow", "live": "sampling.live"}


class Cancelled(Exception):
    """Nobody wants this stream any more."""


class Wire:
    """The way back. One frame at a time, whoever sends it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, header: Dict[str, Any], data: bytes = b"") -> None:
        line = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            for part in (line, data):
                view = memoryview(part)
                while view:
                    view = view[os.write(self._descriptor, view) :]


class Stream:
    """What a stream's thread is given: a way to send, to wait, and to learn that it should stop."""

    def __init__(self, wire: Wire, id: int, name: str) -> None:
        self._wire, self._id, self._name = wire, id, name
        self._credit = WINDOW
        self._changed = threading.Condition()
        self._cancelled = False

    def send(self, header: Dict[str, Any], data: bytes = b"") -> None:
        """One frame; waits while the other side has not taken what was sent before."""
        with self._changed:
            while self._credit <= 0 and not self._cancelled:
                self._changed.wait()
            if self._cancelled:
                raise Cancelled
            self._credit -= len(data)
        self._wire.send(dict(header, id=self._id, stream=self._name, bytes=len(data)), data)

    def wait(self, seconds: float) -> None:
        with self._changed:
            if not self._cancelled:
                self._changed.wait(seconds)
            if self._cancelled:
                raise Cancelled

    def more(self, credit: int) -> None:
        with self._changed:
            self._credit += credit
            self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()


class Probe:
    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._streams: Dict[int, Stream] = {}
        self._todo: "SimpleQueue[Tuple[Dict[str, Any], Optional[Stream]]]" = SimpleQueue()
        self._threads = 0
        self._lock = threading.Lock()
        self._busy = 0
        self.heard = time.monotonic()

    def take(self, asked: Dict[str, Any]) -> None:
        """One message of the controller's."""
        if "call" in asked or "stream" in asked:
            with self._lock:
                if self._busy >= AT_ONCE:
                    self._answer(asked["id"], None, RuntimeError("%d calls are being answered already" % AT_ONCE))
                    return
                self._busy += 1
                new = self._busy > self._threads
                self._threads += new
            stream = None
            if "stream" in asked:
                stream = self._streams[asked["id"]] = Stream(self._wire, asked["id"], asked["stream"])
            self._todo.put((asked, stream))
            if new:
                threading.Thread(target=self._worker, daemon=True).start()
        elif asked.get("id") in self._streams:
            stream = self._streams[asked["id"]]
            if "credit" in asked:
                stream.more(asked["credit"])
            elif "cancel" in asked:
                stream.cancel()

    def _worker(self) -> None:
        while True:
            self._work(*self._todo.get())

    def _work(self, asked: Dict[str, Any], stream: Optional[Stream]) -> None:
        try:
            table, name = (CALLS, asked["call"]) if stream is None else (STREAMS, asked["stream"])
            module, function = table[name].split(".")
            __import__("remote.probe." + module)
            work = getattr(sys.modules["remote.probe." + module], function)
            args = asked.get("args", {})
            self._answer(asked["id"], work(**args) if stream is None else work(stream, **args), None)
        except Cancelled:
            pass
        except Exception as error:
            self._answer(asked["id"], None, error)
        finally:
            self._streams.pop(asked["id"], None)
            with self._lock:
                self._busy -= 1

    def _answer(self, id: int, result: Any, error: Optional[Exception]) -> None:
        answer: Dict[str, Any] = {"id": id, "ok": error is None, "wall": time.time(), "monotonic": time.monotonic()}
        if error is None:
            answer["result"] = result
        else:
            answer.update(type=type(error).__name__, error="%s: %s" % (type(error).__name__, error))
        try:
            self._wire.send(answer)
        except OSError:
            leave()  # nobody reads any more

    def beat(self) -> None:
        """For ever: show that we live, and look whether the controller does."""
        number = 0
        while True:
            time.sleep(BEAT_S)
            number += 1
            if time.monotonic() - self.heard > SILENCE_S:
                leave()
            try:
                self._wire.send({"beat": number, "wall": time.time(), "monotonic": time.monotonic()})
            except OSError:
                leave()


def leave() -> None:
    """At once, whatever the threads do: they only look. A program that one of them waits for ends with us."""
    children = getattr(sys.modules.get("remote.probe.host"), "CHILDREN", ())
    for child in list(children):
        child.kill()
    os._exit(0)


def limit() -> None:
    """A probe must never be what a host suffers from. Programs that it starts get the old limits back: host.run."""
    import resource

    os.nice(NICE)
    threading.stack_size(512 << 10)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY if hard < 0 else min(MEMORY, hard), hard))


def main(argv: List[str]) -> None:
    # Only we write to the real stdout: a stray print of some library must not end up between two answers.
    wire = Wire(os.dup(1))
    os.dup2(2, 1)
    limit()
    nonce = argv[0] if argv else ""
    ready = {"ready": nonce, "v": 2, "pid": os.getpid(), "boot_id": procs.boot_id(), "python": sys.executable}
    wire.send(ready)
    probe = Probe(wire)
    threading.Thread(target=probe.beat, daemon=True).start()
    source = sys.stdin.buffer
    for line in iter(source.readline, b""):
        probe.heard = time.monotonic()
        asked = json.loads(line)
        data = source.read(asked["bytes"]) if "bytes" in asked else b""
        if "load" in asked:
            sys.modules["remote"].SENT["remote.probe." + asked["load"]] = zlib.decompress(data)
        else:
            probe.take(asked)
    leave()
