"""A host's GPUs as lines of text within 80 columns: the same for the command and for the app."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remote.gpus import Gpu, Holder, Look

WIDTH = 80
CLASSES = {
    "live": "ours, live",
    "orphan": "ours, orphaned",
    "unclaimed": "unclaimed orphan",
}
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
    out += [f"  {_cut(holder_line(gpu, holder), WIDTH - 4)}" for holder in gpu.holders]
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


def summary(look: Look) -> str:
    """All GPUs of a host in a few words."""
    from remote.gpus import known

    if look.state != "ok":
        return STATES.get(look.state, look.state)
    shown = [gpu for gpu in look.gpus if gpu.state == "ok"]
    loads = [load for gpu in shown if (load := known(gpu.values["load"])) is not None]
    used = [known(gpu.values["memory"]["used"]) for gpu in shown]
    total = [known(gpu.values["memory"]["total"]) for gpu in shown]
    words = f"{len(look.gpus)} GPU{'s' if len(look.gpus) != 1 else ''}"
    if loads:
        words += f" {sum(loads) / len(loads):.0f}%"
    if shown and None not in used and None not in total:
        words += f" {sum(used) / (1 << 30):.0f}/{sum(total) / (1 << 30):.0f} GiB"
    lost = len(look.gpus) - len(shown) - sum(gpu.state in ("passed-through", "unbound") for gpu in look.gpus)
    return words + (f", {lost} LOST" if lost else "")
