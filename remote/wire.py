"""What an SSH connection runs over, a TCP socket or a ProxyCommand, and which algorithms it asks for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from typing import Any

import asyncssh

from remote.resolve import Resolved
from state.errors import USAGE, RigbookError

HAPPY_S = 0.25  # before the next address of a name is tried beside the first (RFC 8305)
MSG_IGNORE = 2  # RFC 4253 §11.2


async def tcp(resolved: Resolved, seconds: float) -> socket.socket:
    """A connected socket. A name with several addresses is tried at them in turn, a little apart."""
    loop = asyncio.get_running_loop()
    family = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(resolved.one("addressfamily") or "", 0)
    try:
        found = socket.getaddrinfo(
            resolved.host, resolved.port, family, socket.SOCK_STREAM, 0, socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        )
    except socket.gaierror:
        found = await loop.getaddrinfo(resolved.host, resolved.port, family=family, type=socket.SOCK_STREAM)
    bind = resolved.one("bindaddress")

    async def one(place: int) -> socket.socket:
        await asyncio.sleep(place * HAPPY_S)
        kind, type_, protocol, _, address = found[place]
        wire = socket.socket(kind, type_, protocol)
        try:
            wire.setblocking(False)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if bind:
                wire.bind((bind, 0))
            await loop.sock_connect(wire, address)
        except BaseException:
            wire.close()
            raise
        return wire

    async with asyncio.timeout(seconds):
        if len(found) == 1:
            return await one(0)
        tries = [asyncio.ensure_future(one(place)) for place in range(len(found))]
        chosen: socket.socket | None = None
        error: BaseException = OSError("no address")
        try:
            for done in asyncio.as_completed(tries):
                try:
                    chosen = await done
                    return chosen
                except OSError as failed:
                    error = failed
            raise error
        finally:
            for task in tries:
                task.cancel()
                if task.done() and not task.cancelled() and not task.exception() and task.result() is not chosen:
                    task.result().close()


class Proxy:
    """A running ProxyCommand, on a socket of its own, so that its bytes do not pass through Python twice."""

    def __init__(self, process: asyncio.subprocess.Process, wire: socket.socket) -> None:
        self.socket = wire
        self._process = process
        self._said = b""
        self._listening = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        """Read what it complains about, or it would block at some point; the end is kept."""
        assert self._process.stderr
        while data := await self._process.stderr.read(4096):
            self._said = (self._said + data)[-4096:]

    async def said(self, otherwise: str) -> str:
        """Its complaint, which is the reason; that the connection closed is only the result."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._listening), 1.0)
        return f"ProxyCommand: {self._said.decode('utf-8', 'replace').strip()[-300:] or otherwise}"

    def end(self) -> None:
        self.socket.close()
        self._listening.cancel()
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)


async def proxied(command: str) -> Proxy:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                "/bin/sh",
                "-c",
                f"exec {command}",
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    return Proxy(process, ours)


def algorithms(resolved: Resolved) -> dict[str, Any]:
    """What the config asks for, as far as asyncssh knows it; AES-GCM first where it asks for nothing."""
    from asyncssh.encryption import get_default_encryption_algs, get_encryption_algs
    from asyncssh.kex import get_kex_algs
    from asyncssh.mac import get_mac_algs
    from asyncssh.public_key import get_certificate_algs, get_public_key_algs

    usual = [name.decode() for name in get_default_encryption_algs()]
    # asyncssh would ask for ChaCha20 first; with AES instructions GCM is half as fast again.
    chosen: dict[str, Any] = {"encryption_algs": sorted(usual, key=lambda name: "-gcm@" not in name)}
    for key, option, known in (
        ("ciphers", "encryption_algs", get_encryption_algs),
        ("kexalgorithms", "kex_algs", get_kex_algs),
        ("macs", "mac_algs", get_mac_algs),
        ("pubkeyacceptedalgorithms", "signature_algs", lambda: [*get_public_key_algs(), *get_certificate_algs()]),
    ):
        if wanted := resolved.names(key):
            have = {name.decode() for name in known()}
            if not (both := [name for name in wanted if name in have]):
                raise RigbookError(
                    "host.ssh-config",
                    f"{key} of {resolved.target.host}: none of {', '.join(wanted)} is known here",
                    exit_code=USAGE,
                )
            chosen[option] = both
    if resolved.on("compression"):
        chosen["compression_algs"] = ["zlib@openssh.com", "none"]
    if preferred := resolved.names("preferredauthentications"):
        chosen["preferred_auth"] = preferred
    return chosen


def without_ignored(connection: asyncssh.SSHClientConnection) -> None:
    """asyncssh sends an empty packet before each one, against an attack on CBC ciphers. With the others it protects
    nothing, and costs a system call and a wake-up of the server for every packet."""
    if "cbc" in str(connection.get_extra_info("send_cipher")):
        return
    send = connection.send_packet

    def send_packet(kind: int, *args: bytes, handler: Any = None) -> None:
        if kind != MSG_IGNORE:
            send(kind, *args, handler=handler)

    connection.send_packet = send_packet  # type: ignore[method-assign, assignment]
