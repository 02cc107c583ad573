"""The journal keeps what it acknowledged, whatever happens to its writers, its disk or its file."""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

from state import upcasters
from state.book import project_book, stored_records
from state.errors import REFUSED, RigbookError
from state.events import FactObserved, NoteAdded, Source
from state.filesystem import file_system_of
from state.journal import GENESIS, Journal
from state.outline import Outline, journal_path
from state.record import decode, encode
from state.render.markdown import render

ROOT = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ".rigbook" / "journal.db"


def writer(path: Path, name: str, count: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.lab.journal_writer", str(path), name]
    if count is not None:
        command.append(str(count))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def texts(path: Path) -> list[str]:
    with Journal.open(path, read_only=True) as journal:
        return [record.body["text"] for record in journal.records() if record.body]


# ── what is acknowledged stays ───────────────────────────────────────────────────────────────────────────────────


def test_killed_writers_lose_nothing_that_was_acknowledged(path: Path) -> None:
    acknowledged: list[str] = []
    with Journal.open(path):
        pass
    for round_ in range(4):
        writers = [writer(path, f"r{round_}w{i}") for i in range(3)]
        # The moment differs from round to round: after 1, 4, 7 … acknowledgements of the first writer.
        first = writers[0].stdout
        assert first is not None
        heard = [first.readline() for _ in range(1 + 3 * round_)]
        for one in writers:
            one.send_signal(signal.SIGKILL)
        for i, one in enumerate(writers):
            out, err = one.communicate(timeout=30)
            assert one.returncode == -signal.SIGKILL, err
            lines = [*(heard if i == 0 else []), *out.splitlines(keepends=True)]
            acknowledged += [line.split()[2] for line in lines if line.endswith("\n")]
        with Journal.open(path, read_only=True) as journal:
            found = journal.verify()
            ids = {record.id for record in journal.records()}
        assert found.ok, found.problems
        assert found.events % 2 == 0, "half of a transaction was kept"
        missing = set(acknowledged) - ids
        assert not missing
    assert len(acknowledged) > 4


def test_first_starters_at_once_make_one_journal(path: Path) -> None:
    writers = [writer(path, f"w{i}", 5) for i in range(4)]
    for one in writers:
        _, err = one.communicate(timeout=60)
        assert one.returncode == 0, err
    with Journal.open(path, read_only=True) as journal:
        found = journal.verify()
        assert found.ok and found.events == 40
        assert len({record.origin for record in journal.records()}) == 1


def test_threads_share_a_journal(path: Path) -> None:
    with Journal.open(path) as journal:

        def work(name: int) -> None:
            for i in range(10):
                journal.append(NoteAdded(text=f"{name}.{i}"))
                journal.head()

        threads = [threading.Thread(target=work, args=(name,)) for name in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert journal.verify().ok
        assert sorted(r.body["text"] for r in journal.records() if r.body) == sorted(
            f"{name}.{i}" for name in range(6) for i in range(10)
        )


def test_a_full_disk_is_told_and_outlived(path: Path) -> None:
    script = """
import resource, sys
from pathlib import Path
from state.errors import RigbookError
from state.events import NoteAdded
from state.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
journal.append(NoteAdded(text="before"))
wal = Path(sys.argv[1] + "-wal").stat().st_size
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (wal + 20_000, hard))
try:
    for i in range(50):
        journal.append(NoteAdded(text="many words " * 300), NoteAdded(text="pair"))
except RigbookError as error:
    print(error.id)
head = journal.head()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert journal.append(NoteAdded(text="after"))[0].seq == head[0] + 1
print(journal.verify().ok)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["journal.disk-full", "True"], done.stderr
    kept = texts(path)
    assert kept[0] == "before" and kept[-1] == "after"
    assert sum(text == "pair" for text in kept) == len(kept) // 2 - 1, "half of a transaction was kept"


# ── what a record is ─────────────────────────────────────────────────────────────────────────────────────────────


def test_versions_count_up_and_chain(path: Path) -> None:
    with Journal.open(path) as journal:
        assert journal.head() == (0, GENESIS)
        first, second = journal.append(NoteAdded(text="a"), NoteAdded(text="b"), actor="lena", actor_kind="person")
        assert (first.seq, second.seq) == (1, 2)
        assert journal.head() == (2, second.hash)
        assert [record.seq for record in journal.records(since=1)] == [2]
        assert [record.seq for record in journal.records(until=1)] == [1]
        assert second.event == NoteAdded(text="b")
        assert second.actor == "lena"
        before = journal.data_version()
        with Journal.open(path) as other:
            other.append(NoteAdded(text="c"))
        assert journal.data_version() > before


def test_an_empty_append_is_nothing(path: Path) -> None:
    with Journal.open(path) as journal:
        assert journal.append() == []
        assert journal.head()[0] == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_bodies_come_back_as_they_went(body: dict[str, object]) -> None:
    assert repr(decode(encode(body))) == repr(body)  # repr, because NaN is not equal to itself


def test_nan_is_kept_and_bad_bytes_become_visible(path: Path) -> None:
    with Journal.open(path) as journal:
        bad = b"caf\xe9".decode("utf-8", "surrogateescape")
        journal.append(FactObserved(key="a.b", value=float("nan"), source=Source(command=bad)), NoteAdded(text=bad))
        fact, note = journal.records()
    assert fact.body and fact.body["value"] != fact.body["value"]
    assert fact.body["source"]["command"] == "caf\\udce9"
    assert note.body and note.body["text"] == "caf\\udce9"


def test_a_clock_that_steps_back_does_not_reorder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(["2026-05-02T00:00:00.000Z", "2026-05-01T00:00:00.000Z", "2026-05-03T00:00:00.000Z"])
    with Journal.open(path) as journal:
        monkeypatch.setattr("state.journal._now", lambda: next(times))
        for text in "abc":
            journal.append(NoteAdded(text=text))
        stamps = [record.ts for record in journal.records()]
    assert stamps == sorted(stamps)


# ── damage and purges ────────────────────────────────────────────────────────────────────────────────────────────


def filled(path: Path) -> None:
    with Journal.open(path) as journal:
        for i in range(5):
            journal.append(NoteAdded(text=f"note {i}"))


def tamper(path: Path, sql: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute("DROP TRIGGER event_stays; DROP TRIGGER event_unchanged;")
    connection.execute(sql)
    connection.close()


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ('UPDATE event SET body = \'{"text":"forged"}\' WHERE seq = 3', "event 3: its body was changed"),
        ("UPDATE event SET actor = 'nobody' WHERE seq = 2", "event 2: its header"),
        ("DELETE FROM event WHERE seq = 4", "event 5:"),
        ("UPDATE event SET prev_hash = hash WHERE seq = 2", "event 2: does not follow"),
    ],
)
def test_tampering_is_found(path: Path, sql: str, told: str) -> None:
    filled(path)
    tamper(path, sql)
    with Journal.open(path, read_only=True) as journal:
        found = journal.verify()
    assert not found.ok
    assert any(problem.startswith(told) for problem in found.problems), found.problems


def test_a_body_that_was_made_unreadable_is_told(path: Path) -> None:
    filled(path)
    tamper(path, "UPDATE event SET body = '{not json' WHERE seq = 2")
    with Journal.open(path, read_only=True) as journal, pytest.raises(RigbookError, match="was changed") as raised:
        list(journal.records())
    assert raised.value.id == "journal.corrupt"


def test_sql_cannot_change_events_by_accident(path: Path) -> None:
    filled(path)
    connection = apsw.Connection(str(path))
    for sql in ("DELETE FROM event", "UPDATE event SET body = 'x'", "UPDATE event SET hash = 'x', body = NULL"):
        with pytest.raises(apsw.ConstraintError):
            connection.execute(sql)


def test_a_purged_body_is_gone_and_the_chain_holds(path: Path) -> None:
    secret = "correct horse battery staple"
    with Journal.open(path) as journal:
        journal.append(NoteAdded(text="before"))
        leaked = journal.append(NoteAdded(text=secret))[0]
        journal.append(NoteAdded(text="after"))
        journal.purge(leaked.id, "a passphrase", actor="lena")
        records = list(journal.records())
        found = journal.verify()
    assert found.ok and found.purged == 1
    assert records[1].body is None and records[1].event is None
    assert records[3].body == {"event": leaked.id, "reason": "a passphrase"}
    for file in path.parent.iterdir():
        assert secret.encode() not in file.read_bytes(), f"the secret is still in {file.name}"


def test_purging_what_is_not_there_changes_nothing(path: Path) -> None:
    filled(path)
    with Journal.open(path) as journal:
        with pytest.raises(RigbookError) as raised:
            journal.purge("nobody.7", "why", actor="lena")
        assert raised.value.id == "journal.no-such-event"
        assert journal.head()[0] == 5


# ── refusing ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_newer_schema_is_read_but_not_written(path: Path) -> None:
    filled(path)
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with Journal.open(path) as journal:
        assert journal.head()[0] == 5
        with pytest.raises(RigbookError) as raised:
            journal.append(NoteAdded(text="x"))
    assert (raised.value.id, raised.value.exit_code) == ("journal.newer-schema", REFUSED)


def test_an_event_of_a_newer_rigbook_is_kept_and_not_guessed_at(path: Path) -> None:
    filled(path)
    with Journal.open(path) as journal:
        journal._append([("moon.landed", 1, {"crater": "Tycho"})], "future", "machine")
        newest = list(journal.records())[-1]
        assert newest.event is None and newest.body == {"crater": "Tycho"}
        found = journal.verify()
        assert found.ok and found.newer == 1


def test_old_versions_are_read_through_upcasters_and_stay_as_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written when notes had a `body`; read by a program in which they have a `text`."""
    with Journal.open(path) as journal:
        journal._append([("note.added", 1, {"body": "old words"})], "lena", "person")
        monkeypatch.setitem(upcasters.CURRENT, "note.added", 3)
        monkeypatch.setitem(upcasters.UPCASTERS, ("note.added", 1), lambda b: {"text": b["body"]})
        monkeypatch.setitem(upcasters.UPCASTERS, ("note.added", 2), lambda b: {**b, "section": "hardware"})
        (record,) = journal.records()
        assert record.event == NoteAdded(v=3, text="old words", section="hardware")
        assert record.body == {"body": "old words"}
        assert journal.verify().ok
    assert "old words" in render(project_book([record], Outline(name="x")))


def test_a_journal_that_is_just_being_made_reads_as_empty(tmp_path: Path) -> None:
    path = journal_path(tmp_path)
    path.parent.mkdir()
    path.touch()
    assert stored_records(tmp_path) == []
    assert path.read_bytes() == b""


def test_network_file_systems_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state.journal.file_system_of", lambda folder: "nfs4")
    with pytest.raises(RigbookError) as raised:
        Journal.open(path)
    assert raised.value.id == "journal.network-filesystem"
    assert not path.exists()


def test_the_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    place = tmp_path / "a b" / "c"
    place.mkdir(parents=True)
    escaped = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(
        "1 0 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
        f"2 1 0:9 / {escaped} rw - nfs4 server:/x rw\n"
        "3 1 0:7 / /proc rw - proc p rw\n"
    )
    assert file_system_of(place, mounts) == "nfs4"
    assert file_system_of(place / "not" / "yet", mounts) == "nfs4"
    assert file_system_of(tmp_path, mounts) == "ext4"


@pytest.mark.parametrize("content", [b"hello, I am a text file " * 400, b"\x00" * 5000])
def test_other_files_are_left_alone(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(RigbookError):
        Journal.open(path)
    assert path.read_bytes() == content


def test_other_databases_are_left_alone(path: Path) -> None:
    path.parent.mkdir()
    connection = apsw.Connection(str(path))
    connection.execute("CREATE TABLE mine (x)")
    connection.close()
    with pytest.raises(RigbookError) as raised:
        Journal.open(path)
    assert raised.value.id == "journal.not-a-journal"


def test_reading_makes_no_journal(path: Path) -> None:
    with pytest.raises(RigbookError) as raised:
        Journal.open(path, read_only=True)
    assert raised.value.id == "journal.absent"
    assert not path.parent.exists()


def test_only_the_owner_may_read(path: Path) -> None:
    filled(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_stuck_writer_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state.journal.BUSY_TIMEOUT_MS", 200)
    filled(path)
    stuck = apsw.Connection(str(path))
    stuck.execute("BEGIN IMMEDIATE")
    with Journal.open(path) as journal:
        began = time.monotonic()
        with pytest.raises(RigbookError) as raised:
            journal.append(NoteAdded(text="x"))
        assert raised.value.id == "journal.busy" and time.monotonic() - began < 10
        stuck.execute("ROLLBACK")
        journal.append(NoteAdded(text="y"))
    assert texts(path)[-1] == "y"


def test_readers_do_not_wait_for_writers(path: Path) -> None:
    filled(path)
    writing = apsw.Connection(str(path))
    writing.execute("BEGIN IMMEDIATE")
    with Journal.open(path, read_only=True) as journal:
        assert journal.head()[0] == 5
    with contextlib.suppress(apsw.Error):
        writing.execute("ROLLBACK")


def test_nothing_is_written_when_secrets_cannot_be_looked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(path)

    def broken(text: str) -> list[object]:
        raise OSError("rules are missing")

    monkeypatch.setattr("state.redact._scan", broken)
    with Journal.open(path) as journal:
        with pytest.raises(RigbookError) as raised:
            journal.append(NoteAdded(text="fine"), NoteAdded(text="ghp_0123456789abcdefghijABCDEFGHIJ012345"))
        assert raised.value.id == "redact.failed"
        assert journal.head()[0] == 5
