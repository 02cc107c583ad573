"""A reference engine as a real process on a free port, for tests that talk HTTP to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEADLINE = 60.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port


class Engine:
    def __init__(self, model: Path, log: Path, *flags: str, port: int | None = None) -> None:
        self.port, self.log = port or free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        argv = [sys.executable, "-m", "pipeline.stages.reference_engine", "--model-path", str(model)]
        argv += ["--port", str(self.port), "--threads", "1", *flags]
        with log.open("ab") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out)

    def wait_ready(self) -> Engine:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(OSError):
                if self.get("/health")[0] == 200:
                    return self
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def get(self, path: str) -> tuple[int, bytes]:
        return self.ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = self.ask(urllib.request.Request(self.url + path, data=data))
        return status, json.loads(answer)

    def ask(self, request: urllib.request.Request) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def children(self) -> list[int]:
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)


@contextlib.contextmanager
def engine(model: Path, log: Path, *flags: str) -> Iterator[Engine]:
    server = Engine(model, log, *flags)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop()


def gone(pid: int) -> bool:
    """Whether the process has ended, within the deadline (a zombie has)."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
