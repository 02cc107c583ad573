"""Servers that misbehave, several at once: no row is lost or asked twice at once, and what is kept is whole."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from base64 import b64encode
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from aiohttp import web

from pipeline.stages import dispatch, generate
from pipeline.stages.protocol import execute
from tests.lab.chat_server import chat_server, delta, good, refused, stream
from tests.lab.engine import free_port
from tests.lab.stages import prompts_file, result_of, rows_of


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same waits, sooner."""
    monkeypatch.setattr(dispatch, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(dispatch, "LAST_WAIT", 0.1)


def spec(tmp_path: Path, url: str, prompts: int, **settings: Any) -> dict[str, Any]:
    return {
        "stage": "generate",
        "out": str(tmp_path / "out"),
        "inputs": {"prompts": str(prompts_file(tmp_path / "prompts.jsonl", prompts))},
        "settings": {"base_url": url, "max_tokens": 20, "temperature": 0.7, "concurrency": 4} | settings,
        "transient": ["base_url", "concurrency", "endpoints", "max_cost", "max_unfinished"],
        "events": str(tmp_path / "events.jsonl"),
    }


def remote(name: str, url: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "base_url": url, "concurrency": 4, "stream": False} | more


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in rows_of(tmp_path / "events.jsonl") if event["kind"] == kind]


def name_of(body: dict[str, Any]) -> str:
    text: str = body["messages"][0]["content"]
    return text


def test_passing_failures_are_retried(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        seen[name_of(body)] += 1
        kinds = [
            lambda: web.Response(status=503, text="busy"),
            lambda: web.Response(text="<html>not JSON"),
            lambda: web.json_response({"choices": []}),
            lambda: web.Response(status=502),
            lambda: good(),
        ]
        return kinds[seen[name_of(body)] - 1]()

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, 5)
        assert execute(wanted, generate.run) == 0
    assert set(seen.values()) == {5}
    assert result_of(wanted)["rows"] == {"in": 5, "out": 5, "errors": 0, "skipped": 0}
    assert result_of(wanted)["with_ids"] == 0
    assert result_of(wanted)["endpoints"]["server"]["lost"] == 15


@pytest.mark.training_report(20)
def test_a_refused_prompt_is_an_error_row(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return refused(400, "too long") if name_of(body) == "Say 2" else good()

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, 5)
        assert execute(wanted, generate.run) == 0
    assert result_of(wanted)["rows"] == {"in": 5, "out": 4, "errors": 1, "skipped": 0}
    (error,) = rows_of(tmp_path / "out" / "errors.jsonl")
    assert error["id"] == "p002" and error["error"] == "HTTP 400: too long"
    assert events(tmp_path, "warning")[0]["check"] == "generate.errors"


def test_a_server_that_refuses_everything_is_not_asked_everything(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return refused(404, "no model named default")

    with chat_server(answer) as url:
        assert execute(spec(tmp_path, url, 1000), generate.run) == 3
    (error,) = events(tmp_path, "error")
    assert error["id"] == "generate.nothing" and "no model named default" in error["message"]


def test_a_row_that_breaks_the_server_is_given_up_and_the_others_are_not(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return web.Response(status=500, text="boom") if name_of(body) == "Say 7" else good()

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, 30)
        assert execute(wanted, generate.run) == 0
    assert result_of(wanted)["rows"] == {"in": 30, "out": 29, "errors": 1, "skipped": 0}
    (error,) = rows_of(tmp_path / "out" / "errors.jsonl")
    assert error["id"] == "p007" and "boom" in error["error"] and f"asked {dispatch.TRIES} times" in error["error"]


@pytest.mark.parametrize("fields", [("return_token_ids",), ("return_token_ids", "return_prompt_token_ids")])
def test_a_server_that_does_not_know_a_field(tmp_path: Path, fields: tuple[str, ...]) -> None:
    strict = 0

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        nonlocal strict
        for name in fields:
            if name in body:
                strict += 1
                return refused(400, f"Unrecognized argument: {name}")
        return good()

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, 5, concurrency=1)
        assert execute(wanted, generate.run) == 0
    assert strict == len(fields) and result_of(wanted)["rows"]["out"] == 5


def test_a_server_that_went_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE", 0.5)
    asked = 0

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return good() if asked <= 3 else web.Response(status=503)

    with chat_server(answer) as url:
        assert execute(spec(tmp_path, url, 100), generate.run) == 3
    assert events(tmp_path, "error")[0]["id"] == "generate.server-gone"
    assert len(rows_of(tmp_path / "out" / "rows.jsonl")) == 3, "what came is kept"
    assert asked < 100, "and nobody asks on for hours"


def test_a_server_that_dies_and_returns(tmp_path: Path) -> None:
    """Nothing is listening in between: connections are refused, and no row is given up for it."""
    port, seen = free_port(), Counter[str]()
    half = threading.Event()

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        seen[name_of(body)] += 1
        if len(seen) >= 20:
            half.set()
        if half.is_set() and not back.is_set():
            assert request.transport is not None
            request.transport.abort()
        return good()

    back = threading.Event()
    wanted = spec(tmp_path, f"http://127.0.0.1:{port}", 60)
    codes: list[int] = []
    with chat_server(answer, port):
        worker = threading.Thread(target=lambda: codes.append(in_thread(wanted)))
        worker.start()
        assert half.wait(30)
    back.set()
    with chat_server(answer, port):
        worker.join(60)
    assert codes == [0]
    assert result_of(wanted)["rows"] == {"in": 60, "out": 60, "errors": 0, "skipped": 0}


def in_thread(wanted: dict[str, Any]) -> int:
    """`execute` outside of the main thread, where no signal handler can be set."""

    original = generate.run_async
    generate.run_async = asyncio.run  # type: ignore[assignment]
    try:
        return execute(wanted, generate.run)
    finally:
        generate.run_async = original  # type: ignore[assignment]


def test_retry_after_is_honoured(tmp_path: Path) -> None:
    """Turned away with a time, the server is left alone for that time; nobody counts it against the rows."""
    loop_times: list[float] = []

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        loop_times.append(asyncio.get_running_loop().time())
        return refused(429, "slow down", Retry_After="0.7") if len(loop_times) <= 4 else good()

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, 12)
        assert execute(wanted, generate.run) == 0
    # Causal, not a speed: a timer never fires early.
    assert loop_times[4] - loop_times[3] >= 0.65
    told = result_of(wanted)["endpoints"]["server"]
    assert told["busy"] == 4 and told["lost"] == 0 and told["limit"] == 2
    assert "4 at once were too many: HTTP 429: slow down" in told["why"]
    assert result_of(wanted)["rows"]["out"] == 12


def test_a_row_is_with_one_server_at_a_time_and_the_fast_one_does_more(tmp_path: Path) -> None:
    """The slow one answers once the fast one has done its share: it holds nobody up, and takes nothing at the end."""
    open_: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    fast_done = threading.Event()
    counts: Counter[str] = Counter()

    def server(who: str) -> Any:
        async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
            name = name_of(body)
            asked[name] += 1
            open_[name] += 1
            assert open_[name] == 1, "one server at a time"
            counts[who] += 1
            while who == "slow" and not fast_done.is_set():
                await asyncio.sleep(0.01)
            if counts["fast"] >= 150:
                fast_done.set()
            open_[name] -= 1
            return good()

        return answer

    with chat_server(server("fast")) as fast, chat_server(server("slow")) as slow:
        wanted = spec(tmp_path, fast, 200, profile="fast", endpoints=[remote("slow", slow)])
        assert execute(wanted, generate.run) == 0
    told = result_of(wanted)["endpoints"]
    assert told["fast"]["answers"] + told["slow"]["answers"] == 200 and set(asked.values()) == {1}
    assert 4 <= told["slow"]["answers"] < told["fast"]["answers"]
    by = Counter(row["endpoint"] for row in rows_of(tmp_path / "out" / "rows.jsonl"))
    assert by == {name: one["answers"] for name, one in told.items()}


def test_an_endpoint_that_fails_is_set_aside_and_comes_back(tmp_path: Path) -> None:
    failing = itertools.count()

    async def sick(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good() if next(failing) >= 6 else web.Response(status=500, text="out of memory")

    async def well(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        return good()

    with chat_server(well) as a, chat_server(sick) as b:
        wanted = spec(tmp_path, a, 300, profile="well", endpoints=[remote("sick", b)])
        assert execute(wanted, generate.run) == 0
    told = result_of(wanted)["endpoints"]
    assert result_of(wanted)["rows"] == {"in": 300, "out": 300, "errors": 0, "skipped": 0}
    assert told["sick"]["lost"] == 6 and told["sick"]["answers"] > 0


def test_an_endpoint_that_is_not_there_is_told_and_the_others_work(tmp_path: Path) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good()

    with chat_server(answer) as url:
        nobody = remote("nobody", f"http://127.0.0.1:{free_port()}")
        wanted = spec(tmp_path, url, 10, endpoints=[nobody])
        assert execute(wanted, generate.run) == 0
    assert result_of(wanted)["rows"]["out"] == 10
    (warning,) = events(tmp_path, "warning")
    assert warning["check"] == "generate.endpoint" and "nobody" in warning["message"]


def test_another_endpoint_goes_on_where_the_first_one_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PATIENCE", 0.3)
    count = itertools.count()

    async def dying(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good("first") if next(count) < 5 else web.Response(status=503)

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good("second")

    with chat_server(dying) as url:
        assert execute(spec(tmp_path, url, 20), generate.run) == 3
    with chat_server(answer) as url:
        wanted = spec(tmp_path, "", 20, endpoints=[remote("other", url)])
        assert execute(wanted, generate.run) == 0
    texts = Counter(row["response"] for row in rows_of(tmp_path / "out" / "rows.jsonl"))
    assert texts == {"first": 5, "second": 15}


# --- what an answer holds -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "finish"), [("", "stop"), (None, "stop"), ("  \n", "length")])
def test_an_empty_answer_is_an_error_with_its_reason(tmp_path: Path, text: Any, finish: str) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good(text, 9, finish) if name_of(body) == "Say 3" else good()

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, 5)
        assert execute(wanted, generate.run) == 0
    (error,) = rows_of(tmp_path / "out" / "errors.jsonl")
    assert error["id"] == "p003" and error["error"] == f"the answer is empty (9 tokens, finish_reason {finish})"
    assert result_of(wanted)["response_tokens"] == 12


@pytest.mark.report(16)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.training_report(16)
def test_reasoning_comes_under_two_names(tmp_path: Path, field: str, streamed: bool) -> None:
    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        if not streamed:
            return good("Four.", 5, **{field: "2 and 2"})
        parts = [delta(**{field: "2 and"}), delta(**{field: " 2"}), delta(content="Four"), delta(content=".")]
        usage = {"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 7}}
        return await stream(request, [*parts, delta("stop"), usage, "data: [DONE]\n\n"])

    with chat_server(answer) as url:
        wanted = spec(tmp_path, "", 5, reasoning="yes", endpoints=[remote("it", url, stream=streamed)])
        assert execute(wanted, generate.run) == 0
    for row in rows_of(tmp_path / "out" / "rows.jsonl"):
        assert (row["response"], row["reasoning"]) == ("Four.", "2 and 2")
        assert "reasoning_content" not in row
        assert (row["completion_tokens"], row["prompt_tokens"], row["finish_reason"]) == (5, 7, "stop")
    assert result_of(wanted)["with_reasoning"] == 5


@pytest.mark.report(16)
@pytest.mark.parametrize("prompts", [5, 200])
@pytest.mark.training_report(16)
def test_a_model_that_thinks_and_tells_no_reasoning_is_stopped(tmp_path: Path, prompts: int) -> None:
    """Few rows or many; nothing of it is kept, so a server that is put right can go on in the same folder."""
    parser = False

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good("Four.", 50, reasoning="2 and 2" if parser else None)

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, prompts, reasoning="yes")
        assert execute(wanted, generate.run) == 3
        (error,) = events(tmp_path, "error")
        assert error["id"] == "generate.no-reasoning" and "reasoning parser" in error["message"]
        assert rows_of(tmp_path / "out" / "rows.jsonl") == []
        parser = True
        assert execute(wanted, generate.run) == 0
    assert result_of(wanted)["with_reasoning"] == prompts


@pytest.mark.report(16)
def test_one_of_two_servers_without_a_parser_is_found(tmp_path: Path) -> None:
    async def parsed(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.005)
        return good("Four.", reasoning="hm")

    async def bare(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good("Four.")

    with chat_server(parsed) as a, chat_server(bare) as b:
        wanted = spec(tmp_path, a, 200, reasoning="yes", profile="a", endpoints=[remote("b", b)])
        assert execute(wanted, generate.run) == 3
    assert "responses of b holds" in events(tmp_path, "error")[0]["message"]
    assert {row["endpoint"] for row in rows_of(tmp_path / "out" / "rows.jsonl")} <= {"a"}


def test_reasoning_that_stayed_in_the_text_is_taken_out_of_it(tmp_path: Path) -> None:
    """A server without a parser, whole: what the model wrote is all there, on both sides of its closing token."""

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good("2 and 2\n</think>\n\nFour.")

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, 3, reasoning="yes")
        assert execute(wanted, generate.run) == 0
    for row in rows_of(tmp_path / "out" / "rows.jsonl"):
        assert (row["reasoning"], row["response"]) == ("2 and 2\n", "\n\nFour.")


@pytest.mark.report(17)
@pytest.mark.parametrize("prompts", [20, 3000])
@pytest.mark.training_report(17)
def test_too_many_unfinished_answers_are_refused_and_early(tmp_path: Path, prompts: int) -> None:
    count = itertools.count()

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good(finish="length" if next(count) % 2 else "stop")

    with chat_server(answer) as url:
        assert execute(spec(tmp_path, url, prompts, max_unfinished=0.2), generate.run) == 3
        (error,) = events(tmp_path, "error")
        assert error["id"] == "generate.unfinished" and "max_tokens (20)" in error["message"]
        assert next(count) < prompts or prompts == 20, "not after the last of them"
        wanted = spec(tmp_path, url, prompts)
        assert execute(wanted, generate.run) == 0, "and a person may say that it is well so"
    finished = result_of(wanted)["finish_reasons"]
    assert sum(finished.values()) == prompts and abs(finished["length"] - finished["stop"]) <= 20
    assert "generate.unfinished" in {event["check"] for event in events(tmp_path, "warning")}


# --- streams --------------------------------------------------------------------------------------------------------

USAGE = {"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 7}}
WHOLE = [
    ": OPENROUTER PROCESSING\n\n",
    delta(role="assistant", content=""),
    delta(content="One "),
    delta(content="two."),
    delta("stop"),
    USAGE,
    "data: [DONE]\n\n",
]


@pytest.mark.parametrize("kept", range(len(WHOLE)))
def test_a_stream_cut_anywhere_is_asked_again(tmp_path: Path, kept: int) -> None:
    seen: Counter[str] = Counter()

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        assert body["stream"] and body["stream_options"] == {"include_usage": True}
        seen[name_of(body)] += 1
        first = seen[name_of(body)] == 1
        return await stream(request, WHOLE[:kept] if first else WHOLE, cut=first and kept % 2 == 0)

    with chat_server(answer) as url:
        wanted = spec(tmp_path, "", 3, endpoints=[remote("it", url, stream=True)])
        assert execute(wanted, generate.run) == 0
    assert set(seen.values()) == {2}
    for row in rows_of(tmp_path / "out" / "rows.jsonl"):
        assert (row["response"], row["completion_tokens"]) == ("One two.", 4)


def test_an_error_in_the_middle_of_a_stream_is_no_answer(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        seen[name_of(body)] += 1
        broken = [delta(content="One "), {"error": {"code": 502, "message": "provider lost"}, "choices": []}]
        return await stream(request, WHOLE if seen[name_of(body)] > 1 else [*broken, *WHOLE[4:]])

    with chat_server(answer) as url:
        wanted = spec(tmp_path, "", 3, endpoints=[remote("it", url, stream=True)])
        assert execute(wanted, generate.run) == 0
    assert {row["response"] for row in rows_of(tmp_path / "out" / "rows.jsonl")} == {"One two."}


@pytest.mark.parametrize("finish", [None, "abort", "error"])
def test_an_answer_without_an_end_is_asked_again(tmp_path: Path, finish: Any) -> None:
    seen: Counter[str] = Counter()

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        seen[name_of(body)] += 1
        return good("half", finish=finish) if seen[name_of(body)] == 1 else good("whole")

    with chat_server(answer) as url:
        wanted = spec(tmp_path, url, 3)
        assert execute(wanted, generate.run) == 0
    assert {row["response"] for row in rows_of(tmp_path / "out" / "rows.jsonl")} == {"whole"}


# --- keys -----------------------------------------------------------------------------------------------------------

KEY = 'sk-or/v1+"0123456789abcdef"'


@pytest.mark.parametrize(
    "words",
    [
        lambda key: f"Incorrect API key provided: {key}",
        lambda key: f"bad header {json.dumps(key)} at https://x/?key=" + quote(key, safe=""),
        lambda key: f"Basic {b64encode(key.encode()).decode()} in " + json.dumps({"headers": [f"Bearer {key}"]}),
    ],
)
@pytest.mark.parametrize("status", [401, 400, 429, 500])
def test_a_key_is_in_the_header_and_nowhere_else(
    tmp_path: Path, status: int, words: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A server that echoes the key in whatever it refuses: no file, event or line of the log holds it."""
    monkeypatch.setattr(dispatch, "PATIENCE", 0.2)
    (tmp_path / "key").write_text(KEY + "\n")
    headers: list[str | None] = []

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        headers.append(request.headers.get("Authorization"))
        return refused(status, words(KEY))

    with chat_server(answer) as url:
        endpoint = remote("it", url, key={"file": str(tmp_path / "key")})
        wanted = spec(tmp_path, "", 5, endpoints=[endpoint])
        assert execute(wanted, generate.run) == 3
    assert set(headers) == {f"Bearer {KEY}"}
    said = [capfd.readouterr().out, json.dumps(wanted)]
    said += [p.read_text() for p in [tmp_path / "events.jsonl", *(tmp_path / "out").iterdir()]]
    for text in said:
        assert KEY not in text and "0123456789abcdef" not in text and b64encode(KEY.encode()).decode() not in text
    assert "«secret»" in said[0]


def test_an_answer_that_repeats_the_key_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", KEY)

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        return good(f"I was asked with {request.headers['Authorization']}") if name_of(body) == "Say 1" else good()

    with chat_server(answer) as url:
        wanted = spec(tmp_path, "", 5, endpoints=[remote("it", url, key={"env": "A_KEY"})])
        assert execute(wanted, generate.run) == 0
    assert result_of(wanted)["rows"] == {"in": 5, "out": 4, "errors": 1, "skipped": 0}
    for path in (tmp_path / "out").iterdir():
        assert "0123456789abcdef" not in path.read_text()


@pytest.mark.parametrize("content", [None, "", "  \n", "two words", "k\u00e9y"])
def test_a_key_that_is_none_is_a_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "key").write_text(content)
    endpoint = remote("it", "http://127.0.0.1:1", key={"file": str(tmp_path / "key")})
    assert execute(spec(tmp_path, "", 5, endpoints=[endpoint]), generate.run) == 3
    assert events(tmp_path, "error")[0]["id"] == "generate.key"


def test_a_key_does_not_follow_a_redirection(tmp_path: Path) -> None:
    async def thief(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        raise AssertionError("it was asked")

    async def answer(body: dict[str, Any], request: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect(f"{other}/v1/chat/completions")

    with chat_server(thief) as other, chat_server(answer) as url:
        (tmp_path / "key").write_text("abc")
        endpoint = remote("it", url, key={"file": str(tmp_path / "key")})
        assert execute(spec(tmp_path, "", 3, endpoints=[endpoint]), generate.run) == 3
    assert "307" in events(tmp_path, "error")[0]["message"]
