"""The probe: answers questions about the host that it runs on. Standard library and Python 3.9 syntax only.

It is never installed. The controller starts `python3 -I -S -u -c BOOT N NONCE`, writes N bytes of packed source to
stdin, and from then on one JSON object a line in both directions:

    <- {"ready": NONCE, "v": 1, "pid": ..., "boot_id": ...}
    -> {"id": 7, "call": "system", "args": {}}
    <- {"id": 7, "ok": true, "result": {...}, "wall": ..., "monotonic": ...}      seconds
    <- {"id": 8, "ok": false, "error": "PermissionError: ...", "type": "PermissionError"}

End of stdin ends the program: a lost connection leaves nothing behind.
"""

import json
import os
import sys
import time
from typing import Any, Callable, Dict, List

from remote.probe import host, jobdir, procs, reclaim


def _job(jobs: str, id: str) -> Dict[str, Any]:
    return jobdir.state(os.path.join(os.path.realpath(os.path.expanduser(jobs)), id))


def _jobs(jobs: str) -> List[Dict[str, Any]]:
    return jobdir.listing(os.path.realpath(os.path.expanduser(jobs)))


def _job_read(jobs: str, id: str, file: str, offset: int, limit: int, wait: float) -> Dict[str, Any]:
    return jobdir.read(os.path.join(os.path.realpath(os.path.expanduser(jobs)), id), file, offset, limit, wait)


def _holders(jobs: str) -> Dict[str, Any]:
    return reclaim.scan(os.path.expanduser(jobs))


def _reclaim(jobs: str, items: List[Dict[str, Any]], grace: float) -> List[Dict[str, Any]]:
    return reclaim.apply(os.path.expanduser(jobs), items, grace)


CALLS: Dict[str, Callable[..., Any]] = {
    "clock": host.clock,
    "system": host.system,
    "space": host.space,
    "processes": host.processes,
    "listeners": host.listeners,
    "env": host.env,
    "gpus": host.gpus,
    "job": _job,
    "jobs": _jobs,
    "job_read": _job_read,
    "holders": _holders,
    "reclaim": _reclaim,
}


def main(argv: List[str]) -> None:
    # Only we write to the real stdout: a stray print of some library must not end up between two answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def say(message: Dict[str, Any]) -> None:
        data = json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        view = memoryview(data)
        while view:
            view = view[answers.write(view) or 0 :]

    say({"ready": argv[0] if argv else "", "v": 1, "pid": os.getpid(), "boot_id": procs.boot_id()})
    for line in iter(sys.stdin.buffer.readline, b""):
        asked = json.loads(line)
        answer: Dict[str, Any] = {"id": asked["id"]}
        try:
            answer["result"] = CALLS[asked["call"]](**asked.get("args", {}))
            answer["ok"] = True
        except Exception as error:
            answer.update(ok=False, type=type(error).__name__, error="%s: %s" % (type(error).__name__, error))
        answer.update(wall=time.time(), monotonic=time.monotonic())
        try:
            say(answer)
        except BrokenPipeError:
            return
