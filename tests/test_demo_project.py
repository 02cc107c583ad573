"""The demo's folder: whose it is, what is checked before anything is made."""

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from pipeline import demo_project
from pipeline.demo_project import check_disk, free_ports, prepare
from state.errors import RigbookError
from state.project import load


def refusal(directory: Path) -> RigbookError:
    with pytest.raises(RigbookError) as caught:
        prepare(directory)
    return caught.value


def test_a_new_folder_becomes_a_valid_project_and_is_found_again(tmp_path: Path) -> None:
    directory = tmp_path / "a b" / 'quo"te'
    mark = prepare(directory)
    project = load(directory)
    assert project.profile("eagle3").port == mark["eagle3"] != project.profile("baseline").port == mark["baseline"]
    assert all(host.played for host in project.hosts.values())
    assert prepare(directory) == mark


def test_another_project_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text('[project]\nname = "mine"\n')
    assert refusal(tmp_path).id == "demo.other-project"
    assert (tmp_path / "rigbook.toml").read_text() == '[project]\nname = "mine"\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rigbook.toml"]


def test_a_folder_with_files_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert refusal(tmp_path).id == "demo.not-empty"
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    assert refusal(tmp_path / "f").id == "demo.not-a-folder"


def test_too_little_disk_is_told_with_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5 * 2**20, 5 * 2**20))
    with pytest.raises(RigbookError) as caught:
        check_disk(tmp_path)
    need = sum(demo_project.DISK.values()) // 2**20
    assert f"needs {need} MiB" in str(caught.value) and "5 MiB are free" in str(caught.value)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_project, "NEEDS", ("torch", "no_such_package_anywhere"))
    error = refusal(tmp_path / "demo")
    assert error.id == "demo.packages" and "no_such_package_anywhere" in str(error) and "torch" not in str(error)
    assert not (tmp_path / "demo").exists()


def test_ports_are_free_and_differ() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))


@pytest.mark.parametrize("left", [[], [".rigbook"], [".rigbook", ".rigbook/demo.json"]])
def test_killed_while_it_began_it_goes_on(tmp_path: Path, left: list[str]) -> None:
    directory = tmp_path / "demo"
    mark = prepare(tmp_path / "other")
    for name in left:
        directory.mkdir(exist_ok=True)
        if name.endswith(".json"):
            (directory / name).write_text(json.dumps(mark))
        else:
            (directory / name).mkdir()
    again = prepare(directory)
    assert load(directory).profile("baseline").port == again["baseline"]
    assert ".rigbook/demo.json" not in left or again == mark


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", '{"baseline": "x", "eagle3": 1}', '{"baseline": 1}', "\x00"])
def test_a_damaged_record_is_a_sentence(tmp_path: Path, text: str) -> None:
    prepare(tmp_path / "demo")
    (tmp_path / "demo" / ".rigbook" / "demo.json").write_text(text)
    assert refusal(tmp_path / "demo").id == "demo.damaged"


def test_stopping_needs_no_working_project(tmp_path: Path) -> None:
    """The project file is broken by hand; the played hosts must stop all the same."""
    import asyncio

    from pipeline.demo import stop
    from remote import demo_rig

    directory = tmp_path / "demo"
    prepare(directory)
    demo_rig.start(directory / "hosts", {"llm": "lxc"})
    (directory / "rigbook.toml").write_text("not toml")
    try:
        assert "llm" in asyncio.run(stop(directory))
        assert demo_rig.running(directory / "hosts") == {}
    finally:
        demo_rig.stop(directory / "hosts")
