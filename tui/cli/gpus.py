"""`rigbook gpus`: every GPU of the rig, what it does, and who holds it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from state.errors import REFUSED, UNREACHABLE, USAGE, RigbookError
from tui.cli.common import ctx, emit, journal, project, say, wait_for
from tui.cli.rig import chosen, rig_of

if TYPE_CHECKING:
    from remote.connect import Rig
    from remote.gpus import Gpu, Holder, Look
    from state.project import Project

WIDTH = 80
CLASSES = {
    "live": "ours, live",
    "orphan": "ours, orphaned",
    "unclaimed": "unclaimed orphan",
}


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


STATES = {
    "none": "no NVIDIA GPU",
    "no-library": "GPU devices, but no usable NVML library",
    "no-driver": "NVML is here, but the kernel module is not loaded",
    "mismatch": "the NVML library and the kernel module have different versions",
    "hung": "the driver does not answer",
    "failed": "NVML does not work",
}


def lines(look: Look) -> list[str]:
    """A host's GPUs for people, within 80 columns."""
    head = f"{look.host}: {STATES.get(look.state, look.state)}" if look.state != "ok" else look.host
    if look.state == "ok":
        head += f": driver {look.driver or '?'}, CUDA {look.cuda or '?'}"
    elif look.reason and look.state != "none":
        head += f" ({look.reason})"
    out = _wrap(head, "")
    if look.gpus:
        out.append(_row(["", "", "memory MiB", "load", "power W", "temp", "MHz", "link", "who"]).rstrip())
    for gpu in look.gpus:
        out.append(_row(cells(gpu)).rstrip())
    for gpu in look.gpus:
        out += [text for each in details(gpu) for text in _wrap(each, "  ")]
    for check, message in look.warnings:
        out += _wrap(f"{check}: {message}", "  ")
    return out


WIDTHS = (3, 8, 13, 4, 8, 4, 4, 5, 0)  # and 8 blanks between: 57, so 23 are left for who


def _row(texts: list[str]) -> str:
    out = ""
    for at, (text, width) in enumerate(zip(texts, WIDTHS, strict=True)):
        if width == 0:
            return out + _cut(text, WIDTH - len(out))
        out += (_cut(text, width).ljust(width) if at == 1 else _cut(text, width).rjust(width)) + " "
    return out


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _wrap(text: str, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=True)


def _n(value: Any, unit: float = 1) -> str:
    from remote.gpus import known

    value = known(value)
    return "-" if value is None else f"{value / unit:.0f}"


def short(name: str) -> str:
    for word in ("NVIDIA ", "Tesla ", "GeForce ", "Graphics Device"):
        name = name.replace(word, "")
    return name.strip()


def label(gpu: Gpu) -> str:
    """The index, which people use on one machine; the address where there is no index."""
    index = gpu.values.get("index")
    return str(index) if index is not None else "-"


def cells(gpu: Gpu) -> list[str]:
    v = gpu.values
    if gpu.state != "ok":
        what = {"passed-through": f"given to {gpu.owner} (vfio-pci)", "unbound": "no driver bound"}
        name = short(str(v.get("name") or gpu.pci or "?"))
        return [label(gpu), name, *("-" * 6), what.get(gpu.state, gpu.state.upper())]
    memory = v["memory"]
    return [
        label(gpu),
        short(str(v["name"]) if isinstance(v["name"], str) else "?"),
        f"{_n(memory['used'], 1 << 20)}/{_n(memory['total'], 1 << 20)}",
        _n(v["load"]) + ("%" if _n(v["load"]) != "-" else ""),
        f"{_n(v['power'])}/{_n(v['power_limit'])}",
        _n(v["temperature"]) + ("C" if _n(v["temperature"]) != "-" else ""),
        _n(v["clock"]),
        f"{_n(v['link_gen'])}x{_n(v['link_width'])}",
        who(gpu),
    ]


def who(gpu: Gpu) -> str:
    if gpu.ghost:
        return "GHOST load"
    people = [holder for holder in gpu.holders if holder.kind != "protected"]
    if not people:
        return "free" if gpu.unattributed is None else "free (see below)"
    runs = sorted({holder.run or holder.job for holder in people if holder.run or holder.job})
    kinds = sorted({CLASSES.get(holder.kind, holder.kind) for holder in people})
    return f"{owner(gpu.owner)}: {', '.join(runs or kinds)}" + (f" ({len(people)})" if len(people) > 1 else "")


def owner(text: str) -> str:
    kind, _, id = text.partition(":")
    return {"lxc": "CT", "vm": "VM"}.get(kind, kind + (":" if id else "")) + id


def details(gpu: Gpu) -> list[str]:
    """What does not fit the row: trouble, and everybody who holds it."""
    v, out = gpu.values, []
    trouble = problems(gpu)
    if trouble or gpu.holders or gpu.unattributed or gpu.ghost:
        out.append(f"GPU {label(gpu)} {gpu.uuid or ''} {gpu.pci or ''}".rstrip())
    out += [f"  ! {text}" for text in trouble]
    out += [f"  {holder_line(gpu, holder)}" for holder in gpu.holders]
    if gpu.unattributed:
        out.append(f"  {_n(gpu.unattributed.size, 1 << 20)} MiB unattributed: {gpu.unattributed.reason}")
    if gpu.ghost:
        out.append(f"  ! {gpu.ghost}")
    out += [
        f"  MIG {instance['gi']} {instance['uuid']}: {_n(instance['memory']['used'], 1 << 20)}/"
        f"{_n(instance['memory']['total'], 1 << 20)} MiB"
        for instance in v.get("instances", ())
    ]
    return out


def problems(gpu: Gpu) -> list[str]:
    """What is wrong with a GPU, in words."""
    from remote.gpus import known

    v, out = gpu.values, []
    if gpu.state not in ("ok", "passed-through", "unbound"):
        out.append(f"{gpu.state}: {v.get('reason', '')}".rstrip(": "))
    throttle = [word for word in known(v.get("throttle")) or [] if word != "idle"]
    if throttle:
        out.append(f"clocks held down by: {', '.join(throttle)}")
    if known(v.get("ecc_volatile")):
        out.append(f"{v['ecc_volatile']} uncorrected memory errors since the driver was loaded")
    rows = known(v.get("remapped")) or {}
    if rows.get("pending") or rows.get("failed"):
        out.append(
            "memory rows wait to be remapped: reset when idle" if rows.get("pending") else "row remapping failed"
        )
    width, most = known(v.get("link_width")), known(v.get("link_width_max"))
    if width and most and width < most:
        out.append(f"PCIe link has {width} of {most} lanes")
    return out


def holder_line(gpu: Gpu, holder: Holder) -> str:
    share = holder.used.get(gpu.uuid or "", -1)
    memory = "holds it open" if share == -1 else "share not told" if share is None else f"{share / (1 << 20):.0f} MiB"
    inner = f" ({owner(holder.inner.guest)}: {holder.inner.pid})" if holder.inner else ""
    where = f" in {owner(holder.owner)}" if holder.owner != "host" and not holder.inner else ""
    run = f" {holder.run or holder.job}" if holder.run or holder.job else ""
    waits = f" waits on {holder.waits[0]}" if holder.waits else ""
    kind = CLASSES.get(holder.kind, holder.kind)
    return f"pid {holder.pid.pid}{inner}{where} {memory}, {kind}{run}{waits}: {holder.command[:60] or '?'}"
