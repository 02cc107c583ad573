"""The predicted accept length: what decoding by hand accepts, counted as an engine counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.draft import Drafter
from pipeline.eagle3.target import Target
from pipeline.stages.predict import accepted_everywhere, summary, walk
from tests.lab.stage_run import rows, run_stage
from tests.lab.tiny_pipeline import up_to_export

STEPS = 3


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return up_to_export(tmp_path_factory.mktemp("predict"))


def decode_by_hand(target: Target, drafter: Drafter, prompt: list[int], response: list[int]) -> list[int]:
    """Accepted drafts of each verify step, drafting one token after another and starting over after each step."""
    ids, taken = prompt + response[:1], []
    text = prompt + response
    while len(ids) < len(text):
        captures = target.forward(torch.tensor([ids]), captures=drafter.config.aux_layers).captures
        assert captures is not None
        cache = drafter.new_cache(1, len(ids) + STEPS)
        # Slots 0 .. n-2: true captures, and the token after each.
        slots = len(ids) - 1
        hidden = drafter.fuse(captures[:, :slots])
        out = drafter(torch.tensor([ids[1:]]), hidden, torch.arange(slots).unsqueeze(0), cache)[:, -1:]
        accepted = 0
        for step in range(STEPS):
            guess = int(drafter.to_target(drafter.logits(out)[0, 0].argmax()))
            if len(ids) + step >= len(text) or guess != text[len(ids) + step]:
                break
            accepted += 1
            out = drafter(torch.tensor([[guess]]), out, torch.tensor([[slots + step]]), cache)
        taken.append(accepted)
        ids = text[: len(ids) + accepted + 1]
    return taken


def test_prediction_equals_drafting_by_hand(paths: dict[str, Path]) -> None:
    target = Target.load(paths["model"], torch.float32)
    drafter = Drafter.load(paths["drafter"], target.embed, torch.float32)
    total = 0
    chat = Chat(paths["model"])
    for row in rows(paths["generated"])[:5]:  # what it was trained on: a random model's other text is beyond it
        response, prompt = row["output_ids"], chat.encode(chat.render(row["messages"], True))
        ids = torch.tensor(prompt + response)
        everywhere = accepted_everywhere(target, drafter, ids, len(prompt), STEPS)
        assert len(everywhere) == len(response) - 1
        assert walk(everywhere, STEPS) == decode_by_hand(target, drafter, prompt, response)
        total += sum(everywhere)
    assert total > 20, "too little was accepted for the test to notice a drafter that is never right"


def test_counters_add_up() -> None:
    taken = walk([3, 9, 9, 9, 0, 1, 9, 0], STEPS)
    assert taken == [3, 0, 1, 0]  # 3 + 1 tokens on, then 1, then 2
    made = summary([taken, [2]], STEPS)
    assert made["accept_len"] == pytest.approx((3 + 0 + 1 + 0 + 2 + 5) / 5)
    assert made["histogram"] == [2, 1, 1, 1] and made["verify_steps"] == 5 and made["proposed"] == 15
    assert made["per_position"] == pytest.approx([3 / 5, 2 / 5, 1 / 5])
    assert summary([], STEPS)["accept_len"] is None


def test_the_stage_tells_the_two_kinds_apart(paths: dict[str, Path], tmp_path: Path) -> None:
    inputs = {"drafter": paths["drafter"], "model": paths["model"]}
    inputs |= {"held_self": paths["held"], "held_people": paths["held"]}
    result = run_stage("predict", tmp_path / "predict", inputs, {"steps": STEPS, "dtype": "float32"})
    assert result["self"] == result["people"]
    assert result["self"]["rows"] == 4 and 0 < result["self"]["draft_vocab_coverage"] <= 1
    assert 1.0 <= result["self"]["accept_len"] <= 4.0
