"""Making one SSH connection as `ssh` would, and saying in one sentence why there is none.

A `Dialer` belongs to a Rig: connections to jump hosts are shared by all that lies behind them, and nobody, however
many hosts are asked for at once, has more than a few logins in progress on one sshd (MaxStartups, 10 by default,
after which OpenSSH drops connections at random).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import asyncssh

from remote import hostkeys, identity, resolve, wire
from remote.connect import backoff
from remote.resolve import Resolved, Target
from state.errors import UNREACHABLE, USAGE, RigbookError

AT_ONCE = 6  # logins in progress on one sshd
TRIES = 5  # for what a busy sshd does to a connection before login; nothing has run then, so it is safe to knock again
BUSY_TRIES = 15  # when it is known to let people in
CONNECT_S, LOGIN_S = 10.0, 20.0
# To a host that answered before. Short, since the next knock may be the one that finds the link back: a TCP connection
# whose first packets were lost waits 1, 3, 7 s between its own attempts.
AGAIN_CONNECT_S, AGAIN_LOGIN_S = 2.5, 8.0
KEEPALIVE_S, KEEPALIVE_TRIES = 4, 3  # a peer that is gone without a word is noticed within 16 s

Vouch = Callable[[], Awaitable[list[str]]]


@dataclass
class Line:
    """A connection, and how it came about."""

    connection: asyncssh.SSHClientConnection
    resolved: Resolved
    host_key: str  # fingerprint, and the CA that signed it
    via: str  # the jump hosts or the ProxyCommand; "" for none


class Gate:
    """Lets a few logins at once through to one sshd, and fewer when it drops some."""

    def __init__(self) -> None:
        self.room = AT_ONCE
        self.tries = TRIES
        self.login_s = 0.0  # the longest that a login took
        self._inside = 0
        self._changed = asyncio.Condition()

    async def __aenter__(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._inside < self.room)
            self._inside += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._changed:
            self._inside -= 1
            self._changed.notify_all()


class Dialer:
    def __init__(self, pins: Path, *, accept_new: bool = False) -> None:
        self._pins = pins
        self._accept_new = accept_new
        self._ask_first: set[str] = set()  # guests whose host can tell their keys: that comes before taking a new one
        self._gates: dict[tuple[str, int], Gate] = defaultdict(Gate)
        self._hops: dict[tuple[object, ...], asyncio.Task[Line]] = {}

    async def aclose(self) -> None:
        for task in self._hops.values():
            if task.done() and not task.cancelled() and not task.exception():
                task.result().connection.close()
            task.cancel()
        self._hops.clear()

    async def dial(
        self, name: str, target: Target, config: Path | None, *, again: bool = False, vouch: Vouch | None = None
    ) -> Line:
        """Connected and logged in. `again`: it answered before. `vouch` tells a machine's keys over a trusted way."""
        try:
            resolved = await _resolve(target, config)
            if vouch is not None:
                self._ask_first.add(name)
            try:
                return await self._line(name, resolved, again=again)
            except RigbookError as error:
                # A jump host's key is not this guest's.
                if error.id != "host.key-unknown" or vouch is None or "jump host" in error.message:
                    raise
                keys = await vouch()
                self._ask_first.discard(name)
                if keys:
                    hostkeys.pin(self._pins, name, 22, *keys)
                elif not self._accept_new:
                    raise
                return await self._line(name, resolved, again=again)
        except RigbookError as error:
            error.host = error.host or name
            raise

    async def around(self, name: str, resolved: Resolved) -> Line:
        """Another connection to a host behind jump hosts, through `ssh -W`: that program does the outer encryption, on
        another core and in C, where a tunnel in asyncssh would do both in one Python."""
        ssh = shutil.which("ssh")
        if ssh is None:
            raise RigbookError("host.unreachable", "there is no ssh here", host=name, exit_code=UNREACHABLE)
        *before, last = resolved.jumps
        files = [self._pins, *(await _resolve(last, resolved.config)).known_hosts]
        words = [ssh, *(["-F", str(resolved.config)] if resolved.config else [])]
        for option in (
            "BatchMode=yes",
            "StrictHostKeyChecking=yes",
            "ControlMaster=no",
            "ForwardAgent=no",
            "UserKnownHostsFile=" + " ".join(f'"{str(file).replace("%", "%%")}"' for file in files),
        ):
            words += ["-o", option]
        if before:
            words += ["-J", ",".join(_jump(hop) for hop in before)]
        words += ["-W", f"[{resolved.host}]:{resolved.port}", *last.words()]
        way = replace(resolved, jumps=(), proxy_command=shlex.join(words))
        return await self._login(name, way, None, "", True)

    async def _line(self, name: str, resolved: Resolved, *, again: bool, trail: tuple[Target, ...] = ()) -> Line:
        """`name` is the host's in the project, under which its key may be pinned; "" for a jump host."""
        hops, tunnel = resolved.jumps, None
        for position, hop in enumerate(hops):
            tunnel = await self._hop(name, hop, resolved.config, tunnel, position == 0, again, trail)
        via = " → ".join(hop.words()[-1] for hop in hops)
        return await self._login(name, resolved, tunnel.connection if tunnel else None, via, again)

    async def _hop(
        self,
        name: str,
        hop: Target,
        config: Path | None,
        through: Line | None,
        first: bool,
        again: bool,
        trail: tuple[Target, ...],
    ) -> Line:
        """The shared connection to a jump host."""
        if hop in trail:  # to wait for its connection would be to wait for ourselves
            raise RigbookError(
                "host.ssh-config", f"ProxyJump leads in a circle at {hop.host}", host=name, exit_code=USAGE
            )
        key = (hop, config, id(through.connection) if through else None)
        task = self._hops.get(key)
        if task is None or (task.done() and _gone(task)):

            async def make() -> Line:
                resolved = await _resolve(hop, config)
                if not first:  # it is reached from the hop before it, whatever its own config says
                    resolved = replace(resolved, jumps=(), proxy_command=None)
                    assert through is not None
                    return await self._login("", resolved, through.connection, "", again)
                return await self._line("", resolved, again=again, trail=(*trail, hop))

            self._hops = {known: hop for known, hop in self._hops.items() if not (hop.done() and _gone(hop))}
            task = self._hops[key] = asyncio.ensure_future(make())
        try:
            return await asyncio.shield(task)
        except hostkeys.UnknownKey as error:
            raise error.behind(hop.host, name) from None
        except RigbookError as error:
            raise RigbookError(
                error.id,
                f"jump host {hop.host}: {error.message}",
                host=name,
                hint=error.hint,
                exit_code=error.exit_code,
            ) from error

    async def _login(self, name: str, resolved: Resolved, tunnel: Any, via: str, again: bool) -> Line:
        gate, attempt = self._gates[(resolved.host, resolved.port)], 0
        while True:
            attempt += 1
            watcher = hostkeys.Watcher(await self._judge(name, resolved))
            try:
                async with gate:
                    began = time.monotonic()
                    # A machine that is slow to let people in (name servers, PAM, load) stays so.
                    login_s = max(AGAIN_LOGIN_S, 3 * gate.login_s) if again else LOGIN_S
                    connection = await self._connect(resolved, tunnel, watcher, again, login_s)
                    gate.login_s = max(gate.login_s, time.monotonic() - began)
            except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed) as error:
                if watcher.refused is None:
                    raise _unreachable(name, resolved, error, via) from error
                raise hostkeys.refusal(name, resolved.where(), watcher.refused, self._pins) from error
            except (asyncssh.ConnectionLost, ConnectionResetError, BrokenPipeError) as error:
                # A server that takes connections and then says nothing is not a busy one.
                if attempt >= gate.tries or "timeout" in str(error):
                    raise _unreachable(name, resolved, error, via) from error
                gate.room = max(1, gate.room // 2)
                await asyncio.sleep(backoff(attempt))
            except (TimeoutError, OSError, asyncssh.Error, ValueError) as error:
                raise _unreachable(name, resolved, error, via) from error
            else:
                gate.tries = BUSY_TRIES
                judge = watcher.judge
                if judge.accepted and judge.shown is not None:
                    where = (name, 22) if name else resolved.where()
                    hostkeys.pin(self._pins, *where, judge.shown.export_public_key().decode())
                return Line(connection, resolved, judge.told(), via or resolved.proxy_command or "")

    async def _judge(self, name: str, resolved: Resolved) -> hostkeys.Judge:
        lines = ""
        if resolved.known_hosts_command:
            host, port = resolved.where()
            tokens = {"H": f"[{host}]:{port}" if port != 22 else host, "h": resolved.host, "p": str(resolved.port),
                      "r": resolved.user, "n": resolved.target.host, "I": "HOSTNAME"}  # fmt: skip
            lines = await asyncio.to_thread(hostkeys.from_command, resolved.known_hosts_command, tokens)
        accept_new = self._accept_new and name not in self._ask_first
        return hostkeys.Judge(
            resolved.where(), self._pins, name, resolved.known_hosts, resolved.revoked, lines, accept_new
        )

    async def _connect(
        self, resolved: Resolved, tunnel: Any, watcher: hostkeys.Watcher, again: bool, login_s: float
    ) -> asyncssh.SSHClientConnection:
        connect_s = AGAIN_CONNECT_S if again else float(resolved.one("connecttimeout") or CONNECT_S)
        offer = await identity.offer(resolved)
        if not offer.pairs and offer.unusable and resolved.named_identities and not offer.locked:
            raise RigbookError(
                "host.ssh-config",
                f"the ssh config for {resolved.target.host} cannot be used: {'; '.join(offer.unusable)}",
                hint=f"What does `{by_hand(resolved)}` say?",
                exit_code=USAGE,
            )
        try:
            with contextlib.ExitStack() as stack:
                where: dict[str, Any] = {"tunnel": tunnel}
                proxy: wire.Proxy | None = None
                if tunnel is None and resolved.proxy_command:
                    proxy = await wire.proxied(resolved.proxy_command)
                    stack.callback(proxy.end)
                    where = {"sock": proxy.socket}
                elif tunnel is None:
                    where = {"sock": await wire.tcp(resolved, connect_s)}
                try:
                    connection = await asyncssh.connect(
                        resolved.host,
                        resolved.port,
                        config=None,
                        **where,
                        **wire.algorithms(resolved),
                        server_host_key_algs=watcher.judge.algorithms(),
                        known_hosts=([], [], []),
                        client_factory=partial(_same, watcher),
                        username=resolved.user,
                        client_keys=offer.pairs or None,
                        agent_path=None,
                        agent_forwarding=False,
                        password_auth=False,
                        kbdint_auth=False,
                        host_based_auth=False,
                        gss_auth=resolved.on("gssapiauthentication"),
                        gss_kex=False,
                        pkcs11_provider=resolved.one("pkcs11provider") if find_spec("pkcs11") else None,
                        x509_trusted_certs=None,
                        x509_trusted_cert_paths=(),
                        tcp_keepalive=True,
                        connect_timeout=connect_s + LOGIN_S if tunnel is not None else None,
                        login_timeout=login_s,
                        keepalive_interval=KEEPALIVE_S,
                        keepalive_count_max=KEEPALIVE_TRIES,
                    )
                except (asyncssh.ConnectionLost, ConnectionResetError, BrokenPipeError) as error:
                    if proxy is not None:
                        raise ConnectionAbortedError(await proxy.said(str(error))) from error
                    raise
                wire.without_ignored(connection)
                watcher.at_end = stack.pop_all().close  # the proxy lives as long as the connection
                return connection
        except asyncssh.DisconnectError as error:
            # "Too many authentication failures" comes as a protocol error.
            if not isinstance(error, asyncssh.PermissionDenied) and "authentication failures" not in str(error):
                raise
            raise _refused(resolved, error, offer) from error
        finally:
            offer.close()


def _gone(task: asyncio.Task[Line]) -> bool:
    return task.cancelled() or task.exception() is not None or task.result().connection.is_closed()


async def _resolve(target: Target, config: Path | None) -> Resolved:
    return await asyncio.to_thread(resolve.resolve, target, config)


def _same(watcher: hostkeys.Watcher) -> hostkeys.Watcher:
    return watcher


# --- sentences ------------------------------------------------------------------------------------------------------


def by_hand(resolved: Resolved) -> str:
    return shlex.join([*resolve.by_hand(resolved.target, resolved.config), "true"])


def _jump(hop: Target) -> str:
    """As ProxyJump wants it."""
    host = f"[{hop.host}]" if ":" in hop.host else hop.host
    return f"{f'{hop.user}@' if hop.user else ''}{host}{f':{hop.port}' if hop.port else ''}"


def _shown(resolved: Resolved) -> str:
    return resolved.target.words()[-1]


def _unreachable(name: str, resolved: Resolved, error: BaseException, via: str) -> RigbookError:
    said = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    if isinstance(error, OSError) and error.errno and error.errno > 0:
        said = os.strerror(error.errno)  # asyncio puts the address instead
    through = f" through {via}" if via else ""
    return RigbookError(
        "host.unreachable",
        f"no connection to {_shown(resolved)}{through}: {said}",
        host=name,
        hint=f"Is it up? Try `{by_hand(resolved)}`.",
        exit_code=UNREACHABLE,
    )


def _refused(resolved: Resolved, error: BaseException, offer: identity.Offer) -> RigbookError:
    """Let in nowhere: a locked key is told apart from a key that the server does not know."""
    if offer.locked:
        files = " ".join(shlex.quote(str(path)) for path in offer.locked)
        return RigbookError(
            "host.key-locked",
            f"{_shown(resolved)} does not let us in, and {files} is locked by a passphrase that no agent holds",
            hint=f"ssh-add {files}",
            exit_code=UNREACHABLE,
        )
    also = f" ({'; '.join(offer.unusable)})" if offer.unusable else ""
    none = "" if offer.pairs else ", and there is no key to show it"
    return RigbookError(
        "host.login-refused",
        f"{_shown(resolved)} does not let {resolved.user} in{none}: {error}{also}",
        hint=f"Does `{by_hand(resolved)}` work without a question?",
        exit_code=UNREACHABLE,
    )
