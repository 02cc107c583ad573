"""Detached jobs: they outlive the connection and us. What a job directory holds is told in probe/jobdir.py.

Submitting is safe to repeat: the job's id is its name on the host, and of any number of submissions with one id
exactly one starts it. What a job's state is, its own host decides; when we cannot ask, it is `unknown`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from remote import files, pythons, shell
from remote.connect import Link, backoff
from remote.follow import Piece, follow, mirror, pieces, shown
from remote.probe import ship
from state.errors import REFUSED, UNREACHABLE, USAGE, RigbookError

__all__ = [
    "JobSpec",
    "JobStatus",
    "Piece",
    "follow",
    "jobs_dir",
    "list_jobs",
    "mirror",
    "pieces",
    "shown",
    "status",
    "stop",
    "submit",
    "wait",
]

State = Literal["running", "finished", "vanished", "lost_reboot", "unknown", "absent"]
ENDED = frozenset({"finished", "vanished", "lost_reboot"})
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
PUZZLED = 3  # looks at a job whose record cannot be read
SUBMIT_S = 120.0
ANSWER_S = 18.0  # a state that nobody tells by then is unknown
AGAIN_S = 5.0  # a link that was silent for longer before it was called lost is not tried again while somebody waits
SOURCE = Path(__file__).resolve().parents[1]  # where our own packages lie, installed or not


@dataclass(frozen=True)
class JobSpec:
    """What to run. `{job}` in argv, env and cwd becomes the job's absolute directory there.

    `files` (relative name -> content) land in the job directory. `packages` are Python sources that travel: a
    directory of yours, or a path relative to our own packages ("pipeline/stages"). They land under its `src/`, which
    comes first on PYTHONPATH. The working directory is the job directory unless `cwd` says otherwise.

    `memory_max` (bytes) and `tasks_max` (threads of all its processes) end the job when it goes beyond; `log_quota`
    (bytes, 8 GiB when None) is what its log may take up: beyond, the middle of the log is dropped.
    """

    id: str
    name: str
    argv: list[str]
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    packages: list[str] = field(default_factory=list)
    run: str = ""
    memory_max: int | None = None
    tasks_max: int | None = None
    log_quota: int | None = None


@dataclass(frozen=True)
class JobStatus:
    """`exit` or `signal` is set when it finished; `supervisor` is the pid that watches it.

    `started` and `ended` are Unix seconds by the host's clock, `seconds` how long it ran (or has run by now) by a
    clock that nobody sets: never subtract the one from a clock of ours. `oom`: it was ended for want of memory.
    """

    id: str
    state: State
    name: str = ""
    run: str = ""
    exit: int | None = None
    signal: str | None = None
    pid: int | None = None
    supervisor: int | None = None
    started: float | None = None
    ended: float | None = None
    seconds: float | None = None
    dir: str = ""
    reason: str = ""
    stopped: bool = False  # ended because somebody asked it to
    swept: tuple[str, ...] = ()  # command lines of what it left behind and the supervisor ended
    left: tuple[str, ...] = ()  # and of what would not end
    digest: str = ""  # of what it runs: see `digest`
    backend: Literal["systemd", "supervisor"] = "supervisor"
    unit: str | None = None
    oom: bool = False

    @property
    def ok(self) -> bool:
        return self.state == "finished" and self.exit == 0

    @property
    def over(self) -> bool:
        return self.state in ENDED

    def describe(self) -> str:
        if self.state == "finished":
            how = f"killed by SIG{self.signal}" if self.signal else f"exit code {self.exit}"
            how += " for want of memory" if self.oom and not self.reason else ""
            return f"{'stopped' if self.stopped else 'finished'}: {how}" + (f" ({self.reason})" if self.reason else "")
        return f"{self.state.replace('_', ' ')}" + (f": {self.reason}" if self.reason else "")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_status(raw: Mapping[str, Any]) -> JobStatus:
    supervisor = raw.get("supervisor") or {}
    return JobStatus(
        id=raw["id"],
        state=raw["state"],
        name=raw.get("name", ""),
        digest=raw.get("digest", ""),
        run=raw.get("run", ""),
        exit=raw.get("exit"),
        signal=raw.get("signal"),
        pid=raw.get("pid"),
        supervisor=supervisor.get("pid"),
        started=raw.get("started"),
        ended=raw.get("ended"),
        seconds=raw.get("seconds"),
        dir=raw.get("dir", ""),
        reason=raw.get("reason", ""),
        stopped=raw.get("stopped", False),
        swept=tuple(entry["command"] for entry in raw.get("swept", ())),
        left=tuple(entry["command"] for entry in raw.get("left", ())),
        backend=raw.get("backend", "supervisor"),
        unit=raw.get("unit"),
        oom=raw.get("oom", False),
    )


async def jobs_dir(link: Link) -> str:
    """The absolute directory of all jobs on this host."""
    return f"{await link.state_dir()}/jobs"


async def submit(link: Link, spec: JobSpec) -> JobStatus:
    """Start the job, or find the one of the same id. Retries a lost link, since repeating is safe."""
    check_id(spec.id)
    if not spec.argv:
        raise RigbookError("shell.no-command", f"job {spec.id} has no command", exit_code=USAGE)
    tree = await asyncio.to_thread(_tree, spec)
    data = await asyncio.to_thread(files.pack, tree)
    jobs = await jobs_dir(link)
    began = time.monotonic()
    for attempt in range(1, 4):
        stage = f"{jobs}/.stage-{spec.id}-{secrets.token_hex(4)}"
        script = (
            f"umask 077;s={shell.quote(stage)};p=$({shell.FIND_PYTHON})||{{ {pythons.REPORT} exit 127;}};"
            f'mkdir -p "$s"&&(cd "$s"&&LC_ALL=C tar -xf -)||{{ rm -rf "$s";exit 74;}};'
            f'exec "$p" -I -S "$s/supervisor.pyz" adopt {shell.quote(f"{jobs}/{spec.id}")} "$s"'
        )
        result = await link.run(script=script, stdin=data, timeout=SUBMIT_S)
        if result.state != "unknown" or time.monotonic() - began > AGAIN_S:
            break
        await asyncio.sleep(backoff(attempt))
    if pythons.MARK in result.stderr.decode("utf-8", "replace"):
        raise pythons.missing(result.stderr.decode("utf-8", "replace"), link.name)
    raw = json.loads(files.check(result, f"starting job {spec.id}").stdout)
    if raw.get("refused") == "session-bound":
        raise RigbookError(
            "job.session-bound",
            f"no job of {raw['user']} outlives the connection: logind ends what a login leaves behind",
            host=link.name,
            hint=f"Once, on the host: loginctl enable-linger {raw['user']}",
            exit_code=REFUSED,
        )
    return parse_status(raw)


def check_id(id: str) -> str:
    if not _ID.match(id):
        raise RigbookError("job.bad-id", f"{id!r} is not a job's id (letters, digits, . _ -)", exit_code=USAGE)
    return id


def digest(spec: JobSpec) -> str:
    """Of what the job does; `JobStatus.digest` is that of the job which really bears the id."""
    return hashlib.sha256(json.dumps(_plain(spec), sort_keys=True).encode()).hexdigest()


def _plain(spec: JobSpec) -> dict[str, Any]:
    plain: dict[str, Any] = {"argv": list(spec.argv), "cwd": spec.cwd, "env": dict(spec.env), "name": spec.name}
    plain.update(run=spec.run, memory_max=spec.memory_max, tasks_max=spec.tasks_max, log_quota=spec.log_quota)
    return plain


def _tree(spec: JobSpec) -> dict[str, bytes | Path]:
    """The job directory as it travels."""
    tree: dict[str, bytes | Path] = dict(spec.files)
    for package in spec.packages:
        # Absolute: some directory, by its own name. Relative: a part of what is installed beside us, at its place.
        root = SOURCE / package
        base = root.parent if Path(package).is_absolute() else SOURCE
        if not root.exists():
            raise RigbookError("job.no-package", f"{root} is not there", exit_code=USAGE)
        for file in [root] if root.is_file() else sorted(root.rglob("*")):
            place = file.relative_to(base)
            if file.is_file() and not any(part.startswith(".") or part == "__pycache__" for part in place.parts):
                tree[f"src/{place.as_posix()}"] = file
    record = {"v": 2, "id": spec.id, **_plain(spec), "digest": digest(spec)}
    for name, content in (
        ("spec.json", json.dumps(record, indent=1).encode()),
        ("supervisor.pyz", ship.archive()),
        ("~complete", b""),  # sorts last: a cut archive lacks it
    ):
        if name in tree:
            raise RigbookError("job.reserved-name", f"{name} in a job directory is ours", exit_code=USAGE)
        tree[name] = content
    return tree


async def status(link: Link, id: str) -> JobStatus:
    """What the host says; `unknown` when it cannot be asked (which says nothing about the job)."""
    check_id(id)
    reason = f"no answer within {ANSWER_S:g} s"  # a dead link, or a file system there that hangs
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_S):
            for _ in range(2):  # the shared probe may have died unnoticed since the last call
                try:
                    return parse_status(await (await link.probe()).call("job", jobs=await jobs_dir(link), id=id))
                except RigbookError as error:
                    if error.exit_code != UNREACHABLE:
                        raise
                    reason = str(error)
    return JobStatus(id, "unknown", reason=reason)


async def list_jobs(link: Link) -> list[JobStatus]:
    """All jobs of this host, oldest first. Raises when it cannot be asked."""
    return [parse_status(raw) for raw in await (await link.probe()).call("jobs", jobs=await jobs_dir(link))]


async def wait(link: Link, id: str) -> JobStatus:
    """Wait until the job is over (or is absent). A lost link is waited out; a host that answers and does not know
    (a damaged record) is asked a few times."""
    pause, lost, puzzled = 0.05, 0, 0
    while True:
        now = await status(link, id)
        puzzled = puzzled + 1 if now.state == "unknown" and now.dir else 0
        if now.over or now.state == "absent" or puzzled >= PUZZLED:
            return now
        lost = lost + 1 if now.state == "unknown" else 0
        await asyncio.sleep(1 + backoff(min(lost, 6)) if lost else pause)
        pause = min(pause * 1.5, 1.0)


async def stop(link: Link, id: str, grace: float = 10) -> JobStatus:
    """TERM to the job, `grace` seconds, KILL; then what it left behind. Returns when it is over. Twice is fine."""
    check_id(id)
    where = f"{await jobs_dir(link)}/{id}"
    script = (
        f"d={shell.quote(where)};[ -d \"$d\" ]||{{ printf '{{}}';exit 0;}};p=$({shell.FIND_PYTHON})||exit 127;"
        f'exec "$p" -I -S "$d/supervisor.pyz" stop "$d" {grace:g}'
    )
    began = time.monotonic()
    result = await link.run(script=script, timeout=grace + 60)
    if result.state == "unknown":
        if time.monotonic() - began > AGAIN_S:
            return JobStatus(id, "unknown", reason=result.reason)
        return await status(link, id)
    raw = json.loads(result.check(f"stopping job {id}").stdout)
    return parse_status(raw) if raw else JobStatus(id, "absent", reason="there is no such job")
