"""Hidden states from a server: the rows' own, or a refusal. The server is a stand-in around the real capture module."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.eagle3.shards import read_index, read_shards
from pipeline.sglang_patches import capture
from pipeline.stages import hidden, hidden_server
from pipeline.stages.protocol import Refused, write_jsonl
from tests.gpu import hidden_sglang
from tests.lab.capture_server import CaptureServer, serving
from tests.lab.stage_run import run_stage
from tests.lab.tiny_model import make_tiny_model

LAYERS = [1, 3, 4]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    monkeypatch.setattr(hidden, "SHARD_BYTES", (4 * 20 * 389, 1 << 30))
    monkeypatch.setattr(capture, "FLOOR", 1)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(12):
        length = int(torch.randint(6, 30, (1,), generator=generator))
        ids = torch.randint(3, 384, (length,), generator=generator).tolist()
        rows.append({"id": f"r{i}", "input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4)})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    return {"rows": tmp_path / "rows.jsonl", "model": make_tiny_model(tmp_path / "model")}


@pytest.fixture
def server(tmp_path: Path, inputs: dict[str, Path]) -> CaptureServer:
    return CaptureServer(inputs["model"], tmp_path / "states", LAYERS)


@pytest.fixture
def url(server: CaptureServer) -> Iterator[str]:
    with serving(server) as url:
        yield url


def run(tmp_path: Path, inputs: dict[str, Path], url: str, out: str = "out", **more: Any) -> dict[str, Any]:
    settings = {"how": "sglang", "dtype": "float32", "base_url": url, "folder": str(tmp_path / "states"), **more}
    return run_stage("hidden", tmp_path / out, inputs, settings)


def test_states_from_a_server_are_those_of_our_own_decoder(
    tmp_path: Path, inputs: dict[str, Path], server: CaptureServer, url: str
) -> None:
    result = run(tmp_path, inputs, url)
    run_stage("hidden", tmp_path / "torch", inputs, {"dtype": "float32"})
    assert max(server.passes) > 1, "rows were never computed side by side"
    index, own = read_index(tmp_path / "out"), read_index(tmp_path / "torch")
    assert index.source == "sglang 0.5.15.post1" and index.layers == own.layers == (1, 3, 4)
    assert index.target["model"] == own.target["model"] and index.target["tp_size"] == 1
    assert (index.rows, index.tokens, index.response_tokens) == (own.rows, own.tokens, own.response_tokens)
    assert result["worst_spot_difference"] < 1e-3
    for theirs, ours in zip(read_shards(tmp_path / "out"), read_shards(tmp_path / "torch"), strict=True):
        assert theirs.id == ours.id and torch.equal(theirs.tokens, ours.tokens) and torch.equal(theirs.mask, ours.mask)
        torch.testing.assert_close(theirs.aux.float(), ours.aux.float(), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(theirs.last.float(), ours.last.float(), rtol=1e-2, atol=1e-2)
    assert [path.name for path in (tmp_path / "states").iterdir()] == ["capture.json"], "states were left lying"


def swapped_rows(batch: Any) -> None:
    batch.ids = batch.ids.roll(1)


def cut(batch: Any) -> None:
    batch.lengths[0] -= 1


def in_cache(batch: Any) -> None:
    batch.prefixes[0] = 3


def a_layer_less(batch: Any) -> None:
    batch.aux.pop()


def not_finite(batch: Any) -> None:
    batch.final[0, 0] = float("nan")


def leaky(batch: Any) -> None:
    batch.final += len(batch.rids)  # depends on who else was computed at the same time


@pytest.mark.training_report(24)
@pytest.mark.training_report(25)
@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (swapped_rows, "the same tokens"),
        (cut, "asked for were"),
        (in_cache, "in a cache"),
        (a_layer_less, "captured 2 layers, expected 3"),
        (not_finite, "not finite"),
        (leaky, "something leaks"),
    ],
)
@pytest.mark.training_report(24)
def test_a_server_that_does_wrong_is_found_out(
    tmp_path: Path, inputs: dict[str, Path], server: CaptureServer, url: str, tamper: Callable[[Any], None], why: str
) -> None:
    server.tamper = tamper
    with pytest.raises(Refused, match=why):
        run(tmp_path, inputs, url)
    assert not (tmp_path / "out/index.json").exists()


@pytest.mark.training_report(24)
@pytest.mark.parametrize(
    ("key", "value"),
    [("disable_radix_cache", False), ("chunked_prefill_size", 8192), ("speculative_algorithm", "EAGLE3")],
)
@pytest.mark.training_report(24)
def test_a_server_whose_flags_cut_states_is_refused_before_it_is_asked(
    tmp_path: Path, inputs: dict[str, Path], server: CaptureServer, url: str, key: str, value: Any
) -> None:
    server.args[key] = value
    with pytest.raises(Refused, match="gives wrong states") as refused:
        run(tmp_path, inputs, url)
    assert refused.value.id == "hidden.server-flags" and server.passes == []


def test_a_server_without_the_patch_or_with_other_layers_is_refused(
    tmp_path: Path, inputs: dict[str, Path], server: CaptureServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Refused, match="RIGBOOK_HIDDEN_LAYERS=2,3,4"):
        run(tmp_path, inputs, url, layers=[2, 3, 4])
    server.args["model_path"] = "/another"
    with pytest.raises(Refused, match="of /another"):
        run(tmp_path, inputs, url, out="out2")
    (tmp_path / "states/capture.json").unlink()
    with pytest.raises(Refused, match=r"manage apply"):
        run(tmp_path, inputs, url, out="out3")
    (tmp_path / "states/capture.json").write_text(json.dumps({"layers": LAYERS, "model": "/another", "pid": 1}))
    monkeypatch.setattr(hidden_server, "LATE", 0.05)
    server.tamper = lambda batch: batch.rids.clear()  # it answers, and writes nothing
    with pytest.raises(Refused, match="did not come within"):
        run(tmp_path, inputs, url, out="out4")


def test_a_row_longer_than_the_servers_context_is_named(tmp_path: Path, inputs: dict[str, Path], url: str) -> None:
    write_jsonl(inputs["rows"], [{"id": "long", "input_ids": [5] * 201, "loss_mask": [1] * 201}])
    with pytest.raises(Refused, match=r"row long: .*longer than the context"):
        run(tmp_path, inputs, url)


def test_a_stage_that_goes_on_asks_only_for_what_is_missing(
    tmp_path: Path, inputs: dict[str, Path], server: CaptureServer, url: str
) -> None:
    assert run(tmp_path, inputs, url)["shards_written_now"] > 1
    asked = sum(server.passes)
    (tmp_path / "out/manifest.json").unlink()
    (tmp_path / "out/shard-00001.safetensors").unlink()
    assert run(tmp_path, inputs, url)["shards_written_now"] == 1
    assert sum(server.passes) - asked < asked / 2


@pytest.mark.parametrize("shift", [0, 1])
def test_the_comparison_for_a_real_gpu_names_a_shift_by_one(
    tmp_path: Path, inputs: dict[str, Path], server: CaptureServer, url: str, shift: int
) -> None:
    """tests/gpu/hidden_sglang.py on the CPU. The server says that it captures our layers, and may capture the next."""
    server.layers = [layer + shift for layer in LAYERS]
    argv = ["--model", str(inputs["model"]), "--url", url, "--folder", str(tmp_path / "states")]
    argv += [
        "--out",
        str(tmp_path / "compared"),
        "--rows",
        "6",
        "--longest",
        "40",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    assert hidden_sglang.main(argv) == shift
    table = json.loads((tmp_path / "compared/hidden_sglang.json").read_text())["table"]
    assert [line["closest_layer"] for line in table] == [*(str(layer + shift) for layer in LAYERS), "last"]
