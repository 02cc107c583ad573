"""Tokens and money: what is asked, what is left out, what was spent, and that a cap holds whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.stages import dispatch, generate
from pipeline.stages.allot import Allotment, Row
from pipeline.stages.protocol import execute
from pipeline.stages.purse import Price, Purse, prompt_bytes
from tests.lab.chat_server import chat_server, good, refused
from tests.lab.stages import result_of, rows_of, start_stage


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(dispatch, "LAST_WAIT", 0.1)


def prompts(count: int, sources: str = "a") -> list[dict[str, Any]]:
    return [
        {"id": f"p{n:04d}", "source": sources[n % len(sources)], "messages": [{"role": "user", "content": f"Say {n}"}]}
        for n in range(count)
    ]


def spec(tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    inputs = {"prompts": str(path)}
    if (tmp_path / "budgets.json").exists():
        inputs["budgets"] = str(tmp_path / "budgets.json")
    return {
        "stage": "generate",
        "out": str(tmp_path / "out"),
        "inputs": inputs,
        "settings": {"base_url": "", "max_tokens": 100, "temperature": 0.7, "concurrency": 8} | settings,
        "transient": ["base_url", "endpoints", "concurrency", "max_cost"],
        "events": str(tmp_path / "events.jsonl"),
    }


def errors(tmp_path: Path) -> list[dict[str, Any]]:
    return [event for event in rows_of(tmp_path / "events.jsonl") if event["kind"] == "error"]


# --- tokens ---------------------------------------------------------------------------------------------------------


def drain(allotment: Allotment, at_once: int, tokens: Any, fail: Any = lambda row: False) -> list[int]:
    """Ask at most `at_once` at a time, answers in random order. Returns the places answered."""
    order: list[int] = []
    out: list[Row] = []
    shuffle = random.Random(1)
    while True:
        while len(out) < at_once and (row := allotment.peek()) is not None:
            allotment.take(row)
            out.append(row)
        if not out:
            assert not allotment.pending and not allotment.in_flight, "nothing in flight, and yet it waits"
            return order
        row = out.pop(shuffle.randrange(len(out)))
        if fail(row):
            allotment.give_back(row)
        else:
            order.append(row.place)
            allotment.settle(row, tokens(row))


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(1, 120),
    total=st.integers(0, 4000),
    first=st.integers(0, 2000),
    second=st.integers(0, 2000),
    at_once=st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_every_row_is_answered_once_or_left_out_for_a_budget_that_is_reached(
    count: int, total: int, first: int, second: int, at_once: int, seed: int
) -> None:
    lengths = random.Random(seed)
    budgets = {"a": first, "b": second}
    given_tokens: Counter[str] = Counter()

    def tokens(row: Row) -> int:
        length = lengths.randint(1, 100)
        given_tokens[row.source] += length
        return length

    allotment = Allotment(prompts(count, "ab"), {}, total, budgets, 100)
    order = drain(allotment, at_once, tokens, lambda row: lengths.random() < 0.1)
    asked = set(order)
    left = sum(allotment.left_out.values())
    assert len(asked) == len(order) == count - left
    for name, missing in allotment.left_out.items():
        whole = total and sum(given_tokens.values()) >= total
        assert missing == 0 or whole or given_tokens[name] >= budgets[name] > 0
    assert sum(allotment.overshoot().values()) <= (at_once + 1) * 100 * 3


def test_a_budget_is_overshot_by_an_answer_or_two_and_not_by_all_in_flight() -> None:
    allotment = Allotment(prompts(1000), {}, 20_000, {}, 1000)
    lengths = random.Random(3)
    order = drain(allotment, 64, lambda row: lengths.randint(50, 150))
    assert allotment.overshoot()[""] <= 500, "64 in flight are 6,400 tokens"
    assert len(order) == 1000 - allotment.left_out["a"]


def test_the_rows_of_a_budget_do_not_depend_on_how_many_are_asked_at_once() -> None:
    """Each row's length is its own; then the set asked differs by a row or two at its end."""
    sets = []
    for at_once in (1, 7, 64):
        allotment = Allotment(prompts(1000), {}, 20_000, {}, 1000)
        sets.append(set(drain(allotment, at_once, lambda row: 50 + row.place * 37 % 100)))
    assert max(map(len, sets)) - min(map(len, sets)) <= 3
    assert all(one == set(range(len(one))) for one in sets)


def test_budgets_by_source_and_in_all_are_kept_by_the_stage(tmp_path: Path) -> None:
    (tmp_path / "budgets.json").write_text('{"a": 300, "b": 100}')

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good(tokens=10)

    with chat_server(answer) as url:
        wanted = spec(tmp_path, prompts(300, "abc"), base_url=url, token_budget=900)
        assert execute(wanted, generate.run) == 0
    result = result_of(wanted)
    by = Counter(row["source"] for row in rows_of(tmp_path / "out" / "rows.jsonl"))
    assert by == {"a": 30, "b": 10, "c": 50} and result["response_tokens"] == 900
    assert result["rows"] == {"in": 300, "out": 90, "errors": 0, "skipped": 210}
    assert result["left_out"] == {"a": 70, "b": 90, "c": 50} and set(result["overshoot"].values()) == {0}


def test_a_budget_counts_what_an_earlier_start_had(tmp_path: Path) -> None:
    (tmp_path / "budgets.json").write_text('{"a": 500}')
    count = itertools.count()

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if next(count) == 20:
            process.kill()
        await asyncio.sleep(0.02)
        return good(tokens=10)

    with chat_server(answer) as url:
        wanted = spec(tmp_path, prompts(100), base_url=url)
        process = start_stage("generate", wanted, tmp_path)
        process.wait(60)
        assert execute(wanted, generate.run) == 0
    assert result_of(wanted)["response_tokens"] == 500
    assert len(rows_of(tmp_path / "out" / "rows.jsonl")) == 50


# --- money ----------------------------------------------------------------------------------------------------------

PRICE = {"price_in": 1.0, "price_out": 10.0}  # dollars per million


def paid(url: str, **more: Any) -> dict[str, Any]:
    return {"name": "paid", "base_url": url, "stream": False, "concurrency": 8} | PRICE | more


def test_what_an_answer_cost_is_in_its_row_and_the_sum_in_the_result(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        text = body["messages"][0]["content"]
        if text == "Say 1":
            return good("", tokens=90)  # paid for nothing
        if text == "Say 2":
            return good(tokens=50, usage={"cost": 0.25})  # its own word goes before the table of prices
        return good(tokens=50)

    with chat_server(answer) as url:
        wanted = spec(tmp_path, prompts(5), endpoints=[paid(url)])
        assert execute(wanted, generate.run) == 0
    each = (7 * 1.0 + 50 * 10.0) / 1e6
    rows = {row["id"]: row["usd"] for row in rows_of(tmp_path / "out" / "rows.jsonl")}
    assert rows == {"p0000": each, "p0002": 0.25, "p0003": each, "p0004": each}
    assert result_of(wanted)["usd"] == pytest.approx(3 * each + 0.25 + (7 + 900) / 1e6)
    lost = sum(entry.get("usd", 0.0) for entry in rows_of(tmp_path / "out" / "spent.jsonl"))
    assert lost == pytest.approx(907 / 1e6)


def test_the_cap_is_never_passed_and_can_be_raised(tmp_path: Path) -> None:
    """As much is in flight as could be paid for at its dearest; what was answered is kept, and it goes on."""
    spent = 0.0

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        nonlocal spent
        spent += (7 * 1.0 + 100 * 10.0) / 1e6
        return good(tokens=100)

    cap = 0.02  # twenty dearest answers, less a bit for their prompts
    with chat_server(answer) as url:
        wanted = spec(tmp_path, prompts(100), endpoints=[paid(url)], max_cost=cap)
        assert execute(wanted, generate.run) == 3
        assert errors(tmp_path)[0]["id"] == "generate.max-cost"
        kept = len(rows_of(tmp_path / "out" / "rows.jsonl"))
        assert 0.9 * cap <= spent <= cap and kept == round(spent / 0.001007)
        wanted["settings"]["max_cost"] = None
        assert execute(wanted, generate.run) == 0
    assert result_of(wanted)["rows"]["out"] == 100 and result_of(wanted)["usd"] == pytest.approx(100 * 0.001007)


def test_free_servers_go_on_when_the_money_is_at_its_end(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good(tokens=100)

    with chat_server(answer) as free, chat_server(answer) as dear:
        wanted = spec(tmp_path, prompts(200), base_url=free, endpoints=[paid(dear)], max_cost=0.01)
        assert execute(wanted, generate.run) == 0
    told = result_of(wanted)["endpoints"]
    assert told["paid"]["answers"] <= 9 and told["server"]["answers"] == 200 - told["paid"]["answers"]
    assert result_of(wanted)["usd"] <= 0.01


def test_a_price_that_is_not_known_is_not_free(tmp_path: Path) -> None:
    endpoint = paid("http://127.0.0.1:1") | {"price_out": None}
    assert execute(spec(tmp_path, prompts(3), endpoints=[endpoint], max_cost=1.0), generate.run) == 3
    assert errors(tmp_path)[0]["id"] == "generate.no-price"


def test_a_budget_that_would_cost_more_than_the_cap_does_not_begin(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        raise AssertionError("it was asked")

    with chat_server(answer) as url:
        wanted = spec(tmp_path, prompts(1000), endpoints=[paid(url)], token_budget=50_000, max_cost=0.4)
        assert execute(wanted, generate.run) == 3
    (error,) = errors(tmp_path)
    assert error["id"] == "generate.estimate" and "$0.5" in error["message"] and "$0.40" in error["message"]


def test_the_first_answers_tell_what_the_whole_will_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "FEW", 20)

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good(tokens=40)

    with chat_server(answer) as url:
        wanted = spec(tmp_path, prompts(1000), endpoints=[paid(url)], max_cost=0.3)
        assert execute(wanted, generate.run) == 3
        (error,) = errors(tmp_path)
        assert error["id"] == "generate.estimate" and "$0.4" in error["message"]
        assert 20 <= len(rows_of(tmp_path / "out" / "rows.jsonl")) <= 60, "and stops there"
        wanted["settings"]["max_cost"] = 1.0
        assert execute(wanted, generate.run) == 0
    # The requests that the refusal cut off count at their dearest, twice as many at most.
    assert 0 <= result_of(wanted)["usd"] - 1000 * (7 + 400) / 1e6 < 3 * 8 * 0.0014


def test_killed_the_money_that_was_in_flight_is_not_forgotten(tmp_path: Path) -> None:
    """Every request that reached the server may be billed; after a kill -9 the account is never below that."""
    billed = 0.0

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        nonlocal billed
        billed += (7 * 1.0 + 100 * 10.0) / 1e6
        if billed > 0.03:
            process.kill()
        await asyncio.sleep(0.02)
        return good(tokens=100)

    with chat_server(answer) as url:
        wanted = spec(tmp_path, prompts(100), endpoints=[paid(url)])
        process = start_stage("generate", wanted, tmp_path)
        process.wait(60)
        assert execute(wanted, generate.run) == 0
    assert result_of(wanted)["usd"] >= billed - 1e-9


def test_lost_answers_count_at_their_dearest(tmp_path: Path) -> None:
    count = itertools.count()

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return refused(500, "boom") if next(count) % 3 == 0 else good(tokens=100)

    with chat_server(answer) as url:
        wanted = spec(tmp_path, prompts(10), endpoints=[paid(url, concurrency=1)])
        assert execute(wanted, generate.run) == 0
    result = result_of(wanted)
    assert result["endpoints"]["paid"]["lost"] == 5
    assert 15 * 0.001007 <= result["usd"] <= 15 * 0.0014


@pytest.mark.parametrize("size", range(0, 140, 7))
def test_the_account_may_be_cut_at_any_byte(tmp_path: Path, size: int) -> None:
    path = tmp_path / "spent.jsonl"
    purse = Purse(path, None, 100)
    for usd in (0.25, 0.5, 1.0):
        purse.send(usd)
        purse.back(usd, 0.0)
        purse.lose(usd, "empty")
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    again = Purse(path, None, 100)
    kept = [json.loads(line) for line in whole[: whole[:size].rfind(b"\n") + 1].splitlines()]
    least = sum(entry.get("usd", 0.0) for entry in kept)
    assert again.spent >= least and again.spent == Purse(path, None, 100).spent, "and is not counted again each time"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=200))
def test_a_request_never_costs_more_than_its_most(text: str) -> None:
    """No tokenizer makes more tokens than bytes."""
    row = {"messages": [{"role": "user", "content": text}]}
    assert prompt_bytes(row) >= len(text.encode())
    assert Price(2.0, 8.0).of(1e6, 1e6) == 10.0 and Price(None, 8.0).cost({"completion_tokens": 5}) is None
