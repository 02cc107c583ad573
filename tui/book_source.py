"""The journal as the app sees it: asked whether it changed, folded into views, rendered at a version.

Everything here blocks and runs on one thread of the collector; nothing here touches the network.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from state.errors import RigbookError
from state.outline import Outline, journal_path, read_outline
from tui.snapshot import NOTHING, FactView, NextView, RunView, VersionView, WarningView

if TYPE_CHECKING:
    from state.book import Book, Server
    from state.journal import Journal, Record

MAX_RUNS = 400  # newest runs that the app holds
PATIENCE_SECONDS = 3.0  # before a journal that cannot be read is told


@dataclass(frozen=True)
class BookViews:
    """What the journal says, ready to be put into a snapshot."""

    seq: int | None = None
    outline: Outline = field(default_factory=Outline)
    runs: tuple[RunView, ...] = ()
    servers: Mapping[str, ServerNow] = field(default_factory=dict)  # profile -> its newest server
    benches: tuple[Any, ...] = ()
    warnings: tuple[WarningView, ...] = ()
    next_steps: tuple[NextView, ...] = ()
    facts: Mapping[str, FactView] = field(default_factory=dict)
    versions: tuple[VersionView, ...] = ()
    plans: tuple[Any, ...] = ()  # newest first
    problem: str = ""


@dataclass(frozen=True)
class ServerNow:
    run: str
    state: str
    detail: str
    since: float | None


class BookSource:
    """Reads the journal of one project. Use from one thread only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._journal: Journal | None = None
        self._records: list[Record] = []
        self._version: tuple[int, int] | None = None
        self._outline_at: float | None = None
        self._failing_since: float | None = None
        self._outline = Outline()

    def poll(self) -> BookViews | None:
        """The views when something changed since the last call, else None."""
        changed = self._reread_outline()
        path = journal_path(self.root)
        try:
            if self._journal is None:
                if not path.exists():
                    # Nothing recorded yet; the app must not make a journal by looking.
                    return BookViews(outline=self._outline, problem=self._outline.problem) if changed else None
                from state.journal import Journal

                self._journal = Journal.open(path, read_only=True)
            version = (self._journal.data_version(), path.stat().st_ino)
            if version != self._version:
                self._version = version
                self._records += self._journal.records(since=self._records[-1].seq if self._records else 0)
                changed = True
            self._failing_since = None
        except (RigbookError, OSError) as error:
            self.close()
            now = time.monotonic()
            self._failing_since = self._failing_since or now
            if now - self._failing_since < PATIENCE_SECONDS:
                # Somebody may be making it at this moment: its file is there before its tables are.
                return BookViews(outline=self._outline) if changed else None
            return BookViews(outline=self._outline, problem=f"the journal cannot be read: {error}")
        return self._views() if changed else None

    def _reread_outline(self) -> bool:
        try:
            at: float | None = (self.root / "rigbook.toml").stat().st_mtime
        except OSError:
            at = -1.0
        if at == self._outline_at:
            return False
        self._outline_at = at
        self._outline = read_outline(self.root)
        return True

    def _views(self) -> BookViews:
        from state.book import project_book

        book = project_book(self._records, self._outline)
        runs = sorted(book.runs.values(), key=lambda run: (run.started, run.seq), reverse=True)[:MAX_RUNS]
        servers: dict[str, Server] = {}
        for server in book.servers.values():
            if server.profile not in servers or server.at >= servers[server.profile].at:
                servers[server.profile] = server
        steps = [step for step in book.next_steps if not step.done_at]
        return BookViews(
            seq=book.seq if self._records else None,
            outline=self._outline,
            runs=tuple(
                RunView(
                    run=run.run,
                    what=run.what,
                    name=run.name,
                    host=run.host,
                    job=run.job,
                    status=run.status,
                    started=when(run.started),
                    seconds=run.seconds,
                    exit=run.exit,
                    result=run.result,
                )
                for run in runs
            ),
            servers={name: server_now(server, book) for name, server in servers.items()},
            benches=tuple(reversed(book.benchmarks)),
            warnings=tuple(
                WarningView(
                    each.where,
                    each.check,
                    each.message + (f" ({each.times} times)" if each.times > 1 else ""),
                    when(each.at),
                )
                for each in reversed(book.warnings)
            ),
            next_steps=tuple(
                NextView(step.id, step.title, step.priority, step.done_when)
                for step in sorted(steps, key=lambda s: s.priority)
            ),
            facts={
                key: FactView(
                    key, shown(fact.value), fact.unit, source_words(fact.source), when(fact.observed_at), fact.state
                )
                for key, fact in sorted(book.facts.items())
            },
            versions=tuple(version_view(record) for record in reversed(self._records)),
            plans=tuple(sorted(book.plans.values(), key=lambda plan: plan.seq, reverse=True)),
            problem=self._outline.problem,
        )

    def text(self, version: int | None, base: int | None) -> str:
        """The book as Markdown at a version, or what changed from `base` to it."""
        from state.book import project_book

        now = project_book(self._records, self._outline, until=version)
        if base is None:
            from state.render import markdown

            return markdown.render(now)
        return _difference(project_book(self._records, self._outline, until=base), now)

    def close(self) -> None:
        if self._journal is not None:
            with contextlib.suppress(RigbookError):
                self._journal.close()
        self._journal, self._version, self._records = None, None, []


def _difference(base: Book, now: Book) -> str:
    from state import diff

    return diff.as_markdown(diff.diff(base, now), base, now)


def server_now(server: Server, book: Book) -> ServerNow:
    """A server as the book has it. Its run's end counts even where nobody recorded the server's own."""
    run = book.runs.get(server.run)
    state = server.state
    if run is not None and run.status != "running" and state in {"starting", "loading", "ready"}:
        state = "stopped" if run.status in {"stopped", "done"} else "vanished"
    detail = server.detail if isinstance(server.detail, str) else ""
    return ServerNow(server.run, state, detail, when(server.at))


def version_view(record: Record) -> VersionView:
    return VersionView(
        record.seq, when(record.ts), record.actor, record.kind, in_words(record.kind, record.current_body)
    )


def in_words(kind: str, body: Mapping[str, Any]) -> str:
    """An event in a few words, for the list of versions."""
    from state.render.text import quantity  # here: the app opens before it needs any of this

    body = body or NOTHING
    if kind == "fact.observed":
        return f"{body.get('key')} = {quantity(body.get('value'), body.get('unit'))}"
    if kind == "facts.confirmed":
        return f"{len(body.get('facts') or ())} facts of {body.get('host') or 'unknown host'} seen again, unchanged"
    if kind == "run.started":
        return f"{body.get('what')} {body.get('name')} began on {body.get('host') or 'this machine'}"
    if kind == "run.finished":
        return f"{body.get('run')} ended: {body.get('status')}"
    if kind == "server.state":
        return f"server {body.get('profile')}: {body.get('state')}"
    if kind == "benchmark.recorded":
        return f"benchmark {(body.get('bench') or {}).get('name')}"
    for name in ("title", "message", "text", "reason", "action", "name", "plan", "path"):
        if body.get(name):
            return f"{kind}: {body[name]}"
    return kind


def shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return ", ".join(shown(each) for each in value)
    return str(value)


def source_words(source: Any) -> str:
    words = [part for part in (source.host, source.command or source.run, source.note) if part]
    return " · ".join(words) or "a claim: no source"


def when(text: str) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None for none."""
    try:
        return datetime.fromisoformat(text).timestamp() if text else None
    except ValueError:
        return None
