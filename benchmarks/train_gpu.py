"""How fast the drafter trains on one GPU, beside speculators on the same shapes, against what the GPU can do.

    python benchmarks/train_gpu.py [--size smollm2] [--size wide] [--speculators PYTHON] [--rounds 3] [--json FILE]
    python benchmarks/train_gpu.py --device cpu --tiny [--speculators PYTHON]        # does it run at all?

smollm2   hidden 576, 9 heads (3 for keys), MLP 1536, vocabulary 49,152, draft vocabulary 8,192
wide      hidden 4,096, 32 heads (8 for keys), MLP 14,336, vocabulary 128,256, draft vocabulary 32,000

Random states and tokens: speed does not depend on them. Rows are like real ones, some 70 prompt and 200 response
tokens, packed into pieces of --tokens (32,768; wide 16,384). Ours is the stage's own loop, from shards on disk through
the feed to the optimiser; speculators' batches lie ready on the GPU. Both in turn within a round, each in a process of
its own.

What is printed for ours: response tokens a second (loss-masked, what both count); the matrix operations of a step at
the rate of the best product measured here, and the bytes that a step must move (weights, optimiser, states) at the
measured rate of a copy; the larger of the two is the floor, and the share of it reached. And how long the step waited
for data.

On a machine without a network speculators travels as wheels beside torch: speculators==0.9.0, hs-connectors==0.9.0,
transformers>=5.0,<5.20, loguru, pydantic, pydantic-settings, python-dotenv, openai, httpx, huggingface-hub, datasets
(imported, not used), safetensors, tokenizers; `pip install --no-deps --target DIR`, then PYTHONPATH=DIR. It asks for
torchvision and torchaudio and imports neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.peer import ask_speculators, sizes
from pipeline.eagle3.batch import Batch, Gathered, Taught, gather, to_batch
from pipeline.eagle3.draft import DraftConfig
from pipeline.eagle3.feed import Feed
from pipeline.eagle3.memory import training_need
from pipeline.eagle3.shards import Row, read_shards, shard_bytes
from pipeline.eagle3.share import Item, Share
from pipeline.eagle3.start import random_start
from pipeline.eagle3.train import Settings, Trainer
from pipeline.eagle3.ttt import swiglu
from pipeline.eagle3.world import World
from pipeline.stages.train_log import READ_EVERY

SMOLLM2 = DraftConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49152,
    draft_vocab_size=8192,
    max_position_embeddings=8192,
    target_layers=30,
    aux_layers=(2, 15, 27),
    rope_theta=100000.0,
)
WIDE = replace(
    SMOLLM2,
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    draft_vocab_size=32000,
)
TINY = replace(SMOLLM2, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
               head_dim=16, vocab_size=512, draft_vocab_size=128)  # fmt: skip
SIZES = {"smollm2": (SMOLLM2, 32768), "wide": (WIDE, 16384), "tiny": (TINY, 1024)}
GUESSES, CANDIDATES, BATCHES = 3, 64, 6


def row_lengths(tokens: int) -> list[list[int]]:
    """[prompt, response] of the rows of one batch of `tokens`."""
    g = torch.Generator().manual_seed(1)
    rows, size = [], 0
    while True:
        prompt = int(torch.randint(40, 100, (1,), generator=g))
        response = int(torch.randint(100, 300, (1,), generator=g))
        if size + prompt + response > tokens:
            return rows
        rows.append([prompt, response])
        size += prompt + response


def write_states(config: DraftConfig, lengths: list[list[int]], folder: Path) -> None:
    """BATCHES shards of random rows; their states are the same values, in files of their own."""
    g = torch.Generator().manual_seed(0)
    longest = max(map(sum, lengths))
    aux = torch.randn(longest, config.capture_size, generator=g).bfloat16()
    for shard in range(BATCHES):
        rows = []
        for i, (prompt, response) in enumerate(lengths):
            n = prompt + response
            tokens = torch.randint(config.vocab_size, (n,), generator=g)
            mask = torch.tensor([False] * prompt + [True] * response)
            rows.append(Row(f"{shard}-{i}", tokens, mask, aux[:n], aux[:n, : config.hidden_size]))
        (folder / f"shard-{shard:05d}.safetensors").write_bytes(shard_bytes(rows))


def taught(row: Row, config: DraftConfig, seed: int) -> Taught:
    """With candidates at random places, distinct within a position."""
    g = torch.Generator().manual_seed(seed)
    m, k = int(row.mask.sum()), min(CANDIDATES, config.draft_vocab_size)
    ids = (torch.randint(config.draft_vocab_size, (m, 1), generator=g) + torch.arange(k) * 7) % config.draft_vocab_size
    probs = torch.softmax(torch.randn(m, k, generator=g) * 2, -1)
    whole = torch.full((m,), 20.0)
    return Taught(row.id, row.tokens, row.mask, row.aux, row.last, ids.to(torch.int32), probs.half(), whole)


def step_flops(config: DraftConfig, tokens: float, responses: float) -> float:
    """Matrix products of a step, attention's left out: forward, and backward to weights and inputs where those are
    wanted (captures and embeddings are data, the head is frozen)."""
    c = config
    q, kv = c.num_attention_heads * c.head_dim, 2 * c.num_key_value_heads * c.head_dim
    h, inner = c.hidden_size, c.intermediate_size
    slots = 4 * c.capture_size * h + 4 * h * kv + 6 * h * kv
    layer = 6 * (h * q + q * h + 3 * h * inner) + 4 * h * c.draft_vocab_size
    return tokens * slots + responses * (4 * h * q + GUESSES * layer + (GUESSES - 1) * 6 * h * kv)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ours(told: dict[str, Any]) -> dict[str, Any]:
    """One measurement of the stage's loop, in a process of its own."""
    config, tokens = SIZES[told["size"]]
    tokens, device, loss = told["tokens"] or tokens, torch.device(told["device"]), told["loss"]
    torch.set_num_threads(told["threads"])
    rows = [taught(row, config, i) for i, row in enumerate(read_shards(Path(told["states"])))]
    g = torch.Generator().manual_seed(2)
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=g).to(device)
    head = embed[: config.draft_vocab_size].clone()
    settings = Settings(GUESSES, 1e-5, torch.bfloat16 if told["bf16"] else torch.float32, loss=loss)
    trainer = Trainer(config, random_start(config, torch.ones(config.hidden_size)), embed, head, settings)
    rms, dense = torch.ones(config.capture_size, device=device), loss != "kl"

    def gathered(item: Item) -> Gathered:
        on_gpu = device.type == "cuda"
        return gather([rows[i] for i in item.rows], with_last=dense, with_spans=on_gpu, pinned=on_gpu)

    def ready(g: Gathered) -> Batch:
        return to_batch(g, rms, settings.dtype, trainer.head if dense else None)

    feed = Feed(Share(rows, GUESSES, tokens, 1, 0).items(0, World(0, 1)), gathered, ready, device)
    figures: list[torch.Tensor] = []

    def step() -> Item:
        item, batch = feed.next()
        trainer.add(batch, item.counts)
        trainer.finish(10**9)
        figures.append(trainer.figures.clone())
        if len(figures) >= READ_EVERY or device.type == "cpu":
            torch.stack(figures).tolist()
            figures.clear()
        return item

    for _ in range(5):
        step()
    wait(device)
    feed.waited, stalled = 0.0, feed.stalled()
    began, steps, responses, all_tokens = time.perf_counter(), 0, 0, 0
    while time.perf_counter() - began < told["seconds"] or steps < 3:
        item = step()
        steps, responses, all_tokens = steps + 1, responses + item.responses, all_tokens + item.tokens
    wait(device)
    seconds = time.perf_counter() - began
    feed.close()
    parameters = trainer.flat.numel()
    per_step = 30 * parameters + (responses * 6 * CANDIDATES + all_tokens * 4 * config.capture_size) / steps
    need = training_need(
        config, responses=responses / all_tokens, steps=GUESSES, own_head=False, dense=dense,
        width=settings.dtype.itemsize,
    )  # fmt: skip
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None
    from pipeline.eagle3.attention import use_flash

    c = config
    return {
        "seconds_per_step": seconds / steps,
        "steps": steps,
        "responses_per_step": responses / steps,
        "tokens_per_step": all_tokens / steps,
        "flop_per_step": step_flops(config, all_tokens / steps, responses / steps),
        "bytes_per_step": per_step,
        "data_wait_share": (feed.waited + feed.stalled() - stalled) / seconds,
        "peak_gib": peak,
        "predicted_gib": need.of(tokens) / 2**30,
        "flash": use_flash(device, settings.dtype, c.num_attention_heads, c.num_key_value_heads, c.head_dim),
        "fused": "eager" if trainer.ops.swiglu is swiglu else "compiled",
    }


def machine(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of a large matrix product, bytes/s of a copy (read and written both counted)."""
    n, size = (8192, 1 << 30) if device.type == "cuda" else (1024, 1 << 26)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    source, target = (torch.empty(size // 4, device=device) for _ in range(2))
    rates = []
    for work, amount in ((lambda: a @ b, 2.0 * n**3), (lambda: target.copy_(source), 2.0 * size)):
        for _ in range(3):
            work()
        wait(device)
        began, count = time.perf_counter(), 10
        for _ in range(count):
            work()
        wait(device)
        rates.append(amount * count / (time.perf_counter() - began))
    return {"flop_per_second": rates[0], "bytes_per_second": rates[1]}


def in_a_process(told: dict[str, Any]) -> dict[str, Any]:
    made = subprocess.run(
        [sys.executable, __file__, "--ours"], input=json.dumps(told), capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise SystemExit(f"ours did not run:\n{made.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(made.stdout.strip().splitlines()[-1])
    return answer


def report(
    size: str, runs: list[dict[str, Any]], theirs: list[dict[str, Any]], rates: dict[str, float]
) -> dict[str, Any]:
    one = runs[0]
    seconds = statistics.median(r["seconds_per_step"] for r in runs)
    products = one["flop_per_step"] / rates["flop_per_second"]
    memory = one["bytes_per_step"] / rates["bytes_per_second"]
    share = max(products, memory) / seconds
    speed = one["responses_per_step"] / seconds
    print(f"{size}: {speed:,.0f} response tokens/s, {one['tokens_per_step'] / seconds:,.0f} tokens/s in all")
    print(f"  a step of {one['tokens_per_step']:,.0f} tokens takes {seconds * 1e3:.1f} ms")
    print(f"  floors: {products * 1e3:.2f} ms of products ({one['flop_per_step'] / 1e12:.2f} TFLOP)")
    print(f"          {memory * 1e3:.2f} ms of memory ({one['bytes_per_step'] / 1e9:.2f} GB); reached {share:.0%}")
    print(f"  waited for data {max(r['data_wait_share'] for r in runs):.2%} of the time")
    print(f"  flash attention {one['flash']}, elementwise {one['fused']}")
    print(f"  memory {one['peak_gib']} GiB, {one['predicted_gib']:.1f} predicted")
    figures: dict[str, Any] = {"response_tokens_per_second": speed, "share_of_floor": share, "runs": runs}
    if theirs:
        ratios = [t["seconds_per_step"] / r["seconds_per_step"] for t, r in zip(theirs, runs, strict=True)]
        peer = one["responses_per_step"] / statistics.median(t["seconds_per_step"] for t in theirs)
        print(f"  speculators: {peer:,.0f} response tokens/s, memory {theirs[0]['peak_gib']} GiB")
        print(f"  ours is {statistics.median(ratios):.2f} times as fast ({', '.join(f'{r:.2f}' for r in ratios)})")
        figures |= {"speculators": theirs, "times_speculators": statistics.median(ratios)}
    return figures


def main() -> None:
    if "--ours" in sys.argv:
        print(json.dumps(ours(json.load(sys.stdin))))
        return
    parser = argparse.ArgumentParser(description="Training speed of the drafter on a GPU.")
    parser.add_argument("--size", action="append", choices=["smollm2", "wide"])
    parser.add_argument("--tiny", action="store_true", help="a size that a processor trains in a moment")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=0, help="of a step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--loss", default="kl")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--speculators", metavar="PYTHON", help="a Python that has speculators, measured in turn")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), torch.float32 if args.fp32 else torch.bfloat16
    rates = machine(device, dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    print(f"{name}, torch {torch.__version__}: {rates['flop_per_second'] / 1e12:.2f} TFLOP/s, "
          f"{rates['bytes_per_second'] / 1e12:.2f} TB/s")  # fmt: skip
    figures: dict[str, Any] = {"device": name, "torch": torch.__version__, **rates}
    for size in ["tiny"] if args.tiny else args.size or ["smollm2", "wide"]:
        config, tokens = SIZES[size]
        lengths = row_lengths(args.tokens or tokens)
        told = {"size": size, "tokens": args.tokens, "device": args.device, "bf16": not args.fp32, "loss": args.loss,
                "seconds": args.seconds, "threads": args.threads}  # fmt: skip
        peer = {"sizes": sizes(config), "guesses": GUESSES, "device": args.device, "bf16": not args.fp32,
                "threads": args.threads, "batches": [lengths] * 2, "seconds": args.seconds}  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            write_states(config, lengths, Path(folder))
            runs, theirs = [], []
            for turn in range(args.rounds):
                runs.append(in_a_process(told | {"states": folder}))
                if args.speculators:
                    theirs.append(ask_speculators(args.speculators, peer))
                print(f"{size}: round {turn + 1} of {args.rounds}", file=sys.stderr)
        figures[size] = report(size, runs, theirs, rates)
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
