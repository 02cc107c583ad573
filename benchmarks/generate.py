"""How much of a server's throughput the stage `generate` gets, beside SGLang's own benchmark client.

    python benchmarks/generate.py --sglang PYTHON [--path DIR] --model DIR [--rounds 5] [--url URL]

PYTHON runs `sglang.benchmark.serving` (bench_serving; DIR: where the package lies, if it is not installed). Both ask
the same server for the same prompts, at the same number at once, with the same longest answer and greedy, in turn
within a round. What is compared is what a user waits for: tokens of the answers by the seconds from the first request
to the last answer, which each of them tells (for ours, with every row durable on the disk).

Servers: a stand-in that answers at once (what the clients themselves can do), and the reference engine with the model
of --model (a real server on this machine); with --url one that runs already, an SGLang on a GPU for example.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# The client without its server: the two things that it imports out of the server's package need torch, CUDA kernels and
# more. A name is given, and the module about addresses is loaded on its own; the client's files run as they are.
CLIENT = """
import os, sys, types
root = next((f"{p}/sglang" for p in sys.path if os.path.isdir(f"{p}/sglang")), None)
def package(name, path=None, **values):
    module = types.ModuleType(name)
    if path:
        module.__path__ = [path]
    module.__dict__.update(values)
    sys.modules[name] = module
package("sglang", root)
package("sglang.srt", f"{root}/srt")
package("sglang.srt.utils", f"{root}/srt/utils")
package("sglang.srt.disaggregation", f"{root}/srt/disaggregation")
package("sglang.srt.disaggregation.utils", FAKE_BOOTSTRAP_HOST="2.2.2.2")
from sglang.benchmark.serving import cli_main
cli_main()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sglang", required=True, help="a Python for SGLang's client")
    parser.add_argument("--path", default="", help="the folder that holds the package sglang, unless it is installed")
    parser.add_argument("--model", type=Path, required=True, help="directory of the model (tokenizer, weights)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help="a server that runs already, instead of the two that are started")
    parser.add_argument("--tokens", type=int, default=200, help="longest answer")
    parser.add_argument("--concurrency", type=int, default=64)
    given = parser.parse_args()
    if given.url:
        compare("server at --url", given.url, given, 2000, streams=True)
        return
    with stand_in(given.tokens) as url:
        compare("stand-in that answers at once", url, given, 3000, streams=True)
    given.tokens = min(given.tokens, 64)  # a real model on a processor: enough for minutes
    with reference(given.model) as url:
        compare("reference engine", url, given, 128, streams=False)


def compare(what: str, url: str, given: argparse.Namespace, requests: int, streams: bool) -> None:
    """Prints each round, the medians, and ours by the better of theirs."""
    print(f"\n{what}: {requests} requests, {given.concurrency} at once, {given.tokens} tokens at most", flush=True)
    found: dict[str, list[float]] = {}
    for number in range(given.rounds):
        arms: list[tuple[str, Any]] = [
            ("generate", lambda folder: ours(url, given, requests, folder)),
            ("bench_serving, whole answers", lambda folder: theirs(url, given, requests, folder, stream=False)),
        ]
        if streams:
            arms.append(("bench_serving, streams", lambda folder: theirs(url, given, requests, folder, stream=True)))
        told = []
        for name, arm in arms[number % len(arms) :] + arms[: number % len(arms)]:
            with tempfile.TemporaryDirectory() as folder:
                found.setdefault(name, []).append(arm(Path(folder)))
            told.append(f"{name} {found[name][-1]:,.0f}")
        print(f"  round {number + 1}: " + "   ".join(sorted(told)) + "   tokens/s", flush=True)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    for name, rate in medians.items():
        print(f"  {name:30} {rate:>10,.0f} tokens/s (median of {given.rounds})")
    mine = medians.pop("generate")
    best = max(medians, key=lambda name: medians[name])
    ratios = [a / b for a, b in zip(found["generate"], found[best], strict=True)]
    print(
        f"  generate is {mine / medians[best]:.3f} of {best} (rounds {min(ratios):.3f} to {max(ratios):.3f})",
        flush=True,
    )


def prompts(count: int) -> list[str]:
    return [
        f"Write a short story about the number {n} and what it did on a rainy day in town {n % 17}."
        for n in range(count)
    ]


def ours(url: str, given: argparse.Namespace, requests: int, folder: Path) -> float:
    rows = [
        {"id": f"p{n:06d}", "source": "bench", "messages": [{"role": "user", "content": text}]}
        for n, text in enumerate(prompts(requests))
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "stage": "generate",
        "out": str(folder / "out"),
        "inputs": {"prompts": str(folder / "prompts.jsonl")},
        "settings": {
            "base_url": url,
            "max_tokens": given.tokens,
            "temperature": 0.0,
            "concurrency": given.concurrency,
            "extra": {"ignore_eos": True},
        },
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    argv = [sys.executable, "-m", "pipeline.stages.generate", "--spec", str(folder / "spec.json")]
    subprocess.run(argv, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    result = json.loads((folder / "out" / "manifest.json").read_text())["result"]
    assert result["rows"]["out"] == requests, result
    rate: float = result["tok_s"]
    return rate


def theirs(url: str, given: argparse.Namespace, requests: int, folder: Path, stream: bool) -> float:
    rows = [
        {"conversations": [{"role": "user", "content": text}, {"role": "assistant", "content": "None of it."}]}
        for text in prompts(requests)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [given.sglang, "-c", CLIENT, "--backend", "sglang-oai-chat", "--base-url", url, "--model", str(given.model)]
    argv += ["--dataset-name", "custom", "--dataset-path", str(folder / "data.jsonl"), "--num-prompts", str(requests)]
    argv += ["--sharegpt-output-len", str(given.tokens), "--max-concurrency", str(given.concurrency)]
    argv += ["--output-file", str(folder / "out.jsonl"), "--disable-tqdm", "--warmup-requests", "0"]
    argv += [] if stream else ["--disable-stream"]
    env = os.environ | ({"PYTHONPATH": given.path} if given.path else {})
    done = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"SGLang's client ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    result = json.loads((folder / "out.jsonl").read_text().splitlines()[-1])
    assert result["completed"] == requests, result
    rate: float = result["total_output_tokens"] / result["duration"]
    return rate


@contextmanager
def stand_in(tokens: int) -> Iterator[str]:
    port = free_port()
    yield from serving([sys.executable, str(ROOT / "benchmarks" / "stand_in_server.py"), str(port), str(tokens)], port)


@contextmanager
def reference(model: Path) -> Iterator[str]:
    port = free_port()
    argv = [sys.executable, "-m", "pipeline.stages.reference_engine", "--model-path", str(model), "--port", str(port)]
    yield from serving([*argv, "--dtype", "bfloat16", "--max-running-requests", "64"], port)


def serving(argv: list[str], port: int) -> Iterator[str]:
    server = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/v1/models", timeout=5)
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
