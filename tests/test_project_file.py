"""rigbook.toml: what is right is read, what is wrong is told with file, line, key and the nearest valid name."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import to_builtins
from pydantic import ValidationError

from state.config_help import explain, schema
from state.errors import USAGE, RigbookError
from state.models import twin
from state.outline import read_outline
from state.project import Pipeline, Project, find, load, loads
from state.toml_positions import positions
from tests.lab.rig_journal import PROJECT

RICH = """\
[project]
name = "kimi"
instructions = ["one", "two"]

[hosts.pve]
kind = "proxmox"
ssh = "root@pve"
[hosts.llm]
kind = "lxc"
on = "pve"
vmid = 101

[envs.serve]
host = "llm"
python = "/root/ml-env/bin/python3"

[profiles.baseline]
env = "serve"
engine = "sglang"
port = 8000
args = { tp-size = 8, mem-fraction-static = 0.88, disable-custom-all-reduce = true, dtype = "auto" }
vars = { NCCL_ALGO = "Ring" }
[profiles.eagle3]
extends = "baseline"
args = { tp-size = 4 }
speculative = { algorithm = "EAGLE3", steps = 2, draft-tokens = 3 }
[profiles.longer]
extends = "eagle3"
speculative = { steps = 4, draft-tokens = 5 }

[secrets]
openrouter = { file = "/root/.or-key", host = "llm" }
"""


def problems(text: str) -> list[str]:
    """The lines of the error that reading `text` gives."""
    with pytest.raises(RigbookError) as raised:
        loads(text, Path("/nowhere"))
    assert raised.value.id == "project.invalid" and raised.value.exit_code == USAGE
    lines = [line.strip() for line in raised.value.message.splitlines()]
    return lines[1:] if len(lines) > 1 else lines


def line_of(needle: str, text: str = RICH) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if needle in line)


def test_a_whole_file_is_read() -> None:
    project = loads(PROJECT, Path("/nowhere"))
    assert project.project.name == "smol-eagle3"
    assert project.hosts["llm"].on == "pve" and project.hosts["llm"].played
    assert project.pipeline is not None and project.pipeline.train.ttt_steps == 3
    assert project.target is not None and project.target.special_tokens == {"<|im_end|>": 2}
    assert project.rules[0].forbid.startswith("args.kv-cache-dtype")


def test_profiles_extend_each_other_table_by_table() -> None:
    project = loads(RICH, Path("/nowhere"))
    longer = project.profile("longer")
    assert longer.port == 8000 and longer.vars == {"NCCL_ALGO": "Ring"}
    assert longer.args == {
        "tp-size": 4,
        "mem-fraction-static": 0.88,
        "disable-custom-all-reduce": True,
        "dtype": "auto",
    }
    assert longer.speculative is not None
    assert (longer.speculative.algorithm, longer.speculative.steps, longer.speculative.draft_tokens) == ("EAGLE3", 4, 5)
    assert project.profile("baseline").args["tp-size"] == 8
    assert project.profile("baseline").speculative is None


def test_types_of_arguments_survive() -> None:
    args = loads(RICH, Path("/nowhere")).profile("baseline").args
    assert args["disable-custom-all-reduce"] is True
    assert type(args["tp-size"]) is int and type(args["mem-fraction-static"]) is float


@pytest.mark.parametrize(
    ("old", "new", "key", "told"),
    [
        ("vmid = 101", "vmdi = 101", "hosts.llm.vmdi", "did you mean 'vmid'?"),
        ("port = 8000", 'port = "8000"', "profiles.baseline.port", "must be a whole number, not the text '8000'"),
        ('engine = "sglang"', 'engine = "sglan"', "profiles.baseline.engine", "did you mean 'sglang'?"),
        ('env = "serve"', 'env = "sreve"', "profiles.baseline.env", "no env named 'sreve'; did you mean 'serve'?"),
        ('host = "llm"\npy', 'host = "lmm"\npy', "envs.serve.host", "did you mean 'llm'?"),
        ("vmid = 101", "vmid = true", "hosts.llm.vmid", "must be a whole number"),
        ("port = 8000", "port = 80000", "profiles.baseline.port", "less than or equal to 65535"),
        (
            "draft-tokens = 3",
            "draft-tokns = 3",
            "profiles.eagle3.speculative.draft-tokns",
            "did you mean 'draft_tokens'?",
        ),
        ('instructions = ["one", "two"]', "instructions = 3", "project.instructions", "must be a list"),
        ('name = "kimi"', 'nmae = "kimi"', "project.nmae", "did you mean 'name'?"),
        ("tp-size = 8", "tp-size = [8]", "profiles.baseline.args.tp-size", "must be a text, a number or true/false"),
        ('extends = "baseline"', 'extends = "basline"', "profiles.eagle3.extends", "did you mean 'baseline'?"),
        ('file = "/root/.or-key", ', "", "secrets.openrouter", "say either file or env"),
        ("vmid = 101\n", "", "hosts.llm", "either ssh, or on and vmid"),
    ],
)
def test_a_mistake_is_told_with_line_and_key(old: str, new: str, key: str, told: str) -> None:
    assert old in RICH
    text = RICH.replace(old, new, 1)
    lines = [line for line in problems(text) if f": {key}: " in line and told in line]
    assert len(lines) == 1, problems(text)
    place = new.splitlines()[0] if new.strip() and new.splitlines()[0] in text else key.split(".")[-1]
    assert lines[0].startswith(f"rigbook.toml:{line_of(place, text)}: ")


def test_all_mistakes_are_told_at_once() -> None:
    text = RICH.replace("vmid", "vmdi").replace("8000", '"x"').replace('kind = "proxmox"', 'kind = "proxmix"')
    told = problems(text)
    assert sum("vmdi" in line for line in told) == 1
    assert sum("profiles.baseline.port" in line for line in told) == 1
    assert sum("proxmix" in line for line in told) == 1
    numbers = [int(line.split(":")[1]) for line in told]
    assert numbers == sorted(numbers)


def test_an_inherited_mistake_is_told_once_where_it_is_written() -> None:
    told = problems(RICH.replace("port = 8000", "port = 0"))
    assert len(told) == 1 and told[0].startswith(f"rigbook.toml:{line_of('port = 8000')}: profiles.baseline.port")


def test_a_circle_of_profiles_is_an_error() -> None:
    text = RICH.replace("[profiles.baseline]", '[profiles.baseline]\nextends = "longer"')
    assert any("cycle" in line and "baseline" in line for line in problems(text))


@pytest.mark.parametrize(
    ("text", "line"),
    [("[project]\nname = \n", 2), ("[project\nname = 'x'", 1), ("[project]\nname='x'\nname='y'\n", 3), ("a = '''", 1)],
)
def test_broken_toml_has_a_line(text: str, line: int) -> None:
    assert problems(text)[0].startswith(f"rigbook.toml:{line}: not valid TOML")


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "{a=" * 3000 + "1" + "}" * 3000, "9" * 5000])
def test_what_the_parser_chokes_on_is_told(tmp_path: Path, value: str) -> None:
    (tmp_path / "rigbook.toml").write_text(f"{RICH}\n[more]\nx = {value}\n")
    with pytest.raises(RigbookError, match="not valid TOML") as raised:
        load(tmp_path)
    assert raised.value.exit_code == USAGE
    assert "could not be read" in read_outline(tmp_path).problem


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text(RICH, encoding="utf-8-sig")
    assert load(tmp_path).project.name == read_outline(tmp_path).name == "kimi"


def test_hyphens_and_underscores_are_one_key() -> None:
    text = RICH.replace("draft-tokens", "draft_tokens")
    assert loads(text, Path("/x")).profile("longer") == loads(RICH, Path("/x")).profile("longer")


def test_missing_project_is_told(tmp_path: Path) -> None:
    with pytest.raises(RigbookError) as raised:
        find(tmp_path)
    assert (raised.value.id, raised.value.exit_code) == ("project.not-found", USAGE)


def test_the_project_is_found_from_below(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text(RICH)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert find(below) == tmp_path.resolve()
    assert load(find(below)).root == tmp_path.resolve()


def test_bytes_that_are_not_text_are_told(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_bytes(b"[project]\nname = '\xff'\n")
    with pytest.raises(RigbookError, match="UTF-8"):
        load(tmp_path)


def test_unknown_names_are_told_with_the_nearest() -> None:
    project = loads(RICH, Path("/nowhere"))
    with pytest.raises(RigbookError, match="did you mean 'eagle3'"):
        project.profile("eagel3")
    with pytest.raises(RigbookError, match="no host named 'x'"):
        project.host("x")


def test_the_outline_reads_what_the_strict_reader_refuses(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text(RICH.replace("vmid", "vmdi"))
    outline = read_outline(tmp_path)
    assert outline.name == "kimi" and set(outline.hosts) == {"pve", "llm"} and not outline.problem
    (tmp_path / "rigbook.toml").write_text("[project")
    assert "could not be read" in read_outline(tmp_path).problem


def test_every_key_is_explained() -> None:
    entries = explain()
    assert all(entry["text"] for entry in entries)
    assert {"pipeline.train.ttt_steps", "profiles.*.speculative.draft_tokens"} <= {entry["key"] for entry in entries}
    (entry,) = explain("pipeline.train.ttt_steps")
    assert entry["default"] == 3 and entry["type"] == "whole number"
    assert [entry["key"] for entry in explain("profiles.eagle3.args")] == ["profiles.*.args"]
    with pytest.raises(RigbookError) as raised:
        explain("pipeline.trian")
    assert "pipeline.train" in (raised.value.hint or "")


def test_the_schema_is_json_and_strict() -> None:
    text = json.dumps(schema())
    assert '"additionalProperties": false' in text and "ttt_steps" in text


# ── where keys stand ─────────────────────────────────────────────────────────────────────────────────────────────


def test_positions_of_all_sorts_of_keys() -> None:
    text = '''a = 1
"b c" = """
x = 2 [not.a.table]
"""
[t.'u v']
d.e = { f = 1, "g" = [1, { h = 2 }], i = { j = 3 } } # k = 4
l = [
  "m = 5", # n = 6
  { o = 7 },
]
[[r]]
p = 'q'
[[r]]
p = 1
[r.s]
w = 1
'''
    tomllib.loads(text)
    found = positions(text)
    expected = {
        ("a",): 1,
        ("b c",): 2,
        ("t", "u v"): 5,
        ("t", "u v", "d", "e"): 6,
        ("t", "u v", "d", "e", "f"): 6,
        ("t", "u v", "d", "e", "i", "j"): 6,
        ("t", "u v", "l"): 7,
        ("r", 0, "p"): 12,
        ("r", 1, "p"): 14,
        ("r", 1, "s", "w"): 16,
    }
    assert {path: found.get(path) for path in expected} == expected
    assert ("x",) not in found and ("k",) not in found and ("m",) not in found


@given(st.text())
def test_positions_never_hang_or_raise(text: str) -> None:
    assert all(1 <= line <= text.count("\n") + 1 for line in positions(text).values())


def _mutations(raw: Any) -> Iterator[Any]:
    """The document with one value replaced by each of many others, or one key taken out or put in."""
    replacements = (1, 0, -1, 70000, 1.5, float("nan"), True, "x", "", [], {}, ["x"], [1], date(2026, 1, 1))
    if isinstance(raw, dict):
        for key, value in raw.items():
            rest = {name: other for name, other in raw.items() if name != key}
            yield rest
            for other in (*replacements, *_mutations(value)):
                yield {**rest, key: other}
        yield {**raw, "unheard-of": 1}
    elif isinstance(raw, list):
        for at, value in enumerate(raw):
            for other in (*replacements, *_mutations(value)):
                yield [*raw[:at], other, *raw[at + 1 :]]


def test_the_structs_and_their_pydantic_twins_judge_alike() -> None:
    """One reads files, the other says what is wrong with them: a file that only one accepts would be told nonsense."""
    parts = {"target": {"path": "/m"}, "rules": [{"forbid": "a=b", "because": "c"}], "actions": {"a": {"host": "llm"}}}
    pipeline = to_builtins(Pipeline(host="llm", env="serve", workdir="/w"))
    whole = to_builtins(loads(RICH, Path("."))) | parts | {"pipeline": pipeline}
    whole["actions"]["a"]["run"] = ["true"]
    model, tried = twin(Project), 0
    for raw in _mutations(whole):
        tried += 1
        try:
            model.model_validate(raw)
            fits = True
        except ValidationError:
            fits = False
        try:
            msgspec.convert(raw, Project, strict=True)
            accepted = True
        except msgspec.ValidationError:
            accepted = False
        assert fits == accepted, raw
    assert tried > 1000
