"""How fast `hidden` extracts states, disk, digests and spot checks included, beside the plain forward passes alone.

    python benchmarks/extract.py --model DIR --out DIR [--device cuda] [--rows 512] [--longest 1024] [--rounds 3]

Both load the model and pass the same batches, in turn; plain keeps nothing. Prints tokens a second of each round and
the median ratio, which is to be 0.8 at least, and writes extract.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from pipeline.eagle3.devices import DTYPES
from pipeline.eagle3.target import Target, read_config
from pipeline.stages import hidden, protocol


@torch.inference_mode()
def plain(model: Path, rows: list[dict[str, Any]], device: torch.device, dtype: str) -> float:
    """Seconds of loading and of the forward passes that the stage does for its rows."""
    began = time.monotonic()
    target = Target.load(model, DTYPES[dtype], max(len(row["input_ids"]) for row in rows), device)
    per_token = hidden.bytes_per_token(target.config.hidden_size, 3) + 5
    for chunk in hidden.plan_shards(rows, per_token):
        for batch in hidden.by_length(chunk, hidden.BATCH_TOKENS[device.type]):
            ids = torch.zeros(len(batch), max(len(row["input_ids"]) for row in batch), dtype=torch.long)
            for i, row in enumerate(batch):
                ids[i, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            target.forward(ids.to(device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - began


def stage(out: Path, model: Path, rows: Path, device: str, dtype: str) -> float:
    shutil.rmtree(out, ignore_errors=True)
    spec = {
        "stage": "hidden", "out": str(out), "inputs": {"rows": str(rows), "model": str(model)},
        "settings": {"device": device, "dtype": dtype},
    }  # fmt: skip
    made = protocol.Stage(spec)
    made.out.mkdir(parents=True)
    began = time.monotonic()
    hidden.run(made)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPES))
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    vocab, generator = read_config(args.model).vocab_size, torch.Generator().manual_seed(0)
    rows = []
    for i in range(args.rows):
        length = int(torch.randint(args.longest // 8, args.longest, (1,), generator=generator))
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        rows.append({"id": f"r{i}", "input_ids": ids, "loss_mask": [0] * 8 + [1] * (length - 8)})
    protocol.write_jsonl(args.out / "rows.jsonl", rows)
    tokens = sum(len(row["input_ids"]) for row in rows)
    rounds = []
    for number in range(args.rounds):
        ours = tokens / stage(args.out / "hidden", args.model, args.out / "rows.jsonl", args.device, args.dtype)
        alone = tokens / plain(args.model, rows, torch.device(args.device), args.dtype)
        rounds.append({"hidden": ours, "plain": alone, "ratio": ours / alone})
        print(f"round {number}: hidden {ours:,.0f} tokens/s, plain forward {alone:,.0f}, ratio {ours / alone:.2f}")
    ratio = statistics.median(one["ratio"] for one in rounds)
    report = {"device": args.device, "dtype": args.dtype, "tokens": tokens, "rounds": rounds, "ratio": ratio}
    (args.out / "extract.json").write_text(json.dumps(report, indent=1) + "\n")
    shutil.rmtree(args.out / "hidden")
    print(f"median ratio {ratio:.2f} of {tokens:,} tokens on {args.device}")


if __name__ == "__main__":
    main()
