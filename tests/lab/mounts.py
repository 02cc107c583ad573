"""Places that are full, cannot be written to, or run no programs. Root only; each is unmounted when its test ends."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small(size: str = "256k", options: str = "") -> Iterator[Path]:
    """A file system in memory that holds `size`; everybody may write to it."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    sweep()
    path = Path(tempfile.mkdtemp(prefix=f"rb-mount-{os.getpid()}-"))
    try:
        flags = f"size={size},mode=1777" + (f",{options}" if options else "")
        subprocess.run(["mount", "-t", "tmpfs", "-o", flags, "tmpfs", path], check=True)
        yield path
    finally:
        _remove(path)


@contextmanager
def full(size: str = "256k") -> Iterator[Path]:
    """Nothing more goes in. `filler` in it holds all the space: make it shorter and there is room."""
    with small(size) as path:
        with (path / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 4096)
            except OSError:
                pass  # ENOSPC: that is what it is for
        yield path


@contextmanager
def noexec() -> Iterator[Path]:
    with small("8m", "noexec") as path:
        yield path


@contextmanager
def read_only() -> Iterator[Path]:
    """It holds one file, `file`."""
    with small() as path:
        (path / "file").write_text("what was there\n")
        subprocess.run(["mount", "-o", "remount,ro", path], check=True)
        yield path


def _remove(path: Path) -> None:
    # Lazily: a process that a failed test left in it must not keep the mount.
    subprocess.run(["umount", "-l", path], check=False, capture_output=True)
    if not os.path.ismount(path):
        shutil.rmtree(path, ignore_errors=True)


def sweep() -> None:
    """Those of runs that were killed."""
    for path in Path(tempfile.gettempdir()).glob("rb-mount-*"):
        made = re.match(r"rb-mount-(\d+)-", path.name)
        if made and not os.path.exists(f"/proc/{made[1]}"):
            _remove(path)
