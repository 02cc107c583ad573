"""How fast the drafter trains, against what the machine can do and against the same loss written plainly.

    python benchmarks/train_speed.py [--rounds 5] [--speculators PYTHON] [--json FILE]

Sizes are those of a drafter for SmolLM2-135M: hidden 576, 9 heads (3 for keys), MLP 1536, draft vocabulary 8192, three
guesses. Random data, since speed does not depend on it: 512 tokens a step in rows as long as the demo's.

Printed for each kind of step: tokens a second (median of the rounds), the floating-point operations that a token takes
(counted by torch as they are executed, matrix products only), the product of the two, and its share of the rate at
which this machine multiplies matrices in the same type. Everything is measured in turn within a round, so that whatever
else the machine is doing falls on all alike.

`tokens` counts all tokens of a step, prompts too, as other trainers count. *demo rows*: 70 % of them are response
tokens, as in the demo. *all response*: every token drafts, the worst case and the one that trainers which draft on
prompts always pay.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peer import ask_speculators, sizes
from benchmarks.plain_ttt import plain_loss
from pipeline.eagle3.batch import Taught, pack
from pipeline.eagle3.draft import DraftConfig
from pipeline.eagle3.train import Settings, Trainer
from pipeline.eagle3.ttt import trained_shapes

CONFIG = DraftConfig(
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
GUESSES, CANDIDATES = 3, 64
# (prompt, response) tokens of the rows of one step: 512 in all.
DEMO_ROWS = [(52, 120), (44, 130), (58, 108)]
ALL_RESPONSE = [(2, 170), (2, 172), (2, 164)]


def make_rows(shape: list[tuple[int, int]], seed: int = 0) -> list[Taught]:
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i, (prompt, response) in enumerate(shape):
        length = prompt + response
        top = torch.softmax(3 * torch.randn(response, CONFIG.draft_vocab_size, generator=g), -1).topk(CANDIDATES, -1)
        rows.append(
            Taught(
                id=str(i),
                tokens=torch.randint(CONFIG.vocab_size, (length,), generator=g),
                mask=torch.tensor([0] * prompt + [1] * response, dtype=torch.bool),
                aux=torch.randn(length, CONFIG.capture_size, generator=g).bfloat16(),
                last=torch.zeros(length, CONFIG.hidden_size).bfloat16(),
                teacher_ids=top.indices.to(torch.int32),
                teacher_probs=top.values.half(),
            )
        )
    return rows


def start() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    made = {name: torch.randn(shape, generator=g) / shape[-1] ** 0.5 for name, shape in trained_shapes(CONFIG).items()}
    return made | {"norm": torch.ones(CONFIG.hidden_size)}


def ours(rows: list[Taught], embed: Tensor, head: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """A whole training step as the stage does it: packing, loss, gradient, optimiser."""
    trainer = Trainer(CONFIG, start(), embed, head, Settings(GUESSES, 1e-5, dtype))
    rms = torch.ones(CONFIG.capture_size)
    return lambda: trainer.step(pack(rows, rms, dtype)[0], 10**9)


def plain(rows: list[Taught], embed: Tensor, head: Tensor, dtype: torch.dtype) -> Callable[[], object]:
    """The same step written plainly: dense autograd, parameters in the compute type, torch's AdamW."""
    weights = {name: tensor.to(dtype).requires_grad_() for name, tensor in start().items()}
    optimizer = torch.optim.AdamW(weights.values(), lr=1e-5)
    embed, head, rms = embed.to(dtype), head.to(dtype), torch.ones(CONFIG.capture_size)

    def step() -> None:
        optimizer.zero_grad()
        loss, _ = plain_loss(CONFIG, weights, embed, head, rows, rms, GUESSES)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def operations(step: Callable[[], object]) -> float:
    """Floating-point operations of one step's matrix products, counted while they run."""
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


Clock = Callable[[], float]


def seconds_per_call(step: Callable[[], object], at_least: float, clock: Clock) -> float:
    calls, began = 0, clock()
    while (spent := clock() - began) < at_least:
        step()
        calls += 1
    return spent / calls


def product_rate(dtype: torch.dtype, at_least: float, clock: Clock) -> float:
    """Operations a second of the faster of two products: square, and of the shape of the head's."""
    best = 0.0
    for m, k, n in ((1024, 1024, 1024), (512, 576, 8192)):
        a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
        best = max(best, 2 * m * k * n / seconds_per_call(lambda a=a, b=b: a @ b.t(), at_least / 2, clock))
    return best


def speculators_step_seconds(python: str, busy: bool, shape: list[tuple[int, int]], dtype: torch.dtype) -> float:
    """Seconds of one step of speculators' own trainer on the same rows."""
    told = {"sizes": sizes(CONFIG), "guesses": GUESSES, "device": "cpu", "bf16": dtype == torch.bfloat16, "busy": busy}
    told |= {"threads": torch.get_num_threads(), "batches": [shape], "seconds": 2.0}
    return float(ask_speculators(python, told)["seconds_per_step"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Training speed of the drafter, in context.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement in a round")
    parser.add_argument("--speculators", metavar="PYTHON", help="a Python that has speculators, measured in turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--busy", action="store_true", help="for a machine that others use: one thread, seconds of the processor"
    )
    args = parser.parse_args()
    clock: Clock = time.perf_counter
    if args.busy:
        torch.set_num_threads(1)
        clock = time.process_time

    g = torch.Generator().manual_seed(2)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = embed[: CONFIG.draft_vocab_size].clone()
    types = {"bf16": torch.bfloat16, "fp32": torch.float32}
    steps: dict[str, tuple[str, Callable[[], object]]] = {}
    for kind, shape in (("demo rows", DEMO_ROWS), ("all response", ALL_RESPONSE)):
        rows = make_rows(shape)
        for name, dtype in types.items():
            steps[f"{kind}, {name}"] = (name, ours(rows, embed, head, dtype))
    steps["plain, bf16"] = ("bf16", plain(make_rows(DEMO_ROWS), embed, head, torch.bfloat16))
    steps["plain, fp32"] = ("fp32", plain(make_rows(DEMO_ROWS), embed, head, torch.float32))

    tokens = sum(map(sum, DEMO_ROWS))
    flops = {name: operations(step) / tokens for name, (_, step) in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in [*steps, *(f"speculators, {n}" for n in types)]}
    rates: dict[str, list[float]] = {name: [] for name in types}
    for turn in range(args.rounds):
        for name, dtype in types.items():
            rates[name].append(product_rate(dtype, args.seconds / 2, clock))
        for name, (_, step) in steps.items():
            times[name].append(seconds_per_call(step, args.seconds, clock))
        if args.speculators:
            for name, dtype in types.items():
                seconds = speculators_step_seconds(args.speculators, args.busy, DEMO_ROWS, dtype)
                times[f"speculators, {name}"].append(seconds)
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)

    figures: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__, "tokens_a_step": tokens}
    figures["product_tflops"] = {name: statistics.median(values) / 1e12 for name, values in rates.items()}
    for name, tflops in figures["product_tflops"].items():
        print(f"matrix products, {name}: {tflops:.3f} TFLOP/s")
    print(f"{'':22}{'tokens/s':>10}{'MFLOP/token':>13}{'TFLOP/s':>9}{'share':>8}{'x plain':>9}")
    for name, (dtype_name, _) in steps.items():
        speed = tokens / statistics.median(times[name])
        # The share is taken round by round: both were measured within seconds of each other.
        shares = [tokens / t * flops[name] / r for t, r in zip(times[name], rates[dtype_name], strict=True)]
        against = statistics.median(p / t for p, t in zip(times[f"plain, {dtype_name}"], times[name], strict=True))
        figures[name] = {
            "tokens_per_second": speed,
            "flop_per_token": flops[name],
            "share_of_product_rate": statistics.median(shares),
            "times_plain": against,
        }
        done = speed * flops[name] / 1e12
        print(
            f"{name:22}{speed:10,.0f}{flops[name] / 1e6:13.1f}{done:9.3f}{statistics.median(shares):8.0%}{against:9.1f}"
        )
    if args.speculators:
        for kind in types:
            theirs = times[f"speculators, {kind}"]
            figures[f"speculators, {kind}"] = {"tokens_per_second": tokens / statistics.median(theirs)}
            print(f"{f'speculators, {kind}':22}{tokens / statistics.median(theirs):10,.0f}")
            for name in steps:
                ratio = statistics.median(a / b for a, b in zip(theirs, times[name], strict=True))
                print(f"{name} is {ratio:.1f} times speculators in {kind}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
