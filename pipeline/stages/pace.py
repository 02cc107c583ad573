"""How many requests a server is given at once. Pure: time is told, nothing sleeps.

With a number given, that many, fewer while the server says that it has too much. With 0 the server's own limit is
found: twice as many for as long as twice as many bring more tokens a second (a batch that grows is nearly free until
memory bandwidth or the KV cache is full; after that requests only wait), and fewer when it refuses (429, 503) or when
its own counters say that requests queue. Every change keeps the reason that was measured.
"""

from __future__ import annotations

from typing import Literal

FIRST = 16  # requests at once to begin with, where the limit is to be found
MOST = 4096  # more never helped a server that we know of, and each is a socket
GAIN = 1.08  # twice as many must bring 8 % more tokens a second: less is the noise of the answers' lengths
SECONDS = 2.0  # shortest time over which a rate is believed
ANSWERS = 64  # and fewest answers; at least two for each request at once, or the short ones among them are judged
QUEUED = 0.25  # share of what runs that may wait in the server's queue: enough that it never runs dry
LESS = 0.7  # after a refusal; as TCP does, gentler than a half because a refused request costs little here
COOL = 5.0  # seconds in which further refusals are the echo of the same crowd


class Pace:
    """The limit of one server, and why it is what it is."""

    def __init__(self, asked: int) -> None:
        """`asked`: requests at once, or 0 to find out."""
        self.asked = asked
        self.ceiling = asked or MOST
        self.limit = asked or FIRST
        self.why = "as configured" if asked else "to begin with"
        # doubling: looking for the limit. climbing: refused once, up again in small steps. held: the limit is known.
        self.mode: Literal["doubling", "climbing", "held"] = "held" if asked else "doubling"
        self._best = (0, 0.0)  # (limit, tokens/s)
        self._cool_until = 0.0
        self._skip = 0  # answers to requests that were sent under another limit: their rate is not this one's
        self._began: float | None = None
        self._tokens = self._answers = 0

    def answered(self, now: float, tokens: int, full: bool) -> None:
        """An answer of so many tokens came; `full`: as many requests were open as the limit allows."""
        if self.mode == "held":
            return
        if not full:
            self._restart()  # there was not enough work: the rate says nothing about the limit
            return
        if self._skip > 0:
            self._skip -= 1
            return
        if self._began is None:
            self._began = now
            return
        self._tokens += tokens
        self._answers += 1
        if now - self._began >= SECONDS and self._answers >= max(ANSWERS, 2 * self.limit):
            self._judge(self._tokens / (now - self._began))

    def refused(self, now: float, words: str) -> None:
        """The server said that it has too much. One step down for one crowd."""
        if now < self._cool_until:
            return
        self._cool_until = now + COOL
        before = self.limit
        self._change(max(1, int(before * LESS)))
        self.mode = "climbing"
        self.why = f"{before} at once were too many: {words}"

    def queued(self, now: float, waiting: float, running: float) -> None:
        """The server's own counters: so many requests wait, so many are decoded."""
        wanted = max(1, int(running * (1 + QUEUED)))
        if self.asked or waiting <= max(2.0, QUEUED * running) or wanted >= self.limit or now < self._cool_until:
            return
        self._cool_until = now + COOL
        self.why = f"of {self.limit} at once {waiting:.0f} waited in its queue while {running:.0f} ran"
        self._change(wanted)
        self.mode = "held"

    def _judge(self, rate: float) -> None:
        limit, best = self._best
        told = f"{self.limit} at once gave {rate:,.0f} tokens/s"
        if self.mode == "climbing":
            self._change(min(self.limit + max(1, self.limit // 16), self.ceiling))
            if self.limit == self.ceiling:
                self.mode = "held"
        elif rate <= best * GAIN:
            self.mode, self.why = "held", f"{told}, {limit} gave {best:,.0f}"
            self._change(limit)
        elif self.limit == self.ceiling:
            self.mode, self.why = "held", told
        else:
            self._best, self.why = (self.limit, rate), f"{told}; twice as many are tried"
            self._change(min(self.limit * 2, self.ceiling))

    def _change(self, limit: int) -> None:
        self._skip = self.limit  # those that are open now
        self.limit = limit
        self._restart()

    def _restart(self) -> None:
        self._began, self._tokens, self._answers = None, 0, 0
