"""A project folder as a demo in full swing leaves it: real journal, real run files. Made through the real writers."""

from __future__ import annotations

import json
import time
from pathlib import Path

from state import events
from state.benchmarks import Arm, BenchRecord, Dataset, Round, Settings, judge
from state.journal import Journal

TOML = """
[project]
name = "rigbook-demo"
goal = "Make SmolLM2-135M-Instruct faster with an EAGLE-3 drafter, and know by how much."
instructions = ["No precision-cutting hacks.", "Don't game benchmark numbers."]

[hosts.pve]
kind = "local"
played = true
state_dir = "STATE"
[hosts.llm]
kind = "local"
played = true
state_dir = "STATE"

[envs.serve]
host = "llm"
python = "/usr/bin/python3"

[target]
path = "/nowhere/model"

[profiles.baseline]
env = "serve"
engine = "reference"
port = 18999
args = { dtype = "bfloat16", max-running-requests = 64 }
[profiles.eagle3]
extends = "baseline"
port = 18998
draft = "/nowhere/drafter"
speculative = { algorithm = "EAGLE3", steps = 3, topk = 1, draft_tokens = 4 }

[pipeline]
host = "llm"
env = "serve"
workdir = "/nowhere/eagle3"
"""

DONE = ("target", "prompts", "generate", "held_self", "held_people", "tokenize", "mix", "vocab", "hidden")
TRAIN = "train-1a2b3c4d-1"


def make(root: Path, *, toml: str = TOML) -> Path:
    """The project in `root`: nine stages done, training under way, a server ready, one benchmark, one failure."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "rigbook.toml").write_text(toml.replace("STATE", str(root / "state")))
    (root / ".rigbook").mkdir(mode=0o700, exist_ok=True)
    with Journal.open(root / ".rigbook" / "journal.db") as journal:
        journal.append(events.ProjectOpened(name="rigbook-demo", goal="Make it faster."))
        journal.append(
            fact("hosts.llm.hw.cpu", "Xeon with AMX"),
            fact("hosts.llm.hw.cores", 2),
            fact("hosts.llm.hw.memory", 7.6, "GiB"),
            fact("target.layers", 30),
        )
        for stage in DONE:
            run = f"{stage}-0f0f0f0f-1"
            journal.append(started(run, "stage", stage))
            rows = {"in": 480, "out": 478, "errors": 2, "skipped": 0} if stage == "generate" else None
            result = {"seconds_per_row": 0.25, **({"rows": rows} if rows else {})}
            journal.append(events.RunFinished(run=run, status="done", exit=0, result=result, seconds=62.5))
            write_run(root, run, [f"{stage}: 100.0 %"], [])
        journal.append(started("audit-bad-1", "stage", "audit"))
        error = "lm_head.weight has the wrong shape: [8192, 576] is not [8192, 192]"
        journal.append(
            events.RunFinished(run="audit-bad-1", status="failed", exit=3, result={"error": error}, seconds=1.0)
        )
        journal.append(started("server-baseline-aa-1", "server", "baseline"))
        journal.append(
            events.ServerState(run="server-baseline-aa-1", profile="baseline", state="ready", detail="after 8.1 s")
        )
        journal.append(started(TRAIN, "stage", "train"))
        journal.append(events.BenchmarkRecorded(bench=bench("plain against eagle3", "self")))
        journal.append(events.BenchmarkRecorded(bench=bench("plain against eagle3, people", "people", 1.4, 34.0)))
        journal.append(events.Warned(where="llm", check="disk.low", message="2.1 GiB free, the pipeline needs 3"))
        journal.append(
            events.NextAdded(title="Try four draft steps", priority=1, done_when="a verdict is in the book"),
            actor="kim",
            actor_kind="person",
        )
        journal.append(
            events.DiscoveryMade(title="Looping text passes for a good drafter", text="n-gram lookup reaches 1.2"),
            actor="kim",
            actor_kind="person",
        )
    lines = [f"train: step {i} loss {3 + 5 / (i + 1):.3f}" for i in range(400)]
    said = [{"kind": "metric", "name": "loss", "value": 3 + 5 / (i + 1)} for i in range(400)]
    said.append(progress(400, 1000))
    write_run(root, TRAIN, [*lines, "\x1b[31mcolour\x1b[0m and \x07bell \x1b]0;title\x07 end", "bad \udcff byte"], said)
    return root


def progress(done: float, total: float) -> dict[str, object]:
    said = {"kind": "progress", "t": time.time(), "done": done, "total": total}
    return {**said, "unit": "step", "rate": 2.5, "eta": 240.0}


def started(run: str, what: str, name: str) -> events.RunStarted:
    return events.RunStarted(run=run, what=what, name=name, host="llm", job=run)  # type: ignore[arg-type]


def fact(key: str, value: object, unit: str | None = None) -> events.FactObserved:
    return events.FactObserved(key=key, value=value, unit=unit, source=events.Source(host="llm", command="lscpu"))


def write_run(root: Path, run: str, lines: list[str], said: list[dict[str, object]]) -> Path:
    folder = root / ".rigbook" / "runs" / run
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "out.log").write_bytes("".join(f"{each}\n" for each in lines).encode("utf-8", "surrogateescape"))
    append_events(folder / "events.jsonl", said)
    return folder


def append_events(path: Path, said: list[dict[str, object]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in said)


def bench(name: str, kind: str, accept: float = 1.9, spec: float = 52.0) -> BenchRecord:
    plain = [Round(order=i, requests=8, output_tokens=512, seconds=12.8, tok_s=40.0 + i) for i in range(3)]
    steps = 512
    accepted = round((accept - 1) * steps)
    histogram = [steps - accepted, accepted, 0, 0]
    quick = [
        Round(
            order=i + 3,
            requests=8,
            output_tokens=512,
            seconds=9.8,
            tok_s=spec + i,
            verify_steps=steps,
            accepted_drafts=accepted,
            proposed_drafts=3 * steps,
            accept_histogram=histogram,
            per_position=[accepted, 0, 0],
        )
        for i in range(3)
    ]
    record = BenchRecord(
        name=name,
        arms=[
            Arm(profile="baseline", engine="reference", dtype="bfloat16", rounds=plain),
            Arm(
                profile="eagle3",
                engine="reference",
                dtype="bfloat16",
                speculative={"algorithm": "EAGLE3", "steps": 3},
                rounds=quick,
            ),
        ],
        dataset=Dataset(id=f"held_{kind}", kind=kind, n=8),  # type: ignore[arg-type]
        settings=Settings(max_tokens=64),
        ngram_accept_len=1.18,
        repetition_rate=0.07,
        break_even=1.52,
        lossless={"identical": True, "checked": 16, "dtype": "float32"},
    )
    record.verdict = judge(record)
    return record
