"""Money: what an answer cost, what the next may cost at most, and a cap that is never passed.

A request is sent only while what was spent, and the most that every request in flight can cost, stay under the cap.
The most: every byte of the prompt a token (no tokenizer makes more of them), and the longest response. What was spent
outlives a kill: each row bears its price, and `spent.jsonl` beside the rows has what was paid for answers that were not
kept. Requests that a kill or a lost connection cut off may have been billed: nobody tells, so they count at their most.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.stages.protocol import parse_object

TEMPLATE_TOKENS = 256  # of a chat template around the messages, at most
PER = 1e6  # prices are told per million tokens


@dataclass(frozen=True)
class Price:
    """Dollars per million tokens; None: not known, which is not free."""

    prompt: float | None
    response: float | None

    @property
    def known(self) -> bool:
        return self.prompt is not None and self.response is not None

    def of(self, prompt_tokens: float, response_tokens: float) -> float:
        """Dollars, as far as prices are known."""
        return ((self.prompt or 0.0) * prompt_tokens + (self.response or 0.0) * response_tokens) / PER

    def cost(self, fields: dict[str, Any]) -> float | None:
        """Dollars of an answer: what the server says, or its usage times the price; None where neither is known."""
        if "usd" in fields:
            return float(fields["usd"])
        if not self.known:
            return None
        return self.of(fields.get("prompt_tokens", 0), fields["completion_tokens"])


FREE = Price(0.0, 0.0)


def prompt_bytes(row: dict[str, Any]) -> int:
    return len(json.dumps(row["messages"], ensure_ascii=False).encode())


class Purse:
    """What was spent, in dollars, and what may still be. `cap` None: as much as it costs, but counted."""

    def __init__(self, path: Path, cap: float | None, longest: int) -> None:
        self.path, self.cap, self.longest = path, cap, longest
        self.spent = 0.0  # on rows that are kept, and on those that are not
        self.lost = 0.0  # of that: on those that are not
        self.out = 0.0  # the most that all requests in flight can cost
        self.open = 0  # how many they are
        self._written = 0.0  # what the file says is in flight: never less than `out`
        self._read()

    def _read(self) -> None:
        """A torn last line says less than a whole one would: it was written before its request was sent."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            os.truncate(self.path, len(whole))
        in_flight = 0.0
        for number, line in enumerate(whole.splitlines(), 1):
            entry = parse_object(line, f"line {number} of {self.path}")
            self.lost += entry.get("usd", 0.0)
            in_flight = entry.get("in_flight", in_flight)
        self.spent += self.lost
        if in_flight:
            self.lose(in_flight, "in flight when an earlier start was killed: the most that it can have cost")
            self._write({"in_flight": 0.0})

    def most(self, price: Price, row: dict[str, Any]) -> float:
        """Dollars that a request can cost at most."""
        return price.of(prompt_bytes(row) + TEMPLATE_TOKENS, self.longest)

    def allows(self, most: float) -> bool:
        return not most or self.cap is None or self.spent + self.out + most <= self.cap

    def send(self, most: float) -> None:
        """A request that can cost so much is about to be sent."""
        self.out += most
        self.open += 1
        if self.out > self._written:
            # Twice as much as needed: written a few times in all, not for each request.
            self._written = 2 * self.out
            self._write({"in_flight": self._written})

    def back(self, most: float, usd: float) -> None:
        """It came back, and cost `usd`, which its row says."""
        self.open -= 1
        self.out = self.out - most if self.open else 0.0  # sums of floats do not come back to nothing by themselves
        self.spent += usd

    def lose(self, usd: float, why: str) -> None:
        """Paid for nothing that is kept."""
        self.spent += usd
        self.lost += usd
        if usd:
            self._write({"usd": usd, "why": why})

    def close(self) -> None:
        """The last word: what is in flight now (nothing, where the end was reached)."""
        if self._written:
            self._write({"in_flight": self.out})

    def _write(self, entry: dict[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write((json.dumps(entry) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
