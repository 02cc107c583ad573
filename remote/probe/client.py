"""Our side of the probe: start the program on a host and ask it things. The protocol is in program.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from remote import pythons, shell
from remote.probe import program, ship
from state.errors import UNREACHABLE, RigbookError

if TYPE_CHECKING:
    from remote.connect import Channel, Link

START_S = 20.0
MAX_LINE = 64 << 20  # bytes; the process table of a big machine is about 1 MiB
KEPT_STDERR = 8192
MISSED = 3  # beats without one byte after which a probe counts as lost: 15 to 20 s
CREDIT = 1 << 20  # bytes taken from a stream before the far side is told


@dataclass(frozen=True)
class Frame:
    """One frame of a stream: what its header says, and its bytes."""

    header: dict[str, Any]
    data: bytes


class Frames:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._header: dict[str, Any] | None = None
        self._seen = 0  # bytes without a newline that need not be looked at again

    def feed(self, data: bytes) -> list[Frame]:
        self._held += data
        found, at = [], 0
        while True:
            if self._header is None:
                end = self._held.find(b"\n", at + self._seen)
                if end < 0:
                    self._seen = len(self._held) - at
                    break
                self._seen = 0
                self._header = json.loads(self._held[at:end])
                at = end + 1
            need = int(self._header.get("bytes", 0))
            if len(self._held) - at < need:
                break
            found.append(Frame(self._header, bytes(self._held[at : at + need])))
            at += need
            self._header = None
        del self._held[:at]
        if self._seen > MAX_LINE:
            raise ValueError(f"an answer of more than {MAX_LINE} bytes")
        return found


class Probe:
    """A conversation with one probe: any number of calls and streams at once. A lost link fails all that wait."""

    def __init__(self, link: Link, stack: contextlib.AsyncExitStack, channel: Channel, marker: shell.Marker) -> None:
        self._link = link
        self._stack = stack
        self._channel = channel
        self._marker = marker
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._streams: dict[int, asyncio.Queue[Frame | RigbookError]] = {}
        self._sent = set(ship.FIRST)
        self._last = 0
        self._stderr = bytearray()
        self._write = asyncio.Lock()
        self._heard = True
        self.closed = False
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.ensure_future(work) for work in (self._read(), self._read_errors(), self._watch())]

    async def call(self, name: str, **args: Any) -> Any:
        """The result of one call. RigbookError `probe.lost` (exit code 4) or `probe.failed`."""
        answer = await self.call_timed(name, **args)
        return answer["result"]

    async def call_timed(self, name: str, **args: Any) -> dict[str, Any]:
        """As `call`, with the far side's `wall` and `monotonic` clocks beside the `result`."""
        self._last += 1
        id = self._last
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        try:
            await self._say({"id": id, "call": name, "args": args}, program.CALLS.get(name))
            answer = await future
        finally:
            self._waiting.pop(id, None)
        return self._checked(name, answer)

    async def stream(self, name: str, **args: Any) -> AsyncGenerator[Frame, None]:
        """The frames of a stream, the last being its answer (`ok`, `result`). Leave the iterator to end it; close it
        (`contextlib.aclosing`) where you leave early. Errors as those of `call`."""
        self._last += 1
        id = self._last
        queue = self._streams[id] = asyncio.Queue()
        taken, over = 0, False
        try:
            await self._say({"id": id, "stream": name, "args": args}, program.STREAMS.get(name))
            while not over:
                frame = await queue.get()
                if isinstance(frame, RigbookError):
                    over = True
                    raise frame
                over = "ok" in frame.header
                if over:
                    self._checked(name, frame.header)
                taken += len(frame.data)
                if taken >= CREDIT:
                    credit, taken = taken, 0
                    await self._say({"id": id, "credit": credit})
                yield frame
        finally:
            del self._streams[id]
            if not over and not self.closed:
                with contextlib.suppress(RigbookError):
                    await self._say({"id": id, "cancel": True})

    def _checked(self, name: str, answer: dict[str, Any]) -> dict[str, Any]:
        if not answer["ok"]:
            raise RigbookError("probe.failed", f"probe call {name}: {answer['error']}", host=self._link.name)
        return answer

    async def _say(self, message: dict[str, Any], work: str | None = None) -> None:
        """One message, after the modules that it needs and that are not there yet."""
        if self.closed:
            raise self._lost()
        parts = []
        for module in sorted(ship.needs(work.partition(".")[0]) - self._sent) if work else ():
            data = ship.packed(module)
            parts += [json.dumps({"load": module, "bytes": len(data)}).encode(), b"\n", data]
            self._sent.add(module)
        parts += [json.dumps(message).encode(), b"\n"]
        try:
            async with self._write:
                await self._channel.write(b"".join(parts))
        except Exception as error:
            raise self._lost(error) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(Exception):
                await self._channel.eof()
        for task in self._tasks:
            task.cancel()
        self._fail(self._lost())
        with contextlib.suppress(Exception):
            await self._stack.aclose()

    async def _read(self) -> None:
        frames, error = Frames(), None
        try:
            while data := await self._channel.read():
                self._heard = True
                if own := self._marker.feed(data):
                    for frame in frames.feed(own):
                        self._take(frame)
        except Exception as caught:
            error = caught
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        """The far side is gone: tell all who wait, and give the channel back."""
        self.closed = True
        self._fail(self._lost(error))
        self._closing = asyncio.ensure_future(self.close())

    def _take(self, frame: Frame) -> None:
        header = frame.header
        if "ready" in header:
            if not self.ready.done():
                self.ready.set_result(header)
        elif header.get("id") in self._streams:
            self._streams[header["id"]].put_nowait(frame)
        elif (future := self._waiting.get(header.get("id", 0))) is not None and not future.done():
            future.set_result(header)

    async def _read_errors(self) -> None:
        with contextlib.suppress(Exception):
            while data := await self._channel.read_error():
                self._stderr += data
                del self._stderr[:-KEPT_STDERR]

    async def _watch(self) -> None:
        """Show the far side that we live, and look whether it does. What counts is how often we looked and saw nothing,
        not the clock: after a sleep of our own machine everything is late at once."""
        missed = 0
        while missed < MISSED:
            await asyncio.sleep(program.BEAT_S)
            missed = 0 if self._heard or not self.ready.done() else missed + 1
            self._heard = False
            if self.ready.done() and missed == 0:
                with contextlib.suppress(RigbookError, TimeoutError):
                    await asyncio.wait_for(self._say({"beat": 1}), program.BEAT_S)
        self._end(TimeoutError(f"nothing came from it for {MISSED * program.BEAT_S:.0f} s"))

    def _fail(self, error: RigbookError) -> None:
        for queue in self._streams.values():
            queue.put_nowait(error)
        for future in [*self._waiting.values(), self.ready]:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting any more; that is no news

    def _lost(self, error: Exception | None = None) -> RigbookError:
        last = self._stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        why = str(error) if error and str(error) else (last[0] if last else "the link is gone")
        return RigbookError(
            "probe.lost",
            f"the probe does not answer any more: {why}",
            host=self._link.name,
            hint="What runs there goes on; the next command makes a new connection.",
            exit_code=UNREACHABLE,
        )

    @property
    def errors(self) -> str:
        """The end of what it wrote to stderr."""
        return self._stderr.decode("utf-8", "replace")


async def start(link: Link) -> Probe:
    """Send the probe and wait until it is ready. It is found by its nonce whatever login scripts print."""
    nonce, packed = secrets.token_hex(8), ship.payload()
    # Found before, it need not be tried again: that takes as long as starting it.
    known = f'p={shell.quote(link.known_python)};[ -x "$p" ]||' if link.known_python else ""
    script = (
        f"{known}p=$({shell.FIND_PYTHON})||{{ {pythons.REPORT} exit 127;}};"
        'exec /usr/bin/env -i RIGBOOK_PROBE=1 PATH="$PATH" HOME="$HOME" LC_ALL=C.UTF-8 '
        f'"$p" -I -S -u -c {shell.quote(ship.BOOT)} {len(packed)} {nonce}'
    )
    stack = contextlib.AsyncExitStack()
    probe: Probe | None = None
    try:
        channel, marker = await stack.enter_async_context(link.open(script=script))
        probe = Probe(link, stack, channel, marker)
        await channel.write(packed)
        ready = await asyncio.wait_for(asyncio.shield(probe.ready), START_S)
    except BaseException as error:
        if probe is not None:
            await probe.close()
        await stack.aclose()
        if isinstance(error, asyncio.CancelledError):
            raise
        if probe is not None and pythons.MARK in probe.errors:
            raise pythons.missing(probe.errors, link.name) from error
        if isinstance(error, RigbookError) and error.id != "probe.lost":
            raise
        raise RigbookError(
            "probe.not-started", f"the probe did not start: {error}", host=link.name, exit_code=UNREACHABLE
        ) from error
    if ready["ready"] != nonce:
        await probe.close()
        raise RigbookError("probe.not-started", "something else answered in the probe's place", host=link.name)
    link.known_python = ready["python"]
    return probe
