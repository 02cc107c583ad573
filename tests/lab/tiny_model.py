"""A Llama of random weights and a byte-level tokenizer, written as a Hugging Face directory in well under a second."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pipeline.eagle3.target import key_table, read_config

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS, EOS = 1, 2


def make_tiny_model(directory: Path, *, layers: int = 8, hidden: int = 48, vocab: int = 384, seed: int = 0,
                    positions: int = 256, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:  # fmt: skip
    """Returns `directory`. Weights are large enough that logits differ clearly (no near-ties in fp32)."""
    directory.mkdir(parents=True, exist_ok=True)
    heads, kv_heads = 6, 2
    (directory / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": 16, "max_position_embeddings": positions, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "tie_word_embeddings": tied, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS,
    }))  # fmt: skip
    (directory / "generation_config.json").write_text(json.dumps({"bos_token_id": BOS, "eos_token_id": EOS}))
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for key, shape in key_table(read_config(directory)).items():
        if key.endswith("norm.weight"):
            weights[key] = 1 + 0.1 * torch.randn(shape, generator=generator)
        else:
            scale = 1.0 if "embed" in key else 2.0 / shape[-1] ** 0.5
            weights[key] = scale * torch.randn(shape, generator=generator)
    save_file({key: value.to(dtype) for key, value in weights.items()}, directory / "model.safetensors")
    make_tiny_tokenizer(directory, vocab)
    return directory


def make_tiny_tokenizer(directory: Path, vocab: int) -> None:
    """Three special tokens, the 256 bytes, then filler up to `vocab` (every id of the model must decode)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    words += [f"Ġw{i}" for i in range(vocab - len(words))]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in specials])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": specials[1], "eos_token": specials[2],
        "pad_token": specials[2], "unk_token": specials[0], "chat_template": CHAT_TEMPLATE,
    }))  # fmt: skip
