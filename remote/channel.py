"""A command's channel over SSH, directly on asyncssh's session: bytes in, bytes out, and how it ended.

asyncssh's own streams cost another layer of tasks and locks, wait for the server's answer before the first byte of
input is sent, and raise a different error in each place where a link can break. Here the first line of input leaves
in the same breath as the request, and a break is `Lost` wherever it is noticed.

`began` says whether that line was sent: until then nothing can have run, and the caller may try again elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import asyncssh

from remote.connect import CHUNK, Lost

HELD = 4 * CHUNK  # bytes that wait to be read before the far side is asked to hold back


class _Pile:
    """Bytes that came and were not read yet."""

    def __init__(self) -> None:
        self.parts: deque[bytes] = deque()
        self.waiting: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)


class SSHChannel(asyncssh.SSHClientSession[bytes]):
    def __init__(self, line: bytes, *, eof: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._line, self._no_more = line, eof
        self._chan: Any = None
        self._out, self._err = _Pile(), _Pile()
        self._held = 0
        self._paused = False
        self._ended = False  # no more will come,
        self._whole = False  # and the far side said so
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._broken: BaseException | None = None
        self._may_write: asyncio.Future[None] | None = None
        self._exit: int | None = None
        self._signal: str | None = None
        self.began = False

    # --- called by asyncssh ---

    def connection_made(self, chan: Any) -> None:
        self._chan = chan
        # asyncssh sends the request right after this and then waits for the answer: this runs in between.
        self._loop.call_soon(self._begin)

    def _begin(self) -> None:
        self.began = True
        with contextlib.suppress(OSError):
            if self._line:
                self._chan.write(self._line)
            if self._no_more:
                self._chan.write_eof()

    def data_received(self, data: bytes, datatype: int | None) -> None:
        pile = self._err if datatype == asyncssh.EXTENDED_DATA_STDERR else self._out
        pile.parts.append(data)
        self._held += len(data)
        if self._held > HELD and not self._paused:
            self._paused = True
            self._chan.pause_reading()
        pile.wake()

    def eof_received(self) -> bool:
        self._whole = True
        self._end()
        return True  # the channel stays open: how it ended comes after its output

    def exit_status_received(self, status: int) -> None:
        self._exit = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self._signal = signal

    def pause_writing(self) -> None:
        self._may_write = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._may_write is not None and not self._may_write.done():
            self._may_write.set_result(None)
        self._may_write = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self._broken = exc
        self._end()
        self.resume_writing()
        if not self._closed.done():
            self._closed.set_result(None)

    def _end(self) -> None:
        self._ended = True
        self._out.wake()
        self._err.wake()

    # --- called by us: the Channel protocol ---

    async def write(self, data: bytes) -> None:
        try:
            self._chan.write(data)
        except OSError as error:  # it ended, or the link is lost: which one, the reading tells
            raise BrokenPipeError(str(error)) from error
        if self._may_write is not None:
            await asyncio.shield(self._may_write)
            if self._broken is not None:
                raise Lost(str(self._broken)) from self._broken

    async def eof(self) -> None:
        if not self._no_more:
            self._no_more = True
            with contextlib.suppress(OSError):
                self._chan.write_eof()

    async def read(self) -> bytes:
        return await self._read(self._out)

    async def read_error(self) -> bytes:
        return await self._read(self._err)

    async def _read(self, pile: _Pile) -> bytes:
        while not pile.parts:
            if self._ended:
                if self._broken is not None and not self._whole:
                    raise Lost(str(self._broken) or type(self._broken).__name__) from self._broken
                return b""
            pile.waiting = self._loop.create_future()
            await pile.waiting
        data = pile.parts.popleft() if len(pile.parts) == 1 else _joined(pile.parts)
        self._held -= len(data)
        if self._paused and self._held < HELD // 2:
            self._paused = False
            with contextlib.suppress(OSError):
                self._chan.resume_reading()
        return data

    async def end(self) -> tuple[int | None, str | None]:
        await asyncio.shield(self._closed)
        return (None, self._signal) if self._signal else (self._exit, None)

    def signal(self, name: str) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            self._chan.send_signal(name)

    async def close(self) -> None:
        if self._closed.done():
            return
        if self._chan is not None:
            self._chan.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._closed), 1.0)


def _joined(parts: deque[bytes]) -> bytes:
    """Up to CHUNK bytes, in one piece."""
    taken, size = [], 0
    while parts and size < CHUNK:
        taken.append(parts.popleft())
        size += len(taken[-1])
    return b"".join(taken)
