"""Samples of tokenised rows as a person sees them: what counts is marked, and no text drives the terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stages.protocol import write_jsonl
from state.errors import USAGE
from tests.lab.stage_run import rows, run_stage
from tests.lab.tiny_model import make_tiny_model
from tests.test_estimate import RIG
from tests.test_rig_commands import rigbook
from tui.cli.preview import MASKED, PLAIN, sample_text


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A project whose `tokenize` has run."""
    (tmp_path / "rigbook.toml").write_text(RIG.format(root=tmp_path))
    model = make_tiny_model(tmp_path / "model")
    messages = [{"role": "user", "content": "say it"}]
    given = [
        {"id": f"p{i}", "source": "self", "messages": messages, "response": text, "finish_reason": "stop"}
        for i, text in enumerate(["hello there", "line one\nline two", "odd \x1b[31m one"])
    ]
    write_jsonl(tmp_path / "given.jsonl", given)
    (tmp_path / "eagle3").mkdir()
    run_stage("tokenize", tmp_path / "eagle3/tokenize", {"rows": tmp_path / "given.jsonl", "model": model})
    return tmp_path


@pytest.mark.training_report(14)
def test_a_preview_marks_exactly_what_counts_for_the_loss(made: Path) -> None:
    text = rigbook(made, "run", "preview", "2").stdout.decode()
    assert text.count("---") == 2
    span = text[text.index("⟦") + 1 : text.index("⟧")]
    assert span == "hello there<|im_end|>"
    assert "<|im_start|>user\nsay it<|im_end|>" in text and "⟦line one\nline two<|im_end|>⟧" in text
    told = json.loads(rigbook(made, "--json", "run", "preview").stdout)
    assert [row["id"] for row in told] == ["p0", "p1", "p2"]
    tokens = rows(made / "eagle3/tokenize/rows.jsonl")
    assert [[mask for _, mask in row["tokens"]] for row in told] == [row["loss_mask"] for row in tokens]


def test_on_a_terminal_the_span_is_coloured_and_foreign_colours_are_not(made: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tui.cli.main", "-C", str(made), "run", "preview"]
    done = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=subprocess.PIPE)
    os.close(slave)
    data = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        data += block
    os.close(master)
    assert done.wait(60) == 0, done.stderr and done.stderr.read()
    text = data.decode()
    assert f"{MASKED}hello{PLAIN}" in text or MASKED + "h" + PLAIN in text
    assert "⟦" not in text and "\x1b[31m" not in text


def test_a_line_break_inside_the_span_does_not_paint_the_line(made: Path) -> None:
    shown = sample_text({"id": "a", "source": "s", "tokens": [["x", 0], ["a\nb", 1], ["y", 0]]}, colour=True)
    assert shown.endswith(f"x{MASKED}a{PLAIN}\n{MASKED}b{PLAIN}y") and "33% of the tokens" in shown


def test_without_samples_it_says_what_to_run(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text(RIG.format(root=tmp_path))
    done = rigbook(tmp_path, "run", "preview")
    assert done.returncode == USAGE and b"rigbook run tokenize" in done.stderr
    assert rigbook(tmp_path, "run", "preview", "many").returncode == USAGE
