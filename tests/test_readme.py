"""What the README shows is what rigbook takes: its tables are read strictly, its commands and flags are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from pipeline.recipe import STAGES, spec
from state.project import loads

README = (Path(__file__).parents[1] / "README.md").read_text()
TOML = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)


def test_the_rig_and_its_pipeline_are_read_together_and_every_stage_can_be_planned(tmp_path: Path) -> None:
    project = loads("\n".join(TOML), tmp_path)
    specs = {stage.name: spec(project, stage) for stage in STAGES}
    assert project.pipeline is not None and len(project.pipeline.prompts.sources) == 2
    assert specs["generate"]["settings"]["endpoints"][0]["key"] == {"file": "/root/.or-key"}
    assert specs["hidden"]["settings"]["folder"] == "/dev/shm/states"
    assert project.profile("states").args["tp-size"] == 8


def test_the_flags_of_run_that_it_shows_are_there() -> None:
    lines = [a or b for a, b in re.findall(r"`(rigbook run [^`]+)`|^(rigbook run .*)$", README, re.MULTILINE)]
    shown = {flag for line in lines for flag in re.findall(r"--[a-z-]+", line)} | {"--disk-anyway"}
    assert {"--target-config", "--assume", "--draft", "--until"} <= shown
    done = subprocess.run(
        [sys.executable, "-m", "tui.cli.main", "run", "--help"], capture_output=True, text=True, timeout=60
    )
    missing = {flag for flag in shown - {"--dry-run"} if flag not in done.stdout}
    assert not missing, "everywhere-flags apart, each is an option of `run`"
