"""What training starts from, what it sets aside, and how much memory it will want."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.eagle3.batch import Taught, gather, to_batch
from pipeline.eagle3.draft import expected_shapes, read_config
from pipeline.eagle3.feed import Feed
from pipeline.eagle3.foreign import read_drafter
from pipeline.eagle3.frozen import Vocab, borrow, read_vocab
from pipeline.eagle3.heldout import accept_length, held_out, walk
from pipeline.eagle3.memory import training_need
from pipeline.eagle3.start_from import from_drafter
from pipeline.eagle3.trained import read_trained
from pipeline.eagle3.ttt import Tape, from_engine_layout, to_engine_layout, ttt_loss
from pipeline.stages import predict
from pipeline.stages.protocol import Refused
from tests.lab.stage_run import rows as history
from tests.lab.stage_run import run_stage
from tests.lab.tiny_drafter import CONFIG
from tests.lab.tiny_pipeline import up_to_export
from tests.lab.tiny_rows import random_row, random_trained, rows

SETTINGS: dict[str, Any] = {"steps": 3, "batch_tokens": 160, "dtype": "float32", "lr": 1e-5}
STEPS = 3
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return up_to_export(tmp_path_factory.mktemp("start"))


def train(paths: dict[str, Path], out: Path, **settings: Any) -> list[dict[str, Any]]:
    run_stage("train", out, {name: paths[name] for name in ("model", "vocab", "hidden")}, SETTINGS | settings)
    return history(out / "history.jsonl")


def test_the_engines_layout_is_the_same_layer_and_norms_are_folded() -> None:
    weights, rms = random_trained(), torch.rand(CONFIG.capture_size) + 0.5
    for name, tensor in from_engine_layout(to_engine_layout(weights, rms), rms).items():
        torch.testing.assert_close(tensor, weights[name])
    # Norm weights that are not 1 become part of the products behind them.
    g = torch.Generator().manual_seed(4)
    engine = to_engine_layout(weights, rms)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        engine[f"midlayer.{name}.weight"] = torch.rand(CONFIG.hidden_size, generator=g) + 0.5
    folded = from_engine_layout(engine, rms)
    x, y = torch.randn(5, CONFIG.hidden_size, generator=g), torch.randn(5, CONFIG.hidden_size, generator=g)
    seen = torch.cat((x * engine["midlayer.input_layernorm.weight"], y * engine["midlayer.hidden_norm.weight"]), 1)
    torch.testing.assert_close(
        x @ folded["q_embed"].t() + y @ folded["q_hidden"].t(),
        seen @ engine["midlayer.self_attn.q_proj.weight"].t(),
        rtol=1e-4,
        atol=1e-4,
    )


def test_training_goes_on_from_an_exported_drafter_where_it_ended(tmp_path: Path, paths: dict[str, Path]) -> None:
    before = history(paths["checkpoint"] / "history.jsonl")
    after = train(paths, tmp_path / "on", start=str(paths["drafter"]))
    ridge = train(paths, tmp_path / "ridge")
    assert after[0]["loss"] < ridge[0]["loss"] - 0.1
    assert after[0]["loss"] == pytest.approx(before[-1]["loss"], rel=0.3)
    assert "head" not in read_trained(tmp_path / "on/trained.safetensors").weights  # its head was the target's rows
    assert train(paths, tmp_path / "random", start="random")[0]["loss"] > ridge[0]["loss"]


def renamed(directory: Path, out: Path, change: dict[str, Any]) -> Path:
    """The drafter as speculators writes it (layers.0., nested config, embeddings in the file), with changes."""
    tensors = {k.replace("midlayer.", "layers.0."): v for k, v in load_file(directory / "model.safetensors").items()}
    raw = json.loads((directory / "config.json").read_text())
    nested = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": raw["draft_vocab_size"],
        "transformer_layer_config": {k: v for k, v in raw.items() if k not in ("architectures", "captures")},
    }
    out.mkdir()
    made = tensors | {"embed_tokens.weight": torch.zeros(4, 4)} | change.get("tensors", {})
    gone = change.get("without", ())
    save_file({k: v.contiguous() for k, v in made.items() if k not in gone}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(nested | change.get("config", {})))
    return out


def test_another_trainers_layout_and_draft_vocabulary_are_taken_by_target_id(
    tmp_path: Path, paths: dict[str, Path]
) -> None:
    vocab, borrowed = read_vocab(paths["vocab"]), borrow(paths["model"])
    config = read_config(paths["drafter"])
    theirs = torch.randperm(vocab.target_size, generator=torch.Generator().manual_seed(1))[:150].sort().values
    other = Vocab(theirs, vocab.target_size)
    head = torch.randn(150, config.hidden_size, generator=torch.Generator().manual_seed(2))
    maps = {"d2t": other.d2t, "t2d": other.t2d, "lm_head.weight": head}
    folder = renamed(paths["drafter"], tmp_path / "spec", {"tensors": maps, "config": {"draft_vocab_size": 150}})
    rms = torch.rand(config.capture_size) + 0.5
    taken = from_drafter(read_drafter(folder), config, vocab, borrowed.head, rms)
    common = 0
    for row, target in enumerate(vocab.target_ids.tolist()):
        at = (theirs == target).nonzero().flatten()
        expected = head[at[0]] if len(at) else borrowed.head[target].float()
        common += len(at)
        torch.testing.assert_close(taken.weights["head"][row], expected)
    assert 0 < common < len(vocab.target_ids)
    told = " | ".join(taken.notes)
    assert f"{common} of {len(vocab.target_ids)} rows taken" in told and "not taken: embed_tokens" in told
    engine = to_engine_layout(taken.weights, rms)
    for name, tensor in load_file(paths["drafter"] / "model.safetensors").items():
        if name.startswith(("fc", "norm", "midlayer")):
            torch.testing.assert_close(engine[name], tensor.float(), rtol=1e-3, atol=1e-4)
    # End to end: its head is trained, and is what the exported drafter has.
    train(paths, tmp_path / "on", start=str(folder), lr=1e-3)
    trained = read_trained(tmp_path / "on/trained.safetensors")
    assert trained.weights["head"].shape == (len(vocab.target_ids), config.hidden_size)
    run_stage("export", tmp_path / "export", {"checkpoint": tmp_path / "on", "model": paths["model"]})
    exported = load_file(tmp_path / "export/drafter/model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(exported, trained.weights["head"].bfloat16())
    assert not torch.equal(exported, borrowed.head[vocab.target_ids].bfloat16())


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"without": ["fc.weight"]}, "it lacks fc.weight"),
    ({"without": ["layers.0.mlp.up_proj.weight"]}, "it lacks midlayer.mlp.up_proj.weight"),
    ({"tensors": {"layers.0.mlp.bias": torch.zeros(3)}}, "no engine knows: layers.0.mlp.bias"),
    ({"tensors": {"layers.1.hidden_norm.weight": torch.zeros(3)}}, "no engine knows: layers.1"),
    ({"tensors": {"fc.weight": torch.zeros(48, 96)}}, r"fc.weight is \(48, 96\), expected \(48, 144\)"),
    ({"tensors": {"fc_norm.0.weight": torch.zeros(48)}}, "of another build: fc_norm.0.weight"),
    ({"tensors": {"d2t": torch.arange(200)}}, "contradict each other"),
    ({"tensors": {"lm_head.weight": torch.zeros(7, 48)}}, "200 entries, lm_head 7 rows"),
    ({"without": ["d2t", "t2d"]}, "no d2t and t2d say which tokens"),
    ({"config": {"norm_output": True}}, "EAGLE-3.1"),
    ({"config": {"speculators_model_type": "eagle", "architectures": ["LlamaForCausalLMEagle"]}}, "not an EAGLE-3"),
]


@pytest.mark.parametrize(("change", "sentence"), WRONG)
def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, paths: dict[str, Path], change: dict[str, Any], sentence: str
) -> None:
    folder = renamed(paths["drafter"], tmp_path / "wrong", change)
    with pytest.raises(Refused, match=sentence) as refusal:
        train(paths, tmp_path / "t", start=str(folder))
    assert refusal.value.id == "train.start"


def test_a_start_that_is_no_directory_is_refused(tmp_path: Path, paths: dict[str, Path]) -> None:
    with pytest.raises(Refused, match="is no directory"):
        train(paths, tmp_path / "t", start="rigde")


def test_a_drafter_of_other_widths_keeps_them(tmp_path: Path, paths: dict[str, Path]) -> None:
    config = replace(read_config(paths["drafter"]), num_key_value_heads=3, intermediate_size=80, head_dim=24)
    g = torch.Generator().manual_seed(0)
    shapes = expected_shapes(config)
    made = {n: torch.randn(s, generator=g) / 7 for n, s in shapes.items() if n not in ("d2t", "t2d", "lm_head.weight")}
    raw = json.loads((paths["drafter"] / "config.json").read_text())
    raw |= {"num_key_value_heads": 3, "intermediate_size": 80, "head_dim": 24}
    folder = tmp_path / "wide"
    folder.mkdir()
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    train(paths, tmp_path / "on", start=str(folder))
    trained = read_trained(tmp_path / "on/trained.safetensors")
    assert (trained.config.num_key_value_heads, trained.config.head_dim) == (3, 24)
    assert "head" not in trained.weights


def test_each_budget_and_loss_is_what_it_says(tmp_path: Path, paths: dict[str, Path]) -> None:
    passes = train(paths, tmp_path / "epochs", steps=0, epochs=2.0)
    result = json.loads((tmp_path / "epochs/manifest.json").read_text())["result"]
    assert 2.0 <= result["passes"] < 2.0 + 1.5 * 160 / sum(e["tokens"] for e in passes) * 2
    for loss in ("lk-alpha", "lk-lambda"):
        curve = train(paths, tmp_path / loss, steps=60, loss=loss, lr=3e-3, start="random")
        assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]
    with pytest.raises(Refused, match="there are kl, lk-alpha, lk-lambda"):
        train(paths, tmp_path / "other", loss="lk")


def test_rows_set_aside_are_not_trained_on_and_improve(tmp_path: Path, paths: dict[str, Path]) -> None:
    curve = train(paths, tmp_path / "held", steps=100, lr=3e-3, held_rows=4)
    held = [entry["held_accept_length"] for entry in curve if "held_accept_length" in entry]
    assert len(held) == 10 and held[-1] >= held[0] > 1
    result = json.loads((tmp_path / "held/manifest.json").read_text())["result"]
    assert result["held_accept_length"] == held[-1] and result["rows_used"] == 8
    assert held_out(12, 4, 0) == held_out(12, 4, 0) != held_out(12, 4, 1)
    with pytest.raises(Refused, match="12 rows in all"):
        train(paths, tmp_path / "all", held_rows=12)


def test_the_walk_is_that_of_the_prediction() -> None:
    g = torch.Generator().manual_seed(8)
    for _ in range(50):
        m = int(torch.randint(2, 30, (1,), generator=g))
        left = list(range(m - 1, -1, -1))
        accepted = [min(int(torch.randint(0, 4, (1,), generator=g)), n) for n in left]
        taken = predict.walk(accepted[:-1], 3)
        assert walk(accepted, left) == (len(taken), sum(taken))
    # Two answers in one row: nothing is drafted across the gap.
    assert walk([2, 0, 0, 1, 0], [2, 1, 0, 1, 0]) == (2, 3)
    assert accept_length([(2, 3), (2, 1)]) == 2.0 and accept_length([]) is None


def test_what_the_target_would_write_is_its_likeliest_token_at_each_response_token(paths: dict[str, Path]) -> None:
    """The tiny pipeline's rows are the target's greedy ones (its special tokens left out), so it wrote just that."""
    from pipeline.eagle3.heldout import greedy_next
    from pipeline.eagle3.shards import read_shards

    head = borrow(paths["model"]).head.float()
    same = total = 0
    for row in read_shards(paths["hidden"]):
        wrote = row.tokens[row.mask.nonzero().flatten()[1:]]
        wanted = greedy_next(row, head)[: len(wrote)]
        same, total = same + int((wrote == wanted).sum()), total + len(wrote)
    assert same > 0.9 * total


@pytest.mark.training_report(15)
def test_an_empty_mask_is_refused(tmp_path: Path, paths: dict[str, Path]) -> None:
    from pipeline.eagle3.shards import read_shards, shard_bytes

    hidden = tmp_path / "hidden"
    hidden.mkdir()
    stored = read_shards(paths["hidden"])
    for row in stored:
        row.mask = torch.zeros_like(row.mask)
    (hidden / "shard-00000.safetensors").write_bytes(shard_bytes(stored))
    (hidden / "index.json").write_text((paths["hidden"] / "index.json").read_text())
    with pytest.raises(Refused) as refusal:
        train(paths | {"hidden": hidden}, tmp_path / "t")
    assert refusal.value.id == "train.no-response"


# --- memory


class Kept:
    """Bytes of all tensors that autograd and the tape keep, each memory counted once."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.alive: list[Tensor] = []  # so that no memory is used twice

    def pack(self, tensor: Tensor) -> Tensor:
        self.sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        self.alive.append(tensor)
        return tensor


@pytest.mark.parametrize("responses", [0.5, 1.0])
@pytest.mark.training_report(29)
def test_the_memory_told_beforehand_is_what_autograd_keeps(responses: float) -> None:
    config = replace(CONFIG, hidden_size=96, intermediate_size=256, num_attention_heads=6, head_dim=16)
    length = 400
    mask = [0] * int(length * (1 - responses)) + [1] * int(length * responses)
    mask[0] = 0
    weights = {name: tensor.requires_grad_() for name, tensor in random_trained(config).items()}
    embed, head = torch.randn(config.vocab_size, 96), torch.randn(config.draft_vocab_size, 96)

    def kept(count: int) -> int:
        data = [random_row(str(i), mask, i, config) for i in range(count)]
        gathered = gather(data, with_last=False, with_spans=True)
        batch = to_batch(gathered, torch.ones(config.capture_size), torch.float32)
        saved, tape = Kept(), Tape()
        saved.pack(batch.captures)
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda t: t):
            outcome = ttt_loss(config, weights, embed, head, batch, STEPS, tape)
        outcome.loss.backward()
        for pairs in tape.pairs.values():
            for pair in pairs:
                for tensor in pair:
                    saved.pack(tensor)
        return sum(saved.sizes.values())

    tokens = length
    measured = (kept(3) - kept(1)) / (2 * tokens)
    need = training_need(config, responses=sum(mask) / length, steps=STEPS, own_head=False, dense=False, width=4)
    aside = 2 * 4 * config.capture_size  # batches that wait: not autograd's
    joined = need.each_token - aside - measured
    assert 0 <= joined <= 0.45 * measured  # above it, for what is joined before it is multiplied, and not by much


@pytest.mark.training_report(29)
def test_memory_that_is_not_there_is_told_in_numbers(
    tmp_path: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pipeline.stages import train as stage_module
    from pipeline.stages.protocol import Stage

    free = 6 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    stage = Stage({"stage": "train", "out": str(tmp_path), "settings": {"batch_tokens": 1 << 22}})
    config, device = read_config(paths["drafter"]), torch.device("cuda", 0)
    plan = stage_module.read_plan(stage)
    data = rows()

    def check(tokens: int, pieces: int) -> None:
        stage_module.check_memory(stage, plan, config, data, tokens, pieces, False, tokens, device)

    with pytest.raises(Refused, match=r"set pieces = (\d+)") as refusal:
        check(1 << 22, 1)
    assert refusal.value.id == "train.memory"
    pieces = int(str(refusal.value).rpartition("pieces = ")[2])
    check((1 << 22) // pieces, pieces)  # and that fits
    assert pieces > 1
    free = 1 << 29
    with pytest.raises(Refused, match="No batch fits"):
        check(1 << 22, 1)


# --- the feed


def feed_of(data: list[Taught], items: list[list[int]], ahead: int | None) -> Feed:
    def gathered(item: list[int]):  # type: ignore[no-untyped-def]
        return gather([data[i] for i in item], with_last=False, with_spans=False)

    one = torch.ones(CONFIG.capture_size)
    return Feed(iter(items), gathered, lambda g: to_batch(g, one, torch.float32), torch.device("cpu"), ahead)


def test_batches_made_beside_training_are_those_made_in_turn() -> None:
    data, items = rows(), [[0, 1], [2], [3, 0], [1, 2, 3]]
    beside, in_turn = feed_of(data, items, 2), feed_of(data, items, None)
    for item in items:
        (a, left), (b, right) = beside.next(), in_turn.next()
        assert a == b == item
        assert torch.equal(left.captures, right.captures) and torch.equal(left.left, right.left)
    beside.close()
    assert beside.waited > 0 and beside.stalled() == 0.0


def test_what_goes_wrong_beside_training_is_raised_in_it_and_nothing_is_left_running() -> None:
    feed = feed_of(rows(), [[0], [99]], 2)
    feed.next()
    with pytest.raises(IndexError):
        feed.next()
    feed.close()
    full = feed_of(rows(), [[0]] * 50, 2)  # nobody takes them
    full.close()
    assert not any(thread.name == "feed" for thread in threading.enumerate())
