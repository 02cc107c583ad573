"""`rigbook clean`: what dead work still holds on the rig; plan, apply, proof."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from state.errors import FINDINGS, UNREACHABLE, UNVERIFIED, USAGE, RigbookError
from tui.cli.common import ctx, emit, journal, project, say, wait_for
from tui.cli.rig import chosen, rig_of

if TYPE_CHECKING:
    from remote.cleanup import Outcome, Plan
    from state.project import Project


def clean(
    names: list[str] = typer.Argument(None, metavar="[HOST]…", help="Which hosts; all when left out."),
    apply: str = typer.Option("", "--apply", metavar="PLAN", help="Carry out exactly this plan."),
) -> None:
    """What dead work still holds: ports, memory, GPUs. Shows a plan; --apply gives back and proves it.

    Only processes of jobs that rigbook started and that have ended are ever in a plan. Without --apply nothing is
    changed: exit code 6 when there is something to give back. With --apply: 5 when it could not be proved.
    --yes plans and applies at once.

    Example:  rigbook clean llm, then rigbook clean --apply clean-0123456789
    """
    loaded = project()
    if apply:
        if names:
            raise RigbookError("usage", "a plan names its host itself: give --apply alone", exit_code=USAGE)
        _carry_out(loaded, [load_plan(loaded.root, apply)])
        return
    plans, failures = wait_for(_plans(loaded, chosen(loaded, names)))
    found = [plan for plan in plans if plan.items]
    if found:
        _keep(loaded.root, found)
    if ctx.yes and not ctx.dry_run and found:
        _carry_out(loaded, found)
    else:
        emit([plan.to_dict() for plan in plans], "\n".join(_told(plan) for plan in plans))
    for name, why in failures.items():
        say(f"{name}: not looked at: {why}")
    if failures:
        raise typer.Exit(UNREACHABLE)
    if found and (ctx.dry_run or not ctx.yes):
        raise typer.Exit(FINDINGS)


async def _plans(loaded: Project, names: list[str]) -> tuple[list[Plan], dict[str, str]]:
    from remote.cleanup import plan

    failures: dict[str, str] = {}
    plans = []
    async with rig_of(loaded) as rig:

        async def look(name: str) -> Plan | None:
            try:
                return await plan(await rig.link(name))
            except RigbookError as error:
                failures[name] = str(error)
                return None

        plans = [found for found in await asyncio.gather(*map(look, names)) if found]
    return plans, failures


def _told(plan: Plan) -> str:
    from remote.cleanup import describe

    lines = [plan.describe()]
    lines += [f"  {describe(item)}" for item in plan.items]
    lines += [f"  stays: {kept}" for kept in plan.kept]
    lines += [f"  to give it back: rigbook clean --apply {plan.id}"] if plan.items else []
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


def _carry_out(loaded: Project, plans: list[Plan]) -> None:
    if ctx.dry_run:
        emit([plan.to_dict() for plan in plans], "\n".join(_told(plan) for plan in plans))
        return
    outcomes = wait_for(_apply(loaded, plans))
    emit([outcome.to_dict() for outcome in outcomes], "\n".join(f"{o.host}: {o.describe()}" for o in outcomes))
    if not all(outcome.verified for outcome in outcomes):
        raise typer.Exit(UNVERIFIED)


async def _apply(loaded: Project, plans: list[Plan]) -> list[Outcome]:
    from remote.cleanup import applied_event, apply

    outcomes: list[Any] = []
    book = journal()
    try:
        async with rig_of(loaded) as rig:
            for plan in plans:
                chosen(loaded, [plan.host])
                outcome = await apply(await rig.link(plan.host), plan)
                book.append(applied_event(plan, outcome))
                outcomes.append(outcome)
    finally:
        book.close()
    return outcomes
