"""What can be done from the app, as a table: each action is a `rigbook` command line, as a person would type it.

An action runs as a process of its own, in its own session: closing the app, losing the terminal or killing us ends
nothing. What an action does is shown first: its dry run is the plan, made by the same command with `--dry-run`.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tui.snapshot import HostView, Snapshot

FOLDER = "actions"  # under .rigbook/: what each action said
PLAN_SECONDS = 90.0
NO_HOST = HostView("", "", "")


@dataclass(frozen=True)
class Action:
    """Something that can be done to what is under the cursor. `words` follow `rigbook -C ROOT`."""

    id: str
    title: str
    words: tuple[str, ...]
    what: str = ""  # what it will do, in a sentence, when the command has no dry run
    dry_run: bool = False
    changes: bool = True  # needs the app to be unlocked
    asks: bool = True  # False: it only looks, and says what it found

    @property
    def command(self) -> str:
        return shlex.join(["rigbook", *self.words])


def actions_for(target: str | None, snapshot: Snapshot, screen: str) -> list[Action]:
    """What is possible now, with the thing under the cursor first."""
    kind, _, name = (target or "").partition(":")
    found = list(_for_target(kind, name, snapshot))
    found += [action for action in _for_screen(screen, snapshot) if action.id not in {a.id for a in found}]
    return found


def _for_target(kind: str, name: str, snapshot: Snapshot) -> Iterator[Action]:
    if kind == "host":
        yield probe(name)
        yield look_for_orphans(name)
    if kind == "plan":
        plan = next((p for p in snapshot.plans if p.plan == name and p.verified is None), None)
        if plan is not None:
            words = ("clean", "--apply", name)
            yield Action(f"clean:{name}", f"Give back what {name} found on {plan.host}", words, dry_run=True)
    if kind == "stage":
        stage = next((s for s in snapshot.stages if s.name == name), None)
        if stage is None:
            return
        if stage.state == "running" and stage.run is not None and stage.run.job:
            yield stop_job(stage.run.job, stage.run.host)
        elif stage.in_recipe:
            yield run_stage(name)
            yield run_from(name)
    if kind == "profile":
        server = next((s for s in snapshot.servers if s.profile == name), None)
        if server is None:
            return
        if server.state in {"ready", "loading", "starting"}:
            yield stop_server(name)
        else:
            yield start_server(name)
    if kind == "job":
        host, _, job = name.partition("/")
        if any(j.id == job and j.state == "running" for j in (snapshot.host(host) or NO_HOST).jobs):
            yield stop_job(job, host)
    if kind == "run":
        run = snapshot.run(name)
        if run is not None and run.status == "running" and run.job:
            profile = next((s.profile for s in snapshot.servers if s.run == run.run), None)
            yield stop_server(profile) if profile else stop_job(run.job, run.host)


def _for_screen(screen: str, snapshot: Snapshot) -> Iterator[Action]:
    """What makes sense on a screen whatever the cursor is on."""
    if screen in {"pipeline", "rig"} and snapshot.stages:
        yield Action("run:all", "Run the pipeline: every stage that is not done", ("run", "all"), dry_run=True)
    if screen in {"benchmarks", "server"} and (arms := bench_arms(snapshot)) is not None:
        yield Action(
            f"bench:{arms[1]}", f"Benchmark {arms[0]} against {arms[1]}", ("bench", "run", *arms), dry_run=True
        )
    if screen == "rig":
        yield Action("probe:all", "Look at every host again", ("probe",), asks=False)
    if screen in {"rig", "cleanup"}:
        yield look_for_orphans()


def bench_arms(snapshot: Snapshot) -> tuple[str, str] | None:
    """The first profile that decodes plainly, and the first that speculates."""
    plain = next((s.profile for s in snapshot.servers if not s.speculative), None)
    quick = next((s.profile for s in snapshot.servers if s.speculative), None)
    return (plain, quick) if plain and quick else None


def probe(host: str) -> Action:
    return Action(f"probe:{host}", f"Look at {host} again", ("probe", host), asks=False)


def look_for_orphans(*hosts: str) -> Action:
    """Looks only: what it finds becomes a plan in the book, to be carried out or not."""
    where = f" on {hosts[0]}" if hosts else ""
    name = f"orphans:{hosts[0] if hosts else 'all'}"
    return Action(name, f"Look for what dead work holds{where}", ("clean", *hosts, "--dry-run"), asks=False)


def run_stage(stage: str) -> Action:
    return Action(f"run:{stage}", f"Run {stage}", ("run", stage), dry_run=True)


def run_from(stage: str) -> Action:
    return Action(
        f"run-from:{stage}", f"Run {stage} and everything after it", ("run", "all", "--from", stage), dry_run=True
    )


def stop_job(job: str, host: str | None) -> Action:
    return Action(
        f"stop:{job}",
        f"Stop {job}",
        ("jobs", "stop", job, *(("--host", host) if host else ())),
        f"Asks the job {job} on {host or 'its host'} to end (SIGTERM to its own processes), waits, looks again.",
    )


def start_server(profile: str) -> Action:
    return Action(f"serve:{profile}", f"Start the server {profile}", ("serve", "start", profile), dry_run=True)


def stop_server(profile: str) -> Action:
    return Action(
        f"unserve:{profile}",
        f"Stop the server {profile}",
        ("serve", "stop", profile),
        f"Ends the server of profile {profile}, and looks whether its port is free. Requests in flight are lost.",
    )


def everything(snapshot: Snapshot) -> list[Action]:
    """Every action that is possible now, for the palette."""
    out: dict[str, Action] = {}
    targets = [
        *(f"host:{h.name}" for h in snapshot.hosts),
        *(f"stage:{s.name}" for s in snapshot.stages),
        *(f"profile:{s.profile}" for s in snapshot.servers),
        *(f"run:{r.run}" for r in snapshot.running),
        *(f"job:{j.host}/{j.id}" for j in snapshot.bare_jobs),
        *(f"plan:{p.plan}" for p in snapshot.plans),
    ]
    for target in targets:
        kind, _, name = target.partition(":")
        for action in _for_target(kind, name, snapshot):
            out.setdefault(action.id, action)
    for screen in ("rig", "pipeline", "benchmarks"):
        for action in _for_screen(screen, snapshot):
            out.setdefault(action.id, action)
    return list(out.values())


# -- running them ----------------------------------------------------------------------------------------------


def command_line(root: Path, words: tuple[str, ...], flag: str = "") -> list[str]:
    """The process to start; `flag` (yes, dry-run) is given where the command knows it."""
    from tui.cli.main import COMMANDS

    if flag in COMMANDS[words[0]].flags.split() and f"--{flag}" not in words:
        words = (*words, f"--{flag}")
    return [sys.executable, "-m", "tui.cli.main", "-C", str(root), *words]


def environment() -> dict[str, str]:
    """Ours, with this very source tree first: the command must be the app's own version, from any directory."""
    here = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": f"{here}{os.pathsep}{path}" if path else here,
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
    }


async def plan(root: Path, action: Action) -> tuple[int, str]:
    """(exit code, what the dry run says). For an action without one: what it will do."""
    if not action.dry_run:
        return 0, action.what
    process = await asyncio.create_subprocess_exec(
        *command_line(root, action.words, "dry-run"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment(),
        start_new_session=True,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), PLAN_SECONDS)
    except (TimeoutError, asyncio.CancelledError) as error:
        process.kill()
        if isinstance(error, asyncio.CancelledError):
            raise
        return 4, f"no plan after {PLAN_SECONDS:.0f} s: a host does not answer"
    return process.returncode or 0, said.decode("utf-8", "replace")


async def execute(root: Path, action: Action) -> tuple[asyncio.subprocess.Process, Path]:
    """Start the action on its own feet. Returns its process and the file that holds what it says."""
    folder = root / ".rigbook" / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    name = re.sub(r"[^\w.-]+", "-", action.id)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}.log"
    with path.open("ab", buffering=0) as log:
        log.write(f"$ {action.command}\n".encode())
        process = await asyncio.create_subprocess_exec(
            *command_line(root, action.words, "yes"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=environment(),
            start_new_session=True,
        )
    return process, path


def last_words(path: Path) -> str:
    """What an action said, where one line tells it: its error, else its only line. A table is for the log."""
    from tui.logfile import LogFile

    file = LogFile(path)
    file.grow()
    lines = [file.line(i).strip() for i in range(max(0, file.count - 40), file.count)]
    said = [text for text in lines if text and not text.startswith("$ ")]
    errors = [text for text in said if text.startswith("error[")]
    return errors[-1] if errors else said[0] if len(said) == 1 else ""
