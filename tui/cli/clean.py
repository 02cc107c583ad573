"""`rigbook clean`: what dead work still holds on the rig; plan, apply, proof."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from state.errors import FINDINGS, REFUSED, UNREACHABLE, UNVERIFIED, USAGE, RigbookError
from tui.cli.common import confirm, ctx, emit, journal, project, say, wait_for
from tui.cli.rig import chosen, rig_of

if TYPE_CHECKING:
    from remote.cleanup import Outcome, Plan
    from state.project import Project


def clean(
    names: list[str] = typer.Argument(None, metavar="[HOST]…", help="Which hosts; all when left out."),
    apply: str = typer.Option("", "--apply", metavar="PLAN", help="Carry out exactly this plan."),
    python: list[str] = typer.Option(
        None, "--python", metavar="PATH", help="Orphaned workers of this interpreter are nobody's, too."
    ),
    foreign: list[str] = typer.Option(
        None, "--foreign", metavar="HOST:PID", help="Other people's work: named when planned, and again with --apply."
    ),
) -> None:
    """What dead work still holds: ports, memory, GPUs. Shows a plan; --apply gives back and proves it.

    In a plan are processes of jobs that rigbook started and that have ended; and, shown with the evidence and asked
    about before they are ended, orphaned workers of the project's own Pythons that carry no mark. Everything else
    stays unless --foreign names it. Without --apply nothing is changed: exit code 6 when there is something to give
    back. With --apply: 3 when something was refused, 5 when it could not be proved. --yes plans and applies at once,
    but ends only what carries our mark.

    Example:  rigbook clean llm, then rigbook clean --apply clean-0123456789
    """
    loaded = project()
    strangers = [_target(text) for text in foreign or []]
    if apply:
        if names or python:
            raise RigbookError("usage", "a plan names its host itself: give --apply alone", exit_code=USAGE)
        _carry_out(loaded, [load_plan(loaded.root, apply)], strangers)
        return
    at_once = ctx.yes and not ctx.dry_run
    if strangers and at_once:
        raise RigbookError("usage", "--foreign is planned first and applied with --apply", exit_code=USAGE)
    hosts = chosen(loaded, names or sorted({host for host, _ in strangers}))
    plans, failures = wait_for(_plans(loaded, hosts, python or [], not at_once, strangers))
    found = [plan for plan in plans if plan.items]
    if found:
        _keep(loaded.root, found)
    if at_once and found:
        _carry_out(loaded, found, [])
    else:
        emit([plan.to_dict() for plan in plans], "\n".join(_told(plan) for plan in plans))
    for name, why in failures.items():
        say(f"{name}: not looked at: {why}")
    if failures:
        raise typer.Exit(UNREACHABLE)
    if found and (ctx.dry_run or not ctx.yes):
        raise typer.Exit(FINDINGS)


def _target(text: str) -> tuple[str, int]:
    host, colon, pid = text.rpartition(":")
    if not colon or not pid.isdigit():
        raise RigbookError("usage", f"--foreign {text}: it wants HOST:PID", exit_code=USAGE)
    return host, int(pid)


async def _plans(
    loaded: Project, names: list[str], pythons: list[str], unclaimed: bool, strangers: list[tuple[str, int]]
) -> tuple[list[Plan], dict[str, str]]:
    from remote.cleanup import plan
    from remote.gpus import interpreters

    failures: dict[str, str] = {}
    plans = []
    async with rig_of(loaded) as rig:

        async def look(name: str) -> Plan | None:
            try:
                return await plan(
                    await rig.link(name),
                    interpreters=sorted({*interpreters(loaded, name), *pythons}),
                    unclaimed=unclaimed,
                    foreign=[pid for host, pid in strangers if host == name],
                )
            except RigbookError as error:
                failures[name] = str(error)
                return None

        plans = [found for found in await asyncio.gather(*map(look, names)) if found]
    return plans, failures


def _told(plan: Plan) -> str:
    from remote.cleanup import describe

    lines = [plan.describe()]
    for item in plan.items:
        lines.append(f"  {describe(item)}")
        lines += [f"      {reason}" for reason in item.evidence]
    lines += [f"  stays: {kept}" for kept in plan.kept]
    lines += [f"  {note}" for note in plan.notes]
    names = "".join(f" --foreign {plan.host}:{item.pid}" for item in plan.of("foreign"))
    lines += [f"  to give it back: rigbook clean --apply {plan.id}{names}"] if plan.items else []
    return "\n".join(lines)


def plan_file(root: Path, id: str) -> Path:
    if not re.fullmatch(r"clean-[0-9a-f]{10}", id):
        raise RigbookError("clean.no-plan", f"{id!r} is not a plan's id", hint="rigbook clean", exit_code=USAGE)
    return root / ".rigbook" / "plans" / f"{id}.json"


def _keep(root: Path, plans: list[Plan]) -> None:
    """Store plans and record that they were made. The same finding, looked at again, is the same plan."""
    from remote.cleanup import plan_event

    book = journal()
    try:
        for plan in plans:
            file = plan_file(root, plan.id)
            if file.exists():
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
            temporary.write_text(json.dumps(plan.to_dict(), indent=1) + "\n")
            book.append(plan_event(plan))
            temporary.replace(file)
    finally:
        book.close()


def load_plan(root: Path, id: str) -> Plan:
    from remote.cleanup import plan_from

    file = plan_file(root, id)
    try:
        return plan_from(json.loads(file.read_text()))
    except FileNotFoundError:
        raise RigbookError(
            "clean.no-plan", f"there is no plan {id} here", hint="`rigbook clean` makes one", exit_code=USAGE
        ) from None
    except ValueError as error:
        raise RigbookError("clean.bad-plan", f"{file}: {error}", exit_code=USAGE) from error


def _carry_out(loaded: Project, plans: list[Plan], strangers: list[tuple[str, int]]) -> None:
    if ctx.dry_run:
        emit([plan.to_dict() for plan in plans], "\n".join(_told(plan) for plan in plans))
        return
    for plan in plans:
        if guesses := plan.of("unclaimed"):
            say(_told(plan))
            confirm(f"{len(guesses)} of these carry no mark of ours, and are believed to be nobody's. End them?")
    outcomes = wait_for(_apply(loaded, plans, strangers))
    emit([outcome.to_dict() for outcome in outcomes], "\n".join(f"{o.host}: {o.describe()}" for o in outcomes))
    if any(outcome.refused for outcome in outcomes):
        raise typer.Exit(REFUSED)
    if not all(outcome.verified for outcome in outcomes):
        raise typer.Exit(UNVERIFIED)


async def _apply(loaded: Project, plans: list[Plan], strangers: list[tuple[str, int]]) -> list[Outcome]:
    from remote.cleanup import applied_event, apply

    outcomes: list[Any] = []
    book = journal()
    try:
        async with rig_of(loaded) as rig:
            for plan in plans:
                chosen(loaded, [plan.host])
                foreign = [pid for host, pid in strangers if host == plan.host]
                outcome = await apply(await rig.link(plan.host), plan, foreign=foreign)
                book.append(applied_event(plan, outcome))
                outcomes.append(outcome)
    finally:
        book.close()
    return outcomes
