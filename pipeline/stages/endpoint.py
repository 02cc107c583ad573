"""One OpenAI-compatible server: how it is asked, and what its refusals mean.

One attempt, and an exception of its own for each thing that can be done about a failure: wait (Busy), give the row up
(Rejected), ask somebody else (Gone), never ask this server again (Denied). A key is read on the stage's own host, goes
into one header, and is taken out of every word that comes back.
"""

from __future__ import annotations

import base64
import email.utils
import json
import os
import time
import urllib.parse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import aiohttp

from pipeline.stages.answers import Failure, Malformed, Streamed, events, parse
from pipeline.stages.protocol import Refused
from pipeline.stages.purse import FREE, Price

CONNECT = 15.0  # seconds to a connection
SLOWEST = 0.5  # tokens/s of one request, the queue before it included, below which we no longer believe in an answer
SILENT = 600.0  # seconds without a byte of a stream that has begun: its server hangs
LONGEST_WAIT = 3600.0  # seconds; what a Retry-After may ask for at most
BUSY = {429, 503, 529}  # 529: overloaded, as some providers say it
PASSING = {408, 409, 425, 500, 502, 504, 520, 521, 522, 523, 524}  # 52x: a proxy's word for a server it cannot reach
DENIED = {401, 402}  # the key, the credit: the next row would fare no better
HIDDEN = "«secret»"


class Busy(Exception):
    """Too much for it at the moment. `wait`: seconds that it asks for, where it does."""

    def __init__(self, message: str, wait: float | None) -> None:
        super().__init__(message)
        self.wait = wait


class Rejected(Exception):
    """It answered, and will not do this row: asking again would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Denied(Exception):
    """It will not do any row of ours."""


class Gone(Exception):
    """No whole answer. `sent`: the request may have reached it, and may have been the reason."""

    def __init__(self, message: str, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


@dataclass
class Endpoint:
    """`optional`: fields that we would like to send, each left out once the server says that it does not know it."""

    name: str
    base_url: str
    model: str = "default"
    key: str | None = field(default=None, repr=False)
    headers: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] = field(default_factory=dict)
    price: Price = FREE
    concurrency: int = 0
    stream: bool = False
    optional: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.base_url = self.base_url.rstrip("/").removesuffix("/v1")
        # SGLang refuses prompt ids in a stream, and vLLM tells them with the others.
        self.optional |= {"return_token_ids"} if self.stream else {"return_token_ids", "return_prompt_token_ids"}

    async def look(self, session: aiohttp.ClientSession) -> None:
        """Whether it serves. Raises Busy, Denied, Rejected or Gone."""
        timeout = aiohttp.ClientTimeout(total=30)
        try:
            async with session.get(
                f"{self.base_url}/v1/models", headers=self._headers(), timeout=timeout, allow_redirects=False
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Gone(self._hide(_reason(error)), sent=False) from None
        if response.status not in (200, 404, 405):  # a server of few endpoints may have no list of models
            self._raise(response.status, response.headers.get("Retry-After"), body)

    async def load(self, session: aiohttp.ClientSession) -> tuple[float, float] | None:
        """(waiting, running) requests by the server's own metrics, of SGLang or vLLM; None where it tells none."""
        try:
            async with session.get(
                f"{self.base_url}/metrics", timeout=aiohttp.ClientTimeout(total=10), allow_redirects=False
            ) as response:
                text = (await response.read()).decode(errors="replace") if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None
        waiting = metric(text, "sglang:num_queue_reqs", "vllm:num_requests_waiting")
        running = metric(text, "sglang:num_running_reqs", "vllm:num_requests_running")
        return None if waiting is None or running is None else (waiting, running)

    async def ask(self, session: aiohttp.ClientSession, body: dict[str, Any], tokens: int) -> dict[str, Any]:
        """A row's fields (`answers.parse`), one attempt. `tokens`: how many the answer may have.

        Raises Busy, Rejected, Denied or Gone.
        """
        while True:
            optional = set(self.optional)
            whole = {"model": self.model} | body | self.body | dict.fromkeys(sorted(optional), True)
            if self.stream:
                whole |= {"stream": True, "stream_options": {"include_usage": True}}
            try:
                return await self._attempt(session, whole, tokens)
            except Rejected as error:
                unknown = {name for name in optional if name in str(error)}
                if error.status not in (400, 422) or not unknown:
                    raise
                self.optional -= unknown

    async def _attempt(self, session: aiohttp.ClientSession, body: dict[str, Any], tokens: int) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(
            total=60 + tokens / SLOWEST, sock_connect=CONNECT, sock_read=SILENT if self.stream else None
        )
        try:
            async with session.post(
                f"{self.base_url}/v1/chat/completions",
                data=json.dumps(body).encode(),
                headers=self._headers() | {"Content-Type": "application/json"},
                timeout=timeout,
                allow_redirects=False,  # a key goes where the project file says, and nowhere else
            ) as response:
                if response.status != 200:
                    self._raise(response.status, response.headers.get("Retry-After"), await response.read())
                if response.content_type == "text/event-stream":
                    return await self._streamed(response)
                data = await response.read()
                self._closed_lips(data)
                return parse(data)
        except Failure as error:
            self._raise(error.code or 500, None, str(error).encode())
        except Malformed as error:
            raise Gone(self._hide(str(error)), sent=True) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Gone(self._hide(_reason(error)), sent=False) from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Gone(self._hide(_reason(error)), sent=True) from None

    async def _streamed(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        answer = Streamed()
        async for data in events(response.content.iter_any()):
            self._closed_lips(data)
            answer.add(data)
        return answer.whole()

    def _headers(self) -> dict[str, str]:
        return self.headers | ({"Authorization": f"Bearer {self.key}"} if self.key else {})

    def _raise(self, status: int, retry_after: str | None, body: bytes) -> NoReturn:
        words = self._hide(message(self._hide(body.decode(errors="replace"))))[:400]
        if status in BUSY:
            raise Busy(f"HTTP {status}: {words}", retry_seconds(retry_after, time.time())) from None
        if status in DENIED:
            raise Denied(f"HTTP {status}: {words}") from None
        if status in PASSING or status >= 500:
            raise Gone(f"HTTP {status}: {words}", sent=True) from None
        raise Rejected(status, words) from None

    def _closed_lips(self, data: bytes) -> None:
        if self.key and any(form.encode() in data for form in spellings(self.key)):
            raise Malformed("the answer repeats the key that it was asked with; it was thrown away")

    def _hide(self, text: str) -> str:
        for form in spellings(self.key) if self.key else ():
            text = text.replace(form, HIDDEN)
        return text


def spellings(key: str) -> list[str]:
    """A key as it is, and as JSON, a URL or base64 would write it (each part of it or all); longest first."""
    quoted = json.dumps(key)[1:-1]
    forms = {key, quoted, quoted.replace("/", "\\/"), json.dumps(quoted)[1:-1]}
    forms |= {urllib.parse.quote(key, safe=safe) for safe in ("", "/", "+", '"', '/+"', '"+', '/"', "/+")}
    coded = base64.b64encode(key.encode()).decode()
    return sorted({*forms, coded, coded.rstrip("=")}, key=len, reverse=True)


def read_key(name: str, where: dict[str, str]) -> str:
    """The key that `where` refers to: {"file": path} or {"env": name}. Raises Refused `generate.key`."""
    if "file" in where:
        path, place = Path(where["file"]).expanduser(), f"the file {where['file']}"
        try:
            key = path.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise Refused(
                "generate.key", f"the key of endpoint {name!r} cannot be read from {place}: {reason}"
            ) from None
    else:
        key, place = os.environ.get(where["env"], "").strip(), f"the environment variable {where['env']}"
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise Refused("generate.key", f"the key of endpoint {name!r} in {place} is empty, or is no key (one word)")
    return key


def retry_seconds(header: str | None, now: float) -> float | None:
    """Retry-After: seconds, or a date. `now`: Unix time. None where it is absent or makes no sense."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(header).timestamp() - now
        except (ValueError, TypeError, IndexError):
            return None
    return min(max(0.0, seconds), LONGEST_WAIT) if seconds == seconds else None


def metric(text: str, *names: str) -> float | None:
    """The sum over its label sets of the first metric that is there."""
    for name in names:
        found = [line for line in text.splitlines() if line.startswith((name + " ", name + "{"))]
        try:
            if found:
                return sum(float(line.rpartition("}")[2].split()[-1 if "}" not in line else 0]) for line in found)
        except (ValueError, IndexError):
            return None
    return None


def message(body: str) -> str:
    """What an error body says, whichever shape it has."""
    try:
        value = json.loads(body)
        inner = value.get("error") or value
        return str(inner.get("message") or inner) if isinstance(inner, dict) else str(inner)
    except (ValueError, AttributeError):
        return body[:400]


@asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Connections to every endpoint; how many at once is the dispatcher's business."""
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=1 << 20, trust_env=False
    ) as made:
        yield made


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
