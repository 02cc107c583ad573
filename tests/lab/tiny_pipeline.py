"""The stages up to hidden states, on a tiny model's own greedy text."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.target import Target
from pipeline.stages.protocol import write_jsonl
from tests.lab.stage_run import run_stage
from tests.lab.tiny_model import make_tiny_model


def greedy(model: Path, prompts: list[str], tokens: int) -> list[dict[str, object]]:
    """Rows as the `generate` stage writes them: the target's own continuations, greedy in fp32."""
    target, chat = Target.load(model, torch.float32), Chat(model)
    rows = []
    for i, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        ids = chat.encode(chat.render(messages, add_generation_prompt=True))
        start = len(ids)
        for _ in range(tokens):
            final = target.forward(torch.tensor([ids])).final[:, -1]
            # Not the three special tokens: every response has its full length.
            ids.append(3 + int(target.logits(final)[0, 3:].argmax()))
        made = ids[start:]
        row = {"id": f"p{i}", "source": "self", "messages": messages, "response": chat.decode(made)}
        rows.append(row | {"output_ids": made, "finish_reason": "length", "completion_tokens": len(made)})
    return rows


def up_to_hidden(base: Path) -> dict[str, Path]:
    """Paths: model, vocab, hidden, generated (greedy rows), held (greedy rows over other prompts)."""
    torch.set_num_threads(1)  # products this small gain nothing from two, and wait for each other on a busy machine
    model = make_tiny_model(base / "model")
    write_jsonl(base / "generated.jsonl", greedy(model, [f"tell me about {i * i}" for i in range(12)], 24))
    write_jsonl(base / "held.jsonl", greedy(model, [f"what of {i}" for i in range(4)], 20))
    run_stage("tokenize", base / "tokenize", {"rows": base / "generated.jsonl", "model": model})
    rows = base / "tokenize/rows.jsonl"
    run_stage("vocab", base / "vocab", {"rows": rows, "model": model}, {"size": 200, "mass_rows": 4})
    vocab = base / "vocab/vocab.safetensors"
    run_stage("hidden", base / "hidden", {"rows": rows, "model": model}, {"dtype": "float32"})
    paths = {"model": model, "vocab": vocab, "hidden": base / "hidden"}
    return paths | {"generated": base / "generated.jsonl", "held": base / "held.jsonl"}


def up_to_export(base: Path) -> dict[str, Path]:
    """The same, and: checkpoint, drafter."""
    paths = up_to_hidden(base)
    inputs = {name: paths[name] for name in ("model", "vocab", "hidden")}
    settings = {"steps": 150, "batch_tokens": 160, "dtype": "float32"}
    run_stage("train", base / "train", inputs, settings)
    run_stage("export", base / "export", {"checkpoint": base / "train", "model": paths["model"]})
    return paths | {"checkpoint": base / "train", "drafter": base / "export/drafter"}
