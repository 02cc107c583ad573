"""Speculation changes the speed and never the text: every token is the one that plain decoding chooses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline.eagle3.decode import Decoder, Request, choose, decode, inverse_cumulative, likeliest, nucleus, uniform
from pipeline.eagle3.draft import Drafter, config_for_target
from pipeline.eagle3.target import Target
from tests.lab.tiny_drafter import random_weights
from tests.lab.tiny_model import make_tiny_model

VOCAB = 384


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    return Target.load(directory, torch.float32)


@pytest.fixture(scope="module")
def drafter(target: Target, directory: Path) -> Drafter:
    return make_drafter(target, directory)


def make_drafter(target: Target, directory: Path, seed: int = 0) -> Drafter:
    import json

    raw = json.loads((directory / "config.json").read_text())
    config = config_for_target(raw, target.config.capture_layers, draft_vocab_size=VOCAB // 2)
    return Drafter(config, random_weights(config, seed), target.embed)


def requests(count: int, seed: int, **more: object) -> list[Request]:
    g = torch.Generator().manual_seed(seed)
    out = []
    for i in range(count):
        length = int(torch.randint(1, 30, (1,), generator=g))
        prompt = torch.randint(3, VOCAB, (length,), generator=g).tolist()
        out.append(Request(prompt, max_tokens=5 + 7 * (i % 5), seed=seed * 100 + i, **more))  # type: ignore[arg-type]
    return out


def texts(done: list[Request], order: list[Request]) -> list[list[int]]:
    assert sorted(map(id, done)) == sorted(map(id, order)), "every request ends once"
    return [r.output for r in order]


def run(target: Target, asked: list[Request], **how: object) -> list[list[int]]:
    return texts(list(decode(target, asked, **how)), asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculative_equals_plain(target: Target, directory: Path, seed: int, temperature: float) -> None:
    drafter = make_drafter(target, directory, seed)
    plain = run(target, requests(7, seed, temperature=temperature))
    for rows, steps in ((1, 3), (3, 2), (7, 4)):
        asked = requests(7, seed, temperature=temperature)
        assert run(target, asked, drafter=drafter, steps=steps, rows=rows) == plain
        for r in asked:  # the first token comes from reading the prompt, each verify adds what it accepted and one
            assert 1 + sum(n + 1 for n in r.accepted) >= len(r.output) > sum(r.accepted)


def test_batches_equal_single_rows(target: Target) -> None:
    assert run(target, requests(9, 1), rows=4) == run(target, requests(9, 1), rows=1)


def test_stop_tokens_end_the_text(target: Target, drafter: Drafter) -> None:
    free = requests(1, 5)
    free[0].max_tokens = 40
    text = run(target, free)[0]
    stop = text[10]
    for how in ({}, {"drafter": drafter}):
        asked = requests(1, 5, stop_ids=frozenset([stop]))
        asked[0].max_tokens = 40
        assert run(target, asked, **how)[0] == text[: text.index(stop) + 1]
        assert asked[0].finish == "stop"


def test_a_perfect_drafter_is_accepted_whole(target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """With guesses that are what the target says, 1 + 5 * 4 tokens take five verify steps."""
    asked = requests(1, 3)
    asked[0].max_tokens = 21
    plain = run(target, asked)[0]

    def oracle(self: Decoder, lasts: torch.Tensor) -> torch.Tensor:
        at = len(self.active[0].output)
        return torch.tensor([[*plain, 0, 0, 0][at : at + 3]])

    monkeypatch.setattr(Decoder, "_draft", oracle)
    again = [replace(asked[0], output=[], finish=None, accepted=[])]
    assert run(target, again, drafter=drafter, steps=3)[0] == plain
    assert again[0].accepted == [3, 3, 3, 3, 3]


def test_drafts_after_the_end_do_not_count(target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = requests(1, 3)
    asked[0].max_tokens = 3
    plain = run(target, requests(1, 3))[0]
    monkeypatch.setattr(Decoder, "_draft", lambda self, lasts: torch.tensor([plain[len(self.active[0].output) :][:3]]))
    assert run(target, asked, drafter=drafter)[0] == plain[:3]
    assert asked[0].accepted == [2]


def test_the_drafter_reads_what_it_should(target: Target, drafter: Drafter) -> None:
    """The guesses equal those of a fresh drafter that is given the whole text so far, at every step of ragged rows."""
    seen = 0
    decoder = Decoder(target, rows=5, positions=128, drafter=drafter, steps=3)
    true_draft = decoder._draft

    def checked(lasts: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        guesses = true_draft(lasts)
        for row, request in enumerate(decoder.active):
            text = request.prompt + request.output
            assert guesses[row].tolist() == fresh_guesses(target, drafter, text, 3)
            seen += 1
        return guesses

    decoder._draft = checked  # type: ignore[method-assign]
    waiting = requests(9, 11)
    while waiting or decoder.active:
        decoder.admit([waiting.pop() for _ in range(min(len(waiting), decoder.free_rows, 2))])
        decoder.retire()
        if decoder.active:
            decoder.step()
            decoder.retire()
    assert seen > 50


@torch.inference_mode()
def fresh_guesses(target: Target, drafter: Drafter, text: list[int], steps: int) -> list[int]:
    captures = target.forward(torch.tensor([text[:-1]]), captures=drafter.config.aux_layers).captures
    cache = drafter.new_cache(1, len(text) + steps)
    slots = torch.arange(len(text) - 1).unsqueeze(0)
    assert captures is not None
    hidden = drafter(torch.tensor([text[1:]]), drafter.fuse(captures), slots, cache)[:, -1:]
    guesses: list[int] = []
    for i in range(steps):
        guesses.append(int(drafter.to_target(drafter.logits(hidden[0, -1]).argmax())))
        hidden = drafter(torch.tensor([guesses[-1:]]), hidden, torch.tensor([[len(text) - 1 + i]]), cache)
    return guesses


def test_draws_follow_the_distribution() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    asked = [Request([1], 1, temperature=2.0, seed=i) for i in range(4000)]
    logits = (2.0 * p.log()).expand(4000, 4)
    share = torch.bincount(choose(logits, asked, [0] * 4000), minlength=4) / 4000
    torch.testing.assert_close(share, p, atol=0.03, rtol=0)
    narrow = [replace(r, top_p=0.7) for r in asked]
    share = torch.bincount(choose(logits, narrow, [3] * 4000), minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.625, 0.375, 0, 0]), atol=0.03, rtol=0)


def test_two_levels_are_one_cumulative_sum() -> None:
    g = torch.Generator().manual_seed(0)
    p = torch.rand(200, 1000, generator=g, dtype=torch.float64) * (torch.rand(200, 1000, generator=g) < 0.05)
    u = torch.rand(200, 1, generator=g, dtype=torch.float64)
    u[0], u[1] = 0.0, 1 - 1e-16
    cumulative = p.cumsum(-1)
    expected = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(1)
    expected[1] = p[1].nonzero()[-1]
    got = inverse_cumulative(p, u, block=64)
    assert got.tolist() == expected.tolist()
    assert (p.gather(1, got.unsqueeze(1)) > 0).all()


def test_equal_logits_choose_the_first() -> None:
    logits = torch.zeros(5, 50000, dtype=torch.bfloat16)
    logits[:, [777, 778, 40000]] = 3.0
    assert likeliest(logits).tolist() == [777] * 5


def test_nucleus_keeps_the_token_that_reaches_top_p() -> None:
    p = torch.tensor([0.1, 0.6, 0.3])
    assert nucleus(p, 0.6).tolist() == pytest.approx([0, 0.6, 0])
    assert nucleus(p, 0.61).tolist() == pytest.approx([0, 0.6, 0.3])


def test_random_numbers_depend_on_seed_and_place_only() -> None:
    assert uniform(3, 4) == uniform(3, 4)
    values = [uniform(seed, place) for seed in range(50) for place in range(50)]
    assert len(set(values)) == 2500
    assert 0.47 < sum(values) / 2500 < 0.53
    assert all(0 <= v < 1 for v in values)
