"""A log as numbered lines: what grows, what is replaced, what is huge, what would hurt a terminal."""

from __future__ import annotations

import time
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tui.logfile import LogFile, harmless


def test_grows_and_keeps_an_unfinished_line_apart(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthr")
    log = LogFile(path)
    assert log.grow() and log.count == 2 and log.tail == b"thr"
    with path.open("ab") as file:
        file.write(b"ee\nfour\n")
    assert log.grow() and [log.line(i) for i in range(log.count)] == ["one", "two", "three", "four"]
    assert log.tail == b"" and not log.grow()


def test_a_file_that_was_replaced_or_cut_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\n" * 5)
    log = LogFile(path)
    log.grow()
    path.write_bytes(b"new\n")
    log.grow()
    assert (log.count, log.line(0)) == (1, "new")


def test_two_million_lines_open_and_search_at_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    block = b"".join(b"%07d a line of a usual length in a log of training\n" % i for i in range(20_000))
    with path.open("wb") as file:
        for _ in range(100):
            file.write(block)
        file.write(b"the needle\n")
    log = LogFile(path)
    began = time.perf_counter()
    while log.grow():
        pass
    opened = time.perf_counter() - began
    assert log.count == 2_000_001 and log.line(1_999_999).startswith("0019999")
    assert log.line(20_000 * 37 + 5).startswith("0000005")
    assert log.find("NEEDLE".lower(), 0) == 2_000_000
    assert log.find("the needle", 1_999_999, backwards=True) is None
    assert len(log._at) < 2 * path.stat().st_size / 65536 + 2, "what is held grows with blocks, not with lines"
    assert opened < 5.0, f"opening took {opened:.1f} s"


@given(st.binary(max_size=300))
def test_no_bytes_reach_the_terminal_as_control(raw: bytes) -> None:
    assert harmless(raw.replace(b"\n", b"")).isprintable()


def test_colour_titles_and_progress_bars_become_plain() -> None:
    assert harmless(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07ok") == "red ok"
    assert harmless(b" 10 %\r 20 %\r 30 %") == " 30 %"
    assert harmless(b"x" * 10_000).endswith("(cut)")


def test_what_the_log_quota_dropped_is_one_line(tmp_path: Path) -> None:
    """The copy has a hole there, so that offsets stay true: gigabytes of nothing are neither read nor shown."""
    path = tmp_path / "log"
    log = LogFile(path)
    size = 5 << 30
    path.write_bytes(b"first\nsecond\n")
    assert log.grow() and log.count == 2
    with path.open("r+b") as file:
        file.truncate(13 + size)
    assert not log.grow() and log.count == 2, "what follows is not here yet"
    with path.open("ab") as file:
        file.write(b"last\n")
    assert log.grow()
    shown = [log.line(i) for i in range(log.count)]
    assert shown == ["first", "second", f"[{size} bytes dropped by the log quota]", "last"]
    assert log.find("last", 0) == 3 and log.find("dropped", 0) == 2
    whole = LogFile(path)
    assert whole.grow() and [whole.line(i) for i in range(whole.count)] == shown
