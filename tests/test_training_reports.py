"""What users of other trainers and engines reported about drafters: each of the 45 has a test, here or elsewhere under
`@pytest.mark.training_report(number)`, or stands in the list of what a pipeline cannot see, with the reason.
"""

from __future__ import annotations

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pipeline.demo_project import project_file
from pipeline.eagle3.shards import read_shard, shard_bytes
from pipeline.recipe import BY_NAME, spec
from pipeline.stages.hidden import is_whole
from pipeline.stages.mix import interleaving
from pipeline.stages.protocol import Refused, write_jsonl
from state import benchmarks
from state.benchmarks import Arm, Round
from state.project import loads
from tests.lab.stage_run import rows, run_stage
from tests.lab.tiny_model import CHAT_TEMPLATE, make_tiny_model
from tests.lab.tiny_rows import rows as tiny_rows

# number -> (where it was reported, what was seen, what is right)
REPORTS: dict[int, tuple[str, str, str]] = {
    1: ("sglang #21272, #25673", "accept length exactly 1.00", "EAGLE with an EAGLE-3 drafter is refused"),
    2: ("sglang #36528", "a crash after two loads", "a profile that speculates names its drafter"),
    3: ("sglang #27908, #27829", "HTTP 200, accept length 1.00", "a head that is missing is a finding"),
    4: ("sglang #25454", "0.1 of accept length lost", "layers are physical outputs; odd conventions are a finding"),
    5: ("vllm #43671, #46788, TorchSpec #87", "states off by one", "captures and widths agree with config and target"),
    6: ("vllm #38111, speculators #610", "a flag is ignored", "flags against what the engine's version reads"),
    7: ("TorchSpec #63", "layers.0.* skipped in silence", "names against what the engine's version knows"),
    8: ("vllm #18909, Automodel #2447", "d2t never applied", "d2t and t2d are there, in range, and agree"),
    9: ("TorchSpec #38, #39", "random embeddings exported", "embeddings in the file are the target's"),
    10: ("SpecForge #271, #249, sglang #3574", "collapse beyond 2,048", "positions reach as far as what is served"),
    11: ("SpecForge #265, #702, vllm #51092", "rope lost", "rope is in both schemas and is the one trained with"),
    12: ("SpecForge #140", "shape error on load", "tie_word_embeddings is false"),
    13: ("vllm-ascend #6612, QuaRot #5974", "a drafter of other numerics", "another target is not the same benchmark"),
    14: ("speculators #346, #943, #794", "thoughts or another span in the loss", "the marked span is the response"),
    15: ("marin #7237, liquid-finetune #37", "an empty mask trains", "it is refused"),
    16: ("NemoClaw #8878", "thoughts missing from the data", "both names are read; tokens without text are an error"),
    17: ("speculators #835", "35 % of rows cut, 0 reported", "finish reasons are counted"),
    18: ("tinker-cookbook #784, TRT-LLM #14416", "wrong ids of special tokens", "declared ids must hold"),
    19: ("SpecForge #76, speculators #1081", "a map of another size", "coverage is told, maps belong to their data"),
    20: ("SpecForge #498, #720, #738", "rows vanish", "in = out + errors + skipped"),
    21: ("speculators #644", "merged data not shuffled", "the order is looked at, not believed"),
    22: ("open-instruct #1497", "a stale cache of prompts", "template, tokenizer and settings are in the key"),
    23: ("speculators #907, #801", "one row ends the run", "it is set aside, the others go on"),
    24: ("sglang #8066, #26163", "states cut short, no error", "a state for every token, or no row"),
    25: ("speculators #279, SpecForge #104", "wrong or NaN states in a batch", "finite, and some computed again alone"),
    26: ("SpecForge #426, EAGLE #30", "terabytes nobody foresaw", "the sum is known before the first state"),
    27: ("Automodel #2478", "shards of two configurations", "a changed configuration is refused by name"),
    28: ("speculators #566, #948, #743", "half-written files are read", "a file that is there is whole"),
    29: ("SpecForge #466, #326, AngelSlim #288", "out of memory", "a step can be worked in pieces"),
    30: ("SpecForge #99, #96", "NCCL timeout while rank 0 tokenizes", "training reads what is tokenised already"),
    31: ("TorchSpec #32, #33, speculators #867", "it hangs", "a heartbeat that collects stacks; equal work for all"),
    32: ("SpecForge #243, #587, TorchSpec #43", "a resume that begins anew", "the same curve to the bit"),
    33: ("SpecForge checkpoint.py", "a resume deletes newer checkpoints", "newer ones are not deleted"),
    34: ("SpecForge #492, BaldEagle #17", "90 % accuracy, accept length 1.2", "prediction against the server"),
    35: (
        "speculators #818, #759, #805",
        "wrong tokens in training-time test",
        "losses are those of decoding slot by slot",
    ),
    36: ("sglang #23627, #31645", "orphans hold GPU memory", "the whole tree ends, and that is proved"),
    37: ("sglang #22779", "a restart that hangs", "the port is free before the next start"),
    38: ("sglang #6624, #35884", "healthy while dead", ""),
    39: ("sglang #28569, #25512", "illegal access in tree mode", ""),
    40: ("sglang #34942, #34943", "a profile that never stops", ""),
    41: ("sglang #34743, #16310", "accept length of one rank", "raw counters, over all rounds"),
    42: ("sglang #5274, #6949", "slower than without", "always beside a baseline, with the break-even"),
    43: ("sglang #36452", "less room for tokens", ""),
    44: ("sglang #31214, #32922", "greedy on ROCm", ""),
    45: ("SpecForge #274, #787, #876", "drift between trainer and engine", "the trainer imports no engine"),
}
SERVING = {
    38: "what a server's /health says belongs to the server's own watch; no stage relies on it",
    39: "a fault of the engine's kernels while it serves; the reports are for the reader of its log",
    40: "profiling a server is no stage of the pipeline",
    43: "the engine sizes its KV memory; it is told by the server, not by the drafter",
    44: "no ROCm here: rigbook drives NVIDIA machines",
}


@cache
def marked() -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for path in sorted(Path(__file__).parent.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.training_report":
                    (number,) = mark.args
                    assert isinstance(number, ast.Constant) and number.value in REPORTS, f"{path}: {ast.unparse(mark)}"
                    found.setdefault(number.value, []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("number", REPORTS)
def test_each_report_is_accounted_for(number: int) -> None:
    source, seen, right = REPORTS[number]
    assert bool(marked().get(number)) != (number in SERVING), (
        f"report {number} ({source}: {seen}) has no test that holds: {right or 'why not'}"
    )


def test_the_table_is_whole() -> None:
    assert list(REPORTS) == list(range(1, 46))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model")


def tokenize(tmp_path: Path, model: Path, given: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    write_jsonl(tmp_path / "given.jsonl", given)
    return run_stage("tokenize", tmp_path / "out", {"rows": tmp_path / "given.jsonl", "model": model}, settings)


def row(id: str, *roles: str) -> dict[str, Any]:
    messages = [{"role": role, "content": "say it"} for role in roles or ("user",)]
    return {"id": id, "source": "s", "messages": messages, "response": "it", "finish_reason": "stop"}


@pytest.mark.training_report(18)
@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"<|im_start|>": 1, "<|im_end|>": 2}, None),
        ({"<|im_end|>": 1}, "the tokenizer reads [2]"),
        ({"<think>": 7}, "the tokenizer reads"),  # spelt out, byte by byte
    ],
)
def test_a_special_token_of_another_id_is_refused(
    tmp_path: Path, model: Path, declared: dict[str, int], says: str | None
) -> None:
    if says is None:
        tokenize(tmp_path, model, [row("a")], special_tokens=declared)
        return
    with pytest.raises(Refused, match="declared") as caught:
        tokenize(tmp_path, model, [row("a")], special_tokens=declared)
    assert caught.value.id == "tokenize.special" and says in str(caught.value)


@pytest.mark.training_report(18)
def test_two_tokens_that_look_alike_are_told_apart(tmp_path: Path, model: Path) -> None:
    """<|im_end|> twice in a tokenizer: text is read as one of them, and the declared one is the other."""
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    twin = next(one for one in tokenizer["added_tokens"] if one["id"] == 0)
    twin["content"] = "<|im_end|>"
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(Refused, match=r"declared as 0, the tokenizer reads"):
        tokenize(tmp_path, model, [row("a")], special_tokens={"<|im_end|>": 0})


@pytest.mark.training_report(18)
def test_what_the_project_declares_reaches_the_stage(tmp_path: Path) -> None:
    text = project_file(tmp_path, {"baseline": 4001, "eagle3": 4002})
    declared = spec(loads(text, tmp_path), BY_NAME["tokenize"])["settings"]["special_tokens"]
    assert declared == {"<|im_start|>": 1, "<|im_end|>": 2}


@pytest.mark.training_report(23)
def test_a_row_that_the_template_rejects_does_not_end_the_run(tmp_path: Path, model: Path) -> None:
    path = model / "tokenizer_config.json"
    strict = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('unknown role ' + m.role) }}{% endif %}{% endfor %}"
    )
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": strict + CHAT_TEMPLATE}))
    given = [row(f"r{i}") for i in range(60)]
    result = tokenize(tmp_path, model, [*given[:30], row("odd", "narrator"), *given[30:]])
    assert result["rows"] == {"in": 61, "out": 60, "errors": 1, "skipped": 0}
    (bad,) = rows(tmp_path / "out/errors.jsonl")
    assert bad["id"] == "odd" and "unknown role narrator" in bad["reason"]


@pytest.mark.training_report(22)
@pytest.mark.training_report(19)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_changed_template_or_tokenizer_is_another_configuration(tmp_path: Path, model: Path, file: str) -> None:
    tokenize(tmp_path, model, [row("a")])
    path = model / file
    path.write_text(path.read_text().replace('"', ' "', 1))
    with pytest.raises(Refused) as caught:
        tokenize(tmp_path, model, [row("a")])
    assert caught.value.id == "stage.changed" and "inputs.model" in str(caught.value)


@pytest.mark.training_report(21)
def test_sources_that_stand_one_after_the_other_are_refused(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mix(out: str) -> dict[str, Any]:
        given = [
            {"id": f"r{i}", "source": "ab"[i >= 100], "texts": [f"p {i * 7919}", f"{i}"]}
            | {"input_ids": [5, 9 + i], "loss_mask": [0, 1]}
            for i in range(200)
        ]
        write_jsonl(tmp_path / "rows.jsonl", given)
        held = {"id": "h", "messages": [{"role": "user", "content": "other"}], "response": "words"}
        write_jsonl(tmp_path / "held.jsonl", [held])
        inputs = {name: tmp_path / "held.jsonl" for name in ("held_self", "held_people")}
        return run_stage("mix", tmp_path / out, {"rows": tmp_path / "rows.jsonl", "model": model, **inputs})

    told = mix("good")
    assert told["source_changes_by_chance"] == pytest.approx(100)
    assert 70 < told["source_changes"] < 130
    monkeypatch.setattr("random.Random.shuffle", lambda self, rows: None)  # the result is discarded
    with pytest.raises(Refused, match="changes 1 times") as caught:
        mix("bad")
    assert caught.value.id == "mix.order"


def test_interleaving_is_counted_and_expected_right() -> None:
    assert interleaving(["a"]) == (0, 0.0)
    assert interleaving(["a", "a", "a"]) == (0, 0.0)
    assert interleaving(["a", "b"]) == (1, 1.0)
    changes, expected = interleaving(["a", "b", "a"])
    # The orders aab, aba, baa have 1, 2 and 1 changes.
    assert changes == 2 and expected == pytest.approx(4 / 3)


@pytest.mark.training_report(24)
@pytest.mark.parametrize("tensor", ["aux", "last", "tokens", "mask"])
def test_a_row_with_fewer_states_than_tokens_is_not_taken(tmp_path: Path, tensor: str) -> None:
    made = tiny_rows()
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(shard_bytes(made))
    ids = [one.id for one in made]
    assert is_whole(path, ids)
    tensors = load_file(path)
    tensors[tensor] = tensors[tensor][:-1].clone()
    save_file(tensors, path, metadata={"ids": json.dumps(ids)})
    with pytest.raises(ValueError, match="tokens"):
        read_shard(path)
    assert not is_whole(path, ids)


@pytest.mark.training_report(30)
def test_training_reads_only_what_is_tokenised_and_extracted_already() -> None:
    assert not {"generate", "prompts", "tokenize", "mix"} & {folder for folder, _ in BY_NAME["train"].inputs.values()}


@pytest.mark.training_report(34)
@pytest.mark.parametrize(
    ("accepted", "steps", "predicted", "told"),
    [
        (1500, 1000, 2.5, False),
        (1800, 1000, 2.5, False),  # 2.8: 12 % above
        (200, 1000, 2.5, True),  # 1.2
        (2500, 1000, 2.5, True),  # 3.5: too good is another text
        (20, 100, 2.5, False),  # too few steps to say
    ],
)
def test_a_server_far_from_the_prediction_is_told(accepted: int, steps: int, predicted: float, told: bool) -> None:
    chain = {"algorithm": "EAGLE3", "steps": 3, "topk": 1, "draft_tokens": 4}
    arm = Arm(profile="eagle3", speculative=chain, rounds=[Round(verify_steps=steps, accepted_drafts=accepted)])
    gap = benchmarks.prediction_gap(arm, predicted, 3)
    assert (gap is not None) == told
    if gap is not None:
        assert f"{1 + accepted / steps:.2f}" in gap and "2.50" in gap
    assert benchmarks.prediction_gap(arm, predicted, 5) is None, "another number of steps is another prediction"
    tree = Arm(profile="eagle3", speculative=chain | {"topk": 4}, rounds=arm.rounds)
    assert benchmarks.prediction_gap(tree, predicted, 3) is None


@pytest.mark.training_report(45)
def test_no_stage_and_no_part_of_the_drafter_imports_an_engine_or_another_trainer() -> None:
    foreign = {"sglang", "vllm", "specforge", "speculators"}
    root = Path(__file__).parents[1] / "pipeline"
    for path in sorted([*(root / "stages").rglob("*.py"), *(root / "eagle3").rglob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = {node.module.partition(".")[0]}
            else:
                continue
            assert not names & foreign, f"{path.name}:{node.lineno} imports {names & foreign}"
