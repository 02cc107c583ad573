"""Links: one per host, shared by everybody who works on that host.

    async with Rig(project) as rig:
        link = await rig.link("llm")
        result = await link.run(["nvidia-smi", "-L"])

A link is the same on every route; only `_open` differs. What an SSH library makes easy to get wrong is settled
here once: bytes everywhere, keepalive on, strict host keys, a limited number of sessions on one connection, and
an end that nobody reported is `unknown`, never success.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from remote import pythons, shell
from remote.result import Result
from state.errors import UNREACHABLE, USAGE, RigbookError

if TYPE_CHECKING:
    from remote.dial import Dialer
    from remote.probe.client import Probe
    from state.project import Host, Project

__all__ = ["Channel", "Link", "LocalLink", "Result", "Rig"]

Feed = bytes | AsyncIterator[bytes]
Sink = Callable[[bytes], Awaitable[None] | None]  # one that is awaited holds the far side back
CHUNK = 256 * 1024
ENDING = 3.0  # s that we wait for a command to end after we asked it to


class Lost(Exception):
    """The channel broke: nobody will tell us how the command ended."""


class Channel(Protocol):
    """A command that runs on the far side. Reads raise Lost, never give a short answer as if it were all."""

    async def write(self, data: bytes) -> None: ...
    async def eof(self) -> None: ...
    async def read(self) -> bytes: ...
    async def read_error(self) -> bytes: ...
    async def end(self) -> tuple[int | None, str | None]: ...
    def signal(self, name: str) -> None: ...
    async def close(self) -> None: ...


class Link(ABC):
    """A host that we can run commands on."""

    def __init__(self, name: str, host: Host) -> None:
        self.name = name
        self.host = host
        self._login_shell = ""  # as the far side told; "" until then
        self.known_python: str | None = None
        self._state_dir: str | None = None
        self._probe: Probe | None = None
        self._probe_lock = asyncio.Lock()

    async def ready(self) -> None:  # noqa: B027  nothing to do where there is no connection
        """Connected, or an error that says why not."""

    def route(self) -> dict[str, str]:
        """How we got there, in words: kind, and for SSH address, user and host key."""
        return {"route": "local"}

    @abstractmethod
    def _open(
        self, command: str, line: bytes, *, eof: bool = False, bulk: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Channel]:
        """Start `command` in the login shell. `line` is the first thing on its stdin, with `eof` the last. Lost when
        the link is gone, RigbookError when it cannot be made."""

    async def aclose(self) -> None:
        if self._probe is not None:
            await self._probe.close()
            self._probe = None

    @contextlib.asynccontextmanager
    async def open(
        self,
        argv: Sequence[str] | None = None,
        *,
        script: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> AsyncIterator[tuple[Channel, shell.Marker]]:
        """A channel for a conversation; the caller feeds what it reads through the marker."""
        line = shell.program(argv, script=script, env=env, cwd=cwd)
        command, marker, line = shell.opening(line, direct=self._direct(argv, line), public=not env)
        async with self._open(command, line) as channel:
            yield channel, shell.Marker(marker)

    async def run(
        self,
        argv: Sequence[str] | None = None,
        *,
        script: str | None = None,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Run one command (or one sh script) to its end. `timeout` (seconds) stops it on the far side too."""
        out, err = bytearray(), bytearray()
        result = await self.stream(
            argv, script=script, feed=stdin, out=out.extend, err=err.extend, env=env, cwd=cwd, timeout=timeout
        )
        return Result(
            result.state, result.exit, result.signal, bytes(out), bytes(err) or result.stderr, result.reason, self.name
        )

    async def stream(
        self,
        argv: Sequence[str] | None = None,
        *,
        script: str | None = None,
        feed: Feed = b"",
        out: Sink,
        err: Sink,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        timeout: float | None = None,
        bulk: bool = False,
    ) -> Result:
        """As `run`, but output goes to `out` and `err` while it comes and input may be an iterator. `bulk` says that it
        is much: behind jump hosts there is a faster way for that, which takes longer to begin."""
        line = shell.program(argv, script=script, env=env, cwd=cwd, timeout=timeout)
        command, nonce, line = shell.opening(line, direct=self._direct(argv, line), public=not env)
        markers = shell.Marker(nonce), shell.Marker(nonce)
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            async with self._open(command, line, eof=feed == b"", bulk=bulk) as channel:
                work = asyncio.gather(
                    _drain(channel.read, markers[0], out),
                    _drain(channel.read_error, markers[1], err),
                )
                feeding = None if feed == b"" else asyncio.ensure_future(_feed(channel, feed))
                try:
                    # The far side's own deadline comes first; ours is for a far side that has stopped answering.
                    await asyncio.wait_for(work, None if timeout is None else timeout + ENDING)
                    code, signal_name = await asyncio.wait_for(channel.end(), None if timeout is None else ENDING)
                    if feeding and feeding.done() and not feeding.cancelled() and (failed := feeding.exception()):
                        raise failed
                except TimeoutError:
                    for name in ("TERM", "KILL"):
                        with contextlib.suppress(Exception):
                            channel.signal(name)
                    return Result("timeout", reason=f"still running after its {timeout:g} s", host=self.name)
                except BaseException:
                    # We are given up, or who took the output has gone. Closing a channel stops nothing on the far
                    # side unless there is a terminal: say it.
                    with contextlib.suppress(Exception):
                        channel.signal("TERM")
                    raise
                finally:
                    # Somebody looks at its end, or asyncio would complain on the screen that nobody did.
                    work.add_done_callback(lambda done: done.cancelled() or done.exception())
                    work.cancel()
                    if feeding:
                        feeding.cancel()  # a command may end and leave its input unread
                        # Its source may belong to the caller, who closes it as soon as we return.
                        await asyncio.gather(feeding, return_exceptions=True)
        except Lost as error:
            return Result("unknown", reason=f"the link was lost: {error}", host=self.name)
        if code is None and signal_name is None:
            return Result("unknown", reason="the link was lost before the command's end was reported", host=self.name)
        self._login_shell = markers[0].told or self._login_shell
        if not markers[0].seen:
            self._login_shell = ""
            noise = (markers[0].noise + markers[1].noise).decode("utf-8", "replace").strip()[:300]
            raise self._no_shell(code, noise)
        if timeout is not None and clock() - started >= timeout and (code in (124, 137) or signal_name == "KILL"):
            return Result("timeout", reason=f"stopped after its {timeout:g} s", host=self.name)
        if signal_name is not None:
            return Result("signaled", None, signal_name, host=self.name)
        return Result("exited", code, host=self.name)

    def _direct(self, argv: Sequence[str] | None, line: bytes) -> bool:
        """Whether the login shell itself may read the program: it saves starting another one. Scripts are for sh, and
        anything before `exec` too: its start-up file may have functions by the names of cd or timeout."""
        plain = argv is not None and line.startswith(b"exec ") and line.isascii()
        return plain and self._login_shell.rpartition("/")[2] in shell.LIKE_SH

    def _no_shell(self, code: int | None, noise: str) -> RigbookError:
        """The error for a way in that ended before our command began."""
        return RigbookError(
            "host.no-shell",
            f"the login shell ended (code {code}) before our command began: {noise or 'it printed nothing'}",
            host=self.name,
            hint="Can this user run commands? `ssh HOST true` should print nothing and succeed.",
            exit_code=UNREACHABLE,
        )

    async def python(self) -> str:
        """The far side's Python >= 3.9, as an absolute path."""
        if self.known_python is None:
            found = await self.run(script=f"({shell.FIND_PYTHON})||{{ {pythons.REPORT} exit 127;}}", timeout=20)
            if found.state == "exited" and found.exit == 127:
                raise pythons.missing(found.stderr.decode("utf-8", "replace"), self.name)
            self.known_python = self._told(found, "looking for python3").text()
        return self.known_python

    def _told(self, result: Result, what: str) -> Result:
        """A look of our own that takes this long is a host that does not answer: callers may try again."""
        if result.state == "timeout":
            raise RigbookError("host.unreachable", f"{what}: no answer", host=self.name, exit_code=UNREACHABLE)
        return result.check(what)

    async def state_dir(self) -> str:
        """The absolute path of this host's state directory."""
        if self._state_dir is None:
            # Resolved (links, too), since jobs carry this path as their mark of origin.
            where = shell.path(self.host.state_dir)
            script = f"umask 077;mkdir -p {where}&&cd {where}&&pwd -P"
            found = self._told(await self.run(script=script, timeout=20), f"making {self.host.state_dir}")
            self._state_dir = found.stdout.decode("utf-8", "surrogateescape").removesuffix("\n")
        return self._state_dir

    async def open_probe(self) -> Probe:
        """A probe of one's own; the caller closes it."""
        from remote.probe import client

        return await client.start(self)

    async def probe(self) -> Probe:
        """The probe that everybody on this link shares; started when needed, and again when it was lost."""
        async with self._probe_lock:
            if self._probe is None or self._probe.closed:
                self._probe = await self.open_probe()
            return self._probe

    # Files: see remote/files.py for what each promises.
    async def write(self, remote: str, data: bytes, mode: int = 0o600) -> None:
        from remote import files

        await files.write(self, remote, data, mode)

    async def read(self, remote: str, offset: int = 0, limit: int | None = None) -> bytes:
        from remote import files

        return await files.read(self, remote, offset, limit)

    async def put(self, local: Path, remote: str, mode: int | None = None) -> None:
        from remote import files

        await files.put(self, local, remote, mode)

    async def get(self, remote: str, local: Path) -> None:
        from remote import files

        await files.get(self, remote, local)

    async def put_tree(self, local: Path, remote: str) -> None:
        from remote import files

        await files.put_tree(self, local, remote)

    async def get_tree(self, remote: str, local: Path) -> None:
        from remote import files

        await files.get_tree(self, remote, local)


async def _feed(channel: Channel, feed: Feed) -> None:
    try:
        if isinstance(feed, bytes):
            for at in range(0, len(feed), CHUNK):
                await channel.write(feed[at : at + CHUNK])
        else:
            async with contextlib.AsyncExitStack() as stack:
                if isinstance(feed, AsyncGenerator):
                    # Cancelled amid a write, it would be closed when it is collected: by then what it reads from may
                    # be gone, and its number that of something else.
                    stack.push_async_callback(feed.aclose)
                async for chunk in feed:
                    await channel.write(chunk)
        await channel.eof()
    except BrokenPipeError:
        return  # it ended without reading its input, as `true` does; its exit code tells
    except Exception:
        # Our source failed: the command must not take what came so far for all of it, nor wait for more.
        channel.signal("TERM")
        await channel.eof()
        raise


async def _drain(read: Callable[[], object], marker: shell.Marker, sink: Sink) -> None:
    while True:
        data = await read()  # type: ignore[misc]
        if not data:
            return
        own = marker.feed(data)
        if own and (taking := sink(own)) is not None:
            await taking


class LocalChannel:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin and process.stdout and process.stderr
        self._process = process
        self._in, self._out, self._err = process.stdin, process.stdout, process.stderr

    def begin(self, line: bytes) -> None:
        self._in.write(line)

    async def write(self, data: bytes) -> None:
        try:
            self._in.write(data)
            await self._in.drain()
        except ConnectionResetError as error:
            raise BrokenPipeError(str(error)) from error

    async def eof(self) -> None:
        self._in.close()

    async def read(self) -> bytes:
        return await self._out.read(CHUNK)

    async def read_error(self) -> bytes:
        return await self._err.read(CHUNK)

    async def end(self) -> tuple[int | None, str | None]:
        code = await self._process.wait()
        if code < 0:
            return None, signal.Signals(-code).name.removeprefix("SIG")
        return code, None

    def signal(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, getattr(signal, f"SIG{name}"))

    async def close(self) -> None:
        self._in.close()


class LocalLink(Link):
    """This machine, by subprocess: the same words over another wire."""

    @contextlib.asynccontextmanager
    async def _open(
        self, command: str, line: bytes, *, eof: bool = False, bulk: bool = False
    ) -> AsyncIterator[Channel]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        channel = LocalChannel(process)
        try:
            channel.begin(line)
            if eof:
                await channel.eof()
            yield channel
        finally:
            await channel.close()
            # Output that nobody reads any more must not keep the command, nor us: asyncio waits for the pipes' end.
            for pipe_end in (1, 2):
                process._transport.get_pipe_transport(pipe_end).close()  # type: ignore[attr-defined]
            try:
                await asyncio.wait_for(process.wait(), ENDING)
            except TimeoutError:
                channel.signal("KILL")  # as sshd does to a session whose client has gone
                await process.wait()
            # A child that kept our pipes would keep the transport too, past the end of the event loop.
            process._transport.close()  # type: ignore[attr-defined]


class Rig:
    """The hosts of a project. Links are made when asked for and closed together.

    `accept_new` takes the key of a machine that nobody vouched for and keeps it: trust on first use, never the default.
    """

    def __init__(self, project: Project, *, accept_new: bool = False) -> None:
        self.project = project
        self._accept_new = accept_new
        self._links: dict[str, Link] = {}
        self._dialer: Dialer | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(link.aclose() for link in self._links.values()), return_exceptions=True)
        self._links.clear()
        if self._dialer is not None:
            await self._dialer.aclose()
            self._dialer = None

    async def link(self, name: str) -> Link:
        """The link to a host of the project. Raises host.* when it cannot be reached now."""
        link = self._link(name)
        await link.ready()
        return link

    def _link(self, name: str, inner: tuple[str, ...] = ()) -> Link:
        """The link, which may not be connected. `inner` are the guests that are reached through it."""
        link = self._links.get(name)
        if link is None:
            if name in inner:
                raise RigbookError(
                    "host.no-route", f"it runs on itself: {' on '.join([*inner, name])}", host=name, exit_code=USAGE
                )
            link = self._links[name] = self._make(name, inner)
        return link

    def _make(self, name: str, inner: tuple[str, ...]) -> Link:
        host = self.project.hosts.get(name)
        if host is None:
            known = ", ".join(self.project.hosts) or "none"
            raise RigbookError(
                "host.not-declared", f"no host {name!r} in rigbook.toml (there are: {known})", exit_code=USAGE
            )
        if host.reached_by == "local":
            return LocalLink(name, host)
        if host.reached_by == "none":
            raise RigbookError(
                "host.no-route",
                f"no way to reach it: `hosts.{name}.ssh` is not set",
                host=name,
                hint='Set ssh = "user@address" or an alias of your ssh config.',
                exit_code=USAGE,
            )
        if host.reached_by in ("pct", "agent"):
            from remote.proxmox import through_host

            assert host.on is not None
            return through_host(name, host, self._link(host.on, (*inner, name)))
        from remote.dial import Dialer
        from remote.hostkeys import pins
        from remote.ssh import SSHLink

        root = self.project.root
        if self._dialer is None:
            self._dialer = Dialer(pins(root), accept_new=self._accept_new)
        config = self.project.project.ssh_config
        vouch = partial(self.vouched, name) if host.on and host.vmid and host.on not in inner else None
        return SSHLink(name, host, self._dialer, config=root / config if config else None, vouch=vouch)

    async def vouched(self, name: str) -> list[str]:
        """A guest's own host keys, told by the machine that it runs on, whose key is trusted. [] when that cannot be
        asked: then the guest's key stays unknown."""
        from remote.proxmox import host_keys

        host = self.project.hosts[name]
        if host.on is None or host.vmid is None:
            return []
        try:
            return await host_keys(name, host, await self.link(host.on))
        except RigbookError:
            return []


def backoff(attempt: int) -> float:
    """Seconds before try number `attempt` (from 1): full jitter, so that many clients do not knock together. Capped, so
    that a link that is back is found soon."""
    return random.uniform(0.05, min(1.5, 0.25 * 2**attempt))
