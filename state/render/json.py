"""The book as one JSON document: the same content as the Markdown, for programs."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from math import isfinite
from typing import Any

from state.book import Book
from state.render.bench import verdict_of


def render(book: Book) -> dict[str, Any]:
    """Plain values only. NaN and infinities, which JSON has not, become {"special": "NaN"}."""
    document: dict[str, Any] = {"format": "rigbook.book/1"}
    for one in fields(book):
        document[one.name] = plain(getattr(book, one.name))
    document["facts"] = {
        key: {
            **plain(fact.now),
            "key": key,
            "confidence": fact.confidence,
            "state": fact.state,
            "because": fact.because,
            "changed_at": fact.changed_at,
            "previous": plain(fact.previous),
            "failed_at": fact.failed_at,
            "failure": fact.failure,
            "contrary": plain(fact.contrary),
        }
        for key, fact in sorted(book.facts.items())
    }
    for shown, measured in zip(document["benchmarks"], book.benchmarks, strict=True):
        verdict = verdict_of(measured.bench)
        shown["bench"]["verdict"] = {**plain(verdict), "text": verdict.text}
    document["failed_looks"] = [plain(failed) for failed in book.failed_looks.values()]
    document["conflicts"] = [fact.key for fact in book.conflicts]
    return document


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, all the way down."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return {"special": "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"}
    return value
