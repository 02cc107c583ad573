"""`rigbook gpus`: every GPU of the rig, what it does, and who holds it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from state.errors import REFUSED, UNREACHABLE, USAGE, RigbookError
from tui.cli.common import ctx, emit, journal, project, say, wait_for
from tui.cli.rig import chosen, rig_of
from tui.gpu_lines import label, lines

if TYPE_CHECKING:
    from remote.connect import Rig
    from remote.gpus import Look
    from state.project import Project


def gpus(
    names: list[str] = typer.Argument(None, metavar="[HOST]…", help="Which hosts; all when left out."),
    watch: bool = typer.Option(False, "--watch", help="Look again every second until Ctrl-C."),
    every: float = typer.Option(1.0, "--every", metavar="SECONDS", help="With --watch: how often."),
    since: str = typer.Option("", "--since", metavar="TIME", help="What they did: 90s, 15m, 2h. Asks no host."),
    reset_plan: str = typer.Option("", "--reset-plan", metavar="GPU", help="What a reset of it takes. Resets nothing."),
) -> None:
    """Each GPU: memory, load, power, temperature, clock, link, and who holds it: host, container, process, run.

    A figure that the driver does not tell is a dash, never a zero. --json is described in docs/gpus.md. Every look is
    kept for --since (three hours of eight GPUs), and what is wrong is written into the book when it begins.

    Example:  rigbook gpus llm --watch
    """
    loaded = project()
    wanted = chosen(loaded, names)
    if since:
        from tui.cli.gpu_past import past

        past(loaded.root, wanted, since)
        return
    failures = wait_for(_watch(loaded, wanted, every) if watch else _once(loaded, wanted, reset_plan))
    if failures:
        raise typer.Exit(UNREACHABLE)


async def _once(loaded: Project, names: list[str], reset_plan: str) -> dict[str, str]:
    async with rig_of(loaded) as rig:
        looks, failures = await look_at(rig, loaded, names)
    if reset_plan:
        _reset_plan(looks, reset_plan)
    else:
        show(looks, failures)
    keep(loaded.root, looks)
    return failures


async def _watch(loaded: Project, names: list[str], every: float) -> dict[str, str]:
    from remote.gpus import HOLDERS_S

    async with rig_of(loaded) as rig:
        while True:
            began = time.monotonic()
            looks, failures = await look_at(rig, loaded, names, max_age=HOLDERS_S)
            show(looks, failures, again=True)
            keep(loaded.root, looks)
            await asyncio.sleep(max(0.0, every - (time.monotonic() - began)))


def keep(root: Path, looks: list[Look]) -> None:
    """Into the ring; and what has begun to be wrong into the book."""
    from remote.gpu_checks import findings
    from remote.gpu_history import History
    from state.events import Warned

    history = History(root)
    begun = []
    for look in looks:
        history.add(look)
        begun += history.begun(look.host, findings(look))
    if begun:
        book = journal()
        try:
            for finding in begun:
                book.append(Warned(where=finding.host or "", check=finding.check.id, message=finding.message))
        finally:
            book.close()


def _reset_plan(looks: list[Look], wanted: str) -> None:
    from remote.gpu_map import reset_plan

    found = [(look, gpu) for look in looks for gpu in look.gpus if wanted in (gpu.uuid, gpu.pci, label(gpu))]
    if len(found) != 1:
        why = "no GPU is called" if not found else "several hosts have a GPU"
        raise RigbookError("gpu.which", f"{why} {wanted}", hint="Give its UUID: rigbook gpus", exit_code=USAGE)
    (look, gpu), *_ = found
    steps, against = reset_plan(gpu, look)
    text = [f"To reset GPU {label(gpu)} of {look.host} ({gpu.uuid}):", *(f"  {n}. {t}" for n, t in enumerate(steps, 1))]
    text += ["Not now:", *(f"  {reason}" for reason in against)] if against else []
    emit({"host": look.host, "uuid": gpu.uuid, "steps": steps, "against": against}, "\n".join(text))
    if against:
        raise typer.Exit(REFUSED)


async def look_at(
    rig: Rig, loaded: Project, names: list[str], max_age: float = 0.0
) -> tuple[list[Look], dict[str, str]]:
    """One look at each host; those that could not be looked at, and why."""
    from remote.gpu_map import join
    from remote.gpus import look

    failures: dict[str, str] = {}

    async def one(name: str) -> Look | None:
        try:
            return await look(await rig.link(name), loaded, max_age=max_age)
        except RigbookError as error:
            failures[name] = str(error)
            return None

    found = await asyncio.gather(*map(one, names))
    return join([look for look in found if look], loaded.hosts), failures


def show(looks: list[Look], failures: dict[str, str], *, again: bool = False) -> None:
    import sys

    data = {"hosts": [look.to_dict() for look in looks], "unreachable": failures}
    text = "\n".join(line for look in looks for line in lines(look))
    if again and not ctx.json and sys.stdout.isatty():
        text = f"\x1b[H\x1b[J{text}"
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    else:
        emit(data, text)
    for name, why in failures.items():
        say(f"{name}: not looked at: {why}")
