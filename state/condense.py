"""Looking again costs one event, not one per fact: what is as it was is confirmed, only what changed is written anew.

A rig of three hosts has a few hundred facts; looked at once a minute, they would bury everything else in the journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from state.events import Event, FactObserved, FactsConfirmed, body_of
from state.facts import Fact, Observation, confirm, observation_of, observe, same
from state.journal import Journal
from state.record import Record


def append_observations(journal: Journal, events: Sequence[Event]) -> list[Record]:
    """Append what a probe found, condensed against what the journal knows."""
    return journal.append(*condense(events, machine_facts(journal.records())))


def condense(events: Iterable[Event], known: Mapping[str, Fact]) -> list[Event]:
    """The same observations, those that bring nothing new gathered into one FactsConfirmed per host."""
    kept: list[Event] = []
    confirmed: dict[str | None, dict[str, str]] = {}
    seen_at: dict[str | None, datetime] = {}
    for event in events:
        old = known[event.key].machine if isinstance(event, FactObserved) and event.key in known else None
        if not isinstance(event, FactObserved) or old is None or not _is_again(event, old):
            kept.append(event)
            continue
        host = event.source.host
        confirmed.setdefault(host, {})[event.key] = old.event
        at = event.observed_at or datetime.now(UTC)
        seen_at[host] = min(at, seen_at.get(host, at))
    again = [FactsConfirmed(host=host, facts=keys, observed_at=seen_at[host]) for host, keys in confirmed.items()]
    return [*kept, *again]


def machine_facts(records: Iterable[Record]) -> dict[str, Fact]:
    """What machines were last seen to say, by key."""
    facts: dict[str, Fact] = {}
    for record in sorted(records, key=lambda record: (record.ts, record.origin, record.counter)):
        body = record.current_body
        if record.kind == "fact.observed" and body and body["owner"] == "machine":
            observe(facts, body["key"], observation_of(body, record.id, ts=record.ts))
        elif record.kind == "facts.confirmed" and body:
            for key, event in body["facts"].items():
                confirm(facts, key, event, body["observed_at"])
    return facts


def _is_again(event: FactObserved, old: Observation) -> bool:
    new = observation_of(body_of(event), ts=old.observed_at)
    alike = same(new, old) and new.confidence == old.confidence and vars(new.source) == vars(old.source)
    return event.owner == "machine" and alike
