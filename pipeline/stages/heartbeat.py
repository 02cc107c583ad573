"""Notice that a stage hangs, say where, and end it so that it can be resumed.

A thread looks how long ago the last beat was. After `LATE` times the usual distance of beats it writes the stacks of
all threads of this process to a file and says so (each process of a group does, so the files together show who waits
for whom); after `DEAD` times it ends the process. Nothing else would: a collective that waits for a dead partner, or a
read from a dead disk, waits for ever and looks busy.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

LATE, DEAD = 20, 100  # times the median distance of beats
FLOOR_S = 60.0  # but never before: compilers, page caches and other people's jobs take their time
LOOK_S = 1.0
HUNG = 1  # exit code


class Heartbeat:
    """`beat()` after each unit of work. `late(seconds, file)` is called once when beats stay out, `dead(seconds)`
    before the process is ended. Use as a context."""

    def __init__(self, stacks: Path, late: Callable[[float, Path], None], dead: Callable[[float], None]) -> None:
        self.stacks, self.late, self.dead = stacks, late, dead
        self._distances: deque[float] = deque(maxlen=101)
        self._last = time.monotonic()
        self._told = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(10)

    def beat(self) -> None:
        now = time.monotonic()
        self._distances.append(now - self._last)
        self._last, self._told = now, False

    def rest(self) -> None:
        """After work that is not a unit (a checkpoint, an evaluation): it counts from here."""
        self._last, self._told = time.monotonic(), False

    def usual(self) -> float:
        """The median distance, seconds; before there are beats, a long one."""
        return statistics.median(self._distances) if len(self._distances) >= 3 else 30.0

    def _watch(self) -> None:
        while not self._done.wait(LOOK_S):
            still = time.monotonic() - self._last
            usual = self.usual()
            if still > max(FLOOR_S, LATE * usual) and not self._told:
                self._told = True
                write_stacks(self.stacks)
                self.late(still, self.stacks)
            if still > max(5 * FLOOR_S, DEAD * usual):
                write_stacks(self.stacks)
                self.dead(still)
                os._exit(HUNG)  # the main thread hangs: it cannot be asked to raise


def write_stacks(path: Path) -> None:
    """The Python stacks of all threads; those of the C libraries below them too, where py-spy is installed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()}\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    if spy := shutil.which("py-spy"):
        with path.open("a") as file:
            command = [spy, "dump", "--native", "--pid", str(os.getpid())]
            try:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=30, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                file.write(f"py-spy: {error}\n")
