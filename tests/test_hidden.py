"""Hidden states: those of each row alone, for the right tokens, resumed by shard, refused when wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.eagle3 import teacher
from pipeline.eagle3.frozen import Vocab
from pipeline.eagle3.shards import read_index, read_shards
from pipeline.eagle3.sizes import bytes_per_token
from pipeline.eagle3.target import Target
from pipeline.eagle3.world import World
from pipeline.stages import hidden
from pipeline.stages.protocol import Refused, write_jsonl
from tests.lab.stage_run import run_stage
from tests.lab.tiny_model import make_tiny_model

VOCAB = Vocab(torch.arange(2, 384, 3), 384)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr(hidden, "SHARD_BYTES", (4 * 20 * 389, 1 << 30))  # three or four rows
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(10):
        length = int(torch.randint(6, 30, (1,), generator=generator))
        ids = torch.randint(3, 384, (length,), generator=generator).tolist()
        rows.append({"id": f"r{i}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4)})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    model = make_tiny_model(tmp_path / "model")
    return {"rows": tmp_path / "rows.jsonl", "model": model}


def run(tmp_path: Path, inputs: dict[str, Path], **settings: Any) -> dict[str, Any]:
    return run_stage("hidden", tmp_path / "out", inputs, {"dtype": "float32", "batch_tokens": 80, **settings})


def test_states_are_those_of_the_row_alone(tmp_path: Path, inputs: dict[str, Path]) -> None:
    result = run(tmp_path, inputs)
    assert result["layers"] == [1, 3, 4] and result["shards"] == 3
    index = read_index(tmp_path / "out")
    assert (index.layers, index.hidden_size, index.rows, index.tokens) == ((1, 3, 4), 48, 10, result["tokens"])
    assert [shard["rows"] for shard in index.shards] and sum(shard["rows"] for shard in index.shards) == 10
    assert result["bytes"] >= index.tokens * (bytes_per_token(48, 3) + 5)
    target = Target.load(inputs["model"], torch.float32)
    made = read_shards(tmp_path / "out")
    assert [row.id for row in made] == [f"r{i}" for i in range(10)]
    for row in made:
        alone = target.forward(row.tokens.unsqueeze(0), captures=(2, 4, 5))  # inputs of the layers after
        assert alone.captures is not None
        torch.testing.assert_close(row.aux.float(), alone.captures[0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(row.last.float(), alone.final[0], rtol=1e-2, atol=1e-2)


def test_the_teacher_is_the_target_at_each_response_token(
    tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "CPU_ROWS", 30)  # several rows at a time, and several times
    run(tmp_path, inputs)
    target = Target.load(inputs["model"], torch.float32)
    stored = read_shards(tmp_path / "out")
    taught = teacher.teach(stored, target.head, VOCAB, tmp_path, World(0, 1), lambda tokens: None, dense=False)
    assert [row.id for row in taught] == [row.id for row in stored]
    for row in taught:
        everything = torch.softmax(target.logits(row.last[row.mask].float()), -1)
        chosen = VOCAB.target_ids[row.teacher_ids.long()]
        assert chosen.shape == (int(row.mask.sum()), 64)
        torch.testing.assert_close(row.teacher_probs.float(), everything.gather(1, chosen), rtol=2e-3, atol=1e-4)
        assert torch.equal(chosen[:, 0], VOCAB.target_ids[everything[:, VOCAB.target_ids].argmax(-1)])


def test_states_of_the_size_of_real_models() -> None:
    assert bytes_per_token(7168, 3) == 57_344  # Kimi-K2.5
    assert bytes_per_token(4096, 3) == 32 << 10 and bytes_per_token(8192, 3) == 64 << 10  # Qwen3-8B, a Llama of 70B
    assert round(61.33e6 * bytes_per_token(7168, 3) / 1e9) == 3517


@pytest.mark.training_report(4)
def test_states_of_an_older_layout_are_refused(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"schema": 1, "layers": [2, 4, 5]}')
    with pytest.raises(ValueError, match="schema 1, expected 2"):
        read_index(tmp_path)
    (tmp_path / "index.json").unlink()
    with pytest.raises(ValueError, match=r"no readable index\.json"):
        read_index(tmp_path)


@pytest.mark.training_report(28)
def test_a_stage_that_was_killed_makes_only_the_shards_that_are_missing(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    whole = run(tmp_path, inputs)
    assert whole["shards_written_now"] == 3
    out = tmp_path / "out"
    before = {path.name: path.read_bytes() for path in out.glob("shard-*")}
    (out / "manifest.json").unlink()
    (out / "shard-00002.safetensors").unlink()
    torn = out / "shard-00001.safetensors"
    torn.write_bytes(torn.read_bytes()[:-100])
    assert run(tmp_path, inputs)["shards_written_now"] == 2
    assert {path.name: path.read_bytes() for path in out.glob("shard-*")} == before


@pytest.mark.training_report(25)
def test_states_that_leak_between_rows_of_a_batch_are_found(
    tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Target.forward

    def leaky(self: Target, tokens: Tensor, *args: Any, **more: Any) -> Any:
        made = honest(self, tokens, *args, **more)
        return dataclasses.replace(made, captures=made.captures + 0.1 * made.captures.mean(0, keepdim=True))

    monkeypatch.setattr(Target, "forward", leaky)
    with pytest.raises(Refused, match="leaks"):
        run(tmp_path, inputs)


@pytest.mark.training_report(25)
def test_states_that_are_not_finite_are_refused(
    tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Target.forward

    def broken(self: Target, tokens: Tensor, *args: Any, **more: Any) -> Any:
        made = honest(self, tokens, *args, **more)
        made.captures[0, 1, 0] = float("nan")
        return made

    monkeypatch.setattr(Target, "forward", broken)
    with pytest.raises(Refused, match="not finite"):
        run(tmp_path, inputs)


@pytest.mark.training_report(26)
def test_a_full_disk_is_known_before_the_first_state(
    tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(Refused, match="GB are free"):
        run(tmp_path, inputs)
    assert not list((tmp_path / "out").glob("shard-*"))


@pytest.mark.training_report(26)
def test_a_disk_that_fills_meanwhile_stops_in_a_folder_that_goes_on(
    tmp_path: Path, inputs: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = iter([1 << 40, 1 << 40, 1000])  # before the first, at the first shard, at the second

    monkeypatch.setattr(hidden.shutil, "disk_usage", lambda path: type("Usage", (), {"free": next(room)})())
    with pytest.raises(Refused, match="it goes on here"):
        run(tmp_path, inputs)
    monkeypatch.undo()
    monkeypatch.setattr(hidden, "SHARD_BYTES", (4 * 20 * 389, 1 << 30))
    assert run(tmp_path, inputs)["shards_written_now"] == 2


def test_a_gpu_that_is_not_there_is_no_reason_to_work_on_the_cpu(tmp_path: Path, inputs: dict[str, Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Refused, match="sees no GPU"):
        run(tmp_path, inputs, device="cuda")
    (tmp_path / "other").mkdir()
    assert run(tmp_path / "other", inputs, device="auto")["shards"] == 3


def test_a_layer_that_the_target_lacks_is_refused(tmp_path: Path, inputs: dict[str, Path]) -> None:
    with pytest.raises(Refused, match="8 layers"):
        run(tmp_path, inputs, layers=[1, 3, 7])  # the output of the last one is kept anyway


def test_a_target_of_another_kind_is_refused_in_a_sentence(tmp_path: Path, inputs: dict[str, Path]) -> None:
    path = inputs["model"] / "config.json"
    path.write_text(path.read_text().replace('"llama"', '"mamba"'))
    with pytest.raises(Refused, match="mamba"):
        run(tmp_path, inputs)


def test_the_transformers_library_gives_the_same_states(tmp_path: Path, inputs: dict[str, Path]) -> None:
    run(tmp_path, inputs)
    run_stage("hidden", tmp_path / "hf", inputs, {"dtype": "float32", "batch_tokens": 80, "how": "transformers"})
    index = read_index(tmp_path / "hf")
    assert index.source == "transformers" and index.target == read_index(tmp_path / "out").target
    for theirs, ours in zip(read_shards(tmp_path / "hf"), read_shards(tmp_path / "out"), strict=True):
        assert theirs.id == ours.id and torch.equal(theirs.tokens, ours.tokens) and torch.equal(theirs.mask, ours.mask)
        torch.testing.assert_close(theirs.aux.float(), ours.aux.float(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(theirs.last.float(), ours.last.float(), rtol=1e-2, atol=1e-2)


def test_a_target_that_our_decoder_does_not_load_has_states_by_transformers(
    tmp_path: Path, inputs: dict[str, Path]
) -> None:
    """Qwen3: norms of queries and keys, another model_type."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=384, hidden_size=48, intermediate_size=96, num_hidden_layers=8, num_attention_heads=6,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "qwen")
    other = {**inputs, "model": tmp_path / "qwen"}
    with pytest.raises(Refused, match="qwen3"):
        run_stage("hidden", tmp_path / "own", other, {"dtype": "float32"})
    run_stage("hidden", tmp_path / "hf", other, {"dtype": "float32", "batch_tokens": 80, "how": "transformers"})
    row = read_shards(tmp_path / "hf")[0]
    with torch.inference_mode():
        every = model(row.tokens.unsqueeze(0), output_hidden_states=True).hidden_states  # inputs of layers, then final
    wanted = torch.cat([every[layer + 1][0] for layer in (1, 3, 4)], -1)
    torch.testing.assert_close(row.aux.float(), wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(row.last.float(), every[-1][0], rtol=1e-2, atol=1e-2)
