"""The reference engine over real HTTP: every endpoint, bad input, and how its processes end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipeline.eagle3.draft import config_for_target, write_config
from tests.lab.engine import Engine, engine, gone, kill
from tests.lab.tiny_drafter import random_weights
from tests.lab.tiny_model import make_tiny_model

CONTEXT = 128
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("draft")
    config = config_for_target(json.loads((model / "config.json").read_text()), (2, 4, 5), draft_vocab_size=192)
    (directory / "config.json").write_text(json.dumps(write_config(config)))
    save_file(random_weights(config), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("plain") / "log"
    with engine(model, log, "--dtype", "float32", "--context-length", str(CONTEXT), "--max-running-requests", "3",
                "--served-model-name", "tiny") as server:  # fmt: skip
        yield server


@pytest.fixture(scope="module")
def speculative(model: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    log = tmp_path_factory.mktemp("speculative") / "log"
    with engine(model, log, "--dtype", "float32", "--context-length", str(CONTEXT), *spec_flags(draft)) as server:
        yield server


def spec_flags(draft: Path, steps: int = 3) -> list[str]:
    return ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft),
            "--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1",
            "--speculative-num-draft-tokens", str(steps + 1)]  # fmt: skip


def generate(server: Engine, text: str = "ab", **params: Any) -> dict[str, Any]:
    body = {"text": text, "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True} | params}
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


def chat(server: Engine, **more: Any) -> tuple[int, Any]:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "temperature": 0} | more
    return server.post("/v1/chat/completions", body)


# --- endpoints -----------------------------------------------------------------------------------------------------


def test_chat_completion(plain: Engine) -> None:
    status, answer = chat(plain, ignore_eos=True, return_token_ids=True)
    assert status == 200
    choice = answer["choices"][0]
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 12
    prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert generate(plain, prompt, max_new_tokens=12)["output_ids"] == choice["token_ids"]
    assert "token_ids" not in chat(plain)[1]["choices"][0]


def test_stream_is_the_same_text(plain: Engine) -> None:
    whole = chat(plain, ignore_eos=True)[1]
    asked = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    events = stream(plain, "/v1/chat/completions", asked)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(e) for e in events[:-1]]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    deltas = [c["choices"][0] for c in chunks if c["choices"]]
    assert "".join(d["delta"].get("content", "") for d in deltas) == whole["choices"][0]["message"]["content"]
    assert deltas[-1]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 12
    assert sum("content" in d["delta"] for d in deltas) > 1, "in pieces, not in one go"


def test_generate_stream_grows(plain: Engine) -> None:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    events = stream(plain, "/generate", {"text": "ab", "sampling_params": params, "stream": True})
    lengths = [len(json.loads(e)["output_ids"]) for e in events[:-1]]
    assert lengths == sorted(lengths) and lengths[-1] == 8
    assert json.loads(events[-2])["output_ids"] == generate(plain, max_new_tokens=8)["output_ids"]


def stream(server: Engine, path: str, body: dict[str, Any]) -> list[str]:
    import urllib.request

    request = urllib.request.Request(server.url + path, data=json.dumps(body).encode())
    text = server.ask(request)[1].decode()
    return [part.removeprefix("data: ") for part in text.split("\n\n") if part]


def test_generate_by_ids_equals_by_text(plain: Engine) -> None:
    by_text = generate(plain, "a")
    assert by_text["meta_info"]["prompt_tokens"] == 1
    assert by_text["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
    assert not any(name.startswith("spec_") for name in by_text["meta_info"])
    params = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    status, by_ids = plain.post("/generate", {"input_ids": [prompt_id("a")], "sampling_params": params})
    assert status == 200 and by_ids["output_ids"] == by_text["output_ids"]


def prompt_id(letter: str) -> int:
    from tokenizers import pre_tokenizers

    return 3 + sorted(pre_tokenizers.ByteLevel.alphabet()).index(letter)


def test_stops(plain: Engine) -> None:
    free = generate(plain, max_new_tokens=20)
    ids = free["output_ids"]
    by_id = generate(plain, max_new_tokens=20, stop_token_ids=[ids[6]])
    cut = ids.index(ids[6])
    assert by_id["output_ids"] == ids[: cut + 1]
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": ids[6]}
    piece = free["text"][5:8]
    by_text = generate(plain, max_new_tokens=20, stop=[piece])
    assert by_text["text"] == free["text"][: free["text"].index(piece)]
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": piece}


def test_seeds_repeat(plain: Engine) -> None:
    one = generate(plain, temperature=1.0, sampling_seed=7)["output_ids"]
    assert generate(plain, temperature=1.0, sampling_seed=7)["output_ids"] == one
    assert generate(plain, temperature=1.0, sampling_seed=8)["output_ids"] != one
    unseeded = [generate(plain, temperature=1.0)["output_ids"] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_many_at_once_equal_one_by_one(plain: Engine) -> None:
    """Nine requests over three rows: they wait, join and leave, and none gets another's tokens."""
    texts = [letter * (i + 1) for i, letter in enumerate("abcdefghi")]
    lengths = [4 + 5 * (i % 4) for i in range(9)]
    alone = [generate(plain, t, max_new_tokens=n)["output_ids"] for t, n in zip(texts, lengths, strict=True)]
    with ThreadPoolExecutor(9) as pool:
        together = list(pool.map(lambda t, n: generate(plain, t, max_new_tokens=n)["output_ids"], texts, lengths))
    assert together == alone


def test_speculation_keeps_the_text_and_counts(plain: Engine, speculative: Engine) -> None:
    for text in ("a", "hello there", "x" * 40):
        got = generate(speculative, text, max_new_tokens=30)
        assert got["output_ids"] == generate(plain, text, max_new_tokens=30)["output_ids"]
        meta = got["meta_info"]
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == meta["spec_verify_ct"]
        assert sum(i * n for i, n in enumerate(histogram)) == meta["spec_num_correct_drafts"]
        assert meta["spec_num_proposed_drafts"] == 3 * meta["spec_verify_ct"]
        assert meta["spec_accept_length"] == pytest.approx(30 / meta["spec_verify_ct"])
    same = {"temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 30}
    assert generate(speculative, **same)["output_ids"] == generate(plain, **same)["output_ids"]


def test_speculation_to_the_end_of_the_context(speculative: Engine) -> None:
    assert len(generate(speculative, "a", max_new_tokens=CONTEXT - 1)["output_ids"]) == CONTEXT - 1


def test_metrics_count(speculative: Engine) -> None:
    before = metrics(speculative)
    meta = [generate(speculative, "abc", max_new_tokens=10)["meta_info"] for _ in range(2)]
    after = metrics(speculative)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("sglang:generation_tokens_total") == 20
    assert grown("sglang:prompt_tokens_total") == 6
    assert grown("sglang:num_requests_total") == 2
    assert grown("sglang:spec_verify_calls_total") == sum(m["spec_verify_ct"] for m in meta)
    assert after["sglang:spec_num_draft_tokens"] == 4
    assert {"sglang:gen_throughput", "sglang:num_running_reqs", "sglang:token_usage"} <= after.keys()


def metrics(server: Engine) -> dict[str, float]:
    status, body = server.get("/metrics")
    assert status == 200
    out: dict[str, float] = {}
    for line in body.decode().splitlines():
        if not line.startswith("#"):
            name, value = re.fullmatch(r"(\S+?)\{.*\} (\S+)", line).groups()  # type: ignore[union-attr]
            out[name] = float(value)
    return out


def test_looking(plain: Engine, speculative: Engine) -> None:
    assert plain.get("/health")[0] == plain.get("/health_generate")[0] == 200
    card = json.loads(plain.get("/v1/models")[1])["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", CONTEXT)
    for path in ("/model_info", "/get_model_info"):
        assert json.loads(plain.get(path)[1])["is_generation"] is True
    info = json.loads(speculative.get("/server_info")[1])
    assert info["status"] == "ready" and info["speculative_num_steps"] == 3 and info["dtype"] == "float32"
    assert info["torch"] == torch.__version__ and info["threads"] == 1
    generate(speculative)
    state = json.loads(speculative.get("/server_info")[1])["internal_states"][0]
    assert state["avg_spec_accept_length"] >= 1
    assert speculative.get("/flush_cache")[0] == 200
    assert "avg_spec_accept_length" not in json.loads(speculative.get("/server_info")[1])["internal_states"][0]


def test_log_speaks_as_sglang_does(speculative: Engine) -> None:
    generate(speculative, max_new_tokens=90)
    log = speculative.log.read_text()
    assert "The server is fired up and ready to roll!" in log
    line = (
        r"Decode batch, #running-req: 1, #token: \d+, token usage: 0\.\d\d, accept len: [1-4]\.\d\d, "
        r"accept rate: 0\.\d\d, cuda graph: False, gen throughput \(token/s\): \d+\.\d\d, #queue-req: 0"
    )
    assert re.search(line, log)
    assert "Prefill batch, #new-seq: 1, #new-token: 2, #cached-token: 0" in log


def test_clients_that_hang_up_free_their_rows(plain: Engine) -> None:
    """Six long requests for three rows, and everybody leaves: those that run and those that wait."""
    before = metrics(plain)
    body = {"text": "a", "sampling_params": {"max_new_tokens": CONTEXT - 1, "ignore_eos": True}, "stream": True}
    data = json.dumps(body).encode()
    clients = [socket.create_connection(("127.0.0.1", plain.port)) for _ in range(6)]
    for client in clients:
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
    assert b"200 OK" in clients[0].recv(1000)
    for client in clients:
        client.close()

    async def until() -> None:
        while metrics(plain)["sglang:num_running_reqs"] or plain.get("/flush_cache")[0] != 200:
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(until(), 30))
    after = metrics(plain)
    assert after["sglang:num_aborted_requests_total"] > before["sglang:num_aborted_requests_total"]
    made = after["sglang:generation_tokens_total"] - before["sglang:generation_tokens_total"]
    assert made < 6 * (CONTEXT - 1), "nobody waits for them, so they are not finished"


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text"),
        ({"max_tokens": 0}, "max_tokens must be a positive integer"),
        ({"max_tokens": "many"}, "max_tokens must be a positive integer"),
        ({"max_tokens": 1000}, "maximum context length of 128 tokens"),
        ({"temperature": -1}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be above 0"),
        ({"n": 2}, "n=2 is not supported"),
        ({"stop": [3]}, "stop must be a string"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"frequency_penalty": 0.5}, "not supported"),
        ({"temprature": 0.5}, "unknown field 'temprature'"),
        ({"stream": "yes"}, "stream must be true or false"),
    ],
)
def test_bad_chat_requests(plain: Engine, more: dict[str, Any], says: str) -> None:
    status, answer = chat(plain, **more)
    assert status == 400
    assert says in answer["error"]["message"] and answer["message"] == answer["error"]["message"]
    assert answer["error"]["type"] == "BadRequestError" and answer["error"]["code"] == 400


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (rb'{"text": "\ud800"}', "not JSON"),
        (b"[]", "expected a JSON object"),
        ({}, "either text or input_ids"),
        ({"text": ["a", "b"]}, "text must be one string"),
        ({"input_ids": [384]}, "integers from 0 to 383"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"text": "a", "sampling_params": {"max_new_tokens": CONTEXT}}, "maximum context length"),
    ],
)
def test_bad_generate_requests(plain: Engine, body: Any, says: str) -> None:
    status, answer = plain.post("/generate", body)
    assert status == 400 and says in answer["error"]["message"]


def test_unknown_paths_and_methods(plain: Engine) -> None:
    status, body = plain.get("/v2/nothing")
    assert status == 404 and json.loads(body)["error"]["code"] == 404
    assert plain.get("/generate")[0] == 405


# --- processes -----------------------------------------------------------------------------------------------------


def test_sigterm_ends_both(model: Path, tmp_path: Path) -> None:
    server = Engine(model, tmp_path / "log").wait_ready()
    (worker,) = server.children()
    assert os.getsid(worker) == worker, "a session of its own"
    assert server.stop() == 0
    assert gone(worker)


def test_sigterm_while_loading(model: Path, tmp_path: Path) -> None:
    server = Engine(model, tmp_path / "log")

    async def until() -> int:
        while not (children := server.children()):
            await asyncio.sleep(0.01)
        return children[0]

    worker = asyncio.run(asyncio.wait_for(until(), 30))
    assert server.stop() in (0, 128 + signal.SIGTERM)
    assert gone(worker)


def test_a_killed_launcher_leaves_its_worker(model: Path, tmp_path: Path) -> None:
    server = Engine(model, tmp_path / "log").wait_ready()
    (worker,) = server.children()
    try:
        server.process.kill()
        server.process.wait(10)
        assert server.get("/health")[0] == 200, "the orphan serves on"
        second = Engine(model, tmp_path / "second", port=server.port)
        assert second.process.wait(30) == 2
        assert f"port {server.port} is not free: Address already in use" in second.log.read_text()
        assert len(second.log.read_text().splitlines()) == 1, "one sentence"
    finally:
        kill(worker)
    assert gone(worker)


def test_a_killed_worker_ends_the_launcher(model: Path, tmp_path: Path) -> None:
    server = Engine(model, tmp_path / "log").wait_ready()
    kill(server.children()[0])
    assert server.process.wait(10) == 128 + signal.SIGKILL


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--speculative-algorithm", "EAGLE3"], 2, "needs --speculative-draft-model-path"),
        (["--speculative-num-steps", "3"], 2, "no effect without --speculative-algorithm"),
        (["--speculative-algo", "EAGLE3"], 2, "unrecognized arguments"),
        (["--context-length", "100000"], 1, "beyond the model's 256 positions"),
        ([*spec_flags(Path("/nowhere"))], 1, "there is no drafter at /nowhere"),
    ],
)
def test_what_cannot_be_served(model: Path, tmp_path: Path, flags: list[str], code: int, says: str) -> None:
    server = Engine(model, tmp_path / "log", *flags)
    assert server.process.wait(60) == code
    text = server.log.read_text()
    assert says in text and "Traceback" not in text


def test_a_missing_model(tmp_path: Path) -> None:
    server = Engine(tmp_path / "nothing", tmp_path / "log")
    assert server.process.wait(60) == 1
    assert "Traceback" not in server.log.read_text() and "nothing" in server.log.read_text()


def test_a_drafter_of_another_target(model: Path, draft: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", layers=6)
    server = Engine(other, tmp_path / "log", *spec_flags(draft))
    assert server.process.wait(60) == 1
    assert "made for another target: layers 8 there, 6 here" in server.log.read_text()
