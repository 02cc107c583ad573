"""One line for one event, for logs and status bars."""

from __future__ import annotations

from typing import Any

from state.record import Record
from state.render.text import duration, quantity, size


def summary(record: Record) -> str:
    """What happened, in one line of plain text. Never raises: an event that is not understood says so."""
    if record.body is None:
        return "(content taken out)"
    if not record.known:
        return "(written by a newer rigbook)"
    body = record.current_body
    make = _TOLD.get(record.kind)
    return " ".join(make(body).split()) if make else record.kind


def _fact(body: dict[str, Any]) -> str:
    host = f" on {body['source']['host']}" if body["source"].get("host") else ""
    return f"{body['key']} = {quantity(body['value'], body['unit'])}{host}"


def _finished(body: dict[str, Any]) -> str:
    code = "exit code unknown" if body["exit"] is None else f"exit {body['exit']}"
    return f"{body['run']} {body['status']}, {code}, {duration(body['seconds'])}"


def _benchmark(body: dict[str, Any]) -> str:
    from state.benchmarks import from_dict, judge

    bench = from_dict(body["bench"])
    return f"{bench.name} ({bench.dataset.kind}): {(bench.verdict or judge(bench)).text}"


def _artifact(body: dict[str, Any]) -> str:
    return f"{body['name']}: {body['path']}" + (f", {size(body['bytes'])}" if body["bytes"] is not None else "")


_TOLD: dict[str, Any] = {
    "project.opened": lambda b: b["name"],
    "fact.observed": _fact,
    "facts.confirmed": lambda b: f"{len(b['facts'])} facts of {b['host'] or 'unknown host'} seen again, unchanged",
    "probe.failed": lambda b: f"{b['what']} of {b['host']}: {b['reason']}",
    "run.started": lambda b: f"{b['run']}: {b['what']} {b['name']} on {b['host'] or 'unknown host'}",
    "run.finished": _finished,
    "artifact.made": _artifact,
    "benchmark.recorded": _benchmark,
    "server.state": lambda b: f"{b['profile']} is {b['state']} ({b['run']})",
    "plan.made": lambda b: f"{b['plan']}: {b['action']}, {len(b['items'])} item{'' if len(b['items']) == 1 else 's'}",
    "plan.applied": lambda b: f"{b['plan']}: {'verified' if b['verified'] else 'NOT verified'}",
    "warned": lambda b: f"{b['where']}: {b['message']} [{b['check']}]",
    "note.added": lambda b: b["text"],
    "decision.made": lambda b: b["title"],
    "discovery.made": lambda b: b["title"] + (" (refuted)" if b["status"] == "refuted" else ""),
    "assumption.made": lambda b: b["text"],
    "instruction.added": lambda b: b["text"],
    "next.added": lambda b: f"{b['title']} (priority {b['priority']})",
    "next.done": lambda b: f"{b['next']} {b['text']}",
    "prose.edited": lambda b: f"{b['section']}: {b['text']}",
    "purged": lambda b: f"{b['event']}: {b['reason']}",
}
