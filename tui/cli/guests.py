"""`rigbook guests`: containers and VMs of the Proxmox hosts: list, start, stop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from state.errors import UNREACHABLE, UNVERIFIED, USAGE, RigbookError
from tui.cli.common import confirm, ctx, emit, journal, project, root, say, table, wait_for
from tui.cli.rig import rig_of

if TYPE_CHECKING:
    from remote.connect import Rig
    from remote.guests import Action, Guest, GuestOutcome, GuestPlan
    from state.project import Project

app = typer.Typer(rich_markup_mode=None)

NAMES = typer.Argument(..., metavar="GUEST…", help="Its name in rigbook.toml, its number, or its name in Proxmox.")


@app.callback(invoke_without_command=True)
def guests(context: typer.Context) -> None:
    """Containers and VMs of the Proxmox hosts, through the host: no ssh into the guest is needed."""
    if context.invoked_subcommand is None:
        list_()


@app.command("list")
def list_() -> None:
    """Every guest of every Proxmox host of the project, as the host says now.

    Example:  rigbook guests list
    """
    from dataclasses import asdict

    from state.render.text import size

    loaded = project()

    async def work() -> tuple[list[Guest], dict[str, str]]:
        async with rig_of(loaded) as rig:
            return await _look(rig, loaded)

    found, failures = wait_for(work())
    rows = [
        [
            str(guest.vmid), "container" if guest.kind == "lxc" else "VM", guest.name, guest.status, guest.lock,
            size(guest.memory) if guest.memory is not None else "", guest.host, guest.declared or "",
        ]
        for guest in found
    ]  # fmt: skip
    header = ["id", "kind", "name", "status", "lock", "memory", "on", "in rigbook.toml"]
    emit([asdict(guest) for guest in found], table(rows, header) if rows else "no guests")
    _tell(failures)
    if failures:
        raise typer.Exit(UNREACHABLE)


def _tell(failures: dict[str, str]) -> None:
    for host, why in failures.items():
        say(f"{host}: not asked: {why}")


async def _look(rig: Rig, loaded: Project) -> tuple[list[Guest], dict[str, str]]:
    from remote.guests import list_guests

    hosts = [name for name, host in loaded.hosts.items() if host.kind == "proxmox"]
    if not hosts:
        raise RigbookError(
            "guest.no-host", 'no host of kind "proxmox" is in rigbook.toml', hint="rigbook config explain hosts",
            exit_code=USAGE,
        )  # fmt: skip
    declared = {(host.on, host.vmid): name for name, host in loaded.hosts.items() if host.on and host.vmid}
    failures: dict[str, str] = {}

    async def look(name: str) -> list[Guest]:
        try:
            return await list_guests(await rig.link(name), declared)
        except RigbookError as error:
            failures[name] = str(error)
            return []

    found = await asyncio.gather(*map(look, hosts))
    return [guest for part in found for guest in part], failures


@app.command()
def start(
    names: list[str] = NAMES,
    timeout: int = typer.Option(120, "--timeout", min=1, help="Seconds that Proxmox may take."),
) -> None:
    """Start guests: shown, asked for, done, looked at again, recorded.

    Example:  rigbook guests start llm
    """
    _change("start", names, timeout, force=False)


@app.command()
def stop(
    names: list[str] = NAMES,
    timeout: int = typer.Option(60, "--timeout", min=1, help="Seconds that its shutdown may take."),
    force: bool = typer.Option(False, "--force", help="Stop it hard when it has not shut down by then."),
) -> None:
    """Shut guests down; with --force stop them hard if they do not. What runs in them ends.

    Example:  rigbook guests stop vm --timeout 120
    """
    _change("stop", names, timeout, force=force)


def _change(action: Action, names: list[str], timeout: int, *, force: bool) -> None:
    loaded = project()
    plans = wait_for(_plans(loaded, action, names, timeout, force))
    for plan in plans:
        for line in (plan.describe(), *(f"  {note}" for note in plan.notes), *_work_in(plan)):
            say(line)
    needed = [plan for plan in plans if plan.needed]
    if ctx.dry_run or not needed:
        emit([_as_dict(plan) for plan in plans], "")
        return
    which = ", ".join(plan.guest.declared or plan.guest.name for plan in needed)
    confirm(f"{'Start' if action == 'start' else 'Stop'} {which}?")
    outcomes = wait_for(_apply(loaded, needed))
    emit([_as_dict(outcome) for outcome in outcomes], "\n".join(outcome.describe() for outcome in outcomes))
    if not all(outcome.verified for outcome in outcomes):
        raise typer.Exit(UNVERIFIED)


def _as_dict(what: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(what), **({"needed": what.needed} if hasattr(what, "needed") else {})}


def _work_in(plan: GuestPlan) -> list[str]:
    """What the book says runs in a guest that is to be stopped."""
    from state.book import open_book
    from state.outline import journal_path

    if plan.action != "stop" or not plan.needed or not plan.guest.declared or not journal_path(root()).exists():
        return []
    runs = [
        run for run in open_book(root()).runs.values() if run.status == "running" and run.host == plan.guest.declared
    ]
    return [f"  {run.what} {run.name} ({run.run}) runs in it and ends with it" for run in runs]


async def _plans(loaded: Project, action: Action, names: list[str], timeout: int, force: bool) -> list[GuestPlan]:
    from remote.guests import pick, plan

    async with rig_of(loaded) as rig:
        found, failures = await _look(rig, loaded)
        if failures and not found:
            host, why = next(iter(failures.items()))
            raise RigbookError("host.unreachable", why, host=host, exit_code=UNREACHABLE)
        _tell(failures)
        chosen = list(dict.fromkeys(pick(found, name) for name in names))
        return [await plan(await rig.link(guest.host), action, guest, timeout=timeout, force=force) for guest in chosen]


async def _apply(loaded: Project, plans: list[GuestPlan]) -> list[GuestOutcome]:
    from remote.guests import applied_event, apply, plan_event

    outcomes = []
    book = journal()
    try:
        async with rig_of(loaded) as rig:
            for plan in plans:
                link = await rig.link(plan.guest.host)
                book.append(plan_event(plan))  # before it is done: if we are cut now, the book says what was begun
                outcome = await apply(link, plan)
                book.append(applied_event(outcome))
                outcomes.append(outcome)
    finally:
        book.close()
    return outcomes
