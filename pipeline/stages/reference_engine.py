"""The reference engine: an OpenAI-compatible server on plain torch. `python -m pipeline.stages.reference_engine --help`

Two processes, as real engines have: this launcher, and a worker in a session of its own that holds the port and the
model. The launcher passes SIGTERM and SIGINT on and exits as the worker does. If the launcher is killed outright the
worker stays, with the port and the memory: such crashes look like this on a real rig, and `rigbook clean` is for them.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from types import FrameType

from pipeline.stages.reference.arguments import USAGE, parse

WORKER = "pipeline.stages.reference.worker"


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if reason := port_taken(arguments.host, arguments.port):
        print(f"reference engine: port {arguments.port} is not free: {reason}", file=sys.stderr, flush=True)
        return USAGE
    # Signals that come before the worker runs are kept for it.
    early: list[int] = []
    worker: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType | None) -> None:
        if worker is None:
            early.append(number)
        elif worker.poll() is None:
            worker.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    worker = subprocess.Popen([sys.executable, "-m", WORKER, *argv], start_new_session=True)
    for signalled in early:
        worker.send_signal(signalled)
    code = worker.wait()
    return code if code >= 0 else 128 - code


def port_taken(host: str, port: int) -> str | None:
    """Why the port cannot be had, or None. The worker binds it for good; this spares the wait for its imports."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.strerror
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
