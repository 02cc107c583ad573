"""The SSH route, by asyncssh.

One connection carries at most MaxSessions (OpenSSH: 10) channels, so a link has *lanes*: connections with a
counted number of channels each. The first is opened when the link is made, others only when all are full.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh

from remote import resolve
from remote.channel import SSHChannel
from remote.connect import Channel, Link, Lost, backoff
from remote.dial import TRIES, Dialer, Line, Vouch
from state.errors import UNREACHABLE, RigbookError

if TYPE_CHECKING:
    from state.project import Host

PER_LANE = 8  # channels on one connection, two below OpenSSH's default MaxSessions
LANES = 4
SESSION_S = 15.0
AGAIN_S = 5.0


@dataclass
class _Lane:
    connection: asyncssh.SSHClientConnection
    room: int = PER_LANE
    used: int = 0

    @property
    def alive(self) -> bool:
        return not self.connection.is_closed()


class _Pool:
    """Lanes of one kind. One connection is made at a time, and all who wait for it share its failure."""

    def __init__(self, dial: Callable[[], Coroutine[Any, Any, Line]], most: int) -> None:
        self._dial, self._most = dial, most
        self.lanes: list[_Lane] = []
        self._dialling: asyncio.Task[Line] | None = None
        self._not_before = 0.0  # by the loop's clock: no further lane is tried before
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self) -> _Lane:
        """A lane with room for one more session; a new one when all are full."""
        loop = asyncio.get_running_loop()
        while True:
            self.lanes = [lane for lane in self.lanes if lane.alive]
            for lane in self.lanes:
                if lane.used < lane.room:
                    lane.used += 1
                    return lane
            may_dial = not self.lanes or (len(self.lanes) < self._most and loop.time() >= self._not_before)
            if self._dialling is None and may_dial:
                self._dialling = asyncio.ensure_future(self._dial())
                self._dialling.add_done_callback(self._dialled)
            waiter = loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                self._waiting.remove(waiter)

    def give(self, lane: _Lane) -> None:
        lane.used -= 1
        self._wake()

    def _wake(self, error: BaseException | None = None) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error) if error else waiter.set_result(None)

    def _dialled(self, task: asyncio.Task[Line]) -> None:
        self._dialling = None
        if task.cancelled():
            self._wake(Lost("the link was closed"))
        elif (error := task.exception()) is None:
            self.lanes.append(_Lane(task.result().connection))
            self._wake()
        elif any(lane.alive for lane in self.lanes):
            # There are lanes, only full ones: who waits gets a place there.
            self._not_before = asyncio.get_running_loop().time() + AGAIN_S
        else:
            self._wake(error)

    async def close(self) -> None:
        if self._dialling is not None:
            self._dialling.cancel()
        for lane in self.lanes:
            lane.connection.close()
        for lane in self.lanes:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(lane.connection.wait_closed(), 2.0)
        self.lanes.clear()


class SSHLink(Link):
    """A host over SSH. `config` replaces the user's own ssh config file."""

    def __init__(self, name: str, host: Host, dialer: Dialer, *, config: Path | None, vouch: Vouch | None) -> None:
        super().__init__(name, host)
        assert host.ssh is not None
        self._target = resolve.parse(host.ssh, f"`hosts.{name}.ssh`")
        self._config = config
        self._dialer = dialer
        self._vouch = vouch
        self._line: Line | None = None  # the last one made
        self.pool = _Pool(self._dial, LANES)
        self._bulk = _Pool(self._dial_bulk, 1)
        self._bulk_works = True

    async def aclose(self) -> None:
        await super().aclose()
        await self._bulk.close()
        await self.pool.close()

    async def ready(self) -> None:
        """Connected, or an error that says why not."""
        lane = await self.pool.take()
        self.pool.give(lane)

    def route(self) -> dict[str, str]:
        found = {"route": "ssh", "target": self.host.ssh or ""}
        if self._line is not None:
            resolved = self._line.resolved
            found |= {"address": f"{resolved.host}:{resolved.port}", "user": resolved.user}
            found |= {"host_key": self._line.host_key, **({"via": self._line.via} if self._line.via else {})}
        return found

    def break_lanes(self) -> None:
        """Cut every connection as a dying network would (for tests)."""
        for lane in self.pool.lanes:
            lane.connection.abort()

    @contextlib.asynccontextmanager
    async def _open(
        self, command: str, line: bytes, *, eof: bool = False, bulk: bool = False
    ) -> AsyncIterator[Channel]:
        pool, lane, channel = await self._session(command, line, eof, bulk)
        try:
            yield channel
        finally:
            await channel.close()
            pool.give(lane)

    @contextlib.asynccontextmanager
    async def terminal(
        self, kind: str, size: tuple[int, int], command: str | None = None
    ) -> AsyncIterator[asyncssh.SSHClientProcess[bytes]]:
        """A login shell (or `command`) with a pseudo-terminal of `size` (columns, lines)."""
        lane = await self.pool.take()
        try:
            process = await lane.connection.create_process(
                command, encoding=None, request_pty="force", term_type=kind, term_size=size, env=None, send_env=None
            )
            async with process:
                yield process
        finally:
            self.pool.give(lane)

    async def _session(self, command: str, line: bytes, eof: bool, bulk: bool) -> tuple[_Pool, _Lane, SSHChannel]:
        """Start `command`, which waits for `line`, on a lane with room. As long as the line was not sent, nothing can
        have run, and it may be tried again."""
        clock = asyncio.get_running_loop().time
        began, losses, refusals = clock(), 0, 0
        while True:
            pool, lane = await self._lane(bulk)
            channel = SSHChannel(line, eof=eof)
            try:
                # A server may answer keepalives and still never answer this.
                async with asyncio.timeout(max(1.0, began + SESSION_S - clock())) as limit:
                    await lane.connection.create_session(
                        lambda channel=channel: channel,  # type: ignore[misc]
                        command,
                        encoding=None,
                        request_pty=False,
                        send_env=None,
                        env=None,
                    )
                return pool, lane, channel
            except (asyncssh.Error, OSError) as error:
                refused = isinstance(error, asyncssh.ChannelOpenError) and lane.alive
                if refused:
                    # This sshd allows fewer sessions than we thought (or has not quite closed the last one): learn it.
                    refusals += 1
                    lane.room = max(1, min(lane.room, lane.used - 1))
                else:
                    losses += 1
                pool.give(lane)
                if refused and clock() <= began + SESSION_S:
                    await asyncio.sleep(backoff(min(refusals, 3)) / 4)
                    continue
                if refused or (limit.expired() and not channel.began):
                    said = f": {error}" if refused else ", and does not say why"
                    raise RigbookError(
                        "host.no-session", f"sshd opens no session{said}", host=self.name, exit_code=UNREACHABLE
                    ) from error
                # A peer that was silent until the keepalive gave up: who waits is told now, not after another wait.
                if channel.began or losses >= TRIES or clock() > began + AGAIN_S:
                    raise Lost(str(error) or "the session was never confirmed") from error
            except BaseException:
                pool.give(lane)
                raise

    async def _lane(self, bulk: bool) -> tuple[_Pool, _Lane]:
        """A lane, and where to give it back. Much data goes around the jump hosts' second layer, where that works."""
        lane = await self.pool.take()
        if not (bulk and self._bulk_works and self._line and self._line.resolved.jumps):
            return self.pool, lane
        try:
            other = await self._bulk.take()
        except (RigbookError, Lost):
            self._bulk_works = False  # it is only a faster way
            return self.pool, lane
        except BaseException:
            self.pool.give(lane)
            raise
        self.pool.give(lane)
        return self._bulk, other

    async def _dial(self) -> Line:
        try:
            self._line = await self._dialer.dial(
                self.name, self._target, self._config, again=self._line is not None, vouch=self._vouch
            )
        except RigbookError as error:
            if error.id == "host.unreachable" and self.host.played:
                error.hint = "The demo plays this host: `rigbook demo --dir DIR` starts it again."
            raise
        return self._line

    async def _dial_bulk(self) -> Line:
        assert self._line is not None
        return await self._dialer.around(self.name, self._line.resolved)
