"""Training-time test: what training computes is what decoding does, and its gradient is autograd's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks.plain_ttt import plain_loss
from pipeline.eagle3.batch import Taught, pack, span_left
from pipeline.eagle3.draft import DraftCache, Drafter
from pipeline.eagle3.losses import Top, head_loss
from pipeline.eagle3.shards import draw_batches, read_shard, shard_bytes
from pipeline.eagle3.start import ridge_start, unit_rms
from pipeline.eagle3.train import Settings, Trainer
from pipeline.eagle3.ttt import Tape, to_engine_layout, ttt_loss
from tests.lab.tiny_drafter import CONFIG, random_weights
from tests.lab.tiny_rows import random_row, random_trained, rows

STEPS = 3
torch.set_num_threads(1)  # products this small gain nothing from two


def setting() -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = torch.randn(CONFIG.draft_vocab_size, CONFIG.hidden_size, generator=g) * 0.3
    rms = torch.rand(CONFIG.capture_size, generator=g) + 0.5
    return random_trained(), embed, head, rms


def ttt_gradients(data: list[Taught]) -> tuple[dict[str, torch.Tensor], list[float]]:
    weights, embed, head, rms = setting()
    leaves = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    batch, _ = pack(data, rms, torch.float32)
    tape = Tape()
    outcome = ttt_loss(CONFIG, leaves, embed, head, batch, STEPS, tape)
    outcome.loss.backward()
    gradients: dict[str, torch.Tensor] = {}
    tape.flush(gradients.__setitem__)
    assert leaves["norm"].grad is not None
    return gradients | {"norm": leaves["norm"].grad}, outcome.losses


def test_gradients_equal_those_of_the_plain_dense_implementation() -> None:
    weights, embed, head, rms = setting()
    leaves = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    loss, losses = plain_loss(CONFIG, leaves, embed, head, rows(), rms, STEPS)
    loss.backward()
    gradients, ours = ttt_gradients(rows())
    assert ours == pytest.approx(losses, rel=1e-4)
    assert gradients.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(gradients[name], leaf.grad, rtol=2e-3, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.training_report(35)
def test_losses_are_those_of_decoding_slot_by_slot_with_a_cache() -> None:
    weights, embed, head, rms = setting()
    engine = to_engine_layout(weights, rms) | {"lm_head.weight": head}
    maps = random_weights()
    drafter = Drafter(CONFIG, engine | {"d2t": maps["d2t"], "t2d": maps["t2d"]}, embed)
    sums, counts = [0.0] * STEPS, [0] * STEPS
    for row in rows():
        slots = len(row) - 1
        cache = drafter.new_cache(1, slots + STEPS)
        positions = torch.arange(slots).unsqueeze(0)
        fused = drafter.fuse(row.aux.float()).unsqueeze(0)
        outs = drafter(row.tokens[1:].unsqueeze(0), fused[:, :slots], positions, cache)
        where, left = row.mask.nonzero().flatten().tolist(), span_left(row.mask).tolist()
        for j, (place, more) in enumerate(zip(where, left, strict=True)):
            slot, out, own = place - 1, None, DraftCache(cache.keys.clone(), cache.values.clone())
            for step in range(min(STEPS, more)):
                if out is None:
                    out = outs[:, slot : slot + 1]
                else:
                    after = row.tokens[slot + 1 + step].view(1, 1)
                    out = drafter(after, out, torch.tensor([[slot + step]]), own)
                log_q = torch.log_softmax(drafter.logits(out)[0, 0], -1)
                teacher = row.teacher_probs[j + step].float()
                sums[step] -= float((teacher * log_q[row.teacher_ids[j + step].long()]).sum())
                counts[step] += 1
    _, losses = ttt_gradients(rows())
    assert losses == pytest.approx([s / n for s, n in zip(sums, counts, strict=True)], rel=1e-4)


def test_head_and_loss_fused_equal_autograd_beyond_one_chunk() -> None:
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(300, 16, generator=g, requires_grad=True)
    head = torch.randn(40, 16, generator=g)
    probs, ids = torch.softmax(torch.randn(300, 40, generator=g), -1).topk(6, -1)
    weight = torch.rand(300, generator=g)
    loss, hits = head_loss(hidden, head, Top(ids, probs), weight)
    (gradient,) = torch.autograd.grad(loss, hidden)
    log_q = torch.log_softmax(hidden @ head.t(), -1)
    expected = -(weight.unsqueeze(1) * probs * log_q.gather(1, ids)).sum()
    (wanted,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(hits.bool(), F.linear(hidden, head).argmax(-1) == ids[:, 0])


def test_a_row_does_not_feel_its_neighbours_in_the_batch() -> None:
    _, together = ttt_gradients(rows()[:1] + rows()[1:2])
    alone = [ttt_gradients([row])[1] for row in rows()[:2]]
    counts = [[sum(1 for n in span_left(row.mask).tolist() if n > k) for row in rows()[:2]] for k in range(STEPS)]
    for k in range(STEPS):
        mean = sum(alone[i][k] * counts[k][i] for i in range(2)) / sum(counts[k])
        assert together[k] == pytest.approx(mean, rel=1e-4)


def test_training_lowers_the_loss_and_bf16_follows_fp32() -> None:
    weights, embed, head, rms = setting()
    curves = {}
    for dtype in (torch.float32, torch.bfloat16):
        trainer = Trainer(CONFIG, weights, embed, head, Settings(lr=3e-3, dtype=dtype))
        batch, _ = pack(rows(), rms, dtype)
        curves[dtype] = [float(trainer.step(batch, 60).loss.detach()) for _ in range(60)]
    assert curves[torch.float32][-1] < 0.8 * curves[torch.float32][0]
    assert curves[torch.bfloat16][-1] == pytest.approx(curves[torch.float32][-1], rel=0.05)


def test_shards_give_back_what_was_put_in(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.safetensors").write_bytes(shard_bytes(rows()))
    for put, got in zip(rows(), read_shard(tmp_path / "shard-00000.safetensors"), strict=True):
        assert got.id == put.id
        for name in ("tokens", "mask", "aux", "last"):
            assert torch.equal(getattr(got, name), getattr(put, name)), name


def test_batches_hold_every_row_once_a_pass_in_a_new_order_and_repeat_for_a_seed() -> None:
    lengths = [5, 9, 3, 7, 8, 2, 6]
    stream = draw_batches(lengths, 16, seed=1)
    drawn: list[list[int]] = [next(stream) for _ in range(30)]
    assert all(sum(lengths[i] for i in batch) <= 16 for batch in drawn)
    flat = [i for batch in drawn for i in batch]
    passes = [flat[i : i + 7] for i in range(0, 28, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert passes[0] != passes[1]
    again = draw_batches(lengths, 16, seed=1)
    assert [next(again) for _ in range(30)] == drawn


def test_the_start_predicts_before_any_training() -> None:
    """On data where the next state is a linear function of what a slot sees, the regression finds it."""
    _, embed, _, rms = setting()
    g = torch.Generator().manual_seed(21)
    from_captures = torch.randn(CONFIG.hidden_size, CONFIG.capture_size, generator=g) / CONFIG.capture_size**0.5
    from_embed = torch.randn(CONFIG.hidden_size, CONFIG.hidden_size, generator=g) / CONFIG.hidden_size**0.5
    data = [random_row(f"s{i}", [0] * 3 + [1] * 40, 100 + i) for i in range(40)]
    for row in data:
        slots = row.mask.nonzero().flatten() - 1
        seen = unit_rms(F.embedding(row.tokens[slots + 1], embed), CONFIG.rms_norm_eps)
        row.last = torch.zeros(len(row), CONFIG.hidden_size)
        row.last[row.mask] = (row.aux[slots].float() / rms) @ from_captures.t() + seen @ from_embed.t()
    one = torch.ones(CONFIG.hidden_size)
    start = ridge_start(CONFIG, [pack(data, rms, torch.float32)], embed, one)
    # Each row is judged on its own best guess: the head's rows are the true states of this row.
    batch, last = pack(data[:1], rms, torch.float32)
    head = unit_rms(last, 1e-5)[: CONFIG.draft_vocab_size]
    ids = torch.arange(40).clamp(max=CONFIG.draft_vocab_size - 1).unsqueeze(1)
    batch.teacher = Top(ids, torch.ones(40, 1))
    batch.left = torch.where(torch.arange(40) < CONFIG.draft_vocab_size, 1, 0)
    weights = {name: tensor.requires_grad_() for name, tensor in start.items()}
    assert ttt_loss(CONFIG, weights, embed, head, batch, 1, Tape()).hits[0] > 0.9
    untrained = {name: tensor.requires_grad_() for name, tensor in random_trained().items()}
    assert ttt_loss(CONFIG, untrained, embed, head, batch, 1, Tape()).hits[0] < 0.5


def test_a_loss_that_is_not_finite_stops_training_before_it_spoils_the_weights() -> None:
    weights, embed, head, rms = setting()
    trainer = Trainer(CONFIG, weights, embed, head, Settings(dtype=torch.float32))
    batch, _ = pack(rows(), rms, torch.float32)
    before = trainer.flat.detach().clone()
    batch.captures[3] = float("nan")
    with pytest.raises(FloatingPointError, match="step 0"):
        trainer.step(batch, 60)
    assert torch.equal(trainer.flat.detach(), before) and trainer.steps_done == 0
