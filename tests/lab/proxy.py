"""A bad line: a TCP proxy that delays, throttles, stalls, resets and flaps while a test looks on.

    with Proxy("127.0.0.1", server.port) as line:
        project = line.project(server, "rbbash")
        line.delay = 0.1        # s each way, at any rate
        line.rate = 100_000     # B/s each way, each connection; None: as fast as it goes
        line.stalled = True     # nothing passes, nothing is closed; new connections are accepted and silent
        line.reset()            # every connection ends with RST
        line.reset_after(n)     # … once n more bytes have come from the far side
        line.refuse = True      # new connections are closed at once, as a forwarder does whose target is down
        with line.flapping(0.5): …

Runs in a thread of its own; everything can be changed while connections are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from state.project import Project
from tests.lab import rigs

PIECE = 16 * 1024
HELD = 1 << 20  # bytes on the way in one direction
TICK = 0.005


class Proxy:
    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.delay = 0.0
        self.rate: float | None = None
        self.stalled = False
        self.refuse = False
        self.accepted = 0  # connections so far
        self.port = 0
        self._left: int | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.reset()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def project(self, server: rigs.Sshd, user: str, extra: str = "") -> Project:
        """As `server.project`, by way of this line."""
        known = server.root / "known_hosts"
        line = f"[127.0.0.1]:{self.port} {(server.root / 'host_key.pub').read_text()}"
        if line not in known.read_text():
            known.write_text(known.read_text() + line)
        return rigs.write_project(server.root, "127.0.0.1", self.port, server.accounts.get(user, user), extra)

    def reset(self) -> None:
        """Every open connection, both ends."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (self._reset(), done.set()))
        assert done.wait(10)

    def reset_after(self, count: int) -> None:
        """Every open connection, when `count` more bytes of the far side have been passed on: not one byte more is."""
        self._left = count

    @contextmanager
    def flapping(self, period: float) -> Iterator[None]:
        """Reset everything every `period` seconds, and let it come again."""
        ended = threading.Event()

        def flap() -> None:
            while not ended.wait(period):
                self.reset()

        thread = threading.Thread(target=flap, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _reset(self) -> None:
        for writer in list(self._open):
            # Linger for no time: the kernel sends RST, and what was not sent is dropped.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._open.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        if self.refuse:
            writer.transport.abort()
            return
        self._open.add(writer)
        far_writer = None
        try:
            while self.stalled:
                await asyncio.sleep(TICK)
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            self._open.add(far_writer)
            await asyncio.gather(
                self._pump(reader, far_writer, lambda n: n), self._pump(far_reader, writer, self._allow)
            )
        except OSError:
            pass
        finally:
            for one in (writer, far_writer):
                if one is not None:
                    self._open.discard(one)
                    one.transport.abort()

    def _allow(self, count: int) -> int:
        if self._left is None:
            return count
        count = min(count, self._left)
        self._left -= count
        return count

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, allow: Callable[[int], int]
    ) -> None:
        clock = self._loop.time
        line: deque[tuple[float, bytes]] = deque()  # (when it has come through, what)
        held, ended = 0, False

        async def take() -> None:
            nonlocal held, ended
            with contextlib.suppress(OSError):
                while data := await reader.read(PIECE):
                    line.append((clock() + self.delay, data))
                    held += len(data)
                    while held > HELD:
                        await asyncio.sleep(TICK)
            ended = True

        taking = asyncio.ensure_future(take())
        try:
            while not ended or line:
                if not line or self.stalled or line[0][0] > clock():
                    await asyncio.sleep(TICK if not line or self.stalled else min(TICK, max(0, line[0][0] - clock())))
                    continue
                _, data = line.popleft()
                allowed = allow(len(data))
                writer.write(data[:allowed])
                await writer.drain()
                held -= len(data)
                if allowed < len(data) or self._left == 0:
                    await asyncio.sleep(TICK)  # what was allowed leaves first
                    self._left = None
                    self._reset()
                    return
                if self.rate:
                    await asyncio.sleep(len(data) / self.rate)
            writer.write_eof()
        finally:
            taking.cancel()
