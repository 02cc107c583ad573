"""A job's files, every byte exactly once, whatever happens to the connection.

The far file is only ever appended to, so a byte offset says all. What we have is the local file, and its size is the
offset: there is no second record that could disagree with it.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remote.connect import Link, backoff
from state.errors import UNREACHABLE, RigbookError

if TYPE_CHECKING:
    from remote.probe.client import Probe

CHUNK = 256 * 1024
POLL_S = 1.0  # how long the far side waits for new bytes before it says "none yet"
QUIET_TRIES = 40  # reconnects without one answer before a follower gives up


async def _read(probe: Probe, jobs: str, id: str, file: str, offset: int, wait: float) -> tuple[bytes, bool]:
    """(bytes at offset, whether the job was over BEFORE they were read: then no bytes means there will be none)."""
    answer: dict[str, Any] = await probe.call(
        "job_read", jobs=jobs, id=id, file=file, offset=offset, limit=CHUNK, wait=wait
    )
    if answer["size"] < offset:
        raise RigbookError(
            "job.file-shrank",
            f"{id}/{file} has {answer['size']} bytes, but {offset} were read from it already",
            hint="Somebody truncated or replaced it. Move the local copy away to start over.",
        )
    return base64.b64decode(answer["data"]), bool(answer["ended"])


async def follow(
    link: Link, id: str, file: str = "out.log", offset: int = 0, *, until_end: bool = True
) -> AsyncIterator[tuple[int, bytes]]:
    """(offset, bytes) from `offset` on, until the job is over; with `until_end` False only what there is now.

    Reconnects by itself and goes on where it was. Has a probe of its own, since it waits on the far side.
    """
    jobs = f"{await link.state_dir()}/jobs"
    probe: Probe | None = None
    failures = 0
    try:
        while True:
            try:
                if probe is None or probe.closed:
                    probe = await link.open_probe()
                data, ended = await _read(probe, jobs, id, file, offset, POLL_S if until_end else 0)
            except RigbookError as error:
                failures += 1
                if error.exit_code != UNREACHABLE or failures > QUIET_TRIES:
                    raise
                await asyncio.sleep(backoff(min(failures, 4)))
                continue
            failures = 0
            if data:
                yield offset, data
                offset += len(data)
            elif ended or not until_end:
                return
    finally:
        if probe is not None:
            await probe.close()


async def mirror(link: Link, id: str, dest_dir: Path, files: Sequence[str] = ("out.log", "events.jsonl")) -> bool:
    """Bring the local copies up to date; True when the job is over and they are complete.

    Several may mirror into one place: each file is locked while it grows.
    """
    jobs = f"{await link.state_dir()}/jobs"
    probe = await link.probe()
    complete = True
    for name in files:
        path = dest_dir / name
        descriptor = await asyncio.to_thread(_open_locked, path)
        try:
            offset = os.lseek(descriptor, 0, os.SEEK_END)
            began = offset
            while True:
                data, ended = await _read(probe, jobs, id, name, offset, 0)
                if not data:
                    complete = complete and ended
                    break
                # A kill in the middle of this leaves a shorter file, which is as good an offset as any.
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                offset += len(data)
            if offset != began:
                await asyncio.to_thread(os.fsync, descriptor)
        finally:
            os.close(descriptor)
    return complete


def _open_locked(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor
