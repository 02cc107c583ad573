"""`rigbook hosts [trust]`: the machines of this rig, how each is reached, and whose keys are trusted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from state.errors import UNREACHABLE, USAGE, RigbookError
from tui.cli.common import confirm, emit, project, say, table, wait_for
from tui.cli.rig import chosen, rig_of

if TYPE_CHECKING:
    from remote.connect import Rig
    from state.project import Project

ENTRIES = 8  # unknown keys on the way to one host: its own and its jump hosts'

app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@app.callback()
def hosts(context: typer.Context) -> None:
    """The hosts of this rig, how each is reached, and whether it answers.

    Example:  rigbook hosts
    """
    if context.invoked_subcommand is not None:
        return
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
        row: dict[str, Any] = {"host": name, "kind": kind, "on": host.on, "route": host.reached_by}
        row |= {"target": host.ssh, "played": host.played}
        try:
            link = await rig.link(name)
            if host.reached_by == "agent":
                said = (await link.run(["uname", "-sr"], timeout=30)).check("asking its guest agent").text().strip()
                detail = f"{said}, by its guest agent: single commands only"
            else:
                answer = await (await link.probe()).call("system")
                detail = f"{answer['os']}, kernel {answer['kernel']}"
        except RigbookError as error:
            # Unreachable is not dead: we say what we know, which is that we could not ask.
            return {**row, "state": error.id.removeprefix("host."), "detail": str(error)}
        return {**row, "state": "answers", "detail": detail, **link.route()}

    async with rig_of(loaded) as rig:
        return list(await asyncio.gather(*(look(rig, name) for name in loaded.hosts)))


@app.command()
def trust(
    host: str = typer.Argument(..., help="The host."),
    accept_new: bool = typer.Option(
        False, "--accept-new", help="Take an unknown key without asking. Never one that changed."
    ),
) -> None:
    """Keep a host's key in .rigbook/known_hosts: shown first, asked for.

    The key of a guest with `on` and `vmid` is asked for through its Proxmox host, and needs no question. A key that
    changed is refused either way: the error says which line to remove.

    Example:  rigbook hosts trust pve
    """
    loaded = project()
    (name,) = chosen(loaded, [host])
    if loaded.hosts[name].reached_by != "ssh":
        raise RigbookError(
            "host.no-key",
            f"it is not reached over ssh but by {loaded.hosts[name].reached_by}, so it shows no key of its own",
            host=name,
            exit_code=USAGE,
        )
    told = wait_for(_vouched(loaded, name))
    for _ in range(ENTRIES):
        error = wait_for(_unknown(loaded, name))
        if error is None:
            break
        say(f"{error.message}\n  Compare on the machine's console: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub")
        if not accept_new:
            confirm("Is it the same, and shall it be trusted?", "--accept-new")
        told.append(error.pin())
    emit({"host": name, "pinned": told}, "\n".join(told) or f"the key of {name} is trusted already")


async def _vouched(loaded: Project, name: str) -> list[str]:
    """Pin what a guest's own host says about its keys; they replace what was pinned before."""
    from remote import hostkeys

    async with rig_of(loaded) as rig:
        keys = await rig.vouched(name)
    if not keys:
        return []
    return hostkeys.pin(hostkeys.pins(loaded.root), name, 22, *keys)


async def _unknown(loaded: Project, name: str) -> Any:
    """The key on the way that nobody vouched for; None when all are trusted."""
    from remote.hostkeys import UnknownKey

    async with rig_of(loaded) as rig:
        try:
            await rig.link(name)
        except UnknownKey as error:
            return error
        except RigbookError as error:
            # Whether it lets us in is another question.
            if error.id not in ("host.login-refused", "host.key-locked"):
                raise
    return None
