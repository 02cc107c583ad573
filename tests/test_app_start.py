"""The app opens at once: on the journal alone, without the heavy rooms, whatever the hosts do."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests import desk_project

REPO = Path(__file__).resolve().parent.parent

FIRST_PAINT = """
import asyncio, sys, time
from pathlib import Path
began = time.perf_counter()
from tui.app import RigbookApp
heavy = sorted({"torch", "transformers", "asyncssh", "apsw", "pydantic"} & set(sys.modules))
async def main():
    app = RigbookApp(Path(sys.argv[1]))
    async with app.run_test(size=(80, 24)) as pilot:
        print("paint", time.perf_counter() - began, ",".join(heavy))
        while not app.snapshot.runs:
            await pilot.pause(0.02)
        print("data", time.perf_counter() - began, ",".join(sorted({"torch", "transformers"} & set(sys.modules))))
asyncio.run(main())
"""


def run(*words: str) -> tuple[float, str]:
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *words], cwd=REPO, capture_output=True, text=True, timeout=120, check=True)
    return time.perf_counter() - began, done.stdout


def test_first_paint_and_first_data_come_at_once_with_every_host_unreachable(tmp_path: Path) -> None:
    dead = desk_project.TOML.replace('kind = "local"', 'kind = "linux"\nssh = "nobody@127.0.0.1:9"')
    root = desk_project.make(tmp_path / "rig", toml=dead)
    toolkit = min(run("-c", "import textual.app")[0] for _ in range(3))
    shots = []
    for _ in range(3):
        _, out = run("-c", FIRST_PAINT, str(root))
        shots.append({row.split()[0]: row.split() for row in out.splitlines()})
    assert all(len(shot["paint"]) == 2 for shot in shots), f"imported before the first paint: {shots[0]['paint'][2:]}"
    assert all(len(shot["data"]) == 2 for shot in shots), f"imported for looking: {shots[0]['data'][2:]}"
    paint = min(float(shot["paint"][1]) for shot in shots)
    data = min(float(shot["data"][1]) for shot in shots)
    assert paint <= 1.5 * toolkit + 0.3, f"first paint {paint:.2f} s; importing the toolkit takes {toolkit:.2f} s"
    assert data <= paint + 1.0, f"the journal was on the screen after {data:.2f} s only"
