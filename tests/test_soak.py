"""Minutes of kills: the small demo, ended again and again at random moments, comes to the same end (`make soak`).

RIGBOOK_SOAK_SEED chooses other moments, RIGBOOK_SOAK_KILLS another number of them.
"""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.test_end_to_end import environment, folder, recorded, rigbook, rows_of, small_demo

KILLS = int(os.environ.get("RIGBOOK_SOAK_KILLS", "40"))
SEED = int(os.environ.get("RIGBOOK_SOAK_SEED", "1"))


def victims(directory: Path) -> list[psutil.Process]:
    """Processes of this demo's jobs: stages, supervisors, servers. Not the played hosts, which are machines."""
    jobs = str(directory / "hosts" / "llm" / "home")
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
            marked = "RIGBOOK_JOB" in process.environ() or "supervisor.pyz" in command
        except (psutil.Error, OSError):
            continue
        if jobs in command and marked:
            found.append(process)
    return found


@pytest.mark.slow
def test_killed_at_random_moments_it_comes_to_the_same_end(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    directory, home = small_demo(tmp_path / "rig"), tmp_path / "home"
    home.mkdir()
    command = rigbook("demo", "--dir", str(directory))
    ended = {"controller": 0, "job": 0, "finished": 0}
    try:
        for number in range(KILLS):
            process = subprocess.Popen(
                command, env=environment(home), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            try:
                _, told = process.communicate(timeout=chance.uniform(0.5, 9.0))
            except subprocess.TimeoutExpired:
                prey = victims(directory)
                if prey and chance.random() < 0.4:
                    target = chance.choice(prey)
                    try:
                        print(f"{number}: SIGKILL to {' '.join(target.cmdline())[-60:]}")
                        target.kill()
                    except psutil.Error:
                        pass  # it ended by itself meanwhile
                    ended["job"] += 1
                    time.sleep(chance.uniform(0, 1.0))
                how = chance.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
                print(f"{number}: {how.name} to the controller")
                process.send_signal(how)
                process.communicate(timeout=60)
                ended["controller"] += 1
            else:
                text = told.decode(errors="replace")
                print(f"{number}: it ended by itself with {process.returncode}: {text.strip().splitlines()[-1:]}")
                assert "Traceback" not in text
                ended["finished"] += 1
            recorded(directory)  # asserts that the journal verifies
        last = subprocess.run(command, env=environment(home), capture_output=True, text=True, timeout=1200)
        assert last.returncode == 0, last.stderr[-3000:]
    finally:
        subprocess.run(rigbook("demo", "--dir", str(directory), "--stop"), env=environment(home), timeout=120)
    print(ended)
    prompts = [row["id"] for row in rows_of(folder(directory) / "prompts" / "train.jsonl")]
    answers = [row["id"] for row in rows_of(folder(directory) / "generate" / "rows.jsonl")]
    assert sorted(prompts) == sorted(answers) and len(set(answers)) == len(answers)
    assert (directory / "STATE.md").exists()
    assert not victims(directory)
