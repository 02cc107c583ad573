"""Secrets are taken out, and what is not a secret stays."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from state.events import FactObserved, NoteAdded, RunStarted, Source
from state.journal import Journal
from state.redact import Redactor, could_hold_token, is_secret_name

# Assembled here, so that no scanner takes this file for a leak.
GITHUB = "ghp_" + "0123456789abcdefghijABCDEFGHIJ012345"
HUGGING_FACE = "hf_" + "qWzRtYpLkJhGfDsAxCvBnMmNbVcXzQwErT"


def redactor(**known: str) -> Redactor:
    return Redactor("test", known=known)


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("serve --api-key hunter2 --port 8000", "hunter2"),
        ("serve --api-key=hunter2", "hunter2"),
        ("serve --api-key 'two words'", "two words"),
        ("login --password hunter2", "hunter2"),
        ("curl -H 'Authorization: Bearer s3cret'", "s3cret"),
        ("authorization: basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("sent Bearer abc123def456", "abc123def456"),
        ("git clone https://lena:hunter2@git.example/x.git", "hunter2"),
        ("pip install --index-url https://a1b2c3d4e5f6a7b8@pypi.example/simple", "a1b2c3d4e5f6a7b8"),
        ("HF_TOKEN=hunter2 python run.py", "hunter2"),
        ("export OPENAI_API_KEY='hunter2'", "hunter2"),
        ('{"AWS_SECRET_ACCESS_KEY": "hunter2"}', "hunter2"),
        ('{"password": "hunter2"}', "hunter2"),
        ("client_secret: hunter2", "hunter2"),
        ("HF_TOKEN=\x1b[31mhunter2\x1b[0m", "hunter2"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nMIIEow\n-----END OPENSSH PRIVATE KEY-----", "MIIEow"),
        ("-----BEGIN PRIVATE KEY-----\nMIIEow, cut off", "MIIEow"),
        (f"cloned with {GITHUB}", GITHUB),
        (f"token is {HUGGING_FACE}.", HUGGING_FACE),
    ],
)
def test_secrets_are_taken_out(text: str, secret: str) -> None:
    clean = redactor().text(text)
    assert secret not in clean
    assert "«redacted:" in clean


@pytest.mark.parametrize(
    "text",
    [
        "python -m sglang.launch_server --model-path /data/models/Kimi-K2.5 --tp-size 8 --max-tokens 64",
        "--speculative-algorithm EAGLE3 --speculative-num-draft-tokens 4 --eos-token </s>",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "GPU-8f6ae7f3-9a1c-4d7e-b2a7-0a4e5b6c7d8e NVIDIA H200 141GB HBM3e",
        "the token 163533 decodes to 'chas'; <|im_end|> token: 163586",
        "wrong token: chas",
        "TOKENIZERS_PARALLELISM=false NCCL_ALGO=Ring",
        "the key is in /root/.or-key on llm",
        "HF_TOKEN_PATH=/root/.cache/token",
        "ssh://root@pve:22/ and http://127.0.0.1:8000/v1",
        "output tokens: 12000, accept length 2.31",
        "/root/.local/share/venv-3.11/lib/python3.11/site-packages/torch/nn/modules/module.py:1751",
        "key: hosts.llm.hw.gpus",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redactor().text(text) == text


def test_a_table_and_an_argument_list_are_understood() -> None:
    value = {
        "argv": ["serve", "--api-key", "hunter2", "--port", "8000", "--eos-token", "x"],
        "vars": {"HF_TOKEN": "hunter2", "NCCL_ALGO": "Ring", "MAX_TOKENS": "12"},
        "key": "hosts.llm.hw",
        "special_tokens": {"<|im_end|>": 163586},
        "token": "chas",
    }
    cleaner = redactor()
    clean: Any = cleaner.value(value)
    assert clean["argv"][2].startswith("«redacted:flag:") and clean["argv"][4] == "8000" and clean["argv"][6] == "x"
    assert clean["vars"]["HF_TOKEN"].startswith("«redacted:")
    assert clean["vars"]["NCCL_ALGO"] == "Ring" and clean["vars"]["MAX_TOKENS"] == "12"
    assert (clean["key"], clean["token"]) == ("hosts.llm.hw", "chas")
    assert clean["special_tokens"] == value["special_tokens"]
    assert cleaner.count == 2


def test_marks_show_equality_within_a_project_only() -> None:
    one, two, other = redactor(), redactor(), Redactor("another", known={})
    text = "--api-key hunter2"
    assert one.text(text) == two.text("--api-key hunter2") != other.text(text)
    assert one.text(text) != one.text("--api-key hunter3")


def test_known_values_are_found_anywhere_and_in_disguise() -> None:
    cleaner = redactor(KEY="p@ss/word+1234")
    for spelled in ("p@ss/word+1234", "p%40ss%2Fword%2B1234", "cEBzcy93b3JkKzEyMzQ="):
        assert spelled not in cleaner.text(f"prefix{spelled}suffix")


def test_redaction_is_idempotent() -> None:
    cleaner = redactor()
    once = cleaner.text(f"HF_TOKEN=hunter2 --api-key x9 Authorization: Bearer {GITHUB}")
    assert cleaner.text(once) == once


@given(st.text())
def test_redaction_never_raises(text: str) -> None:
    clean = redactor().text(text)
    assert isinstance(clean, str)
    if "«" not in clean and "\x1b" not in text:
        assert clean == text


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("OPENAI_API_KEY", True),
        ("PGPASSWORD", True),
        ("DB_PASSWORD", True),
        ("api-key", True),
        ("hf_token", True),
        ("password", True),
        ("MAX_TOKENS", False),
        ("special_tokens", False),
        ("eos_token", False),
        ("HF_TOKEN_PATH", False),
        ("key", False),
        ("KEYBOARD", False),
    ],
)
def test_names_that_hold_secrets(name: str, secret: bool) -> None:
    assert is_secret_name(name) is secret


def test_the_scanner_is_loaded_only_where_a_token_could_be() -> None:
    assert could_hold_token(f"x {GITHUB}")
    assert not could_hold_token("9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")
    code = """
import sys
from state.redact import Redactor
Redactor("k", known={}).value({"argv": ["python", "-m", "x", "--api-key", "y"], "note": "a long line of prose " * 50})
sys.exit("kingfisher_sdk" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    "text",
    [
        "SHA256:1fX0abcdEFGH2345ijklMNOP6789qrstUVWXyz01234",
        "task_identifier disk-free-bytes risk_assessment",
        "LlamaForCausalLMEagle3 midlayer.self_attn.q_proj.weight",
        "/tmp/demo-rig/hosts/llm/home/eagle3/train/checkpoint-000412/model.safetensors",
        "server-eagle3-1a2b3c4d-1 generate-0f0f0f0f-12",
        "HuggingFaceTB/SmolLM2-135M-Instruct Intel(R) Xeon(R) Platinum 8488C",
        "6.1.0-rigbook-amd64 2.13.0+cpu 2026.11.19.post1",
    ],
)
def test_what_a_rig_says_all_the_time_does_not_load_the_scanner(text: str) -> None:
    assert not could_hold_token(text)


def test_the_journal_holds_no_secret(tmp_path: Any) -> None:
    path = tmp_path / "journal.db"
    with Journal.open(path) as journal:
        journal.append(
            NoteAdded(text=f"my token is {GITHUB}"),
            RunStarted(run="r1", what="server", name="x", settings={"argv": ["--api-key", "hunter2"]}),
            FactObserved(
                key="hosts.a.sw.env", value={"HF_TOKEN": "hunter2"}, source=Source(command="env HF_TOKEN=hunter2")
            ),
        )
        shown = [record.body for record in journal.records()]
    for file in tmp_path.iterdir():
        content = file.read_bytes()
        assert b"hunter2" not in content and GITHUB.encode() not in content
    assert shown[0] is not None and "«redacted:" in shown[0]["text"]
