"""Our side of the probe: start the program on a host and ask it things. The protocol is in program.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from typing import TYPE_CHECKING, Any, Self

from remote import shell
from remote.probe import ship
from state.errors import UNREACHABLE, RigbookError

if TYPE_CHECKING:
    from remote.connect import Channel, Link

START_S = 30.0
MAX_LINE = 64 << 20  # bytes; the process table of a big machine is about 1 MiB
KEPT_STDERR = 8192


class Probe:
    """A conversation with one probe. Calls are answered in order; a lost link fails all that wait."""

    def __init__(self, link: Link, stack: contextlib.AsyncExitStack, channel: Channel, marker: shell.Marker) -> None:
        self._link = link
        self._stack = stack
        self._channel = channel
        self._marker = marker
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = 0
        self._stderr = bytearray()
        self._write = asyncio.Lock()
        self.closed = False
        self.ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.ensure_future(self._read())
        self._errors = asyncio.ensure_future(self._read_errors())

    async def call(self, name: str, **args: Any) -> Any:
        """The result of one call. RigbookError `probe.lost` (exit code 4) or `probe.failed`."""
        answer = await self.call_timed(name, **args)
        return answer["result"]

    async def call_timed(self, name: str, **args: Any) -> dict[str, Any]:
        """As `call`, with the far side's `wall` and `monotonic` clocks beside the `result`."""
        if self.closed:
            raise self._lost()
        self._last += 1
        id = self._last
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        line = json.dumps({"id": id, "call": name, "args": args}).encode() + b"\n"
        try:
            async with self._write:
                await self._channel.write(line)
            answer = await future
        except Exception as error:
            if isinstance(error, RigbookError):
                raise
            raise self._lost(error) from error
        finally:
            self._waiting.pop(id, None)
        if not answer["ok"]:
            raise RigbookError("probe.failed", f"probe call {name}: {answer['error']}", host=self._link.name)
        return answer

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            with contextlib.suppress(Exception):
                await self._channel.eof()
        for task in (self._reader, self._errors):
            task.cancel()
        self._fail(self._lost())
        with contextlib.suppress(Exception):
            await self._stack.aclose()

    async def _read(self) -> None:
        held = bytearray()
        error: Exception | None = None
        try:
            while True:
                data = await self._channel.read()
                if not data:
                    break
                held += self._marker.feed(data)
                if b"\n" not in data and len(held) < MAX_LINE:
                    continue
                *lines, rest = bytes(held).split(b"\n")
                if len(rest) > MAX_LINE:
                    raise ValueError(f"an answer of more than {MAX_LINE} bytes")
                held = bytearray(rest)
                for line in lines:
                    self._take(line)
        except Exception as caught:
            error = caught
        self.closed = True
        self._fail(self._lost(error))

    def _take(self, line: bytes) -> None:
        message = json.loads(line)
        if "ready" in message:
            if not self.ready.done():
                self.ready.set_result(message)
            return
        future = self._waiting.get(message["id"])
        if future is not None and not future.done():
            future.set_result(message)

    async def _read_errors(self) -> None:
        with contextlib.suppress(Exception):
            while data := await self._channel.read_error():
                self._stderr += data
                del self._stderr[:-KEPT_STDERR]

    def _fail(self, error: RigbookError) -> None:
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


async def start(link: Link) -> Probe:
    """Send the probe and wait until it is ready. It is found by its nonce whatever login scripts print."""
    nonce, packed = secrets.token_hex(8), ship.payload()
    script = (
        f"p=$({shell.FIND_PYTHON})||{{ echo no Python 3.9 or newer >&2;exit 127;}};"
        'exec /usr/bin/env -i PATH="$PATH" HOME="$HOME" LC_ALL=C.UTF-8 '
        f'"$p" -I -S -u -c {shell.quote(ship.BOOT)} {len(packed)} {nonce}'
    )
    stack = contextlib.AsyncExitStack()
    try:
        channel, marker = await stack.enter_async_context(link.open(script=script))
        probe = Probe(link, stack, channel, marker)
        await channel.write(packed)
        ready = await asyncio.wait_for(asyncio.shield(probe.ready), START_S)
    except BaseException as error:
        await stack.aclose()
        if isinstance(error, RigbookError | asyncio.CancelledError):
            raise
        raise RigbookError(
            "probe.not-started", f"the probe did not start: {error}", host=link.name, exit_code=UNREACHABLE
        ) from error
    if ready["ready"] != nonce:
        await probe.close()
        raise RigbookError("probe.not-started", "something else answered in the probe's place", host=link.name)
    return probe
