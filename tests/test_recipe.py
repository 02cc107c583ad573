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


ENDPOINT = """
[secrets]
openrouter = { file = "/root/.or-key", host = "llm" }
[[pipeline.generate.endpoints]]
name = "openrouter"
base_url = "https://openrouter.ai/api/v1"
model = "moonshotai/kimi-k2.5"
key = "openrouter"
body = { provider = { order = ["moonshotai"], allow_fallbacks = false } }
price-in = 0.6
price-out = 2.5
"""


def test_an_endpoint_is_told_where_its_key_is_and_not_the_key(tmp_path: Path) -> None:
    from pipeline.stages.protocol import lasting

    text = project_file(tmp_path, {"baseline": 4001, "eagle3": 4002})
    plain, more = loads(text, tmp_path), loads(text + ENDPOINT, tmp_path)
    old, new = (spec(project, BY_NAME["generate"]) for project in (plain, more))
    (endpoint,) = new["settings"]["endpoints"]
    assert endpoint["key"] == {"file": "/root/.or-key"} and endpoint["stream"] is True
    assert endpoint["body"] == {"provider": {"order": ["moonshotai"], "allow_fallbacks": False}}
    assert (endpoint["price_in"], endpoint["price_out"]) == (0.6, 2.5)
    assert lasting(old) == lasting(new), "who answers does not change what is answered"
    json.dumps(new)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('key = "openrouter"', 'key = "openruter"', "did you mean 'openrouter'?"),
        ("https://openrouter.ai", "https://me:secret@openrouter.ai", "credentials"),
        ("https://", "", "http"),
        ("price-in = 0.6", 'headers = { Authorization = "Bearer x" }', "key"),
        ("price-in = 0.6", "price-in = -1", "price_in"),
        ('name = "openrouter"', "", "missing"),
    ],
)
def test_an_endpoint_that_cannot_be_is_named(tmp_path: Path, old: str, new: str, said: str) -> None:
    text = project_file(tmp_path, {"baseline": 4001, "eagle3": 4002}) + ENDPOINT.replace(old, new, 1)
    with pytest.raises(RigbookError, match=re.escape(said)) as caught:
        loads(text, tmp_path)
    assert caught.value.exit_code == 2 and "generate.endpoints[0]" in str(caught.value)


def test_a_key_on_another_host_does_not_travel(tmp_path: Path) -> None:
    text = project_file(tmp_path, {"baseline": 4001, "eagle3": 4002}) + ENDPOINT.replace('host = "llm"', 'host = "pve"')
    with pytest.raises(RigbookError) as caught:
        spec(loads(text, tmp_path), BY_NAME["generate"])
    assert caught.value.id == "pipeline.key-elsewhere"


def test_without_a_server_of_our_own(tmp_path: Path) -> None:
    text = project_file(tmp_path, {"baseline": 4001, "eagle3": 4002}) + ENDPOINT
    bare = loads(text.replace('profile = "baseline"', 'profile = ""'), tmp_path)
    generate = BY_NAME["generate"]
    assert generate.server and generate.server(bare.pipeline) is None  # type: ignore[arg-type]
    assert spec(bare, generate)["settings"]["base_url"] == ""
    with pytest.raises(RigbookError, match="a server of our own"):
        spec(bare, BY_NAME["prompts"])


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


def test_states_from_a_server_are_asked_for_where_its_profile_writes_them(project: Project, tmp_path: Path) -> None:
    stage = BY_NAME["hidden"]
    assert stage.server is not None and project.pipeline is not None
    assert spec(project, stage)["settings"]["how"] == "torch" and stage.server(project.pipeline) is None
    text = project_file(tmp_path, {"baseline": 4001, "eagle3": 4002})
    text = text.replace('how = "torch"\nprofile = ""', 'how = "sglang"\nprofile = "states"')
    text += '\n[profiles.states]\nextends = "baseline"\nport = 4003\n'
    with pytest.raises(RigbookError, match="no RIGBOOK_HIDDEN_DIR and no RIGBOOK_HIDDEN_LAYERS"):
        spec(loads(text, tmp_path), stage)
    told = loads(
        text + '[profiles.states.vars]\nRIGBOOK_HIDDEN_DIR = "/dev/shm/s"\nRIGBOOK_HIDDEN_LAYERS = "1"\n', tmp_path
    )
    settings = spec(told, stage)["settings"]
    assert (settings["base_url"], settings["folder"]) == ("http://127.0.0.1:4003", "/dev/shm/s")
    assert told.pipeline is not None and stage.server(told.pipeline) == "states"
