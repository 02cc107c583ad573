"""Which prompt is asked next, and when enough was answered. Pure.

Prompts go out in the order of the file, so what a token budget leaves out is the end of it, whatever the servers do.
A budget counts response tokens, in all and for each source. Near its end no more requests are sent than it is expected
to need (at the mean length so far): those in flight are always finished and counted, so it is overshot by the error of
that expectation, not by everything that was in flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

WHOLE = ""  # the budget of all sources together; no source is called so


@dataclass(slots=True, order=True)
class Row:
    """A prompt on its way: its place in the file, and how often an answer to it was lost."""

    place: int
    data: dict[str, Any] = field(compare=False)
    tries: int = field(default=0, compare=False)

    @property
    def source(self) -> str:
        return str(self.data.get("source", "?"))


@dataclass(slots=True)
class Account:
    """Response tokens of one source: wanted (0: no budget), had, and the requests that are out for more."""

    budget: int
    tokens: int = 0
    answers: int = 0
    in_flight: int = 0

    def state(self, mean: float) -> Literal["open", "wait", "full"]:
        if not self.budget:
            return "open"
        if self.tokens >= self.budget:
            return "full"
        return "wait" if self.in_flight and self.tokens + self.in_flight * mean >= self.budget else "open"


class Allotment:
    def __init__(
        self, rows: Sequence[dict[str, Any]], had: dict[str, tuple[int, int]], total: int, budgets: dict[str, int],
        longest: int,
    ) -> None:  # fmt: skip
        """`rows`: still unanswered, in order. `had`: (answers, tokens) by source from an earlier start. `total`,
        `budgets`: response tokens in all (0: no budget) and by source. `longest`: tokens of a response at most, which
        is what one is expected to have before there was any."""
        self.longest = longest
        sources = {Row(0, row).source for row in rows} | had.keys()
        self.accounts = {name: Account(budgets.get(name, 0)) for name in sources} | {WHOLE: Account(total)}
        self.waiting: dict[str, list[Row]] = {name: [] for name in sources}
        self.left_out: dict[str, int] = {}
        for place, data in enumerate(rows):
            row = Row(place, data)
            self.waiting[row.source].append(row)  # ascending: a heap already
        for name, (answers, tokens) in had.items():
            for account in (self.accounts[name], self.accounts[WHOLE]):
                account.answers += answers
                account.tokens += tokens
        self._leave_out()

    @property
    def pending(self) -> int:
        """Prompts that nobody was asked yet, or must be asked again."""
        return sum(map(len, self.waiting.values()))

    @property
    def in_flight(self) -> int:
        return self.accounts[WHOLE].in_flight

    def peek(self) -> Row | None:
        """The next prompt that may be asked now, or None: there is none, or answers must be waited for."""
        if self.accounts[WHOLE].state(self._mean(WHOLE)) != "open":
            return None
        ready = [
            rows[0]
            for name, rows in self.waiting.items()
            if rows and self.accounts[name].state(self._mean(name)) == "open"
        ]
        return min(ready, default=None)

    def take(self, row: Row) -> None:
        """`row`, as peeked, is asked."""
        heapq.heappop(self.waiting[row.source])
        for name in (row.source, WHOLE):
            self.accounts[name].in_flight += 1

    def give_back(self, row: Row) -> None:
        """It got no answer, and is to be asked again."""
        self._landed(row)
        heapq.heappush(self.waiting[row.source], row)
        self._leave_out()

    def settle(self, row: Row, tokens: int | None) -> None:
        """It is answered with so many tokens; None: it will not be asked again."""
        self._landed(row)
        if tokens is None:
            return
        for name in (row.source, WHOLE):
            self.accounts[name].answers += 1
            self.accounts[name].tokens += tokens
        self._leave_out()

    def overshoot(self) -> dict[str, int]:
        """Tokens over each budget that was reached; the whole one's name is empty."""
        full = {name: a for name, a in self.accounts.items() if a.budget and a.tokens >= a.budget}
        return {name: a.tokens - a.budget for name, a in full.items()}

    def expected(self) -> float:
        """Tokens that are expected of all that may still be asked, in flight included."""
        whole, total = self.accounts[WHOLE], 0.0
        for name, rows in self.waiting.items():
            account = self.accounts[name]
            more = (len(rows) + account.in_flight) * self._mean(name)
            total += min(more, max(0, account.budget - account.tokens)) if account.budget else more
        return min(total, max(0, whole.budget - whole.tokens)) if whole.budget else total

    def _mean(self, name: str) -> float:
        for account in (self.accounts[name], self.accounts[WHOLE]):
            if account.answers:
                return account.tokens / account.answers
        return float(self.longest)

    def _landed(self, row: Row) -> None:
        for name in (row.source, WHOLE):
            self.accounts[name].in_flight -= 1

    def _leave_out(self) -> None:
        whole = self.accounts[WHOLE].state(0.0) == "full"
        for name, rows in self.waiting.items():
            if rows and (whole or self.accounts[name].state(0.0) == "full"):
                self.left_out[name] = self.left_out.get(name, 0) + len(rows)
                rows.clear()
