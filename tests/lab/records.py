"""Records as a journal would give them, without a journal: for pure functions."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from state.book import Book, project_book
from state.events import Event, body_of
from state.outline import Outline, outline_of
from state.record import Record

START = datetime(2026, 5, 1, 8, 0, tzinfo=UTC)


def stamp(minutes: float) -> str:
    return (START + timedelta(minutes=minutes)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def records(*events: Event, origin: str = "aaaaaa", start: float = 0, first_seq: int = 1) -> list[Record]:
    """One record a minute, all of one origin."""
    return [
        Record(
            seq=first_seq + i,
            id=f"{origin}.{i + 1}",
            origin=origin,
            counter=i + 1,
            ts=stamp(start + i),
            actor="lena" if getattr(event, "owner", "") == "person" else "rigbook",
            actor_kind="machine",
            kind=event.kind,
            v=event.v,
            body=body_of(event),
            hash=f"{origin}{i + 1:058}",
        )
        for i, event in enumerate(events)
    ]


def book(*events: Event, toml: str = "", now: str | None = None) -> Book:
    """The book of these events, for the project file `toml`."""
    import tomllib

    outline = outline_of(tomllib.loads(toml)) if toml else Outline(name="test")
    return project_book(records(*events), outline, now=now)
