"""Talking to a server from a stage: one session, retries with jitter, timeouts that follow the token budget."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp

from pipeline.stages.protocol import Refused, Terminated

T = TypeVar("T")
ATTEMPTS = 5
FIRST_WAIT = 0.5  # seconds; doubles, each time stretched by up to as much again
SLOWEST = 0.5  # tokens/s of one request, the queue before it included, below which we no longer believe in an answer
RETRIED = {408, 425, 429, 500, 502, 503, 504}


class Rejected(Exception):
    """The server answered, and will not do it: asking again would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """No usable answer after every attempt."""


class Client:
    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self.session, self.base_url = session, base_url.rstrip("/")

    async def get(self, path: str) -> bytes:
        """One attempt, for looking. Raises Unreachable or Rejected."""
        try:
            async with self.session.get(self.base_url + path, timeout=aiohttp.ClientTimeout(total=30)) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise Unreachable(f"{self.base_url}{path}: {_reason(error)}") from error
        if response.status != 200:
            raise Rejected(response.status, _message(body))
        return body

    async def post(self, path: str, body: dict[str, Any], tokens: int, attempts: int = ATTEMPTS) -> dict[str, Any]:
        """`tokens`: how many the answer may have. Raises Rejected, or Unreachable after `attempts`."""
        timeout = aiohttp.ClientTimeout(total=60 + tokens / SLOWEST)
        failure = ""
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(FIRST_WAIT * 2 ** (attempt - 1) * (1 + random.random()))
            try:
                async with self.session.post(self.base_url + path, json=body, timeout=timeout) as response:
                    data = await response.read()
                    if response.status == 200:
                        answer: dict[str, Any] = json.loads(data)
                        return answer
                    if response.status not in RETRIED:
                        raise Rejected(response.status, _message(data))
                    failure = f"HTTP {response.status}: {_message(data)}"
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failure = _reason(error)
        raise Unreachable(f"{self.base_url}{path}: {failure} (attempts: {attempts})")


@asynccontextmanager
async def connect(base_url: str, concurrency: int) -> AsyncIterator[Client]:
    """Raises Refused `server.unreachable` where nothing answers."""
    connector = aiohttp.TCPConnector(limit=concurrency)
    async with aiohttp.ClientSession(connector=connector) as session:
        client = Client(session, base_url)
        try:
            await client.get("/v1/models")
        except Rejected as error:
            if error.status in RETRIED:
                raise Refused("server.unreachable", f"the server at {base_url} is not ready: {error}") from error
        except Unreachable as error:
            raise Refused("server.unreachable", f"no server answers at {error}") from error
        yield client


async def each(work: Iterable[T], concurrency: int, do: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    """`do` for every item in order of start, at most `concurrency` at once. The first exception cancels the rest."""
    items = iter(work)

    async def worker() -> None:
        for item in items:  # shared: each item goes to one worker
            await do(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from group_error


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run a stage's asynchronous part. SIGTERM cancels it cleanly, then Terminated is raised as in any stage.

    (A signal handler that raises inside a task would only end that task.)
    """
    terminated = False

    async def watched() -> T:
        nonlocal terminated
        task = asyncio.ensure_future(main)

        def cancel() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, cancel)
        return await task

    before = signal.getsignal(signal.SIGTERM)
    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        if terminated:
            raise Terminated from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _message(body: bytes) -> str:
    """What an error body says, whichever shape it has."""
    try:
        value = json.loads(body)
        inner = value.get("error", value)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        return body.decode(errors="replace")[:200]
