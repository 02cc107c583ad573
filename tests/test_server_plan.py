"""The command of a profile, and what is refused before a model is loaded."""

import shlex
from pathlib import Path

import pytest

from pipeline.demo_project import project_file
from pipeline.server import plan
from state.errors import RigbookError
from state.project import Project, loads


def project(tmp_path: Path, more: str = "") -> Project:
    return loads(project_file(tmp_path, {"baseline": 4001, "eagle3": 4002}) + more, tmp_path)


def test_flags_are_sglangs_spelled_in_full(tmp_path: Path) -> None:
    argv = plan(project(tmp_path), "eagle3").argv
    assert argv[1:3] == ["-m", "pipeline.stages.reference_engine"]
    for flag, value in {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-num-steps": "3",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "4",
        "--port": "4002",
        "--dtype": "bfloat16",
    }.items():
        assert argv[argv.index(flag) + 1] == value
    assert "--speculative-algorithm" not in plan(project(tmp_path), "baseline").argv


def test_true_is_a_bare_flag_and_false_is_none(tmp_path: Path) -> None:
    more = """
[profiles.big]
extends = "baseline"
engine = "sglang"
port = 4003
args = { disable-custom-all-reduce = true, enable-metrics = false, tp-size = 8 }
vars = { NCCL_PROTO = "LL" }
"""
    big = plan(project(tmp_path, more), "big")
    assert big.argv[1:3] == ["-m", "sglang.launch_server"]
    assert "--disable-custom-all-reduce" in big.argv and "--enable-metrics" not in big.argv
    assert big.argv[big.argv.index("--tp-size") + 1] == "8"
    assert shlex.split(big.command)[0] == "NCCL_PROTO=LL"


@pytest.mark.parametrize(
    ("profile", "id"),
    [
        ('speculative = { algorithm = "EAGLE3", steps = 2, draft_tokens = 3 }', "serve.no-draft"),
        ('draft = "/d"\nspeculative = { algorithm = "EAGLE3", steps = 2, draft_tokens = 5 }', "serve.draft-tokens"),
        ('draft = "/d"\nspeculative = { algorithm = "EAGLE", steps = 2, draft_tokens = 3 }', "serve.eagle-flag"),
        ('args = { kv-cache-dtype = "fp8_e5m2" }', "rules.forbidden"),
        ('args = { kv_cache_dtype = "FP8_E4M3" }', "rules.forbidden"),
        ('engine = "vllm"', "server.engine"),
    ],
)
@pytest.mark.training_report(1)
@pytest.mark.training_report(2)
def test_known_silent_failures_are_refused(tmp_path: Path, profile: str, id: str) -> None:
    more = f'\n[profiles.bad]\nextends = "baseline"\nport = 4003\n{profile}\n'
    with pytest.raises(RigbookError) as caught:
        plan(project(tmp_path, more), "bad")
    assert caught.value.id == id


def test_an_unknown_profile_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RigbookError) as caught:
        plan(project(tmp_path), "eagle")
    assert "eagle3" in str(caught.value) and caught.value.exit_code == 2


def test_a_rule_that_cannot_be_read_is_an_error_not_a_rule_without_effect(tmp_path: Path) -> None:
    with pytest.raises(RigbookError) as caught:
        plan(project(tmp_path, '\n[[rules]]\nforbid = "fp8"\nbecause = "x"\n'), "baseline")
    assert caught.value.id == "rules.form" and caught.value.exit_code == 2


def test_what_a_rule_allows_starts(tmp_path: Path) -> None:
    more = '\n[profiles.fine]\nextends = "baseline"\nport = 4003\nargs = { kv-cache-dtype = "bfloat16" }\n'
    assert "--kv-cache-dtype" in plan(project(tmp_path, more), "fine").argv
