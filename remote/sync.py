"""Making a directory there equal to one here, or the other way, with as few bytes as possible: rsync where both ends
have it, else everything by tar.

rsync wants to start `ssh` itself, which would choose its own route and its own host keys. It gets a helper in that
place (`rsync_bridge.py`), which hands its three pipes to us over a socket; we join them to a channel of our own link.
So rsync runs over whatever we run over: a jump, a container's `pct exec`, this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from remote import rsync_bridge, stdin
from remote.connect import Link
from remote.copying import Progress, check
from remote.result import Result
from remote.trees import TreeCopied, get_tree, put_tree
from state.errors import RigbookError

# Links, modes and times as they are; no owners, devices or pipes. Arguments go through the protocol (-s), so that no
# shell sees them. A large file that is cut is gone on with.
OPTIONS = ("-rlpt", "-s", "--partial-dir=.rsync-partial", "--info=progress2", "--stats")


async def has_rsync(link: Link) -> bool:
    """Whether both ends have it."""
    if shutil.which("rsync") is None:
        return False
    return (await link.run(script="command -v rsync", timeout=20)).ok


async def sync_tree(
    link: Link, local: Path, remote: str, *, fetch: bool = False, delete: bool = False, progress: Progress | None = None
) -> TreeCopied:
    """Bring `remote` to what `local` is (`fetch`: the other way round). `delete` takes away what is on one side only,
    which is left to rsync."""
    if not await has_rsync(link):
        if delete:
            raise RigbookError(
                "file.no-rsync", "to delete what is not on the other side takes rsync at both ends", host=link.name,
                hint="apt install rsync",
            )  # fmt: skip
        return await (
            get_tree(link, remote, local, progress=progress)
            if fetch
            else put_tree(link, local, remote, progress=progress)
        )
    here, there = f"{os.path.abspath(local)}/", f"rig:{_path(remote)}/"
    if fetch:
        local.mkdir(parents=True, exist_ok=True)
    else:
        check(await link.run(["mkdir", "-p", _path(remote)]), remote)
    words = [*OPTIONS, *(["--delete"] if delete else []), *((there, here) if fetch else (here, there))]
    code, out, err, found = await _rsync(link, words, progress)
    if code == 0:
        return _stats(out)
    if found is not None and found.state == "unknown":
        found.check(f"rsync with {remote}")
    # rsync's own words, in one of ours where there is one.
    check(Result("exited", code, stderr=err, host=link.name), remote)
    raise AssertionError("a code other than 0 was refused")


def _path(remote: str) -> str:
    """rsync starts in the home directory and knows no `~` when no shell is there to tell it."""
    remote = remote.rstrip("/") or "/"
    if remote == "~":
        return "."
    remote = remote.removeprefix("~/")
    return f"./{remote}" if remote.startswith("-") else remote


async def _rsync(link: Link, words: Sequence[str], progress: Progress | None) -> tuple[int, str, bytes, Result | None]:
    """Run rsync here with our link in the place of ssh: (its code, what it said, its errors, how the far end ended)."""
    with tempfile.TemporaryDirectory(prefix="rigbook-") as folder:
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            name = f"{folder}/rsync"
            door.bind(name)
            door.listen(1)
            door.setblocking(False)
            helper = " ".join(f'"{word}"' for word in (sys.executable, "-I", "-S", rsync_bridge.__file__, name))
            process = await asyncio.create_subprocess_exec(
                "rsync", "-e", helper, *words,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                env={**os.environ, "LC_ALL": "C"},
            )  # fmt: skip
            serving = asyncio.ensure_future(_serve(door, link))
            assert process.stdout and process.stderr
            try:
                (out, err), _ = await asyncio.gather(
                    asyncio.gather(_told(process.stdout, progress), process.stderr.read()), process.wait()
                )
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                raise
            finally:
                if not serving.done():
                    # rsync that has ended needs nobody; it may have refused before it called us.
                    await asyncio.wait({serving}, timeout=5 if process.returncode == 0 else 1)
                    serving.cancel()
            found: Result | None = None
            with contextlib.suppress(asyncio.CancelledError):
                found = await serving
            return process.returncode or 0, out, err + (found.stderr if found else b""), found
        finally:
            door.close()


async def _serve(door: socket.socket, link: Link) -> Result:
    """Join the pipes of the helper that comes to a command on the far side."""
    loop = asyncio.get_running_loop()
    guest, _ = await loop.sock_accept(door)
    guest.setblocking(False)
    with guest:
        came = asyncio.Event()
        loop.add_reader(guest, came.set)
        try:
            await came.wait()
        finally:
            loop.remove_reader(guest)
        message, pipes, _, _ = socket.recv_fds(guest, 65536, 3)
        errors = bytearray()
        writing: set[asyncio.Future[None]] = set()
        code = 255
        try:
            argv = json.loads(message)[1:]  # without the name of the host

            async def out(data: bytes) -> None:
                work = asyncio.ensure_future(asyncio.to_thread(_write, pipes[1], data))
                writing.add(work)
                work.add_done_callback(writing.discard)
                await asyncio.shield(work)

            result = await link.stream(argv, feed=stdin.chunks(pipes[0]), out=out, err=errors.extend)
            code = result.code
        except BrokenPipeError:
            result = Result("signaled", signal="PIPE", host=link.name)
            code = result.code
        finally:
            # In this order: the helper ends, rsync finds nobody who reads what it writes and ends, so a thread of
            # ours that still writes to it ends. Closed earlier, that would write into whatever gets the number.
            with contextlib.suppress(OSError):
                await loop.sock_sendall(guest, str(code).encode())
            os.close(pipes[0])
            if writing:
                await asyncio.wait(writing)
            os.close(pipes[1])
            os.close(pipes[2])
        return Result(result.state, result.exit, result.signal, b"", bytes(errors), result.reason, link.name)


def _write(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(pipe, view) :]
        except BlockingIOError:  # rsync makes its pipes so
            waiting = select.poll()
            waiting.register(pipe, select.POLLOUT)
            waiting.poll()


_PROGRESS = re.compile(rb"\s*([\d,]+)\s+(\d+)%")


async def _told(stream: asyncio.StreamReader, progress: Progress | None) -> str:
    """What rsync says, with its progress lines read and left out."""
    kept, held = bytearray(), b""
    while data := await stream.read(65536):
        *lines, held = re.split(rb"[\r\n]", held + data)
        for line in lines:
            if match := _PROGRESS.match(line):
                done, percent = int(match[1].replace(b",", b"")), int(match[2])
                if progress and percent:
                    progress(done, done * 100 // percent)
            elif line:
                kept += line + b"\n"
    return bytes(kept + held).decode("utf-8", "replace")


def _stats(text: str) -> TreeCopied:
    def number(label: str) -> int:
        match = re.search(rf"^{label}: ([\d,]+)", text, re.MULTILINE)
        return int(match[1].replace(",", "")) if match else 0

    skipped = re.findall(r'^skipping non-regular file "(.*)"$', text, re.MULTILINE)
    return TreeCopied(
        files=number("Number of regular files transferred"),
        size=number("Total transferred file size"),
        sent=number("Total bytes sent") + number("Total bytes received"),
        skipped=skipped,
        by="rsync",
    )
