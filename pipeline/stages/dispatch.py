"""Rows shared among servers by their speed: each takes the next one when it has room.

A row is with one server at a time. A server that fails is set aside, for longer each time, and comes back with one
request on trial; its rows go to the others meanwhile. Towards the end a slow server takes no row that a fast one would
have finished sooner, queue included. Nothing is given up for the trouble of a server: only when none of them has
answered for PATIENCE (a large model loads for twenty minutes).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from pipeline.stages.allot import Allotment, Row
from pipeline.stages.endpoint import Busy, Denied, Endpoint, Gone, Rejected
from pipeline.stages.pace import Pace
from pipeline.stages.protocol import Refused
from pipeline.stages.purse import Purse

FIRST_WAIT = 0.5  # seconds that a server is left alone after trouble; doubles, stretched by up to as much again
LAST_WAIT = 60.0
TRIES = 5  # lost answers to one row, by servers that were there: then the row is the reason
TROUBLE = 3  # times in a row before a server gets one request at a time
PATIENCE = 1800.0  # seconds without any answer from anybody
LOOK = 2.0  # seconds between two looks at a server's own queue


@dataclass
class Lane:
    """A server at work."""

    endpoint: Endpoint
    pace: Pace
    in_flight: int = 0
    full: bool = False  # at its limit when rows were last given out
    seconds: float | None = None  # an answer takes, a moving mean
    trouble: int = 0  # crowds of failures since its last answer
    since: float = 0.0  # when the trouble began
    aside: float = 0.0  # asked nothing before this time …
    told: float = 0.0  # … which the server itself named (Retry-After)
    closed: str = ""  # why it is asked nothing any more
    broke: bool = False  # because the money is at its end
    answers: int = 0
    tokens: int = 0
    lost: int = 0  # attempts without a whole answer
    busy: int = 0  # attempts that it turned away
    usd: float = 0.0
    words: str = ""  # what it said last, in trouble

    def room(self, now: float) -> int:
        if self.closed or now < self.aside:
            return 0
        return (1 if self.trouble >= TROUBLE else self.pace.limit) - self.in_flight


Ask = Callable[[Lane, Row], Awaitable[dict[str, Any]]]


@dataclass
class Dispatch:
    """`answered` judges an answer: whether it is kept. Then what was set aside for it (dollars) is given back to the
    purse by whoever keeps it, with a `wake`. `failed` is told of a row that will get none, and why."""

    lanes: list[Lane]
    rows: Allotment
    purse: Purse
    ask: Ask
    answered: Callable[[Lane, Row, dict[str, Any], float], bool]
    failed: Callable[[Row, str], None]
    session: aiohttp.ClientSession
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _last: float = 0.0  # when anything was answered

    async def run(self) -> None:
        """Until every row is settled. Raises Refused where no server is left, and what `answered` raises."""
        self._last = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                watchers = [group.create_task(self._watch(lane)) for lane in self.lanes if not lane.pace.asked]
                while self.rows.pending or self.rows.in_flight:
                    self._wake.clear()
                    now = time.monotonic()
                    self._fill(group, now)
                    self._lose_patience(now)
                    await self._news(now)
                for watcher in watchers:
                    watcher.cancel()
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    def wake(self) -> None:
        """Something changed: look again whether a row can be given out."""
        self._wake.set()

    def _fill(self, group: asyncio.TaskGroup, now: float) -> None:
        while (row := self.rows.peek()) is not None:
            lane, most = self._choose(row, now)
            if lane is None:
                break
            self.rows.take(row)
            lane.in_flight += 1
            self.purse.send(most)
            group.create_task(self._attempt(lane, row, most))
        for lane in self.lanes:
            lane.full = lane.room(now) <= 0

    def _choose(self, row: Row, now: float) -> tuple[Lane | None, float]:
        """The server for a row, and what it can cost there; None: nobody now."""
        pending = self.rows.pending
        best, cost = None, 0.0
        for lane in self.lanes:
            if lane.room(now) <= 0 or not self._worth(lane, pending, now):
                continue
            most = self.purse.most(lane.endpoint.price, row.data)
            if not self.purse.allows(most):
                if not self.purse.open:
                    # Nothing that comes back could free anything: this is the end of the money.
                    lane.broke, lane.closed = True, f"the cap of ${self.purse.cap:,.2f} has no room for another request"
                continue
            if best is None or lane.room(now) > best.room(now):
                best, cost = lane, most
        return best, cost

    def _worth(self, lane: Lane, pending: int, now: float) -> bool:
        """Whether it would be done before the others had done everything, this row at their ends included."""
        if lane.seconds is None:
            return True
        others = [
            o for o in self.lanes if o is not lane and o.seconds and not (o.closed or o.trouble) and o.aside < now
        ]
        ends = (o.seconds * math.ceil((pending + o.in_flight) / o.pace.limit) for o in others if o.seconds)
        return lane.seconds <= min(ends, default=math.inf)

    async def _attempt(self, lane: Lane, row: Row, most: float) -> None:
        began = time.monotonic()
        try:
            fields = await self.ask(lane, row)
        except (Busy, Denied, Rejected, Gone) as error:
            self.purse.back(most, 0.0)
            self._no_answer(lane, row, error, most)
        else:
            now = time.monotonic()
            self._last, lane.trouble, lane.aside = now, 0, lane.told
            seconds = now - began
            lane.seconds = seconds if lane.seconds is None else 0.9 * lane.seconds + 0.1 * seconds
            usd = lane.endpoint.price.cost(fields)
            lane.answers += 1
            lane.tokens += fields["completion_tokens"]
            lane.usd += usd or 0.0
            lane.pace.answered(now, fields["completion_tokens"], lane.full)
            if not self.answered(lane, row, fields if usd is None else fields | {"usd": usd}, most):
                self.purse.back(most, 0.0)
                self.purse.lose(usd or 0.0, f"{row.data['id']} at {lane.endpoint.name}: not kept")
        lane.in_flight -= 1
        self._wake.set()

    def _no_answer(self, lane: Lane, row: Row, error: Exception, most: float) -> None:
        now = time.monotonic()
        lane.words = str(error)
        if isinstance(error, Rejected):
            self.rows.settle(row, None)
            self.failed(row, f"HTTP {error.status}: {error}")
            return
        if isinstance(error, Denied):
            lane.closed = str(error)
        elif isinstance(error, Busy):
            lane.busy += 1
            lane.pace.refused(now, str(error))
            self._set_aside(lane, now, error.wait, at_once=True)
        elif isinstance(error, Gone):
            lane.lost += 1
            if error.sent:
                row.tries += 1
                self.purse.lose(most, f"{row.data['id']} at {lane.endpoint.name}: {error}")
            self._set_aside(lane, now, None, at_once=not error.sent)
            if row.tries >= TRIES:
                self.rows.settle(row, None)
                self.failed(row, f"{error} (asked {row.tries} times)")
                return
        self.rows.give_back(row)

    def _set_aside(self, lane: Lane, now: float, wait: float | None, at_once: bool) -> None:
        """`wait`: seconds that it asked for. `at_once`: it was the server; else the row, until it happens again."""
        if now >= lane.aside:  # else it is the same crowd, and counts once
            lane.trouble += 1
            lane.since = lane.since if lane.trouble > 1 else now
            if at_once or lane.trouble >= TROUBLE:
                lane.aside = now + min(LAST_WAIT, FIRST_WAIT * 2 ** min(lane.trouble - 1, 20)) * (1 + random.random())
        if wait is not None:
            lane.told = max(lane.told, now + wait * (1 + 0.1 * random.random()))
            lane.aside = lane.since = max(lane.aside, lane.told)

    def _lose_patience(self, now: float) -> None:
        """Raises Refused where nobody is left to wait for."""
        left = [lane for lane in self.lanes if not lane.closed]
        if not left and not self.rows.in_flight:
            closed = "; ".join(f"{lane.endpoint.name}: {lane.closed}" for lane in self.lanes)
            if all(lane.broke for lane in self.lanes):
                raise Refused(
                    "generate.max-cost",
                    f"${self.purse.spent:,.4f} are spent; {closed}. What was answered is kept: raise "
                    "pipeline.generate.max_cost and start again to go on",
                )
            raise Refused("generate.denied", f"no server takes our requests: {closed}. What was answered is kept")
        if left and all(lane.trouble and lane.in_flight <= 1 for lane in left):
            waited = now - max(self._last, *(lane.since for lane in left))
            if waited > PATIENCE:
                words = "; ".join(f"{lane.endpoint.name}: {lane.words}" for lane in left)
                raise Refused(
                    "generate.server-gone",
                    f"no server has answered for {waited:.0f} s: {words}. What was answered is kept; start again to go "
                    "on",
                )

    async def _news(self, now: float) -> None:
        """Wait for an answer, for the first server that is set aside, or for the end of our patience."""
        times = [lane.aside for lane in self.lanes if lane.aside > now and not lane.closed]
        until = min([now + min(PATIENCE, LAST_WAIT), *times])
        timer = asyncio.get_running_loop().call_later(until - now, self._wake.set)
        try:
            await self._wake.wait()
        finally:
            timer.cancel()

    async def _watch(self, lane: Lane) -> None:
        """Keep an eye on the server's own queue, where it tells it."""
        told = False
        while (load := await lane.endpoint.load(self.session)) is not None or told:
            told = True
            if load is not None:
                lane.pace.queued(time.monotonic(), *load)
            await asyncio.sleep(LOOK)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner
