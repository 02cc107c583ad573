"""The patch that makes SGLang write hidden states: what it writes, what it refuses, and how it gets in and out."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.sglang_patches import capture, manage
from pipeline.sglang_patches.manage import HERE, Patch, PatchError, patched, read_patch, versions

GOOD = {
    "disable_radix_cache": True, "chunked_prefill_size": -1, "disable_cuda_graph": True, "speculative_algorithm": None,
    "pp_size": 1, "enable_dp_attention": False, "enable_mixed_chunk": False, "enable_two_batch_overlap": False,
    "attn_cp_size": 1,
}  # fmt: skip


def batch(rids: list[str] | None, lengths: list[int], prefixes: list[int] | None = None, padding: int = 0) -> Any:
    """The fields of SGLang's ForwardBatch that the capture reads."""
    ids = torch.arange(100, 100 + sum(lengths) + padding)
    return SimpleNamespace(
        rids=rids, input_ids=ids, extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=prefixes or [0] * len(lengths),
        forward_mode=SimpleNamespace(is_extend=lambda: True),
    )  # fmt: skip


def states(tokens: int, seed: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
    made = torch.randn(4, tokens, 6, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return [made[0], made[1], made[2]], made[3]


class Model:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.layers = layers


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> capture.Capture:
    monkeypatch.setenv(capture.FOLDER, str(tmp_path / "states"))
    monkeypatch.setenv(capture.LAYERS, "5,1,3")
    monkeypatch.setattr(capture, "_capture", None)
    monkeypatch.setattr(capture, "FLOOR", 1)
    model = Model()
    capture.start(model, SimpleNamespace(**GOOD, model_path="/m"), 0)
    assert model.layers == [1, 3, 5] and capture._capture is not None
    assert json.loads((tmp_path / "states/capture.json").read_text())["layers"] == [1, 3, 5]
    return capture._capture


def test_each_request_leaves_its_own_states_and_nobody_elses(started: capture.Capture) -> None:
    aux, final = states(3 + 4 + 2 + 5)  # five of padding
    capture.take(final, batch(["rigbook-a", "somebody", "rigbook-b"], [3, 4, 2], padding=5), aux)
    started.close()
    assert sorted(p.name for p in started.folder.iterdir()) == [
        "capture.json", "rigbook-a.safetensors", "rigbook-b.safetensors",
    ]  # fmt: skip
    for rid, at in (("rigbook-a", slice(0, 3)), ("rigbook-b", slice(7, 9))):
        got = load_file(started.folder / f"{rid}.safetensors")
        assert got["tokens"].tolist() == list(range(100 + at.start, 100 + at.stop))
        assert got["states"].dtype == torch.bfloat16
        assert torch.equal(got["states"], torch.stack([*aux, final])[:, at])


def test_states_outlive_the_tensors_they_were_taken_from(started: capture.Capture) -> None:
    """The model reuses its buffers at once; what was taken must not change with them."""
    aux, final = states(6)
    wanted = torch.stack([*aux, final]).clone()
    capture.take(final, batch(["rigbook-a"], [6]), aux)
    for t in (*aux, final):
        t.zero_()
    started.close()
    assert torch.equal(load_file(started.folder / "rigbook-a.safetensors")["states"], wanted)


@pytest.mark.parametrize(
    ("prefixes", "drop", "cut", "why"),
    [([2], 0, 0, "in a cache"), ([0], 1, 0, "captured 2 layers, expected 3"), ([0], 0, 2, "holds 4 of them")],
)
def test_states_that_are_not_the_whole_request_become_an_error(
    started: capture.Capture, prefixes: list[int], drop: int, cut: int, why: str
) -> None:
    aux, final = states(6)
    aux, final = [a[cut:] for a in aux[drop:]], final[cut:]
    capture.take(final, batch(["rigbook-a"], [6], prefixes), aux)
    started.close()
    assert why in (started.folder / "rigbook-a.error").read_text()
    assert not (started.folder / "rigbook-a.safetensors").exists()


def test_a_full_disk_becomes_an_error_and_the_server_goes_on(
    started: capture.Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture, "FLOOR", 1 << 60)
    aux, final = states(6)
    capture.take(final, batch(["rigbook-a"], [6]), aux)
    started.close()
    assert "are free" in (started.folder / "rigbook-a.error").read_text()


def test_more_than_may_wait_passes_in_turn(started: capture.Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "WAITING", 1)  # each waits until the one before is on disk
    aux, final = states(20)
    capture.take(final, batch([f"rigbook-{i}" for i in range(20)], [1] * 20), aux)
    started.close()
    assert len(list(started.folder.glob("*.safetensors"))) == 20 and started.waiting == 0


def test_warm_up_and_decoding_leave_nothing(started: capture.Capture) -> None:
    aux, final = states(3)
    capture.take(final, batch(None, [3]), aux)
    decoding = batch(["rigbook-a"], [3])
    decoding.forward_mode.is_extend = lambda: False
    capture.take(final, decoding, aux)
    started.close()
    assert [p.name for p in started.folder.iterdir()] == ["capture.json"]


def test_without_the_variables_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(capture.FOLDER, raising=False)
    monkeypatch.setattr(capture, "_capture", None)
    capture.start(object(), SimpleNamespace(), 0)
    capture.take(torch.zeros(1, 2), batch(["rigbook-a"], [1]), None)
    assert capture._capture is None


@pytest.mark.parametrize("key", list(GOOD))
def test_a_server_whose_states_would_be_wrong_does_not_start(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(capture.FOLDER, str(tmp_path))
    monkeypatch.setenv(capture.LAYERS, "1")
    other = {"disable_radix_cache": False, "chunked_prefill_size": 8192, "speculative_algorithm": "EAGLE3"}
    bad = GOOD | {key: other.get(key, 2 if isinstance(GOOD[key], int) and GOOD[key] == 1 else not GOOD[key])}
    assert capture.unfit(GOOD) == [] and len(capture.unfit(bad)) == 1
    with pytest.raises(RuntimeError, match="hidden states need"):
        capture.start(Model(), SimpleNamespace(**bad, model_path="/m"), 0)


def test_other_ranks_capture_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(capture.FOLDER, str(tmp_path / "states"))
    monkeypatch.setenv(capture.LAYERS, "1,3")
    monkeypatch.setattr(capture, "_capture", None)
    model = Model()
    capture.start(model, SimpleNamespace(**GOOD, model_path="/m"), 1)
    assert model.layers == [1, 3] and capture._capture is None and not (tmp_path / "states").exists()


# --- in and out -----------------------------------------------------------------------------------------------------

BEFORE = {"srt/a.py": "one\ntwo\nthree\nfour\n", "srt/b.py": "x = 1\ny = 2\n"}
AFTER = {"srt/a.py": "one\ntwo\n2.5\nthree\nfour\n", "srt/b.py": "x = 1\ny = 3\n"}
HUNKS = {
    "srt/a.py": ["@@ -2,2 +2,3 @@", " two", "+2.5", " three"],
    "srt/b.py": ["@@ -1,2 +1,2 @@", " x = 1", "-y = 2", "+y = 3"],
}


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in BEFORE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def patch() -> Patch:
    files = {name: (sha(BEFORE[name]), sha(AFTER[name])) for name in BEFORE}
    return Patch("1.0", files, HUNKS, {"srt/new.py": b"z = 1\n"})


def tree(package: Path) -> dict[str, str]:
    return {str(p.relative_to(package)): p.read_text() for p in sorted(package.rglob("*")) if p.is_file()}


def test_applying_and_reverting_leave_what_was_there(package: Path, patch: Patch) -> None:
    (package / "srt/a.py").chmod(0o640)
    assert manage.state(package, patch) == "clean"
    assert manage.apply(package, patch) and not manage.apply(package, patch)
    assert manage.state(package, patch) == "applied"
    there = tree(package)
    assert {name: there[name] for name in AFTER} == AFTER and there["srt/new.py"] == "z = 1\n"
    assert (package / "srt/a.py").stat().st_mode & 0o777 == 0o640
    assert manage.revert(package, patch) and not manage.revert(package, patch)
    assert tree(package) == BEFORE


def test_a_file_that_somebody_changed_is_refused_before_anything_is_written(package: Path, patch: Patch) -> None:
    (package / "srt/b.py").write_text("x = 1\ny = 2  # mine\n")
    before = tree(package)
    for act in (manage.apply, manage.revert, manage.state):
        with pytest.raises(PatchError, match="somebody changed it"):
            act(package, patch)
    assert tree(package) == before


@pytest.mark.parametrize("killed_after", range(1, 5))
@pytest.mark.parametrize("finish", ["apply", "revert"])
def test_killed_at_any_write_it_can_be_finished_in_both_directions(
    package: Path, patch: Patch, monkeypatch: pytest.MonkeyPatch, killed_after: int, finish: str
) -> None:
    honest, count = manage.write, 0

    def dying(path: Path, data: bytes) -> None:
        nonlocal count
        if count == killed_after:
            raise KeyboardInterrupt
        count += 1
        honest(path, data)

    monkeypatch.setattr(manage, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        manage.apply(package, patch)
    monkeypatch.setattr(manage, "write", honest)
    assert manage.state(package, patch) == "half"
    getattr(manage, finish)(package, patch)
    if finish == "apply":
        assert manage.state(package, patch) == "applied"
        manage.revert(package, patch)
    assert tree(package) == BEFORE


def test_a_hunk_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PatchError, match=r"line 2 of a\.py"):
        patched("one\nother\nthree\nfour\n", HUNKS["srt/a.py"], "a.py")


def test_another_version_is_refused(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert manage.main(["apply", "--package", str(package), "--version", "0.5.99"]) == 3
    assert "no patch for SGLang 0.5.99" in capsys.readouterr().out
    assert tree(package) == BEFORE


def test_our_patches_are_whole() -> None:
    """Each names the same files as its diff, calls what the added module has, and adds that module as it is."""
    assert versions() == ["0.5.15.post1"]
    for version in versions():
        ours = read_patch(version)
        assert ours.files.keys() == ours.hunks.keys()
        assert ours.adds == {"srt/rigbook_capture.py": (HERE / "capture.py").read_bytes()}
        added = "\n".join(line for hunks in ours.hunks.values() for line in hunks if line.startswith("+"))
        assert "rigbook_capture.take(hidden_states, logits_metadata, aux_hidden_states)" in added
        assert "rigbook_capture.start(self.model, self.server_args, self.tp_rank)" in added
