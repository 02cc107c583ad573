"""What a drafter has learnt after the same tokens, from us and from speculators: real text and states, on a CPU.

    python benchmarks/train_quality.py --model DIR --work DIR --speculators PYTHON [--passes 2] [--fp32]

DIR is SmolLM2-135M-Instruct as `rigbook demo` unpacks it. The model answers the shipped prompts (several samples of
each, kept in --work), its states are extracted, and both train on the same batches in the same order: draft vocabulary
8,192, three guesses, 512 tokens a step, AdamW at 1e-3, falling to zero at the last step. speculators twice: of our
architecture (EAGLE-3), and with the norms that it adds by default (EAGLE-3.1: norm_before_fc, norm_output). Ours twice:
from the ridge start, and from random weights as theirs. Head and embeddings are the target's, frozen, for all.

Accept length: greedy, on held-out prompts by other people, each drafter by its own code, walked along the target's
greedy text. Speed: response tokens a second of the training loop alone, everything in turn on the same machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.peer import ask_speculators, sizes
from pipeline.eagle3.batch import Taught, gather, to_batch
from pipeline.eagle3.chat import Chat
from pipeline.eagle3.decode import Request, decode
from pipeline.eagle3.frozen import borrow, end_tokens, read_vocab
from pipeline.eagle3.heldout import accept_length, walk
from pipeline.eagle3.shards import Row, read_shards
from pipeline.eagle3.share import Share
from pipeline.eagle3.target import Target
from pipeline.eagle3.trained import read_trained
from pipeline.eagle3.ttt import accepted_everywhere
from pipeline.eagle3.world import World
from pipeline.stages import hidden, train, vocab
from pipeline.stages.protocol import execute, read_json, write_jsonl
from pipeline.stages.shipped_prompts import HELD_OUT, SEEDS

GUESSES, BATCH, LR = 3, 512, 1e-3


def answers(model: Path, prompts: list[str], path: Path, samples: int, tokens: int) -> None:
    """Tokenised rows: greedy for one sample a prompt, else at temperature 0.7."""
    if path.exists():
        return
    target, chat, ends = Target.load(model, torch.bfloat16, 512), Chat(model), frozenset(end_tokens(model))
    requests: dict[int, str] = {}
    asked = []
    for sample in range(samples):
        for i, prompt in enumerate(prompts):
            messages = [{"role": "user", "content": prompt}]
            ids = chat.encode(chat.render(messages, add_generation_prompt=True))
            warm = 0.0 if samples == 1 else 0.7
            asked.append(Request(ids, tokens, ends, temperature=warm, seed=1000 * sample + i))
            requests[id(asked[-1])] = f"p{i}-{sample}"
    rows = []
    for done in decode(target, asked, rows=64):
        ids, mask = done.prompt + done.output, [0] * len(done.prompt) + [1] * len(done.output)
        rows.append({"id": requests[id(done)], "source": "self", "input_ids": ids, "loss_mask": mask})
        print(f"{path.name}: {len(rows)} of {len(asked)}", file=sys.stderr, end="\r")
    write_jsonl(path, sorted(rows, key=lambda row: str(row["id"])))


def stage(module: Any, name: str, work: Path, inputs: dict[str, Path], settings: dict[str, Any]) -> Path:
    out = work / name
    spec = {"stage": name.partition("-")[0], "out": str(out), "inputs": {k: str(v) for k, v in inputs.items()}}
    if execute(spec | {"settings": settings}, module.run):
        raise SystemExit(f"{name} failed")
    return out


def untaught(row: Row) -> Taught:
    m = int(row.mask.sum())
    nothing = torch.empty(m, 0)
    return Taught(row.id, row.tokens, row.mask, row.aux, row.last, nothing.to(torch.int32), nothing.half())


def held_accept_length(path: Path, held: list[Taught], embed: Tensor, head: Tensor) -> float | None:
    """Of our trained file, in fp32."""
    trained = read_trained(path)
    walks = []
    for row in held:
        batch = to_batch(gather([row], with_last=False, with_spans=False), trained.capture_rms, torch.float32)
        ids = trained.vocab.target_ids
        right = row.tokens[(batch.response + 1).clamp(max=len(row) - 1)]  # the text is the target's greedy one
        made = accepted_everywhere(trained.config, trained.weights, embed, head, ids, batch, right, GUESSES)
        walks.append(walk(made.tolist(), batch.left.tolist()))
    return accept_length(walks)


def as_theirs(rows: list[Row]) -> dict[str, Tensor]:
    """One packed batch as speculators' collate function makes it: place t holds token t+1, captures of t, the final
    state of t+1; a row has one place less than tokens."""
    lengths = torch.tensor([len(row) - 1 for row in rows])
    made = {
        "hidden_states": torch.cat([row.aux[:-1] for row in rows]),
        "input_ids": torch.cat([row.tokens[1:] for row in rows]),
        "document_ids": torch.repeat_interleave(torch.arange(len(rows)), lengths),
        "loss_mask": torch.cat([row.mask[1:] for row in rows]),
        "position_ids": torch.cat([torch.arange(1, len(row)) for row in rows]),
        "verifier_last_hidden_states": torch.cat([row.last[1:] for row in rows]),
    }
    return {name: tensor.unsqueeze(0).contiguous() for name, tensor in made.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Accept length for equal tokens seen, and speed, on real text.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--speculators", metavar="PYTHON")
    parser.add_argument("--passes", type=float, default=2.0)
    parser.add_argument("--samples", type=int, default=6, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer")
    parser.add_argument("--fp32", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    model, dtype = args.model, "float32" if args.fp32 else "bfloat16"
    texts, held_texts = args.work / "rows.jsonl", args.work / "held.jsonl"
    answers(model, list(SEEDS), texts, args.samples, args.tokens)
    answers(model, list(HELD_OUT), held_texts, 1, 64)
    chosen = stage(vocab, "vocab", args.work, {"rows": texts, "model": model}, {"size": 8192}) / "vocab.safetensors"
    states = stage(hidden, "hidden", args.work, {"rows": texts, "model": model}, {})
    held_states = stage(hidden, "hidden-held", args.work, {"rows": held_texts, "model": model}, {})
    borrowed, ids = borrow(model), read_vocab(chosen).target_ids
    embed, head = borrowed.embed.float(), borrowed.head[ids].float()
    held = [untaught(row) for row in read_shards(held_states) if int(row.mask.sum()) > 1]
    rows = read_shards(states)
    steps = Share([untaught(r) for r in rows], GUESSES, BATCH, 1, 0).steps_of(args.passes)
    share = Share([untaught(r) for r in rows], GUESSES, BATCH, 1, 0).items(0, World(0, 1))
    items = [next(share) for _ in range(steps)]
    responses = sum(item.responses for item in items)
    print(f"{len(rows)} rows, {steps} steps, {responses:,} response tokens seen; {len(held)} held-out answers, {dtype}")

    figures: dict[str, Any] = {"steps": steps, "responses_seen": responses, "dtype": dtype}
    figures["threads"] = torch.get_num_threads()
    for start in ("ridge", "random"):
        settings = {"steps": steps, "batch_tokens": BATCH, "lr": LR, "dtype": dtype, "start": start}
        inputs = {"hidden": states, "vocab": chosen, "model": model}
        out = stage(train, f"train-{start}-{dtype}-{steps}", args.work, inputs, settings)
        manifest = read_json(out / "manifest.json")
        assert manifest is not None
        speed = responses / manifest["result"]["loop_seconds"]
        length = held_accept_length(out / "trained.safetensors", held, embed, head)
        figures[f"ours, {start} start"] = {"accept_length": length, "response_tokens_per_second": speed}
    if args.speculators:
        batches = {"embed": embed, "head": head}
        for i, item in enumerate(items):
            batches |= {f"{i}.{name}": t for name, t in as_theirs([rows[n] for n in item.rows]).items()}
        for i, row in enumerate(held):
            batches |= {f"held.{i}.{name}": t for name, t in as_theirs([row]).items()}
        save_file(batches, args.work / "batches.safetensors")
        config = read_trained(args.work / f"train-ridge-{dtype}-{steps}/trained.safetensors").config
        for newer in (False, True):
            told = {"sizes": sizes(config), "guesses": GUESSES, "device": "cpu", "bf16": not args.fp32, "lr": LR}
            told |= {"threads": torch.get_num_threads(), "batches": str(args.work / "batches.safetensors")}
            made = ask_speculators(args.speculators, told | {"steps": steps, "newer": newer, "ids": ids.tolist()})
            walks = []
            for row, accepted in zip(held, made["accepted"], strict=True):
                batch = gather([row], with_last=False, with_spans=False)
                walks.append(walk(accepted, batch.left.tolist()))
            name = f"speculators, {'EAGLE-3.1' if newer else 'EAGLE-3'}"
            figures[name] = {"accept_length": accept_length(walks)}
            figures[name]["response_tokens_per_second"] = responses / made["seconds"]
    ours = figures["ours, ridge start"]["response_tokens_per_second"]
    print(f"{'':26}{'accept length':>14}{'response tokens/s':>19}{'ours is':>9}")
    for name, made in figures.items():
        if isinstance(made, dict):
            length, speed = made["accept_length"], made["response_tokens_per_second"]
            print(f"{name:26}{length:14.3f}{speed:19,.0f}{ours / speed:8.1f}x")
    figures["when"] = time.strftime("%Y-%m-%d")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
