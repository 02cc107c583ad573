"""The stage graph: specs from a project, selection, and what is refused."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from pipeline.demo_project import project_file
from pipeline.recipe import BY_NAME, STAGES, folder, select, spec
from state.errors import RigbookError
from state.project import Project, loads


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return loads(project_file(tmp_path, {"baseline": 4001, "eagle3": 4002}), tmp_path)


def test_every_input_is_made_by_an_earlier_stage(project: Project) -> None:
    made = [folder(project, "target")]
    for stage in STAGES:
        for name, path in spec(project, stage)["inputs"].items():
            assert any(path.startswith(one) for one in made), f"{stage.name} reads {name} before it is made"
        made.append(folder(project, stage.name))


def test_specs_follow_the_project_file(project: Project, tmp_path: Path) -> None:
    assert spec(project, BY_NAME["generate"])["settings"]["base_url"] == "http://127.0.0.1:4001"
    assert spec(project, BY_NAME["held_people"])["settings"]["temperature"] == 0.0
    text = project_file(tmp_path, {"baseline": 4001, "eagle3": 4002})
    other = loads(text.replace("\nminutes = ", "\nminutes = 1.5 # "), tmp_path)
    assert spec(other, BY_NAME["train"])["settings"]["minutes"] == 1.5
    assert spec(project, BY_NAME["train"])["settings"] != spec(other, BY_NAME["train"])["settings"]


def test_where_it_runs_is_not_what_it_is(project: Project, tmp_path: Path) -> None:
    """Another port and another concurrency: the same work, so the same job key and a folder that may go on."""
    from pipeline.stages.protocol import lasting

    text = project_file(tmp_path, {"baseline": 4001, "eagle3": 4002})
    moved = loads(text.replace("4001", "5001").replace("concurrency = 64", "concurrency = 8"), tmp_path)
    warmer = loads(text.replace("temperature = 0.7", "temperature = 0.9"), tmp_path)
    for name in ("prompts", "generate", "held_self", "held_people"):
        old, new = spec(project, BY_NAME[name]), spec(moved, BY_NAME[name])
        assert old["settings"] != new["settings"] and lasting(old) == lasting(new)
    stage = BY_NAME["generate"]
    assert lasting(spec(project, stage)) != lasting(spec(warmer, stage))


@pytest.mark.parametrize(
    ("names", "from_", "until", "expected"),
    [
        ([], None, None, [s.name for s in STAGES]),
        (["all"], "hidden", None, ["hidden", "train", "export", "audit", "predict"]),
        (["train", "mix"], None, None, ["mix", "train"]),
        (["all"], "mix", "vocab", ["mix", "vocab"]),
    ],
)
def test_selection_keeps_the_order(names: list[str], from_: str | None, until: str | None, expected: list[str]) -> None:
    assert [stage.name for stage in select(names, from_, until)] == expected


@pytest.mark.parametrize(("names", "until"), [(["trian"], None), (["all"], "trian")])
def test_a_misspelt_stage_is_named_and_the_nearest_offered(names: list[str], until: str | None) -> None:
    with pytest.raises(RigbookError, match=re.escape("did you mean 'train'?")) as caught:
        select(names, None, until)
    assert caught.value.exit_code == 2


def test_a_project_without_a_pipeline_is_told_so(tmp_path: Path) -> None:
    bare = loads('[project]\nname = "bare"\n', tmp_path)
    with pytest.raises(RigbookError) as caught:
        spec(bare, BY_NAME["train"])
    assert caught.value.id == "pipeline.none"


@pytest.mark.parametrize(
    ("files", "changed"),
    [
        ({}, False),  # never begun
        ({"begun.json": {"identity": {"settings": {"n": 1}}}}, False),  # half done: it continues
        ({"begun.json": {"identity": {"settings": {"n": 2}}}}, True),
        (
            {"begun.json": {"identity": {"settings": {"n": 1}}}, "manifest.json": {"complete": True}},
            True,
        ),  # other inputs
    ],
)
def test_a_folder_that_run_would_refuse_is_listed_as_changed(files: dict[str, object], changed: bool) -> None:
    from tui.cli.work import _changed

    class Folder:
        async def read(self, path: str) -> bytes:
            name = path.rpartition("/")[2]
            if name not in files:
                raise RigbookError("file.not-found", path)
            return json.dumps(files[name]).encode()

    assert asyncio.run(_changed(Folder(), {"out": "/data/mix", "settings": {"n": 1}})) is changed
