"""Events of a small rig over two days, as every room writes them, for tests of what the book makes of them."""

from __future__ import annotations

from typing import Any

from state import events as e
from state.benchmarks import Arm, BenchRecord, Dataset, Round, Settings, break_even_accept_len, judge

PROJECT = """
[project]
name = "smol-eagle3"
goal = "Serve SmolLM2-135M at full precision, and make it faster with an EAGLE-3 drafter."
instructions = ["No precision-cutting hacks", "Record what failed, not only what worked"]

[hosts.pve]
kind = "proxmox"
ssh = "pve"
played = true
[hosts.llm]
kind = "lxc"
on = "pve"
vmid = 101
ssh = "llm"
played = true
[hosts.vm]
kind = "vm"
on = "pve"
vmid = 200
ssh = "vm"
played = true

[envs.work]
host = "llm"
python = "/usr/bin/python3"

[target]
path = "/data/target/model"
name = "SmolLM2-135M-Instruct"
special_tokens = { "<|im_end|>" = 2 }

[profiles.baseline]
env = "work"
engine = "reference"
port = 8000
[profiles.eagle3]
extends = "baseline"
draft = "/data/export/drafter"
speculative = { algorithm = "EAGLE3", steps = 3, draft-tokens = 4 }

[pipeline]
host = "llm"
env = "work"
workdir = "/data"

[[rules]]
forbid = "args.kv-cache-dtype=fp8*"
because = "degrades quality noticeably"
"""


def fact(key: str, value: Any, unit: str | None = None, host: str = "llm", command: str = "probe system", **more: Any):
    return e.FactObserved(key=key, value=value, unit=unit, source=e.Source(host=host, command=command), **more)


def round_(order: int, tok_s: float, counts: list[int] | None = None, tokens: int = 1536) -> Round:
    """One round; `counts` is the histogram of accepted drafts per verify step."""
    if counts is None:
        return Round(order=order, requests=24, output_tokens=tokens, seconds=tokens / tok_s, tok_s=tok_s)
    steps, accepted = sum(counts), sum(i * n for i, n in enumerate(counts))
    return Round(
        order=order,
        requests=24,
        output_tokens=tokens,
        seconds=tokens / tok_s,
        tok_s=tok_s,
        verify_steps=steps,
        accepted_drafts=accepted,
        proposed_drafts=steps * (len(counts) - 1),
        accept_len=1 + accepted / steps,
        accept_histogram=counts,
        per_position=[sum(counts[i:]) for i in range(1, len(counts))],
    )


def bench(kind: str, plain: list[float], fast: list[float], counts: list[int], ngram: float) -> BenchRecord:
    common = {"engine": "reference", "engine_version": "0.1.0", "dtype": "bfloat16"}
    speculative = {"algorithm": "EAGLE3", "steps": 3, "topk": 1, "draft_tokens": 4}
    base = Arm(profile="baseline", rounds=[round_(2 * i, v) for i, v in enumerate(plain)], **common)
    spec = Arm(
        profile="eagle3",
        speculative=speculative,
        draft="/data/export/drafter",
        rounds=[round_(2 * i + 1, v, counts) for i, v in enumerate(fast)],
        **common,
    )
    steps = sum(counts)
    length = 1 + sum(i * n for i, n in enumerate(counts)) / steps
    record = BenchRecord(
        name="eagle3",
        arms=[base, spec],
        dataset=Dataset(id=f"held_{kind}.jsonl", sha256="ab" * 32, kind=kind, n=24),  # type: ignore[arg-type]
        settings=Settings(max_tokens=64),
        target={"name": "SmolLM2-135M-Instruct", "dtype": "bfloat16"},
        host="llm",
        system={"cpu": "Intel(R) Xeon(R) Platinum 8488C", "threads": 2, "torch": "2.13.0"},
        client="rigbook load 0.1.0",
        ngram_accept_len=ngram,
        repetition_rate=0.0312,
        break_even=break_even_accept_len(length, sorted(plain)[1], sorted(fast)[1]),
        lossless={"checked": 16, "identical": 16, "dtype": "float32"},
    )
    record.verdict = judge(record)
    return record


def stage(name: str, run: str, result: dict[str, Any], seconds: float, status: str = "done", **settings: Any):
    exit_code = {"done": 0, "failed": 3, "lost": None}.get(status)
    return [
        e.RunStarted(run=run, what="stage", name=name, host="llm", job=f"job-{run}", key="ab12", settings=settings),
        e.RunFinished(run=run, status=status, exit=exit_code, result=result, seconds=seconds),  # type: ignore[arg-type]
    ]


def probes() -> list[e.Event]:
    made: list[e.Event] = [e.ProjectOpened(name="smol-eagle3")]
    for host in ("pve", "llm", "vm"):
        made += [
            fact(f"hosts.{host}.access.user", "root", host=host, command="id -un"),
            fact(f"hosts.{host}.access.host_key", "SHA256:1fX0abcd", host=host, command="ssh handshake"),
            fact(f"hosts.{host}.hw.cpu.model", "Intel(R) Xeon(R) Platinum 8488C", host=host),
            fact(f"hosts.{host}.hw.cpu.threads", 2, host=host),
            fact(f"hosts.{host}.hw.memory.total", 25_282_232_320, "B", host=host),
            fact(f"hosts.{host}.sw.kernel", "6.1.0-rigbook", host=host),
            fact(f"hosts.{host}.sw.boot_id", "b0074f6e", host=host),
        ]
    made += [
        fact(
            "hosts.llm.hw.gpus",
            [
                {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "memory": "141 GB"},
                {"index": 1, "name": "NVIDIA H200", "uuid": "GPU-2", "memory": None},
            ],
            command="probe gpus",
        ),
        fact("envs.work.torch", "2.13.0", command="probe env"),
        fact("envs.work.python", "3.11.9", command="probe env"),
        fact("target.layers", 30),
        fact("target.parameters", 134_515_008),
        fact("target.special_tokens.<|im_end|>", 2, command="tokenizer.json"),
        e.FactObserved(
            key="costs.machine", value=0.42, unit="USD/h", source=e.Source(note="the provider's price list")
        ),
        fact("profiles.baseline.decode_ms", 24.2, "ms", command="load run"),
    ]
    return made


def pipeline() -> list[e.Event]:
    made = [
        *stage("target", "r1", {"parameters": 134515008, "tensors": 272}, 48.2),
        *stage("prompts", "r2", {"rows": {"in": 552, "out": 540, "errors": 0, "skipped": 12}}, 61.0, seed=0),
        *stage("generate", "r3", {"reason": "the server went away after 211 rows"}, 30.5, status="failed"),
        *stage("generate", "r4", {"rows": {"in": 492, "out": 492, "errors": 0, "skipped": 0}, "tokens": 41230}, 141.0),
        *stage("tokenize", "r5", {"tokens": 62310}, 4.1),
        *stage("mix", "r6", {"rows": {"in": 492, "out": 489, "errors": 0, "skipped": 3}}, 1.2),
        *stage("vocab", "r7", {"size": 8192, "coverage": 0.9971}, 1.4),
        *stage("hidden", "r8", {"bytes": 423_000_000}, 38.0, dtype="bfloat16"),
        *stage(
            "train", "r9", {"steps": 412, "loss": 2.31, "accuracy": [0.61, 0.48, 0.4]}, 240.0, ttt_steps=3, lr=0.001
        ),
        *stage("export", "r10", {"tensors": 15}, 2.0),
        *stage("audit", "r11", {"findings": 0}, 1.0),
        *stage("predict", "r12", {"self": {"accept_len": 2.21}, "people": {"accept_len": 1.52}}, 22.0, steps=3),
        e.ArtifactMade(
            run="r10", name="drafter", path="/data/export/drafter", host="llm", sha256="cd" * 32, bytes=61_234_567
        ),
    ]
    return [event for event in made if isinstance(event, e.Event)]


def benches() -> list[e.Event]:
    counts = [210, 150, 100, 240]
    return [
        e.ServerState(run="s1", profile="baseline", state="starting"),
        e.ServerState(run="s1", profile="baseline", state="ready", detail="port 8000"),
        e.RunStarted(run="b1", what="bench", name="bench", host="llm"),
        e.BenchmarkRecorded(run="b1", bench=bench("self", [41.2, 40.8, 41.9], [55.3, 54.1, 56.0], counts, 1.21)),
        e.BenchmarkRecorded(
            run="b1", bench=bench("people", [41.0, 40.9, 41.5], [36.2, 37.0, 36.8], [600, 250, 90, 30], 1.09)
        ),
        e.RunFinished(run="b1", status="done", exit=0, result={"benchmarks": 2}, seconds=96.0),
        e.PlanMade(plan="p1", action="clean", host="llm", items=[{"pid": 4211, "holds": "port 8001, 512 MiB"}]),
        e.PlanApplied(plan="p1", verified=True, outcome={"port 8001": "free", "freed": "512 MiB"}),
        e.ServerState(run="s1", profile="baseline", state="stopped"),
        e.Warned(where="llm", check="disk.low", message="12 % of /data is free"),
        e.Warned(where="llm", check="disk.low", message="12 % of /data is free"),
        e.ProbeFailed(host="vm", what="system", reason="connection refused"),
    ]


def people() -> list[e.Event]:
    return [
        e.DiscoveryMade(
            title="<|im_end|> has two ids",
            text="2 is the one that the model emits.",
            evidence=["run r1", "tokenizer.json"],
            guard="special_tokens",
        ),
        e.DiscoveryMade(
            title="EAGLE is enough", text="It is not: only EAGLE3 captures hidden states.", status="refuted"
        ),
        e.DecisionMade(
            title="Draft vocabulary of 8,192",
            text="Covers 99.7 % of the responses.",
            alternatives=["32,000", "the whole vocabulary"],
            because="the head is the largest product of a draft step",
        ),
        e.AssumptionMade(text="The machine is otherwise idle", because="nobody else has a login"),
        e.NextAdded(title="Train longer", priority=2, done_when="accept length on people's prompts is above 1.8"),
        e.NextAdded(title="Measure at concurrency 8", priority=1, otherwise="write down why not"),
        e.NoteAdded(text="The rig | is in the cellar.\nMind the step.", section="hardware"),
        e.FactObserved(key="hosts.llm.hw.cpu.threads", value=4, owner="person", source=e.Source(note="we bought 4")),
    ]


def everything() -> list[e.Event]:
    return [*probes(), *pipeline(), *benches(), *people()]
