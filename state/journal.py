"""The append-only journal: one SQLite file, several writers at once, nothing lost, nothing rewritten.

How it holds (each of these has a story behind it in somebody's bug tracker):
- apsw brings its own SQLite, newer than the WAL-reset fault that can lose acknowledged writes; `synchronous=FULL`,
  so that an append returns only when it is on disk; no mmap (SIGBUS when another process truncates).
- always `BEGIN IMMEDIATE`: a deferred transaction that turns into a writer fails at once, whatever the timeout.
- never on a network file system: WAL needs shared memory between all who have the file open.
- each origin (one copy of a journal) has its own counter and hash chain. The chain covers the *hash* of a body, so
  that a leaked secret can be purged later and the chain still verifies. It finds accidents, not an attacker who
  rewrites everything; exports carry the head hash as an anchor.

Reading imports no pydantic (`state.record`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import apsw

from state.errors import REFUSED, RigbookError
from state.filesystem import NETWORK, file_system_of
from state.record import COLUMNS, GENESIS, Record, Verified, chain_hash, decode, encode, record_of, sha256
from state.upcasters import CURRENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from state.events import Event

__all__ = ["GENESIS", "Journal", "Record", "Verified", "chain_hash"]

T = TypeVar("T")

SCHEMA_VERSION = 1
APPLICATION_ID = 0x52494742  # "RIGB"
BUSY_TIMEOUT_MS = 20_000  # a writer holds the lock for a millisecond; this long means that something is stuck


_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE event (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  id TEXT NOT NULL UNIQUE,
  origin TEXT NOT NULL,
  counter INTEGER NOT NULL,
  ts TEXT NOT NULL,
  actor TEXT NOT NULL,
  actor_kind TEXT NOT NULL,
  kind TEXT NOT NULL,
  v INTEGER NOT NULL,
  body_sha256 TEXT NOT NULL,
  body TEXT,
  prev_hash TEXT NOT NULL,
  hash TEXT NOT NULL,
  UNIQUE (origin, counter)
) STRICT;
CREATE TRIGGER event_stays BEFORE DELETE ON event BEGIN SELECT RAISE(ABORT, 'events are never deleted'); END;
CREATE TRIGGER event_unchanged BEFORE UPDATE ON event
WHEN NEW.seq IS NOT OLD.seq OR NEW.hash IS NOT OLD.hash OR NEW.body IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'events are never changed'); END;
"""


class Journal:
    """A journal, open. One connection per thread; every method may be called from any thread."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self.newer_schema = False
        self._local = threading.local()
        self._connections: list[apsw.Connection] = []
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, path: Path, *, read_only: bool = False) -> Journal:
        """Open or create the journal at `path`.

        Raises RigbookError: `journal.absent` (read-only, no file), `journal.network-filesystem`,
        `journal.not-a-journal`, `journal.no-permission`, `journal.busy`, `journal.disk-full`.
        A journal of a newer schema opens read-only.
        """
        if read_only and not path.exists():
            raise RigbookError("journal.absent", f"there is no journal at {path} yet")
        kind = file_system_of(path.parent)
        if any(name in kind for name in NETWORK):
            raise RigbookError(
                "journal.network-filesystem",
                f"{path} is on a network file system ({kind}), where SQLite loses data",
                hint="keep the project folder on a local disk; `rigbook book export` writes a copy anywhere",
                exit_code=REFUSED,
            )
        journal = cls(path, read_only=read_only)
        if not read_only:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise RigbookError("journal.no-permission", f"cannot make {path.parent}: {error.strerror}") from None
        journal._guarded(journal._prepare)
        return journal

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────

    def append(self, *events: Event, actor: str = "rigbook", actor_kind: str = "machine") -> list[Record]:
        """Write events in one transaction, secrets taken out. Returns when they are on disk, all or none.

        Raises RigbookError: `journal.read-only`, `journal.newer-schema`, `journal.disk-full`, `journal.busy`,
        `redact.failed` (then nothing was written).
        """
        from state.events import body_of

        bodies = [(event.kind, event.v, body_of(event)) for event in events]
        return self._append(bodies, actor, actor_kind)

    def append_once(self, *events: Event, unless: str, run: str) -> list[Record]:
        """As `append`, but nothing where an event of the kind `unless` about `run` is there already. Looked up and
        written in one transaction: of several controllers that see a run end, one tells it."""
        from state.events import body_of

        def look(connection: apsw.Connection) -> None:
            sql = "SELECT 1 FROM event WHERE kind = ? AND body ->> '$.run' = ?"
            if connection.execute(sql, (unless, run)).fetchone():
                raise _AlreadyThere

        bodies = [(event.kind, event.v, body_of(event)) for event in events]
        try:
            return self._append(bodies, "rigbook", "machine", first=look)
        except _AlreadyThere:
            return []

    def purge(self, event_id: str, reason: str, *, actor: str, actor_kind: str = "person") -> Record:
        """Take the body of one event out for good, and write down that it was done. The chain still verifies."""

        def take_out(connection: apsw.Connection) -> None:
            if connection.execute("SELECT 1 FROM event WHERE id = ?", (event_id,)).fetchone() is None:
                raise RigbookError("journal.no-such-event", f"no event {event_id} in {self.path}")
            connection.execute("UPDATE event SET body = NULL WHERE id = ?", (event_id,))

        said = [("purged", 1, {"event": event_id, "reason": reason})]
        record = self._append(said, actor, actor_kind, first=take_out)[0]
        # The old page images live on in the write-ahead log until it is rewound.
        self._guarded(lambda: self._connection().wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE))
        return record

    def _append(
        self,
        bodies: Sequence[tuple[str, int, dict[str, Any]]],
        actor: str,
        actor_kind: str,
        first: Callable[[apsw.Connection], None] | None = None,
    ) -> list[Record]:
        self._writable()
        if not bodies:
            return []
        from state.redact import Redactor

        redactor = Redactor(self.meta("redaction_key"))
        clean = [(kind, v, encode(redactor.value(body))) for kind, v, body in bodies]
        who = redactor.text(actor)

        def work() -> list[Record]:
            connection = self._connection()
            records = []
            with _transaction(connection):
                if first:
                    first(connection)
                origin = self._meta(connection, "origin")
                last = connection.execute(
                    "SELECT counter, hash, ts FROM event WHERE origin = ? ORDER BY counter DESC LIMIT 1", (origin,)
                ).fetchone()
                counter, previous, last_ts = last or (0, GENESIS, "")
                for kind, v, body in clean:
                    counter += 1
                    # A clock that was set back must not reorder what one origin says.
                    ts = last_ts = max(_now(), last_ts)
                    digest = sha256(body)
                    event_id = f"{origin}.{counter}"
                    header = (event_id, origin, counter, ts, who, actor_kind, kind, v, digest)
                    chained = chain_hash(previous, header)
                    connection.execute(
                        "INSERT INTO event (id, origin, counter, ts, actor, actor_kind, kind, v, body_sha256,"
                        " prev_hash, hash, body) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
                        (*header, previous, chained, body),
                    )
                    seq = connection.last_insert_rowid()
                    records.append(
                        Record(seq, event_id, origin, counter, ts, who, actor_kind, kind, v, decode(body), chained)
                    )
                    previous = chained
            return records

        return self._guarded(work)

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────

    def records(self, since: int = 0, until: int | None = None) -> Iterator[Record]:
        """Events with since < seq <= until, in order. Read in one short transaction, so that a slow reader never
        keeps the write-ahead log from being rewound."""
        sql = f"SELECT {COLUMNS} FROM event WHERE seq > ? AND seq <= ? ORDER BY seq"
        limit = 2**62 if until is None else until
        rows = self._guarded(lambda: self._connection().execute(sql, (since, limit)).fetchall())
        return (record_of(row) for row in rows)

    def head(self) -> tuple[int, str]:
        """(seq, hash) of the newest event; (0, zeros) of an empty journal."""
        sql = "SELECT seq, hash FROM event ORDER BY seq DESC LIMIT 1"
        row = self._guarded(lambda: self._connection().execute(sql).fetchone())
        return (row[0], row[1]) if row else (0, GENESIS)

    def data_version(self) -> int:
        """A number that grows when anybody has appended. Cheap enough to poll."""
        return self.head()[0]

    def meta(self, name: str) -> str:
        """A value of the journal itself: `origin` (id of this copy), `redaction_key`, `created`."""
        return self._guarded(lambda: self._meta(self._connection(), name))

    def verify(self) -> Verified:
        """Check SQLite's own integrity, every hash chain and every body against its hash."""
        problems: list[str] = []

        def work() -> list[Any]:
            connection = self._connection()
            for (line,) in connection.execute("PRAGMA integrity_check(20)"):
                if line != "ok":
                    problems.append(f"SQLite: {line}")
            return list(connection.execute(f"SELECT {COLUMNS} FROM event ORDER BY seq"))

        rows = self._guarded(work)
        last: dict[str, tuple[int, str]] = {}
        purged = newer = 0
        for seq, event_id, origin, counter, ts, actor, actor_kind, kind, v, digest, body, previous, chained in rows:
            before_counter, before_hash = last.get(origin, (0, GENESIS))
            if counter != before_counter + 1:
                problems.append(f"event {seq}: {origin} jumps from {before_counter} to {counter}; events are missing")
            elif previous != before_hash:
                problems.append(f"event {seq}: does not follow the event before it")
            if chained != chain_hash(previous, (event_id, origin, counter, ts, actor, actor_kind, kind, v, digest)):
                problems.append(f"event {seq}: its header does not match its hash")
            if body is None:
                purged += 1
            elif sha256(body) != digest:
                problems.append(f"event {seq}: its body was changed")
            newer += v > CURRENT.get(kind, 0)
            last[origin] = (counter, chained)
        head = (rows[-1][0], rows[-1][-1]) if rows else (0, GENESIS)
        return Verified(len(rows), head, tuple(problems), purged, newer)

    def close(self) -> None:
        """Close the connections of all threads. A second close does nothing."""
        self._closed = True
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            with contextlib.suppress(apsw.Error):
                connection.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────

    def _connection(self) -> apsw.Connection:
        if self._closed:
            raise RigbookError("journal.closed", f"{self.path} was closed")
        mine: apsw.Connection | None = getattr(self._local, "connection", None)
        if mine is None:
            mine = self._connect()
            self._local.connection = mine
            with self._lock:
                self._connections.append(mine)
        return mine

    def _connect(self) -> apsw.Connection:
        if not self.read_only:
            if not self.path.exists():  # SQLite would make it readable for everybody
                os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            connection = apsw.Connection(str(self.path))
        else:
            connection = self._connect_reader()
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        connection.execute("PRAGMA mmap_size=0; PRAGMA synchronous=FULL; PRAGMA secure_delete=ON")
        return connection

    def _connect_reader(self) -> apsw.Connection:
        """A reader of a WAL file needs to write its shared-memory index. Where the folder does not allow that and
        no writer left a log behind, the file cannot change under us and is read as it is."""
        log = self.path.with_name(self.path.name + "-wal")
        if not os.access(self.path.parent, os.W_OK) and not log.exists():
            from urllib.parse import quote

            flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
            return apsw.Connection(f"file:{quote(str(self.path))}?immutable=1", flags=flags)
        return apsw.Connection(str(self.path), flags=apsw.SQLITE_OPEN_READONLY)

    def _prepare(self) -> None:
        connection = self._connection()
        version = _pragma(connection, "user_version")
        if version == 0 and not self.read_only:
            self._create(connection)
            version = _pragma(connection, "user_version")
        if version and _pragma(connection, "application_id") != APPLICATION_ID:
            raise RigbookError("journal.not-a-journal", f"{self.path} is an SQLite file, but not a rigbook journal")
        if version > SCHEMA_VERSION:
            self.newer_schema = True
        if version == 0:
            if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (0,):
                raise RigbookError("journal.not-a-journal", f"{self.path} is an SQLite file, but not a rigbook journal")
            raise RigbookError("journal.absent", f"the journal at {self.path} is still empty")

    def _create(self, connection: apsw.Connection) -> None:
        """Two first starters race here: whoever gets the lock second finds the work done."""
        deadline = time.monotonic() + BUSY_TIMEOUT_MS / 1000
        while True:
            # Switching to WAL does not wait for the busy timeout when another process switches at the same moment.
            try:
                connection.execute("PRAGMA journal_mode=WAL").fetchall()
                break
            except apsw.BusyError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        with _transaction(connection):
            if _pragma(connection, "user_version"):
                return
            if connection.execute("SELECT count(*) FROM sqlite_schema").fetchone() != (0,):
                raise RigbookError("journal.not-a-journal", f"{self.path} is an SQLite file, but not a rigbook journal")
            connection.execute(_SCHEMA)
            import secrets  # only here: reading never needs it

            values = {"origin": secrets.token_hex(3), "redaction_key": secrets.token_hex(16), "created": _now()}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", values.items())
            connection.execute(f"PRAGMA application_id={APPLICATION_ID}; PRAGMA user_version={SCHEMA_VERSION}")

    def _meta(self, connection: apsw.Connection, name: str) -> str:
        row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise RigbookError("journal.corrupt", f"{self.path} has lost its {name}")
        return str(row[0])

    def _writable(self) -> None:
        if self.newer_schema:
            raise RigbookError(
                "journal.newer-schema",
                f"{self.path} was written by a newer rigbook; this one may read it but not write",
                hint="update rigbook",
                exit_code=REFUSED,
            )
        if self.read_only:
            raise RigbookError("journal.read-only", f"{self.path} was opened for reading only", exit_code=REFUSED)

    def _guarded(self, work: Callable[[], T]) -> T:
        """Run `work`, with SQLite's errors told as sentences."""
        try:
            return work()
        except apsw.BusyError:
            raise RigbookError(
                "journal.busy",
                f"another process has kept {self.path} locked for {BUSY_TIMEOUT_MS // 1000} s",
                hint="`fuser` on that file names it",
            ) from None
        except (apsw.FullError, apsw.IOError) as error:
            raise RigbookError(
                "journal.disk-full",
                f"could not write {self.path}: {error}; nothing of this was recorded, what was there is whole",
                hint="make room and try again",
            ) from None
        except (apsw.ReadOnlyError, apsw.CantOpenError, PermissionError) as error:
            raise RigbookError("journal.no-permission", f"cannot open {self.path}: {error}") from None
        except (apsw.NotADBError, apsw.CorruptError) as error:
            raise RigbookError(
                "journal.corrupt", f"{self.path} is damaged: {error}", hint="keep the file; restore a copy of it"
            ) from None


class _AlreadyThere(Exception):
    """Ends a transaction that would say something twice."""


# ── pieces ───────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _transaction(connection: apsw.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        # On a full disk SQLite has rolled back already, and a second ROLLBACK would hide the real error.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _pragma(connection: apsw.Connection, name: str) -> int:
    row = connection.execute(f"PRAGMA {name}").fetchone()
    return int(row[0]) if row else 0
