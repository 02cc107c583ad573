"""One stored event: how it is written down, hashed, and read back. Imports no pydantic."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from state.errors import RigbookError
from state.upcasters import CURRENT, escape_bad_bytes, upcast

if TYPE_CHECKING:
    from state.events import Event

GENESIS = "0" * 64  # what the first event of a chain follows
COLUMNS = "seq, id, origin, counter, ts, actor, actor_kind, kind, v, body_sha256, body, prev_hash, hash"


@dataclass
class Record:
    """One event as stored. `body` is None when it was purged."""

    seq: int  # the book's version after this event
    id: str  # the same in every copy: origin.counter
    origin: str
    counter: int
    ts: str  # RFC 3339, UTC
    actor: str
    actor_kind: str  # machine, person or agent
    kind: str
    v: int
    body: dict[str, Any] | None
    hash: str

    @property
    def known(self) -> bool:
        """False when a newer rigbook wrote this, so that this one cannot tell what it means."""
        return self.v <= CURRENT.get(self.kind, 0)

    @property
    def current_body(self) -> dict[str, Any]:
        """The body in its newest shape; empty when purged or not known."""
        return upcast(self.kind, self.v, self.body)[0] if self.body is not None and self.known else {}

    @cached_property
    def event(self) -> Event | None:
        """The event as a model; None when it was purged or is not known to this version."""
        if self.body is None or not self.known:
            return None
        from state.events import parse

        return parse(self.kind, self.v, self.body)


@dataclass(frozen=True)
class Verified:
    """What `verify` found. `problems` is empty when every chain is whole."""

    events: int
    head: tuple[int, str]
    problems: tuple[str, ...] = ()
    purged: int = 0
    newer: int = 0  # events of a newer rigbook: chained, but not understood

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def text(self) -> str:
        """In one sentence."""
        if self.problems:
            return f"{len(self.problems)} problems in {self.events} events: {'; '.join(self.problems[:3])}"
        more = f", {self.purged} purged" if self.purged else ""
        more += f", {self.newer} of a newer rigbook" if self.newer else ""
        return f"{self.events} events{more}, every chain is whole; head {self.head[0]} {self.head[1][:12]}"


def chain_hash(previous: str, header: Sequence[str | int]) -> str:
    """The hash of an event: over the one before it and its own header, which holds the hash of its body."""
    return sha256(json.dumps([previous, *header], separators=(",", ":"), ensure_ascii=True))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def encode(body: Any) -> str:
    # The order of keys is kept: it is the order in which people read a table. The hash is over these very bytes.
    return json.dumps(_tag_special(body), separators=(",", ":"), ensure_ascii=False, allow_nan=False)


_SPECIAL = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _tag_special(value: Any) -> Any:
    """JSON has no NaN and no infinities: {"special": "NaN"} stands for them."""
    if isinstance(value, float):
        if value != value:
            return {"special": "NaN"}
        if value in (float("inf"), float("-inf")):
            return {"special": "Infinity" if value > 0 else "-Infinity"}
        return value
    if isinstance(value, str):
        return escape_bad_bytes(value)
    if isinstance(value, dict):
        return {escape_bad_bytes(str(key)): _tag_special(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_tag_special(inner) for inner in value]
    return value


def _untag(pairs: dict[str, Any]) -> Any:
    if len(pairs) == 1 and pairs.get("special") in _SPECIAL:
        return _SPECIAL[pairs["special"]]
    return pairs


def decode(text: str) -> dict[str, Any]:
    # The hook runs for every object, in Python: only where there is something for it to find.
    body: dict[str, Any] = json.loads(text, object_hook=_untag if '"special"' in text else None)
    return body


def record_of(row: Sequence[Any]) -> Record:
    seq, event_id, origin, counter, ts, actor, actor_kind, kind, v, _digest, body, _previous, chained = row
    try:
        decoded = None if body is None else decode(body)
    except ValueError as error:
        raise RigbookError(
            "journal.corrupt",
            f"the body of event {event_id} was changed: {error}",
            hint="`rigbook book verify` lists all that is wrong; restore a copy of the journal",
        ) from None
    return Record(seq, event_id, origin, counter, ts, actor, actor_kind, kind, v, decoded, chained)
