"""The target decoder: equal to transformers, with and without cache, rows side by side at different positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.eagle3.target import Target, TargetError
from tests.lab.tiny_model import make_tiny_model


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param)


@pytest.fixture(scope="module")
def target(directory: Path) -> Target:
    return Target.load(directory, torch.float32)


def random_tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 384, shape, generator=torch.Generator().manual_seed(seed))


def test_equals_transformers(directory: Path, target: Target) -> None:
    from transformers import LlamaForCausalLM

    peer = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = random_tokens(2, 40)
    with torch.inference_mode():
        expected = peer(tokens, output_hidden_states=True)
    layers = target.config.capture_layers
    got = target.forward(tokens, captures=layers)
    torch.testing.assert_close(target.logits(got.final), expected.logits, atol=2e-4, rtol=1e-4)
    assert got.captures is not None
    # transformers' hidden_states[i] is the input of layer i
    wanted = torch.cat([expected.hidden_states[i] for i in layers], -1)
    torch.testing.assert_close(got.captures, wanted, atol=2e-4, rtol=1e-4)
    with torch.inference_mode():
        text = peer.generate(tokens[:1], max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert greedy(target, tokens[0].tolist(), 40) == text[0, 40:].tolist()


def greedy(target: Target, prompt: list[int], count: int) -> list[int]:
    cache = target.new_cache()
    new, out = prompt, []
    for _ in range(count):
        hidden = target.forward(torch.tensor([new]), cache)
        cache.lengths[0] += len(new)
        out.append(int(target.logits(hidden.final[0, -1]).argmax()))
        new = out[-1:]
    return out


def test_cache_equals_no_cache(target: Target) -> None:
    tokens = random_tokens(3, 24)
    expected = target.forward(tokens, captures=target.config.capture_layers)
    cache = target.new_cache(rows=3)
    pieces = []
    for start, stop in ((0, 10), (10, 11), (11, 15), (15, 24)):
        pieces.append(target.forward(tokens[:, start:stop], cache, captures=target.config.capture_layers))
        cache.lengths = [stop] * 3
    torch.testing.assert_close(torch.cat([p.final for p in pieces], 1), expected.final, atol=1e-4, rtol=1e-4)
    captures = [p.captures for p in pieces if p.captures is not None]
    torch.testing.assert_close(torch.cat(captures, 1), expected.captures, atol=1e-4, rtol=1e-4)


def test_rows_at_different_positions(target: Target) -> None:
    """Padded prefill, then steps of one and of four tokens, one of them partly rejected, then a moved row."""
    prompts = [random_tokens(n, seed=n) for n in (5, 17, 9)]
    cache = target.new_cache(rows=4)
    padded = torch.zeros(3, 17, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    target.forward(padded, cache)
    cache.lengths[:3] = [5, 17, 9]
    steps = random_tokens(3, 5, seed=99)
    target.forward(random_tokens(3, 4, seed=7), cache)  # drafts that nobody accepted: lengths stay
    target.forward(steps[:, :1], cache)
    cache.lengths[:3] = [6, 18, 10]
    got = target.forward(steps[:, 1:], cache)
    for row, prompt in enumerate(prompts):
        alone = target.forward(torch.cat((prompt, steps[row])).unsqueeze(0))
        torch.testing.assert_close(got.final[row], alone.final[0, -4:], atol=1e-4, rtol=1e-4)
    cache.lengths[:3] = [10, 22, 14]
    cache.move(2, 0)
    one = random_tokens(1, 1, seed=5)
    got = target.forward(one, cache)
    alone = target.forward(torch.cat((prompts[2], steps[2], one[0])).unsqueeze(0))
    torch.testing.assert_close(got.final[0, 0], alone.final[0, -1], atol=1e-4, rtol=1e-4)


def test_a_full_cache_is_an_error(target: Target) -> None:
    cache = target.new_cache(positions=8)
    with pytest.raises(ValueError, match="9 tokens in a cache of 8"):
        target.forward(random_tokens(1, 9), cache)


def test_strict_keys(directory: Path, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    weights = load_file(directory / "model.safetensors")
    lost = weights.pop("model.layers.3.mlp.up_proj.weight")
    save_file(weights | {"model.layers.3.mlp.up.weight": lost}, tmp_path / "model.safetensors")
    with pytest.raises(TargetError, match=r"missing keys .*up_proj.*unknown keys .*mlp\.up\."):
        Target.load(tmp_path)


def test_other_architectures_are_refused(directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    with pytest.raises(TargetError, match="deepseek_v3"):
        Target.load(tmp_path)
