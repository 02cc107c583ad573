"""The server of a profile: started as a job, ready when it answers, stopped when its port is free.

*Started* is not *ready*: a large model loads for twenty minutes. Ready means that the engine said so in its log and
`/health` answers, asked from the server's own host over loopback. Stuck means that nothing new was heard for a while;
there is no limit on how long a load that makes progress may take.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shlex
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict

from pipeline import preflight
from pipeline.engines import ENGINES, Engine
from pipeline.runs import STAGE_PACKAGES, Update, Work, job_key, run_folder, settle
from remote import jobs
from remote.connect import Link
from remote.jobs import JobSpec, JobStatus
from state import events
from state.errors import FAILED, REFUSED, UNREACHABLE, UNVERIFIED, USAGE, RigbookError
from state.project import Project

STUCK_SECONDS = 180.0  # no new log byte for this long while loading
STOP_SECONDS = 20.0
HTTP = (
    "import sys,urllib.request as u,urllib.error as e\n"
    "try:\n r=u.urlopen(sys.argv[1],timeout=float(sys.argv[2]));s=r.status\n"
    "except e.HTTPError as x:\n r=x;s=x.code\n"
    "except Exception as x:\n sys.stdout.write('0\\n'+str(x));sys.exit()\n"
    "sys.stdout.write('%d\\n'%s);sys.stdout.flush();sys.stdout.buffer.write(r.read())"
)


@dataclass(frozen=True)
class Plan:
    """The resolved command of a profile, before anything is started."""

    profile: str
    host: str
    engine: Engine
    argv: list[str]
    env: dict[str, str]
    port: int
    settings: dict[str, Any]

    @property
    def command(self) -> str:
        return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in sorted(self.env.items())), shlex.join(self.argv)])


def plan(project: Project, name: str) -> Plan:
    """What `start` would run. Raises RigbookError where the profile cannot be served."""
    profile = project.profile(name)
    env = project.env(profile.env)
    if project.target is None:
        raise RigbookError("pipeline.no-target", "rigbook.toml has no [target] table", exit_code=USAGE)
    if profile.engine not in ENGINES:
        raise RigbookError(
            "server.engine", f"the engine {profile.engine!r} of profile {name!r} is not supported yet", exit_code=USAGE
        )
    preflight.check(project, name)
    engine = ENGINES[profile.engine]
    server = {
        "model": project.target.path,
        "host": "127.0.0.1",
        "port": profile.port,
        "draft": profile.draft,
        "speculative": asdict(profile.speculative) if profile.speculative else None,
        "args": dict(profile.args),
    }
    return Plan(
        profile=name,
        host=env.host,
        engine=engine,
        argv=[env.python, "-m", engine.module, *engine.flags(server)],
        env={**env.vars, **profile.vars},
        port=profile.port,
        settings={"engine": profile.engine, **server},
    )


async def find_job(work: Work, name: str) -> JobStatus | None:
    """The profile's newest job that runs, or None."""
    link = await work.rig.link(plan(work.project, name).host)
    running = [j for j in await jobs.list_jobs(link) if j.name == f"server-{name}" and j.state == "running"]
    return max(running, key=lambda j: j.started or 0.0, default=None)


async def start(work: Work, name: str, *, wait: bool = True) -> str:
    """Start the profile's server, or attach to the one that runs already. Returns the run once it is ready.

    Raises RigbookError: `serve.changed` where another configuration of the profile runs, `serve.port-taken` (names the
    holder), `serve.failed` with the end of the log, `serve.stuck`.
    """
    what = plan(work.project, name)
    link = await work.rig.link(what.host)
    key = job_key(what.settings | {"env": what.env})
    existing = await find_job(work, name)
    if existing is not None:
        if f"-{key}-" not in existing.id:
            raise RigbookError(
                "serve.changed",
                f"{name} runs already with another configuration ({existing.id})",
                host=what.host,
                hint=f"rigbook serve stop {name}",
                exit_code=REFUSED,
            )
        if wait:
            await wait_ready(work, name, existing.id)
        return existing.id
    await _port_free(link, what)
    taken = {j.id for j in await jobs.list_jobs(link)}
    attempt = next(n for n in range(1, 100000) if f"server-{name}-{key}-{n}" not in taken)
    run = f"server-{name}-{key}-{attempt}"
    work.journal.append(
        events.RunStarted(run=run, what="server", name=name, host=what.host, job=run, key=key, settings=what.settings),
        events.ServerState(run=run, profile=name, state="starting", detail=what.command),
    )
    spec = JobSpec(
        id=run,
        name=f"server-{name}",
        argv=what.argv,
        env=what.env,
        packages=list(STAGE_PACKAGES) if what.engine.ships else [],
        run=run,
    )
    await jobs.submit(link, spec)
    work.report(Update(run, name, "started", {"host": what.host, "port": what.port}))
    if wait:
        await wait_ready(work, name, run)
    return run


async def _port_free(link: Link, what: Plan) -> None:
    for listener in await listeners(link):
        if listener["port"] == what.port:
            named = [
                f"pid {pid} ({command})" for pid, command in zip(listener["pids"], listener["commands"], strict=True)
            ]
            holder = ", ".join(named) or "a process of somebody else"
            raise RigbookError(
                "serve.port-taken",
                f"port {what.port} is taken by {holder}",
                host=link.name,
                hint="`rigbook clean` gives back what dead work holds; else choose another port in the profile",
                exit_code=REFUSED,
            )


async def listeners(link: Link) -> list[dict[str, Any]]:
    """Who listens on which TCP port of a host: {"port", "address", "pids", "commands", …}."""
    found: list[dict[str, Any]] = await (await link.probe()).call("listeners")
    return found


async def wait_ready(work: Work, name: str, run: str, *, stuck_seconds: float = STUCK_SECONDS) -> float:
    """Wait until the server answers. Returns the seconds since it was started."""
    what = plan(work.project, name)
    link = await work.rig.link(what.host)
    folder = run_folder(work.project, run)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "out.log"
    heard, size = time.monotonic(), -1
    while True:
        ended = await jobs.mirror(link, run, folder)
        data = log.read_bytes() if log.exists() else b""
        if len(data) != size:
            heard, size = time.monotonic(), len(data)
            last = data.decode(errors="replace").strip().splitlines()
            work.report(Update(run, name, "loading", {"line": last[-1] if last else ""}))
        if ended:
            outcome = await settle(work, link, run, name)
            raise RigbookError(
                "serve.failed",
                f"{name} ended while it was loading: {outcome.error}",
                host=what.host,
                hint=f"its log: rigbook jobs logs {run}",
                exit_code=FAILED,
            )
        if what.engine.ready_line.encode() in data and (await http(work, name, "/health"))[0] == 200:
            break
        if time.monotonic() - heard > stuck_seconds:
            raise RigbookError(
                "serve.stuck",
                f"{name} has said nothing for {stuck_seconds:.0f} s and does not answer; it was left as it is",
                host=what.host,
                hint=f"its log: rigbook jobs logs {run}",
                exit_code=FAILED,
            )
        await asyncio.sleep(0.3)
    status = await jobs.status(link, run)
    seconds = time.time() - (status.started or time.time())
    if not _recorded_ready(work, run):
        work.journal.append(
            events.ServerState(run=run, profile=name, state="ready", detail=f"after {seconds:.1f} s"),
            events.FactObserved(
                key=f"profiles.{name}.ready_seconds",
                value=round(seconds, 1),
                unit="s",
                confidence="measured",
                owner="machine",
                source=events.Source(host=what.host, run=run),
                observed_at=datetime.now(UTC),
            ),
        )
        work.report(Update(run, name, "ready", {"seconds": seconds, "port": what.port}))
    return seconds


def _recorded_ready(work: Work, run: str) -> bool:
    return any(
        isinstance(r.event, events.ServerState) and r.event.run == run and r.event.state == "ready"
        for r in work.journal.records()
    )


async def http(work: Work, name: str, path: str, timeout: float = 10.0) -> tuple[int, bytes]:
    """GET a path of the profile's server from its own host. (0, reason) where nothing answers."""
    what = plan(work.project, name)
    link = await work.rig.link(what.host)
    url = f"http://127.0.0.1:{what.port}{path}"
    result = await link.run([what.argv[0], "-I", "-S", "-c", HTTP, url, str(timeout)], timeout=timeout + 10)
    head, _, body = result.check(f"GET {url}").stdout.partition(b"\n")
    return int(head), body


async def status(work: Work, name: str) -> dict[str, Any]:
    """{"profile", "state", "run", "port", "health", "info"}; `state` is stopped, loading, ready, or unknown."""
    what = plan(work.project, name)
    try:
        job = await find_job(work, name)
    except RigbookError as error:
        if error.exit_code != UNREACHABLE:
            raise
        return {"profile": name, "host": what.host, "state": "unknown", "reason": str(error)}
    if job is None:
        return {"profile": name, "host": what.host, "state": "stopped", "port": what.port}
    code, body = await http(work, name, "/server_info")
    info: dict[str, Any] = {}
    if code == 200:
        with contextlib.suppress(ValueError):
            info = json.loads(body)
    return {
        "profile": name,
        "host": what.host,
        "state": "ready" if code == 200 else "loading",
        "run": job.id,
        "port": what.port,
        "pid": job.pid,
        "started": job.started,
        "info": info,
    }


async def stop(work: Work, name: str) -> bool:
    """Stop the profile's server and see that its port is free. False where none runs.

    Raises RigbookError `serve.not-freed` (exit code 5) where the port is still held afterwards.
    """
    what = plan(work.project, name)
    link = await work.rig.link(what.host)
    job = await find_job(work, name)
    if job is None:
        return False
    await jobs.stop(link, job.id, grace=STOP_SECONDS)
    await settle(work, link, job.id, name)
    deadline = time.monotonic() + STOP_SECONDS
    while any(item["port"] == what.port for item in await listeners(link)):
        if time.monotonic() > deadline:
            raise RigbookError(
                "serve.not-freed",
                f"{name} was stopped, but port {what.port} is still held",
                host=what.host,
                hint="rigbook clean",
                exit_code=UNVERIFIED,
            )
        await asyncio.sleep(0.2)
    work.journal.append(
        events.ServerState(run=job.id, profile=name, state="stopped", detail=f"port {what.port} is free")
    )
    work.report(Update(job.id, name, "stopped", {"port": what.port}))
    return True
