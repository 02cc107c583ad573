"""Rows appended in groups: what was told is on the disk, what is on the disk is told, wherever it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.stages import durable
from pipeline.stages.durable import Appended
from pipeline.stages.protocol import Refused
from tests.lab import mounts
from tests.lab.stages import rows_of


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "GROUP", 0.001)


def row(number: int) -> dict[str, Any]:
    return {"id": f"r{number}", "text": "ä" * number}


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_row_is_told_when_it_is_on_the_disk_and_not_before(tmp_path: Path) -> None:
    path, told = tmp_path / "rows.jsonl", []

    def seen(one: dict[str, Any]) -> None:
        assert json.dumps(one, ensure_ascii=False) in path.read_text()
        told.append(one["id"])

    out = Appended(path, seen)
    keeper = asyncio.ensure_future(out.keep())
    for number in range(50):
        out.put(row(number))
        assert f"r{number}" not in told
        await asyncio.sleep(0.0005)
    await until(lambda: len(told) == 50)
    keeper.cancel()
    out.close()
    assert told == [r["id"] for r in rows_of(path)] == [f"r{n}" for n in range(50)]


@pytest.mark.parametrize("when", ["waiting", "before the write", "in the write", "between groups"])
async def test_cancelled_anywhere_the_count_is_what_the_file_holds(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    out = Appended(tmp_path / "rows.jsonl", lambda one: told.append(one["id"]))
    began, go = threading.Event(), threading.Event()
    real = Appended._write

    def slow(self: Appended, rows: list[dict[str, Any]]) -> None:
        began.set()
        if when == "in the write":
            assert go.wait(10)
        real(self, rows)

    monkeypatch.setattr(Appended, "_write", slow)
    if when == "before the write":
        monkeypatch.setattr(durable, "GROUP", 10.0)
    keeper = asyncio.ensure_future(out.keep())
    await asyncio.sleep(0)
    if when != "waiting":
        out.put(row(1))
    if when == "in the write":
        await until(began.is_set)
        out.put(row(2))
    elif when == "between groups":
        await until(lambda: told)
    keeper.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await keeper
    out.put(row(3))
    go.set()
    out.close()
    assert told == [r["id"] for r in rows_of(tmp_path / "rows.jsonl")]
    assert told == {"waiting": ["r3"], "in the write": ["r1", "r2", "r3"]}.get(when, ["r1", "r3"])


@pytest.mark.parametrize("size", [0, 1, 10, 11, 12, 30, 54, 55])
def test_cut_at_any_byte_it_goes_on(tmp_path: Path, size: int) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [(json.dumps(row(n), ensure_ascii=False) + "\n").encode() for n in range(3)]
    path.write_bytes(b"".join(lines)[:size])
    whole = [n for n in range(3) if sum(map(len, lines[: n + 1])) <= size]
    told: list[str] = []
    out = Appended(path, lambda one: told.append(one["id"]))
    assert told == [f"r{n}" for n in whole] and out.done == set(told)
    for number in range(3):
        if f"r{number}" not in out.done:
            out.put(row(number))
    out.close()
    assert [r["id"] for r in rows_of(path)] == ["r0", "r1", "r2"]


@pytest.mark.parametrize(
    "text", ['{"id": "a"}\n{"id\n{"id": "b"}\n', '{"id": "a"}\n{"id": "a"}\n', "[1]\n", '{"no": 0}\n']
)
def test_a_line_that_is_not_ours_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(Refused, match=r"line \d of .*rows.jsonl is damaged"):
        Appended(path, lambda one: None)
    assert path.read_text() == text


async def test_a_full_disk_ends_it_and_tells_nobody_of_what_was_not_written() -> None:
    with mounts.full() as full:
        (full / "rows.jsonl").touch()
        told: list[str] = []
        out = Appended(full / "rows.jsonl", lambda one: told.append(one["id"]))
        keeper = asyncio.ensure_future(out.keep())
        out.put({"id": "big", "text": "x" * 100_000})
        with pytest.raises(OSError, match="No space"):
            await asyncio.wait_for(keeper, 10)
        with contextlib.suppress(OSError):
            out.close()
        assert told == []
