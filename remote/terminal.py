"""An interactive shell on a host: the one place where a pseudo-terminal is asked for.

A pseudo-terminal mixes the outputs, adds carriage returns and ends what runs when the link is lost, which is right for
a person at a keyboard and for nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import termios
import tty
from collections.abc import Iterator

import asyncssh

from remote import stdin
from remote.connect import Link, LocalLink
from remote.proxmox import GuestLink, bootstrap_only
from remote.result import Result
from remote.ssh import SSHLink
from state.errors import USAGE, RigbookError

CHUNK = 64 * 1024
# Leaves the other screen, mouse reports, bracketed paste and colours, and shows the cursor: what ended in the middle of
# vim or htop leaves a terminal that cannot be read.
CLEAN = b"\x1b[?1049l\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?25h\x1b[0m\r\n"


async def attach(link: Link) -> Result:
    """Join our terminal to a login shell there, until that ends."""
    if not sys.stdin.isatty():
        raise RigbookError(
            "shell.no-terminal", "a shell needs a terminal", hint="For one command: rigbook exec HOST -- COMMAND",
            exit_code=USAGE,
        )  # fmt: skip
    entering: list[str] | None = None
    name = link.name
    if isinstance(link, GuestLink):
        entering, link = link.entering(), link.outer
    if isinstance(link, LocalLink):
        argv = entering or [os.environ.get("SHELL", "/bin/sh"), "-l"]
        local = await asyncio.create_subprocess_exec(*argv)
        return Result("exited", await local.wait(), host=name)
    if not isinstance(link, SSHLink):
        raise bootstrap_only(link)
    size = os.get_terminal_size(0)
    command = f"exec {shlex.join(entering)}" if entering else None
    async with link.terminal(os.environ.get("TERM", "xterm"), (size.columns, size.lines), command) as process:
        ended: list[str] = []
        with _raw(), _resizing(process), _ending(ended):
            typing = asyncio.ensure_future(_type(process))
            try:
                while data := await process.stdout.read(CHUNK):
                    await asyncio.to_thread(_show, data)
                await process.wait_closed()
            except (OSError, asyncssh.Error) as error:
                await asyncio.to_thread(_show, CLEAN)
                return Result("unknown", reason=f"the link was lost: {error}", host=name)
            except asyncio.CancelledError:
                await asyncio.to_thread(_show, CLEAN)
                if not ended:
                    raise
                return Result("unknown", reason=f"ended here by {ended[0]}", host=name)
            finally:
                typing.cancel()
    if process.exit_signal:
        await asyncio.to_thread(_show, CLEAN)
        return Result("signaled", signal=process.exit_signal[0], host=name)
    if process.exit_status is None:
        await asyncio.to_thread(_show, CLEAN)
        return Result("unknown", reason="the link was lost", host=name)
    return Result("exited", process.exit_status, host=name)


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
def _ending(ended: list[str]) -> Iterator[None]:
    """A signal that ends us leaves the terminal as we found it."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def end(number: signal.Signals) -> None:
        ended.append(number.name)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _resizing(process: asyncssh.SSHClientProcess[bytes]) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def tell() -> None:
        size = os.get_terminal_size(0)  # COLUMNS and LINES in the environment are of the start
        process.change_terminal_size(size.columns, size.lines)

    loop.add_signal_handler(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
