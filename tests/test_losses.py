"""Losses and attention in one call: the same numbers as autograd and as the row-by-row path."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.plain_ttt import plain_loss
from pipeline.eagle3 import attention
from pipeline.eagle3.attention import attend_rows, attend_spans, causal_masks, groups_of_rows
from pipeline.eagle3.batch import Taught, dense_teacher, gather, judged_counts, span_left, to_batch
from pipeline.eagle3.losses import LAMBDA_RATE, LOSSES, Dense, Teacher, Top, head_loss
from pipeline.eagle3.train import Settings, Trainer
from pipeline.eagle3.ttt import Tape, accepted_everywhere, ttt_loss
from tests.lab.tiny_drafter import CONFIG
from tests.lab.tiny_rows import random_row, random_trained, rows

STEPS = 3
torch.set_num_threads(1)


def reference(hidden: Tensor, head: Tensor, p: Tensor, weight: Tensor, kind: str) -> Tensor:
    """Each loss as its paper writes it, for autograd; p [M, Vd] of the target's whole vocabulary."""
    q = torch.softmax(hidden @ head.t(), -1)
    mass = p.sum(-1)
    kl = -(p / mass.unsqueeze(1) * q.log()).sum(-1)
    acceptance = torch.minimum(p, q).sum(-1)
    lam = torch.exp(-LAMBDA_RATE * acceptance.detach())
    each = {
        "kl": mass * kl,
        "lk-alpha": -mass * acceptance.log(),
        "lk-lambda": lam * mass * kl + (1 - lam) * (1 - acceptance),
    }
    return (weight * each[kind]).sum()


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("shape", ["top", "dense"])
def test_each_loss_and_its_gradients_are_those_of_autograd(kind: str, shape: str) -> None:
    g = torch.Generator().manual_seed(5)
    hidden = torch.randn(300, 16, generator=g, requires_grad=True)  # more than one chunk
    head = torch.randn(40, 16, generator=g, requires_grad=True)
    weight = torch.rand(300, generator=g)
    full = torch.softmax(2 * torch.randn(300, 50, generator=g), -1)[:, :40]  # ten are not drafted
    probs, ids = full.topk(6, -1)
    teacher: Teacher = Dense(full)
    if shape == "top":
        teacher, full = Top(ids, probs), torch.zeros_like(full).scatter_(1, ids, probs)
    expected = reference(hidden, head, full, weight, kind)
    wanted = torch.autograd.grad(expected, (hidden, head))
    sink: list[Tensor] = []
    loss, hits = head_loss(hidden, head, teacher, weight, kind, sink)
    (gradient,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient, wanted[0], rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(sink[0], wanted[1], rtol=1e-3, atol=1e-4)
    assert torch.equal(hits.bool(), (hidden @ head.t()).argmax(-1) == ids[:, 0])


def test_acceptance_losses_fall_to_nothing_where_the_drafter_says_what_the_target_says() -> None:
    head = torch.eye(12)
    p = torch.softmax(torch.randn(5, 12, generator=torch.Generator().manual_seed(1)), -1)
    weight = torch.ones(5)
    for kind in ("lk-alpha", "lk-lambda"):
        same, _ = head_loss(p.log().requires_grad_(), head, Dense(p), weight, kind)
        other, _ = head_loss(torch.zeros(5, 12, requires_grad=True), head, Dense(p), weight, kind)
        assert same < other
    nothing, _ = head_loss(p.log().requires_grad_(), head, Dense(p), weight, "lk-alpha")
    assert float(nothing.detach()) == pytest.approx(0, abs=1e-4)


def many_rows() -> list[Taught]:
    """As `rows`, and longer ones: gaps, an answer at the very end, several rows of one length."""
    masks = [[0] * 5 + [1] * 30, [0, 1] + [0] * 9 + [1] * 12 + [0] * 4, [0] * 20 + [1] * 20, [0] * 20 + [1] * 20]
    return [*rows(), *(random_row(f"m{i}", mask, 40 + i) for i, mask in enumerate(masks))]


@pytest.mark.parametrize("own_keys", [0, 1, 2])
@pytest.mark.parametrize("room", [1, attention.DENSE_BYTES])
def test_attention_in_one_call_is_attention_row_by_row(
    own_keys: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "DENSE_BYTES", room)  # 1: every row a group of its own
    g = torch.Generator().manual_seed(9)
    data = gather(many_rows(), with_last=False, with_spans=True)
    n, m, heads, groups, hd = len(data.tokens), len(data.response), 4, 2, 8
    assert data.spans is not None and data.spans.spread is not None
    assert (len(groups_of_rows(data.spans, heads)) > 1) == (room == 1)
    shapes = [(m, heads, hd), (n, groups, hd), (n, groups, hd), *[(m, groups, hd)] * (2 * own_keys)]
    leaves = [torch.randn(shape, generator=g, requires_grad=True) for shape in shapes]
    d_out = torch.randn(m, heads * hd, generator=g)
    q, k, v, *flat = leaves
    own = list(zip(flat[0::2], flat[1::2], strict=True))
    masks = causal_masks(data.rows, data.response, torch.float32)
    out = attend_rows(q, k, v, own, data.rows, masks)
    wanted = torch.autograd.grad(out, leaves, d_out)
    keep = data.spans.keep
    made = attend_spans(q, k.index_select(0, keep), v.index_select(0, keep), own, data.spans, attention.PLAIN)
    torch.testing.assert_close(made, out, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(made, leaves, d_out), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_spans_need_no_filling_where_each_row_has_one_answer() -> None:
    data = gather([rows()[0], rows()[3]], with_last=False, with_spans=True)
    assert data.spans is not None and data.spans.spread is None
    assert data.spans.q_lengths == [7, 9] and data.spans.k_lengths == [10, 10]


def both(loss: str, spans: bool, dense: bool) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients and losses of the batch, by one of the paths."""
    g = torch.Generator().manual_seed(11)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = torch.randn(CONFIG.draft_vocab_size, CONFIG.hidden_size, generator=g) * 0.3
    data = many_rows()
    for row in data:
        row.whole = (row.last[row.mask].float() @ head.t()).logsumexp(-1) + 0.1  # as if others had a tenth more
        logits = row.last[row.mask].float() @ head.t() - row.whole.unsqueeze(1)
        top = logits.exp().topk(CONFIG.draft_vocab_size, -1)
        row.teacher_ids, row.teacher_probs = top.indices.to(torch.int32), top.values
    gathered = gather(data, with_last=True, with_spans=spans)
    batch = to_batch(gathered, torch.ones(CONFIG.capture_size), torch.float32, head if dense else None)
    weights = {name: tensor.requires_grad_() for name, tensor in random_trained().items()}
    tape = Tape()
    outcome = ttt_loss(CONFIG, weights, embed, head, batch, STEPS, tape, kind=loss)
    outcome.loss.backward()
    gradients: dict[str, Tensor] = {}
    tape.flush(gradients.__setitem__)
    if loss == "kl" and not spans and not dense:
        again = {name: tensor.requires_grad_() for name, tensor in random_trained().items()}
        _, losses = plain_loss(CONFIG, again, embed, head, data, torch.ones(CONFIG.capture_size), STEPS)
        assert outcome.losses == pytest.approx(losses, rel=1e-4)
    return gradients, outcome.losses


@pytest.mark.parametrize("loss", LOSSES)
def test_the_paths_of_a_gpu_give_what_the_path_of_a_processor_gives(loss: str) -> None:
    """All candidates kept: then `Top` and `Dense` are one distribution, and both layouts one attention."""
    gradients, losses = both(loss, spans=False, dense=False)
    for spans, dense in ((True, False), (False, True), (True, True)):
        others, other_losses = both(loss, spans, dense)
        assert other_losses == pytest.approx(losses, rel=1e-3)
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=5e-3, atol=5e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_a_dense_teacher_is_the_targets_softmax_over_its_whole_vocabulary() -> None:
    g = torch.Generator().manual_seed(3)
    last, whole_head = torch.randn(9, 16, generator=g), torch.randn(60, 16, generator=g)
    chosen = torch.tensor([3, 7, 20, 59])
    probs = dense_teacher(last, (last @ whole_head.t()).logsumexp(-1), whole_head[chosen])
    torch.testing.assert_close(probs, torch.softmax(last @ whole_head.t(), -1)[:, chosen])


def test_a_head_of_the_drafters_own_is_trained_with_the_rest() -> None:
    g = torch.Generator().manual_seed(11)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = torch.randn(CONFIG.draft_vocab_size, CONFIG.hidden_size, generator=g) * 0.3
    data = many_rows()
    batch = to_batch(gather(data, with_last=False, with_spans=False), torch.ones(CONFIG.capture_size), torch.float32)
    frozen = Trainer(CONFIG, random_trained(), embed, head, Settings(dtype=torch.float32, lr=3e-3))
    free = Trainer(CONFIG, random_trained() | {"head": head}, embed, head, Settings(dtype=torch.float32, lr=3e-3))
    first = [float(trainer.step(batch, 60).loss.detach()) for trainer in (frozen, free)]
    assert first[0] == first[1]
    # The gradient of the head is autograd's.
    weights = {name: tensor.requires_grad_() for name, tensor in random_trained().items()}
    leaf = head.clone().requires_grad_()
    loss, _ = plain_loss(CONFIG, weights, embed, leaf, data, torch.ones(CONFIG.capture_size), STEPS)
    loss.backward()
    torch.testing.assert_close(free.gradients["head"], leaf.grad, rtol=2e-3, atol=2e-6)
    for _ in range(50):
        losses = [float(trainer.step(batch, 60).loss.detach()) for trainer in (frozen, free)]
    assert losses[1] < losses[0] - 0.01
    assert not torch.equal(free.weights()["head"], head)


def test_what_is_accepted_is_what_the_walk_with_the_drafters_own_guesses_accepts() -> None:
    """The text embedded in place of guesses: the same, as only chains of right guesses count."""
    g = torch.Generator().manual_seed(2)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    data = many_rows()
    gathered = gather(data, with_last=False, with_spans=True)
    batch = to_batch(gathered, torch.ones(CONFIG.capture_size), torch.float32)
    weights, every = random_trained(), torch.arange(CONFIG.vocab_size)
    # Make some guesses right: the text after a query becomes what the drafter says there, guess after guess.
    for _ in range(STEPS):
        made = list(_guessed(weights, embed, head, batch))
        for step, tokens in enumerate(made):
            for j in range(0, len(batch.response), 5):
                if batch.left[j] > step:
                    batch.tokens[batch.response[j] + 1 + step] = tokens[j]
    text = batch.tokens[(batch.response + 1).clamp(max=len(batch.tokens) - 1)]
    accepted = accepted_everywhere(CONFIG, weights, embed, head, every, batch, text, STEPS)
    made = list(_guessed(weights, embed, head, batch))
    for j, left in enumerate(batch.left.tolist()):
        right = 0
        while right < min(STEPS, left) and made[right][j] == batch.tokens[batch.response[j] + 1 + right]:
            right += 1
        assert int(accepted[j]) == right
    assert int(accepted.max()) >= 2 and int(accepted.min()) == 0
    # Through a map of ids: a drafter that never says the text's token is never right.
    shifted = (every + 1) % CONFIG.vocab_size
    inverse = accepted_everywhere(CONFIG, weights, embed, head[shifted], every, batch, text, STEPS)
    mapped = accepted_everywhere(CONFIG, weights, embed, head[shifted], shifted, batch, text, STEPS)
    assert torch.equal(mapped, accepted) and not torch.equal(inverse, accepted)


def _guessed(weights: dict[str, Tensor], embed: Tensor, head: Tensor, batch):  # type: ignore[no-untyped-def]
    from pipeline.eagle3.ttt import PLAIN, guesses

    with torch.no_grad():
        for made in guesses(CONFIG, weights, embed, batch, STEPS, Tape(), PLAIN):
            yield (made @ head.t()).argmax(-1)


def test_spans_that_are_left_are_counted_over_a_whole_batch_as_row_by_row() -> None:
    data = many_rows()
    together = span_left(torch.cat([row.mask for row in data]))
    assert torch.equal(together, torch.cat([span_left(row.mask) for row in data]))
    slow = []
    for row in data:
        flags = row.mask.tolist()
        for i in (i for i, flag in enumerate(flags) if flag):
            run = 0
            while i + 1 + run < len(flags) and flags[i + 1 + run]:
                run += 1
            slow.append(run)
    assert together.tolist() == slow
    counts = sum(judged_counts(row.mask, STEPS) for row in data)
    assert isinstance(counts, Tensor) and counts.tolist() == [sum(n > k for n in slow) for k in range(STEPS)]


@pytest.mark.training_report(29)
def test_pieces_of_a_batch_make_the_step_that_the_whole_batch_makes() -> None:
    g = torch.Generator().manual_seed(11)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = torch.randn(CONFIG.draft_vocab_size, CONFIG.hidden_size, generator=g) * 0.3
    data, rms = many_rows(), torch.ones(CONFIG.capture_size)
    settings = Settings(dtype=torch.float32, weight_decay=0.1, clip=0.05)
    whole, split = (Trainer(CONFIG, random_trained(), embed, head, settings) for _ in range(2))
    counts = sum(judged_counts(row.mask, STEPS) for row in data)
    assert isinstance(counts, Tensor)
    for _ in range(3):
        whole.step(to_batch(gather(data, with_last=False, with_spans=False), rms, torch.float32), 60)
        for piece in (data[:3], data[3:4], data[4:]):
            split.add(to_batch(gather(piece, with_last=False, with_spans=False), rms, torch.float32), counts.tolist())
        split.finish(60)
        torch.testing.assert_close(split.figures, whole.figures, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(split.flat, whole.flat, rtol=1e-4, atol=1e-6)


def test_clipping_and_decay_are_torchs_own() -> None:
    g = torch.Generator().manual_seed(11)
    embed = torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=g)
    head = torch.randn(CONFIG.draft_vocab_size, CONFIG.hidden_size, generator=g) * 0.3
    settings = Settings(dtype=torch.float32, weight_decay=0.3, clip=0.02, lr=1e-2)
    trainer = Trainer(CONFIG, random_trained(), embed, head, settings)
    names = [name for name in trainer.shapes if name != "norm"]
    mine = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in trainer.weights().items()}
    groups = [{"params": [mine[n] for n in names]}, {"params": [mine["norm"]], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=settings.betas, weight_decay=0.3)
    rms = torch.ones(CONFIG.capture_size)
    batch = to_batch(gather(many_rows(), with_last=False, with_spans=False), rms, torch.float32)
    for step in range(3):
        loss, _ = plain_loss(CONFIG, mine, embed, head, many_rows(), rms, STEPS)
        theirs.zero_grad()
        loss.backward()
        assert float(torch.nn.utils.clip_grad_norm_(mine.values(), 0.02)) > 0.02
        for group in theirs.param_groups:
            group["lr"] = 1e-2 * (step + 1) / settings.warmup
        theirs.step()
        trainer.step(batch, 60)
    for name, weight in trainer.weights().items():
        torch.testing.assert_close(weight, mine[name].detach(), rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_compiled_function_is_used_only_where_it_gives_what_the_plain_one_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pipeline.eagle3 import compiled as module

    def plain(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x * y, [x + 1]

    def fails(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        raise RuntimeError("no compiler")

    def wrong_value(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x * y, [x + 1.5]

    def wrong_gradient(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x.detach() * y + 0 * x, [x + 1]

    def same(x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        return y * x, [1 + x]

    def trials(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 3).requires_grad_(), torch.randn(n, 3)

    for made, used in ((fails, plain), (wrong_value, plain), (wrong_gradient, plain), (same, same)):
        monkeypatch.setattr(torch, "compile", lambda function, made=made: made)
        assert module.compiled(plain, trials) is used, made.__name__


def test_the_operations_of_a_step_that_the_benchmark_claims_are_those_executed() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    from benchmarks.train_gpu import GUESSES, TINY, step_flops

    data = [random_row(f"f{i}", [0] * 6 + [1] * (10 + i), i, TINY) for i in range(8)]
    batch = to_batch(gather(data, with_last=False, with_spans=True), torch.ones(TINY.capture_size), torch.float32)
    g = torch.Generator().manual_seed(0)
    embed = torch.randn(TINY.vocab_size, TINY.hidden_size, generator=g)
    trainer = Trainer(TINY, random_trained(TINY), embed, embed[:128], Settings(GUESSES, dtype=torch.float32))
    with FlopCounterMode(display=False) as counter:
        trainer.step(batch, 60)
    claimed = step_flops(TINY, len(batch.tokens), len(batch.response))
    assert claimed <= counter.get_total_flops() <= 1.2 * claimed  # the rest is attention, which is not claimed
