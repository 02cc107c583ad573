"""The command line: global flags anywhere, sentences for mistakes, and nothing heavy on light paths."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tui.cli.main import COMMANDS
from tui.cli.status import explanations

REPOSITORY = Path(__file__).parents[1]
HEAVY = ("torch", "transformers", "textual", "asyncssh", "numpy", "aiohttp")


def rigbook(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(cwd), "NO_COLOR": "1"}
    command = [sys.executable, "-m", "tui.cli.main", *words]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", [("--help",), *((name, "--help") for name in COMMANDS)])
def test_help_shows_an_example_or_the_table(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = rigbook(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Usage: rigbook" in done.stdout
    if "\nCommands:\n" not in done.stdout:
        assert "Example:  rigbook " in done.stdout


def test_every_sub_command_shows_an_example_and_every_name_in_a_summary_is_one() -> None:
    import typer

    for name, command in COMMANDS.items():
        loaded = getattr(import_module(command.module), command.attr)
        if not isinstance(loaded, typer.Typer):
            continue
        group = typer.main.get_command(loaded)
        assert isinstance(group, typer.core.TyperGroup)
        for each, known in group.commands.items():
            assert "Example:  rigbook " in (known.help or ""), f"{name} {each}"
        if ": " in command.help:
            told = command.help.partition(": ")[2].rstrip(".…").split(", ")
            assert set(told) <= set(group.commands), f"{name}: {told}"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("bok",), "did you mean `rigbook book`?"),
        (("-C",), "-C needs a directory"),
        (("note", "--dry-run", "x"), "no --dry-run"),
        (("-C", "nowhere", "book", "show"), "nowhere is not a directory"),
        (("-Cnowhere", "book", "show"), "nowhere is not a directory"),
        (("-C=nowhere", "book", "show"), "nowhere is not a directory"),
        (("--write",), "the app needs a terminal"),
        (("book", "show"), "rigbook.toml"),
        (("explain", "stage.chnged"), "stage.changed"),
        (("run", "--from", "nosuch"), "no stage named"),
    ],
)
def test_mistakes_get_a_sentence_and_exit_2(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    done = rigbook(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert says.lower() in done.stderr.lower()
    assert "Traceback" not in done.stderr and done.stdout == ""


def modules_after(code: str, cwd: Path) -> set[str]:
    """Which heavy modules a light path has loaded."""
    program = f"import sys\nsys.argv = ['rigbook']\n{code}\nprint([m for m in {HEAVY!r} if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(cwd)}
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(eval(done.stdout.splitlines()[-1]))


def run_code(*words: str) -> str:
    # The command ends in SystemExit: let it, and look at what it loaded.
    return f"from tui.cli.main import run\ntry:\n    run({list(words)!r})\nexcept SystemExit:\n    pass"


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        (("--help",), set()),
        (("book", "show"), set()),
        (("book", "log"), set()),
        (("config", "check"), set()),
        (("note", "a note"), set()),
        (("exec", "here", "--", "true"), {"asyncssh"}),
    ],
)
def test_light_paths_load_nothing_heavy(tmp_path: Path, words: tuple[str, ...], allowed: set[str]) -> None:
    (tmp_path / "rigbook.toml").write_text('[project]\nname = "light"\n[hosts.here]\nkind = "local"\n')
    assert rigbook("note", "first", cwd=tmp_path).returncode == 0
    assert modules_after(run_code(*words), tmp_path) <= allowed


def test_flags_behind_a_double_dash_are_the_commands_own(tmp_path: Path) -> None:
    (tmp_path / "rigbook.toml").write_text('[project]\nname = "x"\n[hosts.here]\nkind = "local"\n')
    done = rigbook("exec", "here", "--", "echo", "--json", "-C", "-y", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "--json -C -y\n")


def test_json_is_one_document_on_stdout(tmp_path: Path) -> None:
    assert json.loads(rigbook("--json", "explain", "stage.changed", cwd=tmp_path).stdout)["id"] == "stage.changed"
    assert json.loads(rigbook("explain", "stage.changed", "--json", cwd=tmp_path).stdout)["id"] == "stage.changed"


@pytest.mark.parametrize("words", [("book", "show"), ("hosts",), ("exec", "nosuch", "--", "true"), ("config", "check")])
def test_no_name_drives_the_terminal(tmp_path: Path, words: tuple[str, ...]) -> None:
    odd = r"\u001b[31m\u202e\u009b1m\u0007"
    text = f'[project]\nname = "x{odd}"\ngoal = "{odd}"\n[hosts."a{odd}"]\nkind = "local"\n'
    (tmp_path / "rigbook.toml").write_text(text)
    done = rigbook(*words, cwd=tmp_path)
    assert not set(done.stdout + done.stderr) & set("\x1b\u202e\x9b\x07")


def test_every_error_id_in_the_sources_can_be_explained() -> None:
    import re

    known = explanations()
    used = set()
    for room in ("tui", "remote", "pipeline", "state"):
        for file in (REPOSITORY / room).rglob("*.py"):
            used |= set(re.findall(r'RigbookError\(\s*"([a-z][a-z0-9.-]+)"', file.read_text()))
            used |= set(re.findall(r'\.(?:refuse|warn)\(\s*"([a-z][a-z0-9.-]+)"', file.read_text()))
    assert used - set(known) == set()


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("{rigbook} config check >&-", 0, ""),
        ("{rigbook} nonsense 2>&-", 2, ""),
        ("{rigbook} config check >/dev/full", 1, "could not be written: No space left"),
        ("{rigbook} --help >/dev/full", 1, "could not be written: No space left"),
        ("mkdir gone && cd gone && rmdir ../gone && {rigbook} config check", 2, "deleted"),
    ],
)
def test_a_place_that_takes_no_output_or_is_gone_is_no_bug(tmp_path: Path, line: str, code: int, says: str) -> None:
    (tmp_path / "rigbook.toml").write_text('[project]\nname = "x"\n')
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HOME": str(tmp_path)}
    shell = line.format(rigbook=f"{sys.executable} -m tui.cli.main")
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and "error[bug]" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("bok",), ("explain", "nosuch.id"), ("book", "show"), ("run", "--from", "nosuch")])
def test_an_error_is_json_too_for_whoever_asked_for_json(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = rigbook("--json", *words, cwd=tmp_path)
    told = json.loads(done.stdout)["error"]
    assert told["exit_code"] == done.returncode == 2
    assert told["id"] and told["message"] in done.stderr
