"""speculators' EAGLE-3 drafter, timed or trained in its own environment: run by `train_speed.py`, `train_gpu.py` and
`train_quality.py`, which tell it what to do as JSON on its standard input.

    {"sizes": {hidden, inner, heads, kv_heads, head_dim, vocab, draft_vocab, eps, theta}, "guesses", "decay", "device",
     "bf16", "threads", "lr", "batches": FILE, or for each batch [[prompt, response] of each row, …], "seconds",
     "busy"; with a FILE "steps", "ids" (target's id of each draft token), "newer" (EAGLE-3.1's norms)}

The model class of the library with its own loss, its attention for the device (flex attention and the fused loss on a
GPU, where it compiles its forward pass; eager ones on a processor, where those have no backward), and the step of its
`Trainer`: autocast to bf16 where asked for, gradient clipped to 1, AdamW (its default, Muon, costs more). Batches are
in memory, on the device: reading them costs it nothing. With "batches" a list it is timed on random data and prints
{"seconds_per_step", …}; with a FILE it is trained on what is in there and judged on what is held out.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from safetensors import safe_open
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig


def build(told: dict[str, Any]) -> Eagle3DraftModel:
    s = told["sizes"]
    layer = LlamaConfig(
        vocab_size=s["vocab"],
        hidden_size=s["hidden"],
        intermediate_size=s["inner"],
        num_hidden_layers=1,
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["head_dim"],
        max_position_embeddings=8192,
        rms_norm_eps=s["eps"],
        rope_theta=s["theta"],
    )
    if told["device"] == "cpu":
        layer._attn_implementation = "eager"  # its flex attention has no backward on a processor
    proposal = GreedyTokenProposalConfig(speculative_tokens=told["guesses"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=s["draft_vocab"],
        eagle_aux_hidden_state_layer_ids=[2, 15, 27],
        norm_before_fc=told.get("newer", False),
        norm_output=told.get("newer", False),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[proposal],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    model = Eagle3DraftModel(config)
    for parameter in model.parameters():
        if not parameter.isfinite().all():
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(told["device"])


def random_batch(rows: list[list[int]], sizes: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    """One packed batch, as its collate function makes it: a row has one place less than tokens."""
    lengths = [prompt + response - 1 for prompt, response in rows]
    total = sum(lengths)
    mask = torch.cat([torch.tensor([False] * (prompt - 1) + [True] * response) for prompt, response in rows])
    made = {
        "hidden_states": torch.randn(1, total, 3 * sizes["hidden"], dtype=torch.bfloat16),
        "input_ids": torch.randint(sizes["vocab"], (1, total)),
        "document_ids": torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths)).unsqueeze(0),
        "loss_mask": mask.unsqueeze(0),
        "position_ids": torch.cat([torch.arange(1, n + 1) for n in lengths]).unsqueeze(0),
        "verifier_last_hidden_states": torch.randn(1, total, sizes["hidden"], dtype=torch.bfloat16),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def main() -> None:
    told = json.load(sys.stdin)
    device, on_gpu = told["device"], told["device"] != "cpu"
    clock = time.process_time if told.get("busy") else time.perf_counter
    torch.set_num_threads(told["threads"])
    model = build(told)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=told["lr"], weight_decay=0.01)
    loss_config = resolve_loss_config("kl_div", "fused" if on_gpu else "eager")  # its fused one needs Triton

    def step(batch: dict[str, torch.Tensor]) -> None:
        if not told["bf16"]:
            batch = {name: t.float() if t.is_floating_point() else t for name, t in batch.items()}
        with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16, enabled=told["bf16"]):
            _, loss, _ = model(
                **batch, ttt_steps=told["guesses"], ttt_step_loss_decay=told["decay"], loss_config=loss_config
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    if isinstance(told["batches"], str):
        print(json.dumps(train(told, model, step, optimizer)))
        return
    batches = [random_batch(rows, told["sizes"], device) for rows in told["batches"]]
    for batch in batches[:2] * 2:
        step(batch)
    wait()
    seconds, began = [], clock()
    while clock() - began < told["seconds"] or len(seconds) < 3:
        first = clock()
        for batch in batches:
            step(batch)
        wait()
        seconds.append((clock() - first) / len(batches))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    print(json.dumps({"seconds_per_step": statistics.median(seconds), "rounds": len(seconds), "peak_gib": peak}))


def train(told: dict[str, Any], model: Any, step: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """FILE: embed, head, `NUMBER.name` of each step's batch, `held.NUMBER.name`. Its schedule: linear warm-up over a
    hundredth of the steps, then linearly to zero. Then, for each response token of each held batch: how many guesses in
    a row are the text's own tokens (its forward pass embeds the true ones, as ours does)."""
    with safe_open(told["batches"], framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)

    def batch_of(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

    with torch.no_grad():
        model.embed_tokens.weight.copy_(tensors["embed"])
        model.lm_head.weight.copy_(tensors["head"])
        model.verifier_lm_head.weight.copy_(tensors["head"])
    model.verifier_norm = torch.nn.Identity()  # the stored states are behind the verifier's last norm already
    total, warmup = told["steps"], max(1, told["steps"] // 100)
    began = time.perf_counter()
    for i in range(total):
        rate = min((i + 1) / warmup, (total - i) / max(1, total - warmup))
        for group in optimizer.param_groups:
            group["lr"] = told["lr"] * rate
        step(batch_of(f"{i}."))
    seconds = time.perf_counter() - began
    ids, accepted = torch.tensor(told["ids"]), []
    number = 1 + max(int(name.split(".")[1]) for name in tensors if name.startswith("held."))
    for i in range(number):
        batch = {n: t.float() if t.is_floating_point() else t for n, t in batch_of(f"held.{i}.").items()}
        del batch["verifier_last_hidden_states"]  # without it there is no loss to make
        with torch.no_grad():
            drafted = model(**batch, ttt_steps=told["guesses"])
        text, mask = batch["input_ids"][0], batch["loss_mask"][0]
        alive, right = torch.ones_like(mask), torch.zeros(len(mask), dtype=torch.long)
        for k, guess in enumerate(drafted):
            at = torch.arange(len(text)) + 1 + k  # the token after those embedded so far
            inside = at < len(text)
            at = at.clamp(max=len(text) - 1)
            alive = alive & inside & mask[at] & (ids[guess[0]] == text[at])
            right += alive
        accepted.append(right[mask].tolist())
    return {"seconds": seconds, "steps": total, "accepted": accepted}


if __name__ == "__main__":
    main()
