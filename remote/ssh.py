"""The SSH route, by asyncssh.

One connection carries at most MaxSessions (OpenSSH: 10) channels, so a link has *lanes*: connections with a
counted number of channels each. The first is opened when the link is made, others only when all are full.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh
from asyncssh.known_hosts import SSHKnownHosts

from remote import hostkeys
from remote.connect import CHUNK, Channel, Link, Lost, backoff
from state.errors import REFUSED, UNREACHABLE, USAGE, RigbookError

if TYPE_CHECKING:
    from state.project import Host

PER_LANE = 8  # channels on one connection, two below OpenSSH's default MaxSessions
LANES = 4
CONNECT_S, LOGIN_S, SESSION_S = 10.0, 20.0, 15.0
KEEPALIVE_S, KEEPALIVE_TRIES = 10, 3  # a peer that is gone without a word is noticed within 40 s
TRIES = 4  # sshd drops connections at random while many knock (MaxStartups); before login it is safe to knock again

_TARGET = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<host>\[[^\]\s]+\]|[^:@\s\[\]]+)(?::(?P<port>\d{1,5}))?\Z")


class SSHChannel:
    def __init__(self, process: asyncssh.SSHClientProcess[bytes]) -> None:
        self._process = process

    async def write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        except (asyncssh.ConnectionLost, asyncssh.DisconnectError) as error:
            raise Lost(str(error)) from error
        except OSError as error:
            # asyncssh says BrokenPipeError both for a command that ended and for a lost link; the read tells which.
            raise BrokenPipeError(str(error)) from error

    async def eof(self) -> None:
        with contextlib.suppress(OSError):
            self._process.stdin.write_eof()

    async def read(self) -> bytes:
        return await self._read(self._process.stdout)

    async def read_error(self) -> bytes:
        return await self._read(self._process.stderr)

    async def _read(self, reader: asyncssh.SSHReader[bytes]) -> bytes:
        try:
            return bytes(await reader.read(CHUNK))
        except (asyncssh.Error, OSError) as error:
            raise Lost(str(error) or type(error).__name__) from error

    async def end(self) -> tuple[int | None, str | None]:
        await self._process.wait_closed()
        died = self._process.exit_signal
        if died:
            return None, died[0]
        return self._process.exit_status, None

    def signal(self, name: str) -> None:
        with contextlib.suppress(OSError, asyncssh.Error):
            self._process.send_signal(name)

    async def close(self) -> None:
        self._process.close()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait_closed(), 1.0)


@dataclass
class _Lane:
    connection: asyncssh.SSHClientConnection
    room: int = PER_LANE
    used: int = 0

    @property
    def alive(self) -> bool:
        return not self.connection.is_closed()


@dataclass
class _Target:
    host: str
    user: str | None = None
    port: int | None = None


def parse_target(name: str, ssh: str) -> _Target:
    """alias, user@host, user@host:port or user@[v6]:port."""
    match = _TARGET.match(ssh)
    if not match:
        raise RigbookError(
            "host.bad-address", f"`hosts.{name}.ssh` = {ssh!r} is not [user@]host[:port]", host=name, exit_code=USAGE
        )
    port = match["port"]
    return _Target(match["host"].strip("[]"), match["user"], int(port) if port else None)


class SSHLink(Link):
    """A host over SSH. `config` replaces the user's own ssh config file; `pins` holds keys that we pinned."""

    def __init__(self, name: str, host: Host, *, config: Path | None, pins: Path) -> None:
        super().__init__(name, host)
        assert host.ssh is not None
        self._target = parse_target(name, host.ssh)
        self._config = config
        self._pins = pins
        self._lanes: list[_Lane] = []
        self._free = asyncio.Condition()
        self._dialling = False

    async def aclose(self) -> None:
        await super().aclose()
        for lane in self._lanes:
            lane.connection.close()
        for lane in self._lanes:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(lane.connection.wait_closed(), 2.0)
        self._lanes.clear()

    async def ready(self) -> None:
        """Connected, or an error that says why not."""
        lane = await self._take()
        await self._give(lane)

    def route(self) -> dict[str, str]:
        found = {"route": "ssh", "target": self.host.ssh or ""}
        for lane in self._lanes:
            key = lane.connection.get_server_host_key()
            peer = lane.connection.get_extra_info("peername") or ("", "")
            found["address"] = f"{peer[0]}:{peer[1]}"
            found["user"] = str(lane.connection.get_extra_info("username"))
            found["host_key"] = key.get_fingerprint() if key else ""
        return found

    def break_lanes(self) -> None:
        """Cut every connection as a dying network would (for tests)."""
        for lane in self._lanes:
            lane.connection.abort()

    @contextlib.asynccontextmanager
    async def _open(self, command: str) -> AsyncIterator[Channel]:
        lane, process = await self._session(command)
        channel = SSHChannel(process)
        try:
            yield channel
        finally:
            await channel.close()
            await self._give(lane)

    @contextlib.asynccontextmanager
    async def terminal(self, kind: str, size: tuple[int, int]) -> AsyncIterator[asyncssh.SSHClientProcess[bytes]]:
        """A login shell with a pseudo-terminal of `size` (columns, lines)."""
        lane = await self._take()
        try:
            process = await lane.connection.create_process(
                encoding=None, request_pty="force", term_type=kind, term_size=size
            )
            async with process:
                yield process
        finally:
            await self._give(lane)

    async def _session(self, command: str) -> tuple[_Lane, asyncssh.SSHClientProcess[bytes]]:
        """Start `command` on a lane with room. It waits for its program on stdin, which comes later, so nothing can
        have run when this fails, and it may try again."""
        clock = asyncio.get_running_loop().time
        deadline, losses, refusals = clock() + SESSION_S, 0, 0
        while True:
            lane = await self._take()
            try:
                process = await lane.connection.create_process(
                    command, encoding=None, request_pty=False, send_env=None, env=None
                )
                return lane, process
            except asyncssh.ChannelOpenError as error:
                # This sshd allows fewer sessions than we thought (or has not quite closed the last one): learn it.
                refusals += 1
                if lane.alive:
                    lane.room = max(1, min(lane.room, lane.used - 1))
                await self._give(lane)
                if clock() > deadline:
                    raise RigbookError(
                        "host.no-session", f"sshd opens no session: {error}", host=self.name, exit_code=UNREACHABLE
                    ) from error
                await asyncio.sleep(backoff(min(refusals, 3)) / 4)
            except (asyncssh.Error, OSError) as error:
                losses += 1
                await self._give(lane)
                if losses >= TRIES:
                    raise Lost(str(error)) from error

    async def _take(self) -> _Lane:
        """A lane with room for one more session; a new one when all are full. One connection is made at a time, so that
        many callers do not knock at sshd together (MaxStartups)."""
        while True:
            async with self._free:
                self._lanes = [lane for lane in self._lanes if lane.alive]
                for lane in self._lanes:
                    if lane.used < lane.room:
                        lane.used += 1
                        return lane
                if self._dialling or len(self._lanes) >= LANES:
                    await self._free.wait()
                    continue
                self._dialling = True
            try:
                lane = _Lane(await self._connect(), used=1)
                self._lanes.append(lane)
                return lane
            finally:
                self._dialling = False
                async with self._free:
                    self._free.notify_all()

    async def _give(self, lane: _Lane) -> None:
        async with self._free:
            lane.used -= 1
            self._free.notify_all()

    async def _connect(self) -> asyncssh.SSHClientConnection:
        where = self._where()
        try:
            options = await asyncssh.SSHClientConnectionOptions.construct(**where)
        except (OSError, ValueError, asyncssh.Error) as error:  # a line that it cannot read, a key file that is gone
            raise RigbookError(
                "host.ssh-config",
                f"the ssh config for {self.host.ssh} cannot be used: {error}",
                host=self.name,
                hint=f"What does `{self._by_hand()}` say?",
                exit_code=USAGE,
            ) from error
        known = hostkeys.load(self._known_hosts_files(options.known_hosts))
        for attempt in range(1, TRIES + 1):
            watcher = hostkeys.Watcher()
            try:
                return await asyncssh.connect(
                    **where,
                    known_hosts=known,
                    client_factory=partial(_same, watcher),
                    connect_timeout=CONNECT_S,
                    login_timeout=LOGIN_S,
                    keepalive_interval=KEEPALIVE_S,
                    keepalive_count_max=KEEPALIVE_TRIES,
                    agent_forwarding=False,
                )
            except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed) as error:
                if isinstance(error, asyncssh.KeyExchangeFailed) and "host key" not in str(error):
                    raise self._unreachable(error) from error
                if watcher.shown is None and "revoked" in str(error):
                    raise RigbookError(
                        "host.key-revoked", "known_hosts marks its key as revoked", host=self.name, exit_code=REFUSED
                    ) from error
                raise self._key_refusal(options, known, watcher) from error
            except asyncssh.PermissionDenied as error:
                raise RigbookError(
                    "host.login-refused",
                    f"{self.host.ssh} does not let us in: {error}",
                    host=self.name,
                    hint=f"Does `{self._by_hand()}` work without a question?",
                    exit_code=UNREACHABLE,
                ) from error
            except (asyncssh.ConnectionLost, ConnectionResetError) as error:
                if attempt == TRIES:
                    # We ask only for keys of the types on file, so a machine that now has other types hangs up on us:
                    # that is a changed key as well.
                    watcher.shown = await self._shown_key(where)
                    refusal = self._key_refusal(options, known, watcher)
                    raise (refusal if refusal.id == "host.key-changed" else self._unreachable(error)) from error
                await asyncio.sleep(backoff(attempt))
            except (TimeoutError, OSError, asyncssh.Error, ValueError) as error:
                raise self._unreachable(error) from error
        raise AssertionError("the loop above ends by return or raise")

    def _key_refusal(
        self, options: asyncssh.SSHClientConnectionOptions, known: SSHKnownHosts, watcher: hostkeys.Watcher
    ) -> RigbookError:
        alias = options.host_key_alias
        host, port = (alias, 22) if alias else (str(options.host), int(options.port))
        on_file = hostkeys.lookup(known, host, watcher.addr, port)
        if watcher.shown is None or watcher.shown in on_file:
            on_file = []
        return hostkeys.refusal(self.name, host, port, watcher.shown, on_file, self._pins)

    async def _shown_key(self, where: dict[str, Any]) -> asyncssh.SSHKey | None:
        """The key that the machine shows when it may choose its type; None when it does not answer."""
        plain = {key: value for key, value in where.items() if key != "username"}
        try:
            return await asyncio.wait_for(asyncssh.get_server_host_key(**plain), LOGIN_S)
        except (TimeoutError, OSError, asyncssh.Error):
            return None

    def _where(self) -> dict[str, Any]:
        """What asyncssh needs to find the host; the rest comes from the ssh config."""
        target = self._target
        where: dict[str, Any] = {"host": target.host}
        if target.user:
            where["username"] = target.user
        if target.port:
            where["port"] = target.port
        if self._config is not None:
            if not self._config.is_file():
                raise RigbookError(
                    "host.no-config", f"`project.ssh_config` names {self._config}, which is not there", exit_code=USAGE
                )
            where["config"] = [str(self._config)]
        return where

    def _by_hand(self) -> str:
        """The same with OpenSSH, for people to try."""
        target = self._target
        words = ["ssh", *(["-F", str(self._config)] if self._config else [])]
        words += ["-p", str(target.port)] if target.port else []
        return shlex.join([*words, f"{target.user}@{target.host}" if target.user else target.host, "true"])

    def _known_hosts_files(self, configured: object) -> list[Path]:
        if configured is None:
            # OpenSSH reads `UserKnownHostsFile none` as "no file"; asyncssh as "check nothing". We check.
            return [self._pins]
        names = [Path(str(name)) for name in configured] if isinstance(configured, list | tuple) else []
        return [self._pins, *(names or hostkeys.DEFAULT_FILES)]

    def _unreachable(self, error: BaseException) -> RigbookError:
        said = str(error) or type(error).__name__
        return RigbookError(
            "host.unreachable",
            f"no connection to {self.host.ssh}: {said}",
            host=self.name,
            hint="The demo plays this host: `rigbook demo --dir DIR` starts it again."
            if self.host.played
            else f"Is it up? Try `{self._by_hand()}`.",
            exit_code=UNREACHABLE,
        )


def _same(watcher: hostkeys.Watcher) -> hostkeys.Watcher:
    return watcher
