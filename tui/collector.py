"""The collector: the only one who asks. It watches journal, run files and hosts, and publishes snapshots.

Every source has its own task and its own patience; none waits for another. What they know is put together into one
immutable snapshot at most twice a second, and at least once a second, so that ages and clocks move on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from state.errors import RigbookError
from state.outline import Outline
from tui.book_source import BookSource, BookViews
from tui.gpu_source import GpuWatch
from tui.host_source import HostWatch
from tui.run_source import RunSource
from tui.snapshot import HostView, JobView, LogSource, RunView, ServerView, Snapshot, StageView

T = TypeVar("T")

if TYPE_CHECKING:
    from pipeline.runs import Work
    from remote.connect import Rig
    from state.project import Project

JOURNAL_SECONDS = 0.3  # between two looks at the journal's counter
FILES_SECONDS = 0.5
PUBLISH_SECONDS = 0.5
TICK_SECONDS = 1.0
METRICS_SECONDS = 3.0
MIRROR_SECONDS = 1.0
CLOSE_SECONDS = 2.0  # that a dead host may hold up the end
ALIVE = {"starting", "loading", "ready"}
GONE = {"finished", "vanished", "lost_reboot"}  # states of a job that has ended


class Collector:
    """Runs in the app's loop; `publish` gets each snapshot."""

    def __init__(self, root: Path, publish: Callable[[Snapshot], None], *, hosts: bool = True) -> None:
        self.root = root
        self._publish = publish
        self._with_hosts = hosts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="book")  # the journal has one reader thread
        self._book = BookSource(root)
        self._runs = RunSource(root)
        self._views = BookViews()
        self._loaded = False
        self._logs: tuple[LogSource, ...] = ()
        self._watches: dict[str, HostWatch] = {}
        self._gpus: dict[str, GpuWatch] = {}
        self._figures: dict[str, tuple[Mapping[str, Any], float | None, str]] = {}  # profile -> figures, when, problem
        self._wanted: set[tuple[str, str]] = set()
        self._project_problem = ""
        self._rig: Rig | None = None
        self._stages: tuple[tuple[str, str], ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dirty = asyncio.Event()

    # -- life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Collect until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_journal())
                group.create_task(self._watch_files())
                group.create_task(self._publisher())
                if self._with_hosts:
                    group.create_task(self._watch_rig())
        finally:
            await self._stop_watching()
            self._thread.submit(self._book.close)
            self._thread.shutdown(wait=False)

    def ask_now(self) -> None:
        """Look at everything again now."""
        for watch in self._watches.values():
            watch.ask_now()
        self._dirty.set()

    def want(self, host: str, job: str) -> None:
        """Somebody reads the output of a job that is no run of the book: bring it here from now on."""
        self._wanted.add((host, job))

    async def text(self, version: int | None, base: int | None) -> str:
        """The book as Markdown, or a difference; made on the journal's thread."""
        return await self._on_thread(self._book.text, version, base)

    async def _on_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    # -- this machine ------------------------------------------------------------------------------------------

    async def _watch_journal(self) -> None:
        while True:
            views = await self._on_thread(self._book.poll)
            if views is not None:
                if views.problem and views.seq is None and self._views.seq is not None:
                    # A journal that cannot be read just now replaces nothing that was read before.
                    views = replace(self._views, problem=views.problem)
                self._views = views
            if views is not None or not self._loaded:
                self._loaded = True
                self._dirty.set()
            await asyncio.sleep(JOURNAL_SECONDS)

    async def _watch_files(self) -> None:
        await asyncio.to_thread(__import__, "pipeline.runs")  # dear to import: not before the first paint
        from pipeline import recipe

        self._stages = tuple((s.name, s.help) for s in recipe.STAGES)
        while True:
            logs = await asyncio.to_thread(self._runs.logs, self._views.runs, self._jobs())
            if self._runs.poll(self._interesting()) or logs != self._logs:
                self._logs = logs
                self._dirty.set()
            await asyncio.sleep(FILES_SECONDS)

    def _jobs(self) -> dict[str, JobView]:
        return {job.id: job for watch in self._watches.values() for job in watch.view.jobs}

    def _interesting(self) -> list[str]:
        """Runs whose own words are shown: those that work, and the last of each stage."""
        last: dict[tuple[str, str], str] = {}
        for run in reversed(self._views.runs):
            last[run.what, run.name] = run.run
        return list({*last.values(), *(run.run for run in self._views.runs if run.status == "running")})

    # -- the rig -----------------------------------------------------------------------------------------------

    async def _watch_rig(self) -> None:
        """Load the project, watch its hosts; start afresh when the file changes."""
        await asyncio.to_thread(__import__, "pipeline.server")
        await asyncio.to_thread(__import__, "remote.jobs")
        path = self.root / "rigbook.toml"
        seen: float | None = None
        while True:
            try:
                at = path.stat().st_mtime
            except OSError:
                at = -1.0
            if at != seen:
                seen = at
                await self._stop_watching()
                self._open_project()
                self._dirty.set()
            await asyncio.sleep(TICK_SECONDS)

    def _open_project(self) -> None:
        from remote.connect import Rig
        from state.project import load

        try:
            project = load(self.root)
        except RigbookError as error:
            self._project_problem = error.message
            return
        self._project_problem = ""
        self._rig = rig = Rig(project)
        for name, host in project.hosts.items():
            self._watches[name] = watch = HostWatch(name, host, rig, self._dirty.set)
            self._spawn(watch.run())
            self._gpus[name] = cards = GpuWatch(watch, project, self.root, self._dirty.set)
            self._spawn(cards.run())
        for name in project.profiles:
            self._spawn(self._watch_server(project, rig, name))
        self._spawn(self._mirror())

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A fault of ours in one source must not take the others with it; it is shown, not swallowed.
            self._project_problem = f"a part of the app stopped: {type(error).__name__}: {error}"
            self._dirty.set()

    async def _stop_watching(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._watches.clear()
        self._gpus.clear()
        if self._rig is not None:
            rig, self._rig = self._rig, None
            with contextlib.suppress(Exception):  # closing what is broken may fail; nothing depends on it
                await asyncio.wait_for(rig.__aexit__(), CLOSE_SECONDS)

    async def _watch_server(self, project: Project, rig: Rig, profile: str) -> None:
        """Ask a server that is ready for its figures, on its own host."""
        from pipeline import server
        from pipeline.runs import Work

        work: Work = Work(project, rig, None)  # type: ignore[arg-type]  # asking records nothing
        host = project.envs[project.profiles[profile].env].host
        while True:
            await asyncio.sleep(METRICS_SECONDS)
            now = self._views.servers.get(profile)
            watch = self._watches.get(host)
            if now is None or now.state not in ALIVE or watch is None or watch.link is None:
                continue
            old = self._figures.get(profile, ({}, None, ""))
            try:
                code, body = await asyncio.wait_for(server.http(work, profile, "/metrics", 5.0), 20)
            except (RigbookError, TimeoutError, OSError) as error:
                self._figures[profile] = (old[0], old[1], str(error) or "no answer")
            else:
                if code == 200:
                    self._figures[profile] = (MappingProxyType(metrics(body)), time.time(), "")
                else:
                    why = (
                        f"/metrics answers {code}"
                        if code
                        else f"nothing answers: {body.decode('utf-8', 'replace')[:120]}"
                    )
                    self._figures[profile] = (old[0], old[1], why)
            self._dirty.set()

    async def _mirror(self) -> None:
        """Bring the output of runs here that nobody follows. `remote.jobs.mirror` keeps two followers apart."""
        from remote import jobs

        while True:
            await asyncio.sleep(MIRROR_SECONDS)
            runs = [(r.host, r.job, r.run) for r in self._views.runs if r.status == "running" and r.job and r.host]
            for host, job, run in [*runs, *((host, job, job) for host, job in self._wanted)]:
                watch = self._watches.get(host or "")
                folder = self.root / ".rigbook" / "runs" / run
                if watch is None or watch.link is None or await asyncio.to_thread(followed, folder):
                    continue
                with contextlib.suppress(RigbookError, TimeoutError, OSError):
                    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
                    await asyncio.wait_for(jobs.mirror(watch.link, job or "", folder), 30)

    # -- putting it together -----------------------------------------------------------------------------------

    async def _publisher(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dirty.wait(), TICK_SECONDS)
            self._dirty.clear()
            if self._loaded:
                self._publish(self.snapshot())
            await asyncio.sleep(PUBLISH_SECONDS)

    def snapshot(self) -> Snapshot:
        """Everything known now."""
        views = self._views
        jobs = self._jobs()
        runs = tuple(
            replace(run, progress=self._runs.progress(run.run), status=run_status(run, jobs)) for run in views.runs
        )
        problems = [text for text in (self._project_problem or views.problem,) if text]
        return Snapshot(
            at=time.time(),
            project=views.outline.name or self.root.name,
            goal=views.outline.goal,
            seq=views.seq,
            hosts=self._host_views(views.outline),
            stages=stage_views(self._stages if views.outline.has_pipeline else (), runs),
            servers=tuple(self._server_view(name, views, jobs) for name in views.outline.profiles),
            runs=runs,
            benches=views.benches,
            warnings=views.warnings,
            next_steps=views.next_steps,
            facts=MappingProxyType(dict(views.facts)),
            versions=views.versions,
            plans=views.plans,
            logs=self._logs,
            problems=tuple(problems),
            loaded=self._loaded,
        )

    def _host_views(self, outline: Outline) -> tuple[HostView, ...]:
        if self._watches:
            return tuple(replace(watch.view, gpus=self._gpus[name].view) for name, watch in self._watches.items())
        # The hosts are in the file before anybody has been able to ask them.
        return tuple(
            HostView(
                name, str(table.get("kind", "?")), str(table.get("ssh", "")), table.get("on"), bool(table.get("played"))
            )
            for name, table in outline.hosts.items()
        )

    def _server_view(self, name: str, views: BookViews, jobs: Mapping[str, JobView]) -> ServerView:
        full = resolved(name, views.outline.profiles)
        now = views.servers.get(name)
        figures, at, problem = self._figures.get(name, ({}, None, ""))
        speculative = full.get("speculative") or {}
        state, detail = (now.state, now.detail) if now else ("not started", "")
        job = jobs.get(now.run) if now else None
        if job is not None and state in ALIVE and job.state in GONE:
            # The host knows better than the book, where nobody has recorded the end yet.
            state, detail = "vanished", f"its job is {job.state}; `rigbook status` records it"
        return ServerView(
            profile=name,
            engine=str(full.get("engine", "?")),
            host=(views.outline.envs.get(str(full.get("env"))) or {}).get("host"),
            port=full.get("port"),
            speculative=" ".join(str(speculative[k]) for k in ("algorithm",) if k in speculative)
            + (f", {speculative['steps']} steps" if "steps" in speculative else ""),
            state=state,
            detail=detail,
            run=now.run if now else None,
            since=now.since if now else None,
            figures=figures,
            figures_at=at,
            figures_problem=problem,
            args=tuple((k, str(v)) for k, v in (full.get("args") or {}).items()),
            bench=last_bench(name, views.benches),
        )


def run_status(run: RunView, jobs: Mapping[str, JobView]) -> str:
    """A run that the book has as running while its host says that the job is over has that job's state."""
    job = jobs.get(run.job or "")
    return job.state if run.status == "running" and job is not None and job.state in GONE else run.status


def followed(folder: Path) -> bool:
    """Whether somebody else is bringing this run's output here: it grew within the last seconds."""
    newest = 0.0
    for name in ("out.log", "events.jsonl"):
        with contextlib.suppress(OSError):
            newest = max(newest, os.stat(folder / name).st_mtime)
    return time.time() - newest < 3 * MIRROR_SECONDS


def stage_views(stages: tuple[tuple[str, str], ...], runs: tuple[RunView, ...]) -> tuple[StageView, ...]:
    """Each stage with the run that speaks for it: the one that works, else the last."""
    newest: dict[str, RunView] = {}
    for run in runs:  # newest first
        if run.what == "stage" and (run.name not in newest or run.status == "running"):
            newest.setdefault(run.name, run)
    recipe = [StageView(name, text, *_state(newest.get(name))) for name, text in stages]
    named = {name for name, _ in stages}
    beside = [StageView(name, "", *_state(newest[name]), False) for name in reversed(newest) if name not in named]
    # What others build on came first and is shown first: the target. Checks and the like come after the recipe.
    before = [stage for stage in beside if stage.name == "target"]
    return (*before, *recipe, *(stage for stage in beside if stage not in before)) if stages else ()


def _state(run: RunView | None) -> tuple[str, RunView | None]:
    return (run.status if run is not None else "not started"), run


def resolved(name: str, profiles: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A profile over what it extends, for showing; `state.project` is the strict reader."""
    chain: list[Mapping[str, Any]] = []
    current: Any = name
    while isinstance(current, str) and current in profiles and len(chain) < 20:
        chain.append(profiles[current])
        current = profiles[current].get("extends")
    out: dict[str, Any] = {}
    for table in reversed(chain):
        for key, value in table.items():
            out[key] = (
                {**out.get(key, {}), **value}
                if isinstance(value, dict) and isinstance(out.get(key, {}), dict)
                else value
            )
    return out


def last_bench(profile: str, benches: tuple[Any, ...]) -> str:
    for each in benches:
        for arm in each.bench.arms:
            if arm.profile == profile:
                from state.benchmarks import tok_s

                speed = tok_s(arm)
                verdict = each.bench.verdict.text if each.bench.verdict else "no verdict"
                shown = f"{speed.value:.1f} tok/s" if speed else "speed unknown"
                return f"{each.bench.name}: {shown}; {verdict}"
    return ""


def metrics(body: bytes) -> dict[str, float]:
    """Gauges and counters of a Prometheus text, histograms left out.

    A name may have several series (ranks): amounts are added up, shares and lengths are averaged.
    """
    series: dict[str, list[float]] = {}
    kinds: dict[str, str] = {}
    for each in body.decode("utf-8", "replace").splitlines():
        if each.startswith("# TYPE "):
            _, _, name, kind, *_ = [*each.split(), "", ""]
            kinds[name] = kind
        if not each or each.startswith("#"):
            continue
        head, _, value = each.rpartition(" ")
        name = head.partition("{")[0].strip()
        family = re.sub("_(bucket|sum|count|created)$", "", name)
        if kinds.get(name) in {"histogram", "summary"} or kinds.get(family) in {"histogram", "summary"}:
            continue
        with contextlib.suppress(ValueError):
            amount = float(value)
            series.setdefault(name.partition(":")[2] or name, []).append(amount)
    averaged = ("_rate", "_length", "_usage", "_ratio")
    return {name: sum(v) / len(v) if name.endswith(averaged) else sum(v) for name, v in series.items()}
