"""`rigbook hosts`: the machines of this rig, how each is reached, and whose keys are trusted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from state.errors import UNREACHABLE, RigbookError
from tui.cli.common import emit, project, table, wait_for
from tui.cli.rig import rig_of

if TYPE_CHECKING:
    from remote.connect import Rig
    from state.project import Project


def hosts() -> None:
    """The hosts of this rig, how each is reached, and whether it answers.

    Example:  rigbook hosts
    """
    loaded = project()
    rows = wait_for(_hosts(loaded))
    cells = [[r["host"], r["kind"], r["route"], r["state"], r["detail"]] for r in rows]
    emit(rows, table(cells, ["host", "kind", "route", "state", ""]))
    if any(r["state"] != "answers" for r in rows):
        raise typer.Exit(UNREACHABLE)


async def _hosts(loaded: Project) -> list[dict[str, Any]]:
    async def look(rig: Rig, name: str) -> dict[str, Any]:
        host = loaded.hosts[name]
        kind = host.kind + (", played" if host.played else "")
        # The same words whether it answers or not: how it is reached is what the project file says.
        how = "local" if host.kind == "local" else "ssh" if host.ssh else "none"
        row = {"host": name, "kind": kind, "on": host.on, "route": how, "target": host.ssh, "played": host.played}
        try:
            link = await rig.link(name)
            answer = await (await link.probe()).call("system")
        except RigbookError as error:
            # Unreachable is not dead: we say what we know, which is that we could not ask.
            return {**row, "state": error.id.removeprefix("host."), "detail": str(error)}
        return {**row, "state": "answers", "detail": f"{answer['os']}, kernel {answer['kernel']}", **link.route()}

    async with rig_of(loaded) as rig:
        return list(await asyncio.gather(*(look(rig, name) for name in loaded.hosts)))
