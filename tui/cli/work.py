"""`rigbook run`, `runs`, `serve`, `bench`: thin commands over `pipeline`."""

from __future__ import annotations

from typing import Any

import typer

from state.errors import UNREACHABLE
from tui.cli.common import confirm, ctx, emit, project, root, table, wait_for

serve = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def run(
    stages: list[str] = typer.Argument(None, help="Stages, or `all`. Without any: the list with each one's state."),
    from_: str = typer.Option("", "--from", help="Start at this stage."),
    until: str = typer.Option("", "--until", help="End with this stage."),
) -> None:
    """Run pipeline stages as jobs on the pipeline's host; what is done is not done again.

    Example:  rigbook run all --until export
    """
    from pipeline import recipe

    chosen = recipe.select(list(stages or []), from_ or None, until or None)
    if (not stages and not from_ and not until) or ctx.dry_run:
        states = wait_for(_states(chosen))
        cells = [[r["stage"], r["state"], r["folder"], r["help"]] for r in states]
        text = table(cells, ["stage", "state", "folder", ""])
        emit(states, text)
        return
    from pipeline.stage_runner import run_stages
    from tui.cli.demo import Console

    async def work() -> Any:
        from pipeline.runs import open_work

        async with open_work(root(), Console()) as opened:
            return await run_stages(opened, chosen)

    outcomes = wait_for(work())
    rows = [[name, o.status, f"{o.seconds:.0f} s", o.run] for name, o in outcomes.items()]
    emit(
        {"kind": "summary", "stages": {n: {"status": o.status, "result": o.result} for n, o in outcomes.items()}},
        table(rows, ["stage", "status", "time", "run"]),
    )


async def _states(chosen: list[Any]) -> list[dict[str, str]]:
    from pipeline import recipe
    from pipeline.runs import open_work
    from pipeline.stage_runner import done_manifest

    async with open_work(root()) as work:
        link = await work.rig.link(recipe.pipeline_of(work.project).host)
        rows = []
        for stage in chosen:
            done = await done_manifest(link, recipe.spec(work.project, stage))
            rows.append(
                {
                    "stage": stage.name,
                    "state": "done" if done else "to do",
                    "folder": recipe.folder(work.project, stage.name),
                    "help": stage.help,
                }
            )
        return rows


@runs.command("list")
def runs_list() -> None:
    """Every run that the book knows, newest last."""
    from state.book import open_book

    found = list(open_book(root()).runs.values())
    names = ("run", "what", "name", "host", "status", "seconds")
    text = table(
        [[r.run, r.what, r.host or "", r.status, _seconds(r.seconds)] for r in found],
        ["run", "what", "host", "status", "time"],
    )
    emit([{name: getattr(r, name) for name in names} for r in found], text)


@runs.command("show")
def runs_show(run: str = typer.Argument(..., help="The run's id; a unique beginning is enough.")) -> None:
    """One run: settings, result, artifacts."""
    from dataclasses import asdict

    from state.book import open_book
    from state.errors import USAGE, RigbookError

    known = open_book(root()).runs
    found = [known[run]] if run in known else [r for name, r in known.items() if name.startswith(run)]
    if len(found) != 1:
        what = "no run" if not found else f"{len(found)} runs"
        raise RigbookError("run.unknown", f"{what} begin with {run!r}", hint="rigbook runs list", exit_code=USAGE)
    emit(asdict(found[0]))


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0f} s"


@serve.command("plan")
def serve_plan(profile: str) -> None:
    """The command and environment that `start` would run."""
    from pipeline import server

    plan = server.plan(project(), profile)
    emit(
        {"profile": profile, "host": plan.host, "argv": plan.argv, "env": plan.env}, f"on {plan.host}:\n{plan.command}"
    )


@serve.command("start")
def serve_start(
    profile: str,
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
def serve_stop(profile: str) -> None:
    """Stop the server of a profile, down to the last worker, and see that its port is free."""
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
    """Whether servers run, and what they say about themselves."""

    async def act(work: Any) -> list[dict[str, Any]]:
        from pipeline import server

        return [await server.status(work, name) for name in ([profile] if profile else work.project.profiles)]

    found = wait_for(_with_work(act))
    rows = [[s["profile"], s["host"], s["state"], str(s.get("port", "")), s.get("run", "")] for s in found]
    emit(found, table(rows, ["profile", "host", "state", "port", "run"]))
    if any(s["state"] == "unknown" for s in found):
        raise typer.Exit(UNREACHABLE)


@serve.command("wait")
def serve_wait(profile: str) -> None:
    """Wait until the server of a profile that was started answers."""

    async def act(work: Any) -> float:
        from pipeline import server
        from state.errors import RigbookError

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
    settings = project().pipeline
    rounds = settings.bench.rounds if settings else 0
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
    """Every benchmark in the book, with its verdict."""
    from dataclasses import asdict

    from state.book import open_book
    from tui.cli.demo import headline

    book = open_book(root())
    emit([asdict(entry) for entry in book.benchmarks], headline(book))
