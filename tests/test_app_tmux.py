"""The app in a real terminal (tmux): what stands on the screen, and that nothing of it is left when it ends."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import desk_project

REPO = Path(__file__).resolve().parent.parent


class Terminal:
    """One tmux server with one window, in which a shell runs."""

    def __init__(self, folder: Path, width: int = 80, height: int = 24) -> None:
        self.socket = folder / "tmux.sock"
        self.env = {**os.environ, "PYTHONPATH": str(REPO), "TERM": "screen-256color", "LC_ALL": "C.UTF-8"}
        self.env.pop("TMUX", None)
        self.run("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), "sh")
        self.run("set-option", "-g", "escape-time", "0")

    def run(self, *words: str) -> str:
        command = ["tmux", "-S", str(self.socket), *words]
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True, timeout=30).stdout

    def type(self, *keys: str) -> None:
        self.run("send-keys", *keys)

    def command(self, line: str) -> None:
        self.run("send-keys", "-l", line)
        self.type("Enter")

    def text(self) -> str:
        return self.run("capture-pane", "-p")

    def shows(self, *words: str, seconds: float = 30.0) -> str:
        text = ""

        def there() -> bool:
            nonlocal text
            text = self.text()
            return all(word in text for word in words)

        wait(there, seconds, lambda: f"{words} not on the screen:\n{text}")
        return text

    def close(self) -> None:
        subprocess.run(["tmux", "-S", str(self.socket), "kill-server"], env=self.env, capture_output=True, timeout=30)


def wait(holds: Callable[[], object], seconds: float, otherwise: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(otherwise())
        time.sleep(0.1)


def app_processes(root: Path) -> list[psutil.Process]:
    """Every process whose command line names this project."""
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if str(root) in words and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return desk_project.make(tmp_path / "rig")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def start(terminal: Terminal, root: Path) -> None:
    line = shlex.join([sys.executable, "-m", "tui.cli.main", "-C", str(root)])
    terminal.command(f"clear; {line}; echo ended with $?")
    terminal.shows("Hosts", "Running", "train", "read-only")


def test_screens_resize_and_a_clean_end(terminal: Terminal, project: Path) -> None:
    start(terminal, project)
    for digit, words in (("5", "train is running"), ("6", "Servers"), ("7", "break-even"), ("8", "402 lines")):
        terminal.type(digit)
        terminal.shows(words)
    terminal.type("9")
    terminal.shows("STATE OF THE PROJECT")
    terminal.type("5")
    terminal.run("resize-window", "-x", "120", "-y", "40")
    text = terminal.shows("train is running", "400/1,000")
    assert max(len(row) for row in text.splitlines()) > 80
    terminal.run("resize-window", "-x", "60", "-y", "15")
    terminal.shows("Pipeline", "? help")
    terminal.type("q")
    terminal.shows("ended with 0")
    terminal.command("stty -a | tr ' ;' '\\n\\n' | grep -x -e echo -e icanon | tr '\\n' '+'; echo")
    terminal.shows("icanon+echo+")  # the line discipline is back
    assert terminal.run("display-message", "-p", "#{alternate_on} #{mouse_any_flag} #{cursor_flag}").split() == [
        "0",
        "0",
        "1",
    ]


def test_lost_terminal_leaves_no_process(terminal: Terminal, project: Path) -> None:
    start(terminal, project)
    assert app_processes(project)
    terminal.close()
    wait(lambda: not app_processes(project), 15, lambda: f"still there: {app_processes(project)}")


def test_lost_terminal_ends_it_even_when_hangups_are_ignored(terminal: Terminal, project: Path) -> None:
    terminal.command("trap '' HUP")
    start(terminal, project)
    terminal.close()
    wait(lambda: not app_processes(project), 15, lambda: f"still there: {app_processes(project)}")


def test_kill_9_leaves_no_process(terminal: Terminal, project: Path) -> None:
    start(terminal, project)
    (process,) = app_processes(project)
    process.send_signal(signal.SIGKILL)
    terminal.shows("ended with 137")
    assert app_processes(project) == []


def test_told_to_end_it_leaves_the_terminal_clean(terminal: Terminal, project: Path) -> None:
    start(terminal, project)
    (process,) = app_processes(project)
    process.send_signal(signal.SIGTERM)
    terminal.shows("ended with 0")
    assert terminal.run("display-message", "-p", "#{alternate_on}").strip() == "0"


def test_no_colour_loses_nothing(terminal: Terminal, project: Path) -> None:
    terminal.command("export NO_COLOR=1 TERM=xterm")
    start(terminal, project)
    text = terminal.shows("✗ audit", "! disk.low", "▶ running", "● ready")
    assert "›" in text, "the cursor is visible without colour"
    coloured = terminal.run("capture-pane", "-p", "-e")
    assert "\x1b[3" not in coloured.replace("\x1b[39m", ""), "no foreground colour under NO_COLOR"
    terminal.type("q")
    terminal.shows("ended with 0")
