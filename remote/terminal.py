"""An interactive shell on a host: the one place where a pseudo-terminal is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Iterator

import asyncssh

from remote import stdin
from remote.connect import Link, LocalLink
from remote.result import Result
from remote.ssh import SSHLink
from state.errors import USAGE, RigbookError

CHUNK = 64 * 1024


async def attach(link: Link) -> Result:
    """Join our terminal to a login shell there, until that ends."""
    if not sys.stdin.isatty():
        raise RigbookError(
            "shell.no-terminal", "a shell needs a terminal", hint="For one command: rigbook exec HOST -- COMMAND",
            exit_code=USAGE,
        )  # fmt: skip
    if isinstance(link, LocalLink):
        local = await asyncio.create_subprocess_exec(os.environ.get("SHELL", "/bin/sh"), "-l")
        return Result("exited", await local.wait(), host=link.name)
    assert isinstance(link, SSHLink)
    size = shutil.get_terminal_size()
    async with link.terminal(os.environ.get("TERM", "xterm"), (size.columns, size.lines)) as process:
        with _raw(), _resizing(process):
            typing = asyncio.ensure_future(_type(process))
            try:
                while data := await process.stdout.read(CHUNK):
                    await asyncio.to_thread(_show, data)
                await process.wait_closed()
            except (OSError, asyncssh.Error) as error:
                return Result("unknown", reason=f"the link was lost: {error}", host=link.name)
            finally:
                typing.cancel()
    if process.exit_signal:
        return Result("signaled", signal=process.exit_signal[0], host=link.name)
    if process.exit_status is None:
        return Result("unknown", reason="the link was lost", host=link.name)
    return Result("exited", process.exit_status, host=link.name)


async def _type(process: asyncssh.SSHClientProcess[bytes]) -> None:
    """What is typed, key by key."""
    with contextlib.suppress(OSError):
        async for data in stdin.chunks(0):
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.write_eof()


def _show(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(1, view) :]


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    before = termios.tcgetattr(0)
    try:
        tty.setraw(0, termios.TCSADRAIN)  # what was typed ahead is kept
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _resizing(process: asyncssh.SSHClientProcess[bytes]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def tell() -> None:
        size = shutil.get_terminal_size()
        process.change_terminal_size(size.columns, size.lines)

    loop.add_signal_handler(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
