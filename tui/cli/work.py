"""`rigbook run`, `serve`, `bench`: thin commands over `pipeline`."""

from __future__ import annotations

from typing import Any

import typer

from state.errors import UNREACHABLE, USAGE, RigbookError
from tui.cli.common import confirm, ctx, emit, project, root, say, table, wait_for

serve = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
PROFILE = typer.Argument(..., help="A profile of rigbook.toml.")


def run(
    stages: list[str] = typer.Argument(None, help="Stages, or `all`. Without any: the list with each one's state."),
    from_: str = typer.Option("", "--from", help="Start at this stage."),
    until: str = typer.Option("", "--until", help="End with this stage."),
    assume: list[str] = typer.Option([], "--assume", help="dry run: NAME=NUMBER for tokens, price (an hour), a stage."),
    target_config: str = typer.Option("", "--target-config", help="dry run: the target's config.json, a file here."),
    disk_anyway: str = typer.Option(
        "", "--disk-anyway", help="Go on though the disk is too small: why; it is recorded."
    ),
    draft: str = typer.Option("", "--draft", help="audit: any drafter's directory on the host, also a downloaded one."),
    against: str = typer.Option("", "--against", help="audit: another drafter to compare it with."),
    engine: str = typer.Option("sglang", "--engine", help="audit: what is to load it, sglang or vllm."),
    engine_version: str = typer.Option("", "--engine-version", help="audit: its version; the newest when left out."),
    context: int = typer.Option(0, "--context", min=0, help="audit: tokens that will be served; 0: the target's."),
    env: str = typer.Option("", "--env", help="audit: the env to work in; the pipeline's when left out."),
) -> None:
    """Run pipeline stages as jobs on the pipeline's host; what is done is not done again.

    With --dry-run: time, disk and money of what is to do, and on what each figure rests.
    `preview [N]` shows tokenised rows with what counts for the loss marked.
    `audit --draft DIR` looks at any drafter, the project's or not, and exits with 6 when something is wrong with it.

    Example:  rigbook run all --until export
    Example:  rigbook run preview 5
    Example:  rigbook run audit --draft /data/drafts/downloaded --against /data/drafts/v3
    """
    from pipeline import recipe

    if draft or against:
        if stages != ["audit"] or not draft or engine not in ("sglang", "vllm"):
            raise RigbookError(
                "run.audit",
                "--draft DIR goes with `run audit` alone, --against OTHER with --draft, --engine is sglang or vllm",
                exit_code=USAGE,
            )
        _audit(draft, against or None, engine, engine_version, context, env or None)
        return
    if stages and stages[0] == "preview":
        from tui.cli.preview import preview

        preview(stages[1:])
        return
    chosen = recipe.select(list(stages or []), from_ or None, until or None)
    if ctx.dry_run:
        from tui.cli.planned import show

        show(chosen, assume, target_config)
        return
    if not stages and not from_ and not until:
        found = wait_for(_list(chosen))
        cells = [[r["stage"], r["state"], r["folder"], r["help"]] for r in found]
        emit(found, table(cells, ["stage", "state", "folder", ""]))
        return
    from pipeline.stage_runner import run_stages
    from tui.cli.demo import Console

    async def work() -> Any:
        from pipeline.room import check_room
        from pipeline.runs import open_work

        async with open_work(root(), Console()) as opened:
            if told := await check_room(opened, chosen, disk_anyway or None):
                say(told)
            return await run_stages(opened, chosen)

    outcomes = wait_for(work())
    rows = [[name, o.status, f"{o.seconds:.0f} s", o.run] for name, o in outcomes.items()]
    emit(
        {"kind": "summary", "stages": {n: {"status": o.status, "result": o.result} for n, o in outcomes.items()}},
        table(rows, ["stage", "status", "time", "run"]),
    )


def _audit(draft: str, against: str | None, engine: str, engine_version: str, context: int, env: str | None) -> None:
    from pipeline.audits import Question, audit, env_of
    from pipeline.runs import open_work
    from state.errors import FINDINGS

    async def work() -> dict[str, Any]:
        async with open_work(root()) as opened:
            target = opened.project.target
            question = Question(draft, against, target.path if target else None, engine, engine_version, context)
            return await audit(opened, env_of(opened, env), question)

    report = wait_for(work())
    emit(report, "\n".join(_audit_lines(report)))
    if report["findings"]:
        raise typer.Exit(FINDINGS)


def _audit_lines(report: dict[str, Any]) -> list[str]:
    lines = []
    for finding in report["findings"]:
        lines += [f"{finding['severity'].upper()}  {finding['text']}  [{finding['check']}]", f"  {finding['fix']}"]
    lines += [f"not checked  {one['text']}  [{one['check']}]" for one in report["unchecked"]]
    lines.append(f"{len(report['findings']) or 'no'} findings, {len(report['checked'])} checks made")
    other = report.get("against")
    if other:
        lines.append(f"against the other: {other['same_tensors']} tensors are the same" if "tensors" in other else "")
        lines += [f"  {name}: {_difference(one)}" for name, one in other.get("tensors", {}).items()]
        lines += [f"  only here: {name}" for name in other.get("only_here", [])]
        lines += [f"  only there: {name}" for name in other.get("only_there", [])]
        lines += [f"  {key}: {here!r}, there {there!r}" for key, (here, there) in other.get("config", {}).items()]
        lines += [f"the other cannot be read: {other['unreadable']}"] if "unreadable" in other else []
    return [line for line in lines if line]


def _difference(one: dict[str, Any]) -> str:
    if "shape" in one:
        return f"{one['shape']}, there {one['other']}"
    return f"differs by up to {one['largest_difference']:.3g}, cosine {one['cosine']:.4f}"


async def _list(chosen: list[Any]) -> list[dict[str, str]]:
    from pipeline.runs import open_work

    async with open_work(root()) as work:
        return await states(work, chosen)


async def states(work: Any, chosen: list[Any]) -> list[dict[str, str]]:
    """Whether each stage's folder is done, to do, or changed since it was begun."""
    from pipeline import recipe
    from pipeline.stage_runner import done_manifest

    link = await work.rig.link(recipe.pipeline_of(work.project).host)
    rows = []
    for stage in chosen:
        wanted = recipe.spec(work.project, stage)
        done = await done_manifest(link, wanted)
        state = "done" if done else "changed" if await _changed(link, wanted) else "to do"
        folder = recipe.folder(work.project, stage.name)
        rows.append({"stage": stage.name, "state": state, "folder": folder, "help": stage.help})
    return rows


async def _changed(link: Any, wanted: dict[str, Any]) -> bool:
    """Whether a folder that is not done was begun with other settings, or finished from other inputs.

    Such a folder is not merely to do: `run` refuses it (stage.changed).
    """
    from pipeline.stage_runner import read_json
    from pipeline.stages.protocol import lasting

    begun = await read_json(link, f"{wanted['out']}/begun.json")
    if begun is None:
        return False
    if begun["identity"]["settings"] != lasting(wanted):
        return True
    manifest = await read_json(link, f"{wanted['out']}/manifest.json")
    return bool(manifest and manifest.get("complete"))


@serve.command("plan")
def serve_plan(profile: str = PROFILE) -> None:
    """The command and environment that `start` would run.

    Example:  rigbook serve plan eagle3
    """
    from pipeline import server

    plan = server.plan(project(), profile)
    emit(
        {"profile": profile, "host": plan.host, "argv": plan.argv, "env": plan.env}, f"on {plan.host}:\n{plan.command}"
    )


@serve.command("start")
def serve_start(
    profile: str = PROFILE,
    no_wait: bool = typer.Option(False, "--no-wait", help="Return when it is started; do not wait until it is ready."),
) -> None:
    """Start the server of a profile and wait until it answers.

    Example:  rigbook serve start eagle3
    """
    if ctx.dry_run:
        serve_plan(profile)
        return

    async def act(work: Any) -> dict[str, Any]:
        from pipeline import server

        run = await server.start(work, profile, wait=not no_wait)
        return {"profile": profile, "run": run}

    done = wait_for(_with_work(act))
    emit(done, f"{profile} runs as {done['run']}")


@serve.command("stop")
def serve_stop(profile: str = PROFILE) -> None:
    """Stop the server of a profile, down to the last worker, and see that its port is free.

    Example:  rigbook serve stop eagle3
    """
    if ctx.dry_run:
        serve_status(profile)
        return

    async def act(work: Any) -> bool:
        from pipeline import server

        return await server.stop(work, profile)

    stopped = wait_for(_with_work(act))
    emit({"profile": profile, "stopped": stopped}, f"{profile} is stopped" if stopped else f"{profile} was not running")


@serve.command("status")
def serve_status(profile: str = typer.Argument("", help="Without it: every profile.")) -> None:
    """Whether servers run, and what they say about themselves.

    Example:  rigbook serve status --json
    """

    async def act(work: Any) -> list[dict[str, Any]]:
        from pipeline import server

        return [await server.status(work, name) for name in ([profile] if profile else work.project.profiles)]

    found = wait_for(_with_work(act))
    rows = [[s["profile"], s["host"], s["state"], str(s.get("port", "")), s.get("run", "")] for s in found]
    emit(found, table(rows, ["profile", "host", "state", "port", "run"]))
    if any(s["state"] == "unknown" for s in found):
        raise typer.Exit(UNREACHABLE)


@serve.command("logs")
def serve_logs(
    profile: str = PROFILE,
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on until the server is over."),
) -> None:
    """The log of a profile's newest server, also of one that has ended.

    Example:  rigbook serve logs -f eagle3
    """
    from tui.cli import jobs

    async def newest(work: Any) -> tuple[str, str]:
        from pipeline import server
        from remote.jobs import list_jobs

        link = await work.rig.link(server.plan(work.project, profile).host)
        found = [job for job in await list_jobs(link) if job.name == f"server-{profile}"]
        if not found:
            raise RigbookError(
                "serve.not-running", f"{profile} was never started", hint=f"rigbook serve start {profile}"
            )
        return max(found, key=lambda job: job.started or 0.0).id, link.name

    job, host = wait_for(_with_work(newest))
    jobs.logs(job, follow_=follow, file="out.log", host=host)


@serve.command("wait")
def serve_wait(profile: str = PROFILE) -> None:
    """Wait until the server of a profile that was started answers.

    Example:  rigbook serve wait eagle3 && rigbook serve status eagle3
    """

    async def act(work: Any) -> float:
        from pipeline import server

        job = await server.find_job(work, profile)
        if job is None:
            raise RigbookError("serve.not-running", f"{profile} does not run", hint=f"rigbook serve start {profile}")
        return await server.wait_ready(work, profile, job.id)

    emit({"profile": profile, "seconds": wait_for(_with_work(act))}, f"{profile} is ready")


async def _with_work(act: Any) -> Any:
    from pipeline.runs import open_work
    from tui.cli.demo import Console

    console = Console()
    async with open_work(root(), (lambda update: None) if ctx.json else console) as work:
        result = await act(work)
    console.end()
    return result


@bench.command("run")
def bench_run(
    baseline: str = typer.Argument("baseline", help="The profile to compare with."),
    candidate: str = typer.Argument("eagle3", help="The profile in question."),
) -> None:
    """Benchmark two profiles against each other: interleaved launches, held-out prompts, every round kept.

    Example:  rigbook bench run baseline eagle3
    """
    from pipeline import recipe, server

    loaded = project()
    rounds = recipe.pipeline_of(loaded).bench.rounds
    for name in (baseline, candidate):
        server.plan(loaded, name)  # what cannot be started is told before anybody is asked
    if ctx.dry_run:
        emit({"baseline": baseline, "candidate": candidate, "rounds": rounds}, f"{rounds} launches of each, in turn")
        return
    confirm(f"This stops and starts {baseline} and {candidate} {rounds} times each. Go on?")

    async def act(work: Any) -> Any:
        from pipeline.bench import compare

        return await compare(work, baseline, candidate)

    records = wait_for(_with_work(act))
    from dataclasses import asdict

    emit(
        [asdict(r) for r in records],
        "\n".join(
            f"{r.name}, prompts by {r.dataset.kind}: {r.verdict.text if r.verdict else 'unknown'}" for r in records
        ),
    )


@bench.command("list")
def bench_list() -> None:
    """Every benchmark in the book, with its verdict.

    Example:  rigbook bench list --json
    """
    from dataclasses import asdict

    from state.book import open_book
    from tui.cli.demo import headline

    book = open_book(root())
    emit([asdict(entry) for entry in book.benchmarks], headline(book) if book.benchmarks else "no benchmarks")
