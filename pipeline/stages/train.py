"""Train the drafter on cached hidden states.

inputs    hidden (folder of shards), vocab (vocab.safetensors), model
settings  see `TrainTable` in the project file: `rigbook config explain pipeline.train`
output    trained.safetensors (see `pipeline.eagle3.trained`)
          history.jsonl: one line a step; while it runs checkpoints/ and teacher/; after a hang stacks-RANK.txt

One of three budgets decides how long: steps, epochs (passes over the data), or minutes. Minutes become a number of
steps after the first seconds, and the learning rate falls to zero exactly at the last step: only an annealed drafter is
worth measuring. The number is in the checkpoint, so a resumed run ends at the same.

On several GPUs it is started by torchrun, one process each; rank 0 writes and reports. A step's batch is worked in
`pieces`, the same number of them by each process: their number is in the checkpoint, so that a run may go on with
another number of processes, as long as that divides it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.eagle3 import checkpoint, world
from pipeline.eagle3.batch import Batch, Gathered, Taught, gather, moved, to_batch
from pipeline.eagle3.devices import DTYPES, device_of
from pipeline.eagle3.draft import DraftConfig, config_for_target, config_from_json
from pipeline.eagle3.feed import Feed
from pipeline.eagle3.foreign import read_drafter
from pipeline.eagle3.frozen import Borrowed, Vocab, borrow, read_vocab, target_config
from pipeline.eagle3.heldout import accept_length, greedy_next, held_out, walk
from pipeline.eagle3.losses import LOSSES
from pipeline.eagle3.memory import training_need
from pipeline.eagle3.shards import Row, read_index, read_shards
from pipeline.eagle3.share import Item, Share
from pipeline.eagle3.start import capture_rms, random_start, ridge_start
from pipeline.eagle3.start_from import from_drafter
from pipeline.eagle3.teacher import teach
from pipeline.eagle3.train import (
    MEASURE_FROM,
    MEASURE_TO,
    WARMUP,
    Settings,
    Trainer,
    learning_rate,
    steps_that_fit,
)
from pipeline.eagle3.trained import Trained, trained_bytes
from pipeline.eagle3.ttt import accepted_everywhere, trained_shapes
from pipeline.stages.heartbeat import Heartbeat
from pipeline.stages.protocol import Stage, follow, log, main, write_bytes, write_jsonl
from pipeline.stages.train_log import READ_EVERY, Log

STATS_TOKENS = 1 << 18  # tokens that the captures' RMS and the ridge start are made from, rows spread over the data
EVALUATION_TOKENS = 8192  # at a time


@dataclass(frozen=True)
class Plan:
    """The settings, read."""

    settings: Settings
    batch_tokens: int
    pieces: int  # of a step's batch, over all processes; 0: one for each
    seed: int
    start: str
    train_head: bool
    steps: int | None
    epochs: float | None
    minutes: float
    held_rows: int

    @property
    def dense(self) -> bool:
        return self.settings.loss != "kl"


def read_plan(stage: Stage) -> Plan:
    s = stage.settings
    loss = str(s.get("loss", "kl"))
    if loss not in LOSSES:
        stage.refuse("train.loss", f"loss is {loss!r}; there are {', '.join(LOSSES)}")
    settings = Settings(
        ttt_steps=int(s.get("ttt_steps", 3)),
        lr=float(s.get("lr", 1e-3)),
        dtype=DTYPES[s.get("dtype", "bfloat16")],
        loss=loss,
        warmup=int(s.get("warmup", WARMUP)),
        weight_decay=float(s.get("weight_decay", 0.0)),
        clip=float(s.get("clip", 0.0)),
    )
    return Plan(
        settings,
        int(s.get("batch_tokens", 512)),
        int(s.get("pieces", 0)),
        int(s.get("seed", 0)),
        str(s.get("start", "ridge")),
        bool(s.get("train_head", False)),
        int(s.get("steps") or 0) or None,
        float(s.get("epochs") or 0) or None,
        float(s.get("minutes", 4.0)),
        int(s.get("held_rows", 0)),
    )


def run(stage: Stage) -> dict[str, Any]:
    began = time.monotonic()
    plan = read_plan(stage)
    device = world.local_device(device_of(stage, str(stage.settings.get("device", "cpu"))))
    wanted = int(stage.settings.get("processes", 1))
    if wanted != world.world_size():
        stage.refuse(
            "train.processes",
            f"processes is {wanted}, but {world.world_size()} were started: start it by "
            f"`python -m torch.distributed.run --standalone --nproc-per-node {wanted} -m pipeline.stages.train …`",
        )
    group = world.join(device)
    try:
        return train(stage, plan, device, group, began)
    finally:
        world.leave()


def train(stage: Stage, plan: Plan, device: torch.device, group: world.World, began: float) -> dict[str, Any]:
    settings = plan.settings
    stored = read_states(stage)
    vocab, borrowed = read_vocab(stage.inputs["vocab"]), borrow(stage.inputs["model"])
    config = draft_config(stage, vocab)
    embed, head = borrowed.embed.to(device), borrowed.head[vocab.target_ids]

    state = checkpoint.newest(stage.out / "checkpoints")
    pieces = plan.pieces or group.size if state is None else int(state.meta.get("pieces", 1))
    if pieces % group.size:
        stage.refuse(
            "train.world-size",
            f"a step is worked in {pieces} pieces, and {group.size} processes cannot share them evenly: "
            f"use a number of processes that divides {pieces}, or set pieces before training starts",
        )
    piece_tokens = max(1, plan.batch_tokens // pieces)
    longest = max(len(row) for row in stored)
    if longest > piece_tokens and group.leads:
        stage.warn(
            "train.long-row",
            f"the longest row has {longest} tokens: more than a step's piece (batch_tokens {plan.batch_tokens} in "
            f"{pieces} pieces: {piece_tokens}); such a row makes a larger piece, alone",
        )

    every, taught = sum(len(row) for row in stored) / group.size, 0

    def told(tokens: int) -> None:
        nonlocal taught
        taught += tokens
        if group.leads:
            stage.progress(taught, max(taught, every), "tokens", doing="teacher")

    whole_head = borrowed.head.to(device, settings.dtype)
    rows = teach(stored, whole_head, vocab, stage.out / "teacher", group, told, dense=plan.dense)
    held_at = set(held_out(len(rows), plan.held_rows, plan.seed))
    if len(held_at) >= len(rows):
        stage.refuse("train.held-rows", f"held_rows is {plan.held_rows}, and there are {len(rows)} rows in all")
    held = [(row, greedy_next(row, whole_head)) for i, row in enumerate(rows) if i in held_at]
    del whole_head
    rows = [row for i, row in enumerate(rows) if i not in held_at]

    sample = spread_out(rows)
    rms = capture_rms((row.aux.to(device) for row in sample), config.capture_size)
    if state is None:
        config, start = starting_weights(stage, plan, config, vocab, borrowed, sample, rms, embed, group)
    else:
        config, start = resumed_weights(state, config)
    check_memory(stage, plan, config, rows, piece_tokens, pieces, "head" in start, max(longest, piece_tokens), device)
    trainer = Trainer(config, start, embed, head, settings)
    if state is None:
        world.same_everywhere(group, trainer.flat.data)
        trainer.shadow.copy_(trainer.flat.detach())
    else:
        trainer.restore(state)
        if group.leads:
            say_resumed(stage, state, settings)

    def made_ready(item: Item) -> Gathered:
        chosen = [rows[i] for i in item.rows]
        return gather(chosen, with_last=plan.dense, with_spans=device.type != "cpu", pinned=device.type == "cuda")

    rms_there = rms.to(device)

    def ready(gathered: Gathered) -> Batch:
        return to_batch(gathered, rms_there, settings.dtype, trainer.head if plan.dense else None)

    share = Share(rows, settings.ttt_steps, piece_tokens, pieces, plan.seed)
    feed = Feed(share.items(trainer.steps_done, group), made_ready, ready, device)
    diary = Log(stage, group, trainer, state, began, pieces)
    diary.total = diary.total or plan.steps or (share.steps_of(plan.epochs) if plan.epochs else None)
    stacks = stage.out / f"stacks-{group.rank}.txt"
    with Heartbeat(stacks, lambda s, path: say_stalled(stage, s, path, group), lambda s: say_dead(stage, s)) as heart:
        try:
            diary.entered = time.monotonic()
            while diary.total is None or trainer.steps_done < diary.total:
                decide_steps(diary, plan, device)
                for _ in range(pieces // group.size):
                    item, batch = feed.next()
                    add(stage, trainer, batch, item)
                trainer.finish(diary.total)
                diary.note(item)
                if device.type == "cpu" or trainer.steps_done % READ_EVERY == 0 or trainer.steps_done == diary.total:
                    diary.read()
                    heart.beat()
                    if held and diary.evaluation_due():
                        if group.leads:
                            diary.held(evaluate(trainer, held, rms_there, vocab.target_ids.to(device)))
                        heart.rest()
                    if group.leads and diary.checkpoint_due():
                        diary.save()
                        heart.rest()
        finally:
            feed.close()
    return finish(stage, diary, feed, Trained(config, trainer.weights(), rms, vocab), rows, settings)


# --- before the first step -------------------------------------------------------------------------------------------


def read_states(stage: Stage) -> list[Row]:
    try:
        read_index(stage.inputs["hidden"])
    except ValueError as error:
        stage.refuse("train.states", str(error))
    stored = read_shards(stage.inputs["hidden"])
    if not stored:
        stage.refuse("train.no-data", "there is no row to train on")
    if not any(bool(row.mask.any()) for row in stored):
        stage.refuse("train.no-response", "no row has a response token: every loss mask is empty, see tokenize")
    return stored


def draft_config(stage: Stage, vocab: Vocab) -> DraftConfig:
    index = read_index(stage.inputs["hidden"])
    inputs = tuple(layer + 1 for layer in index.layers)  # the output of a layer is the input of the next
    return config_for_target(target_config(stage.inputs["model"]), inputs, len(vocab.target_ids))


def spread_out(rows: Sequence[Taught]) -> list[Taught]:
    """Every n-th row, so that there are about STATS_TOKENS tokens; all of them where there are fewer."""
    tokens = sum(len(row) for row in rows)
    return list(rows[:: max(1, math.ceil(tokens / STATS_TOKENS))])


def starting_weights(
    stage: Stage,
    plan: Plan,
    config: DraftConfig,
    vocab: Vocab,
    borrowed: Borrowed,
    sample: Sequence[Taught],
    rms: Tensor,
    embed: Tensor,
    group: world.World,
) -> tuple[DraftConfig, dict[str, Tensor]]:
    """The drafter's config and the tensors that training starts with. Rank 0's are what counts; the others only need
    the shapes."""
    if plan.start == "random" or (plan.start == "ridge" and not group.leads):
        start = random_start(config, borrowed.final_norm, plan.seed)
    elif plan.start == "ridge":
        there = rms.to(embed.device)

        def packed() -> Iterator[tuple[Batch, Tensor]]:
            for i in range(0, len(sample), 16):
                g = gather(sample[i : i + 16], with_last=True, with_spans=False)
                g = moved(g, lambda t: t.to(embed.device))
                assert g.last is not None
                yield to_batch(g, there, plan.settings.dtype), g.last

        start = ridge_start(config, packed(), embed, borrowed.final_norm, plan.seed)
    else:
        try:
            taken = from_drafter(read_drafter(Path(plan.start)), config, vocab, borrowed.head, rms)
        except ValueError as error:
            stage.refuse("train.start", f"training cannot go on from {plan.start}: {error}")
        config, start = taken.config, taken.weights
        if group.leads:
            stage.fact("training.start", {"from": plan.start, "notes": taken.notes})
            for note in taken.notes:
                log(f"{stage.name}: {plan.start}: {note}")
    if plan.train_head and "head" not in start:
        start = start | {"head": borrowed.head[vocab.target_ids].float()}
    return config, start


def resumed_weights(state: checkpoint.State, config: DraftConfig) -> tuple[DraftConfig, dict[str, Tensor]]:
    if "config" in state.meta:
        config = config_from_json(state.meta["config"])
    shapes = trained_shapes(config, head=bool(state.meta.get("own_head")))
    return config, {name: torch.zeros(shape) for name, shape in shapes.items()}


def check_memory(
    stage: Stage,
    plan: Plan,
    config: DraftConfig,
    rows: Sequence[Taught],
    piece_tokens: int,
    pieces: int,
    own_head: bool,
    largest: int,
    device: torch.device,
) -> None:
    """Before, not by running out of it at the longest batch, an hour in."""
    if device.type != "cuda":
        return
    responses = sum(int(row.mask.sum()) for row in rows) / sum(len(row) for row in rows)
    need = training_need(
        config,
        responses=responses,
        steps=plan.settings.ttt_steps,
        own_head=own_head,
        dense=plan.dense,
        width=plan.settings.dtype.itemsize,
    )
    free = torch.cuda.mem_get_info(device)[0]
    if need.of(largest) <= free:
        return
    fits = need.tokens_that_fit(free)
    stage.refuse(
        "train.memory",
        f"a piece of {largest} tokens needs about {need.of(largest) / 1e9:.1f} GB, "
        f"{need.weights / 1e9:.1f} GB of them weights and optimiser; {free / 1e9:.1f} GB are free on {device}. "
        + (
            f"A piece of {fits} tokens fits: set pieces = {pieces * math.ceil(piece_tokens / fits)}"
            if fits >= 256
            else "No batch fits: free the GPU's memory, or train on a larger one"
        ),
    )


def say_resumed(stage: Stage, state: checkpoint.State, settings: Settings) -> None:
    total = state.meta["total"]
    next_rate = learning_rate(settings, state.step, total)
    before = learning_rate(settings, max(0, state.step - 1), total)
    stage.warn(
        "train.resumed",
        f"continuing after step {state.step} of {total or 'a number not yet decided'}; learning rate {before:.3g}, "
        f"next {next_rate:.3g}; batches go on with number {state.step * int(state.meta.get('pieces', 1))}",
    )


# --- steps -----------------------------------------------------------------------------------------------------------


def add(stage: Stage, trainer: Trainer, batch: Batch, item: Item) -> None:
    try:
        trainer.add(batch, item.counts)
    except FloatingPointError as error:
        stage.refuse("train.not-finite", f"{error}; lower pipeline.train.lr (now {trainer.settings.lr:g})")


def decide_steps(diary: Log, plan: Plan, device: torch.device) -> None:
    """A budget of minutes becomes a number of steps while the learning rate still warms up."""
    if diary.total is not None or diary.trainer.steps_done not in (MEASURE_FROM, MEASURE_TO):
        return
    diary.read()
    now = time.monotonic()
    if diary.trainer.steps_done == MEASURE_FROM:
        diary.measured = now
        return
    each = (now - diary.measured) / (MEASURE_TO - MEASURE_FROM)
    fits = steps_that_fit(60.0 * plan.minutes, now - diary.began, each, plan.settings.warmup)
    diary.total = world.agreed(diary.group, fits, device)
    if diary.group.leads:
        diary.stage.fact("training.steps", diary.total)


@torch.no_grad()
def evaluate(trainer: Trainer, held: Sequence[tuple[Taught, Tensor]], rms: Tensor, target_ids: Tensor) -> float | None:
    """The accept length on rows that are set aside, each with what the target would write (see `greedy_next`)."""
    walks, at = [], 0
    while at < len(held):
        end, tokens = at + 1, len(held[at][0])
        while end < len(held) and tokens + len(held[end][0]) <= EVALUATION_TOKENS:
            tokens, end = tokens + len(held[end][0]), end + 1
        chosen, right = [row for row, _ in held[at:end]], torch.cat([wanted for _, wanted in held[at:end]])
        gathered = gather(chosen, with_last=False, with_spans=trainer.device.type != "cpu")
        batch = to_batch(moved(gathered, lambda t: t.to(trainer.device)), rms, trainer.settings.dtype)
        steps = trainer.settings.ttt_steps
        weights = {name: tensor.detach() for name, tensor in trainer.compute.items()}
        made = accepted_everywhere(
            trainer.config, weights, trainer.embed, trainer.head, target_ids, batch, right, steps, trainer.ops
        )
        walks.append(walk(made.tolist(), batch.left.tolist()))
        at = end
    return accept_length(walks)


# --- the end ---------------------------------------------------------------------------------------------------------


def finish(
    stage: Stage, diary: Log, feed: Feed, trained: Trained, rows: Sequence[Taught], settings: Settings
) -> dict[str, Any]:
    looped = time.monotonic() - diary.entered
    seconds, history = diary.seconds(), diary.history
    if diary.group.leads:
        path = stage.out / "trained.safetensors"
        weights = {name: tensor.cpu() for name, tensor in trained.weights.items()}
        write_bytes(path, trained_bytes(Trained(trained.config, weights, trained.capture_rms, trained.vocab)))
        write_jsonl(stage.out / "history.jsonl", history)
        stage.artifact("trained", path)
        stage.artifact("history", stage.out / "history.jsonl")
        for old in [*(stage.out / "checkpoints").glob("*"), *(stage.out / "teacher").glob("*")]:
            old.unlink()
    last = history[-min(50, len(history)) :]
    tokens = diary.tokens
    held = [e["held_accept_length"] for e in history if "held_accept_length" in e]
    waited = feed.waited + feed.stalled()
    return {
        "steps": diary.trainer.steps_done,
        "tokens_seen": tokens,
        "response_tokens_seen": diary.responses,
        "passes": tokens / sum(len(row) for row in rows),
        "rows_used": len(rows),
        "seconds": seconds,
        "loop_seconds": looped,  # of this process: without reading, the teacher and the start
        "tokens_per_second": tokens / seconds,
        "data_wait_share": waited / looped if looped else 0.0,
        "loss": sum(e["loss"] for e in last) / len(last),
        "hits": [sum(e["hits"][k] for e in last) / len(last) for k in range(settings.ttt_steps)],
        "train_accept_length": sum(e["accept_length"] for e in last) / len(last),
        **({"held_accept_length": held[-1]} if held else {}),
    }


def say_stalled(stage: Stage, seconds: float, stacks: Path, group: world.World) -> None:
    stage.warn(
        "train.stalled",
        f"process {group.rank} has made no step for {seconds:.0f} s; the stacks of its threads are in {stacks}"
        + (f", those of the other {group.size - 1} beside it" if group.size > 1 else ""),
    )


def say_dead(stage: Stage, seconds: float) -> None:
    stage.failed("train.hung", f"no step for {seconds:.0f} s: ended; start it again to go on from the last checkpoint")


if __name__ == "__main__":
    main(run) if world.rank() == 0 else follow(run)
