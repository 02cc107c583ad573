"""Our own standard input, without a thread that nobody can stop."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncGenerator

CHUNK = 256 * 1024


async def chunks(descriptor: int) -> AsyncGenerator[bytes, None]:
    """What comes in, until its end. The descriptor stays blocking: a terminal shares that flag with our output."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(descriptor, ready.set)
    except OSError:
        # A regular file (or /dev/null) cannot be waited for, and need not be.
        while data := os.read(descriptor, CHUNK):
            yield data
        return
    try:
        while True:
            await ready.wait()
            ready.clear()
            # The loop may have told us of the same bytes twice; a read that blocks would stop everything.
            if not select.select([descriptor], [], [], 0)[0]:
                continue
            data = os.read(descriptor, CHUNK)
            if not data:
                return
            yield data
    finally:
        loop.remove_reader(descriptor)
