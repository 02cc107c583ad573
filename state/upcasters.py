"""Old shapes of event bodies, brought up to date while reading. Pure functions on plain dicts; rows stay as written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Body = dict[str, Any]

# kind → its newest version. A kind that is not here was written by a newer rigbook.
CURRENT: dict[str, int] = {
    "project.opened": 1,
    "fact.observed": 1,
    "facts.confirmed": 1,
    "probe.failed": 1,
    "run.started": 1,
    "run.finished": 1,
    "artifact.made": 1,
    "benchmark.recorded": 1,
    "server.state": 1,
    "plan.made": 1,
    "plan.applied": 1,
    "warned": 1,
    "note.added": 1,
    "decision.made": 1,
    "discovery.made": 1,
    "assumption.made": 1,
    "instruction.added": 1,
    "next.added": 1,
    "next.done": 1,
    "prose.edited": 1,
    "purged": 1,
}

# (kind, v) → function from the body at v to the body at v + 1.
UPCASTERS: dict[tuple[str, int], Callable[[Body], Body]] = {}


def upcast(kind: str, v: int, body: Body) -> tuple[Body, int]:
    """The body in its newest shape, and that version. Raises KeyError when kind or version is newer than we are."""
    newest = CURRENT[kind]
    if v > newest:
        raise KeyError(f"{kind} v{v}")
    while v < newest:
        body, v = UPCASTERS[kind, v](body), v + 1
    return body, v


def escape_bad_bytes(value: Any) -> Any:
    """Lone surrogates, which stand for bytes that were not UTF-8, become visible escapes; one bad byte in what a
    machine said must not keep the rest out of the book."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {escape_bad_bytes(key): escape_bad_bytes(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [escape_bad_bytes(inner) for inner in value]
    return value
