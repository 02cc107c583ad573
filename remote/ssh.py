"""The SSH route, by asyncssh.

One connection carries at most MaxSessions (OpenSSH: 10) channels, so a link has *lanes*: connections with a
counted number of channels each. The first is opened when the link is made, others only when all are full.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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


class SSHLink(Link):
    """A host over SSH. `config` replaces the user's own ssh config file."""

    def __init__(self, name: str, host: Host, dialer: Dialer, *, config: Path | None, vouch: Vouch | None) -> None:
        super().__init__(name, host)
        assert host.ssh is not None
        self._target = resolve.parse(host.ssh, f"`hosts.{name}.ssh`")
        self._config = config
        self._dialer = dialer
        self._vouch = vouch
        self._lanes: list[_Lane] = []
        self._line: Line | None = None  # the last one made
        self._dialling: asyncio.Task[Line] | None = None
        self._not_before = 0.0  # by the loop's clock: no further lane is tried before
        self._waiting: list[asyncio.Future[None]] = []

    async def aclose(self) -> None:
        await super().aclose()
        if self._dialling is not None:
            self._dialling.cancel()
        for lane in self._lanes:
            lane.connection.close()
        for lane in self._lanes:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(lane.connection.wait_closed(), 2.0)
        self._lanes.clear()

    async def ready(self) -> None:
        """Connected, or an error that says why not."""
        lane = await self._take()
        self._give(lane)

    def route(self) -> dict[str, str]:
        found = {"route": "ssh", "target": self.host.ssh or ""}
        if self._line is not None:
            resolved = self._line.resolved
            found |= {"address": f"{resolved.host}:{resolved.port}", "user": resolved.user}
            found |= {"host_key": self._line.host_key, **({"via": self._line.via} if self._line.via else {})}
        return found

    def break_lanes(self) -> None:
        """Cut every connection as a dying network would (for tests)."""
        for lane in self._lanes:
            lane.connection.abort()

    @contextlib.asynccontextmanager
    async def _open(self, command: str, line: bytes, *, eof: bool = False) -> AsyncIterator[Channel]:
        lane, channel = await self._session(command, line, eof)
        try:
            yield channel
        finally:
            await channel.close()
            self._give(lane)

    @contextlib.asynccontextmanager
    async def terminal(
        self, kind: str, size: tuple[int, int], command: str | None = None
    ) -> AsyncIterator[asyncssh.SSHClientProcess[bytes]]:
        """A login shell (or `command`) with a pseudo-terminal of `size` (columns, lines)."""
        lane = await self._take()
        try:
            process = await lane.connection.create_process(
                command, encoding=None, request_pty="force", term_type=kind, term_size=size, env=None, send_env=None
            )
            async with process:
                yield process
        finally:
            self._give(lane)

    async def _session(self, command: str, line: bytes, eof: bool) -> tuple[_Lane, SSHChannel]:
        """Start `command`, which waits for `line`, on a lane with room. As long as the line was not sent, nothing can
        have run, and it may be tried again."""
        clock = asyncio.get_running_loop().time
        began, losses, refusals = clock(), 0, 0
        while True:
            lane = await self._take()
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
                return lane, channel
            except asyncssh.ChannelOpenError as error:
                # This sshd allows fewer sessions than we thought (or has not quite closed the last one): learn it.
                refusals += 1
                if lane.alive:
                    lane.room = max(1, min(lane.room, lane.used - 1))
                self._give(lane)
                if clock() > began + SESSION_S:
                    raise RigbookError(
                        "host.no-session", f"sshd opens no session: {error}", host=self.name, exit_code=UNREACHABLE
                    ) from error
                await asyncio.sleep(backoff(min(refusals, 3)) / 4)
            except (asyncssh.Error, OSError) as error:
                losses += 1
                self._give(lane)
                if channel.began:
                    raise Lost(str(error) or "the session was never confirmed") from error
                if limit.expired():
                    raise RigbookError(
                        "host.no-session", "sshd opens no session, and does not say why",
                        host=self.name, exit_code=UNREACHABLE,
                    ) from error  # fmt: skip
                # A peer that was silent until the keepalive gave up: who waits is told now, not after another wait.
                if losses >= TRIES or clock() > began + AGAIN_S:
                    raise Lost(str(error)) from error
            except BaseException:
                self._give(lane)
                raise

    async def _take(self) -> _Lane:
        """A lane with room for one more session; a new one when all are full. One connection is made at a time, and all
        who wait for it share its failure."""
        loop = asyncio.get_running_loop()
        while True:
            self._lanes = [lane for lane in self._lanes if lane.alive]
            for lane in self._lanes:
                if lane.used < lane.room:
                    lane.used += 1
                    return lane
            if (
                self._dialling is None
                and len(self._lanes) < LANES
                and (not self._lanes or loop.time() >= self._not_before)
            ):
                self._dialling = asyncio.ensure_future(self._dial())
                self._dialling.add_done_callback(self._dialled)
            waiter = loop.create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                self._waiting.remove(waiter)

    def _give(self, lane: _Lane) -> None:
        lane.used -= 1
        self._wake()

    def _wake(self, error: BaseException | None = None) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(error) if error else waiter.set_result(None)

    async def _dial(self) -> Line:
        return await self._dialer.dial(
            self.name, self._target, self._config, again=self._line is not None, vouch=self._vouch
        )

    def _dialled(self, task: asyncio.Task[Line]) -> None:
        self._dialling = None
        if task.cancelled():
            self._wake(Lost("the link was closed"))
        elif (error := task.exception()) is None:
            self._line = task.result()
            self._lanes.append(_Lane(self._line.connection))
            self._wake()
        elif any(lane.alive for lane in self._lanes):
            # There are lanes, only full ones: who waits gets a place there.
            self._not_before = asyncio.get_running_loop().time() + AGAIN_S
        else:
            if isinstance(error, RigbookError) and error.id == "host.unreachable" and self.host.played:
                error.hint = "The demo plays this host: `rigbook demo --dir DIR` starts it again."
            self._wake(error)
