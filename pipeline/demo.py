"""The demo: the whole main job on this machine, over SSH, step by step, resumable at every point.

Nothing here measures or decides: each step calls what the CLI calls on a real rig. A step that is done is found done
(by its stage's manifest, its record in the journal, or its mark), so a demo that was interrupted anywhere goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import bench, server
from pipeline.demo_project import HOSTS, prepare
from pipeline.recipe import BY_NAME, STAGES, StageDef, folder, spec
from pipeline.runs import Update, Work, alone, open_work, settle_all
from pipeline.stage_runner import done_manifest, run_once, run_stage
from pipeline.stages.protocol import write_bytes, write_json
from remote import cleanup, demo_rig, jobs
from remote.inventory import probe_host
from state import events
from state.book import open_book
from state.condense import append_observations
from state.errors import REFUSED, USAGE, RigbookError
from state.render import markdown

PIPELINE_SECONDS = 12 * 60


@dataclass
class Demo:
    """The demo under way: its work, and how long each step took (kept over interruptions)."""

    root: Path
    work: Work
    seconds: dict[str, float] = field(default_factory=dict)

    def note(self, step: str, kind: str, **data: Any) -> None:
        self.work.report(Update("", step, kind, data))


@dataclass(frozen=True)
class Step:
    name: str
    title: str
    run: Callable[[Demo], Awaitable[None]]
    pipeline: bool = True  # whether its time counts as the pipeline's


def stage_step(name: str) -> Step:
    async def run(demo: Demo) -> None:
        await run_stage(demo.work, BY_NAME[name])

    return Step(name, BY_NAME[name].help, run)


async def probe_and_target(demo: Demo) -> None:
    """The model is unpacked by a job while the hosts are looked at: the first facts come at once."""
    making = asyncio.create_task(make_target(demo))
    try:
        for name in demo.work.project.hosts:
            link = await demo.work.rig.link(name)
            found = await probe_host(link, demo.work.project)
            append_observations(demo.work.journal, found)
            facts = {e.key: e.value for e in found if isinstance(e, events.FactObserved)}
            demo.note("target", "host_facts", host=name, facts=facts)
            for event in found:
                if isinstance(event, events.ProbeFailed):
                    demo.note("target", "warning", check="probe", message=f"{event.host}: {event.reason}")
    finally:
        await making


async def make_target(demo: Demo) -> None:
    assert demo.work.project.target is not None
    wanted = {
        "stage": "target",
        "out": folder(demo.work.project, "target"),
        "inputs": {},
        "settings": {"package": demo.work.project.target.package},
    }
    await run_once(demo.work, "target", wanted)


async def serve_baseline(demo: Demo) -> None:
    if await _all_done(demo, [stage for stage in STAGES if stage.server is not None]):
        demo.note("serve", "skipped")
        return
    await server.start(demo.work, "baseline")


async def release(demo: Demo) -> None:
    """The stages from here to the benchmark want the cores. Where they are done, a server may be somebody's by now."""
    if await _all_done(demo, list(STAGES)):
        demo.note("release", "skipped")
        return
    await stop_servers(demo)


async def stop_servers(demo: Demo) -> None:
    for name in demo.work.project.profiles:
        await server.stop(demo.work, name)


async def _all_done(demo: Demo, stages: list[StageDef]) -> bool:
    link = await demo.work.rig.link("llm")
    return all([await done_manifest(link, spec(demo.work.project, stage)) is not None for stage in stages])


async def lossless(demo: Demo) -> None:
    """In fp32, where near-ties do not flip: the same tokens with and without speculation."""
    project = demo.work.project
    profile = project.profile("eagle3")
    assert project.target is not None and profile.speculative is not None
    wanted = {
        "stage": "lossless",
        "out": folder(project, "lossless"),
        "inputs": {
            "model": project.target.path,
            "drafter": f"{folder(project, 'export')}/drafter",
            "prompts": f"{folder(project, 'prompts')}/held_people.jsonl",
        },
        "settings": {"limit": 8, "max_tokens": 48, "steps": profile.speculative.steps},
    }
    await run_once(demo.work, "lossless", wanted)


async def benchmark(demo: Demo) -> None:
    if any(isinstance(r.event, events.BenchmarkRecorded) for r in demo.work.journal.records()):
        demo.note("bench", "skipped")
        return
    for record in await bench.compare(demo.work, "baseline", "eagle3"):
        verdict = record.verdict.text if record.verdict else "unknown"
        demo.note("bench", "verdict", prompts=record.dataset.kind, verdict=verdict, break_even=record.break_even)


async def crash_and_clean(demo: Demo) -> None:
    """A crash that leaves an orphan, and giving back what it holds, with a live server beside it left alone."""
    if any(isinstance(r.event, events.PlanApplied) and r.event.verified for r in demo.work.journal.records()):
        demo.note("clean", "skipped")
        return
    work = demo.work
    await server.start(work, "baseline")
    run = await server.start(work, "eagle3")
    link = await work.rig.link("llm")
    status = await jobs.status(link, run)
    # The job's supervisor and the engine's launcher: all that would have tidied up. The worker stays.
    launchers = [pid for pid in (status.supervisor, status.pid) if pid is not None]
    # As the kernel's out-of-memory killer would: no handler runs.
    (await link.run(["kill", "-9", *map(str, launchers)])).check("killing the launcher")
    demo.note("clean", "killed", pids=launchers, run=run)
    deadline = time.monotonic() + 20
    while (await jobs.status(link, run)).state == "running" and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    await settle_all(work)
    plan = await cleanup.plan(link)
    work.journal.append(cleanup.plan_event(plan))
    for item in plan.items:
        demo.note("clean", "plan", item=cleanup.describe(item))
    outcome = await cleanup.apply(link, plan)
    work.journal.append(cleanup.applied_event(plan, outcome))
    demo.note("clean", "proof", verified=outcome.verified, text=outcome.describe())
    code, _ = await server.http(work, "baseline", "/health")
    demo.note("clean", "bystander", profile="baseline", health=code)
    if not outcome.verified or code != 200:
        raise RigbookError("demo.clean", f"the clean-up is not proved: {outcome.describe()}; baseline: {code}")
    await stop_servers(demo)


async def export(demo: Demo) -> None:
    book = open_book(demo.root)
    write_bytes(demo.root / "STATE.md", markdown.render(book).encode())


STEPS: tuple[Step, ...] = (
    Step("target", "look at the hosts, unpack the model", probe_and_target),
    Step("serve", "serve the model with the reference engine", serve_baseline),
    *(stage_step(name) for name in ("prompts", "generate", "held_self", "held_people")),
    Step("release", "stop the server: its cores are needed", release),
    *(stage_step(name) for name in ("tokenize", "mix", "vocab", "hidden", "train", "export", "audit", "predict")),
    Step("lossless", "greedy output with and without speculation, in fp32", lossless),
    Step("bench", "plain against speculative, interleaved", benchmark),
    Step("clean", "a crash leaves an orphan; give back what it holds", crash_and_clean, pipeline=False),
    Step("state", "write STATE.md", export, pipeline=False),
)


async def run(directory: Path, report: Callable[[Update], None], *, keep_going: bool = False) -> dict[str, Any]:
    """Run the demo in `directory` to its end, or on from where it was. Returns the summary.

    Raises RigbookError at the first step that fails, unless `keep_going`.
    """
    mark = prepare(directory)
    root = directory.resolve()
    busy = RigbookError("demo.running", f"the demo in {directory} is at work already", exit_code=REFUSED)
    with alone(root / ".rigbook" / "demo.lock", busy):
        return await _run(root, mark, report, keep_going)


async def _run(root: Path, mark: dict[str, Any], report: Callable[[Update], None], keep_going: bool) -> dict[str, Any]:
    report(Update("", "rig", "step", {"number": 0, "of": len(STEPS), "title": "three SSH servers on loopback"}))
    hosts = await asyncio.to_thread(demo_rig.start, root / "hosts", HOSTS)
    for name, host in hosts.items():
        report(Update("", "rig", "host", {"host": name, **host}))
    failures: dict[str, str] = {}
    said: set[str] = set()

    def heard(update: Update) -> None:
        said.add(update.kind)
        report(update)

    async with open_work(root, heard) as work:
        demo = Demo(root, work, dict(mark.get("seconds", {})))
        _opened(work)
        for number, step in enumerate(STEPS, 1):
            demo.note(step.name, "step", number=number, of=len(STEPS), title=step.title)
            began = time.monotonic()
            said.clear()
            try:
                await step.run(demo)
            except RigbookError as error:
                if not keep_going:
                    raise
                failures[step.name] = str(error)
                demo.note(step.name, "failed", message=str(error))
            finally:
                # Added up: a step that was interrupted and went on took both times together.
                # One that was found done took what it took then.
                spent = 0.0 if "skipped" in said and step.name in demo.seconds else time.monotonic() - began
                demo.seconds[step.name] = demo.seconds.get(step.name, 0.0) + spent
                write_json(root / ".rigbook" / "demo.json", {**mark, "seconds": demo.seconds})
    return summary(root, demo.seconds, failures)


def _opened(work: Work) -> None:
    if not any(isinstance(r.event, events.ProjectOpened) for r in work.journal.records()):
        info = work.project.project
        work.journal.append(events.ProjectOpened(name=info.name, goal=info.goal, instructions=list(info.instructions)))


async def stop(directory: Path) -> list[str]:
    """Stop the demo's servers over SSH, then the played hosts. Returns what was stopped."""
    root = directory.resolve()
    if not (root / ".rigbook" / "demo.json").exists():
        raise RigbookError("demo.none", f"no demo in {directory}", exit_code=USAGE)
    stopped = []
    if demo_rig.running(root / "hosts"):
        # Whatever keeps us from the servers must not keep the played hosts running.
        try:
            async with open_work(root) as work:
                for name in work.project.profiles:
                    if await server.stop(work, name):
                        stopped.append(name)
        except RigbookError as error:
            stopped.append(f"(servers not asked: {error})")
    return stopped + await asyncio.to_thread(demo_rig.stop, root / "hosts")


def summary(root: Path, seconds: dict[str, float], failures: dict[str, str]) -> dict[str, Any]:
    """Where everything is, how long each step took, and what the benchmarks said."""
    counted = {step.name for step in STEPS if step.pipeline}
    total = sum(spent for name, spent in seconds.items() if name in counted)
    return {
        "root": str(root),
        "state": str(root / "STATE.md"),
        "seconds": {name: round(spent, 1) for name, spent in seconds.items()},
        "pipeline_seconds": round(total, 1),
        "within_budget": total <= PIPELINE_SECONDS,
        "failures": failures,
    }
