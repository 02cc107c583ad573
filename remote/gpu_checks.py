"""What can be wrong with a host's GPUs: the checks, and what one look says of them. Pure functions on a look."""

from __future__ import annotations

from collections.abc import Iterator

from remote.gpus import OVERHEAD, Gpu, Look, known
from state.checks import Check, Finding, table

HOT_C = 87  # where a driver does not tell its own limit
MARGIN_C = 3  # below the slowdown temperature
TROUBLE = ("hw slowdown", "thermal", "hw thermal", "power brake")  # a power cap under full load is none

CHECKS = table(
    [
        Check("gpu.held", "warning", "GPU memory is held by no live work",
              "Processes whose job has ended, or whose launcher is gone, keep it; or nobody is named for it at all.",
              "rigbook clean shows what would be given back, and proves it afterwards."),
        Check("gpu.hot", "warning", "A GPU is close to the temperature at which it slows down",
              "The driver lowers the clocks when it gets hotter: benchmarks are not comparable then.",
              "Look at fans and air flow; rigbook gpus --since 15m shows since when."),
        Check("gpu.throttled", "warning", "A GPU is slowed down by hardware",
              "Temperature, a power brake or another hardware cause holds the clocks down.",
              "Look at cooling and power supply before you measure anything."),
        Check("gpu.xid", "error", "The driver reported an error (Xid)",
              "Xid 13, 31, 43 and 45 are mostly the program's own; 48, 63, 64, 74, 79, 94, 95 are the card's or its "
              "link's.", "Look the number up in NVIDIA's Xid table; 79 means that the card fell off the bus: reboot."),
        Check("gpu.ghost", "warning", "Load with no process",
              "After a process dies inside of a kernel the utilisation counter may stick. Only the counter is wrong.",
              "Open and close a CUDA context on that GPU; no process need be ended, no reset is needed."),
        Check("gpu.lost", "error", "A GPU does not answer",
              "It fell off the bus, or wants a reset. What ran on it is lost.",
              "Look for Xid 79; a reset when nobody holds it, else a reboot."),
        Check("gpu.memory-errors", "error", "A GPU has uncorrected memory errors",
              "What was computed since may be wrong. Rows that wait to be remapped are replaced at the next reset.",
              "Reset the GPU when it is idle; replace it when remapping fails."),
        Check("gpu.stuck", "error", "A process that holds a GPU cannot be killed",
              "A thread is in uninterruptible sleep: no signal reaches it, its memory stays.",
              "Clear what it waits for (a dead FUSE or NFS mount), or reboot. SIGKILL again does not help."),
        Check("gpu.nvml", "error", "NVML does not work on this host",
              "Nothing can be told of its GPUs. After a driver update without a reboot, library and module differ.",
              "Reboot or reload the module; in a container, install the user-space driver of the host's version."),
        Check("gpu.vm-takes", "warning", "Starting a VM would take a GPU from running work",
              "Proxmox binds the card and its whole IOMMU group to vfio-pci when the VM starts.",
              "End the work first, or give the VM another card."),
        Check("gpu.shared", "info", "Several guests have the same GPU",
              "Containers share a card: one's memory is missing to the other, and either may fill it.",
              "Nothing, if it is meant."),
        Check("gpu.driver-mismatch", "error", "A container's user-space driver differs from the host's kernel module",
              "CUDA and NVML in it fail with a version mismatch.",
              "Install the same version in the container (without its kernel module)."),
    ]
)  # fmt: skip


def findings(look: Look) -> list[Finding]:
    """Everything that is wrong now."""
    found = [Finding(CHECKS[check], look.host, message) for check, message in look.warnings]
    if look.state not in ("ok", "none"):
        found.append(Finding(CHECKS["gpu.nvml"], look.host, f"{look.state}: {look.reason}"))
    for gpu in look.gpus:
        name = gpu.uuid or gpu.pci or "?"
        found += [Finding(CHECKS[check], look.host, message, name) for check, message in _of(gpu)]
    for entry in look.xid or ():
        message = f"Xid {entry['xid']} on {entry['pci']}: {entry['text']}"
        found.append(Finding(CHECKS["gpu.xid"], look.host, message, f"{entry['pci']} {entry['uptime']}"))
    return found


def _of(gpu: Gpu) -> Iterator[tuple[str, str]]:
    label = f"GPU {gpu.values.get('index', gpu.pci)}"
    if gpu.state in ("lost", "reset-required", "failed"):
        yield "gpu.lost", f"{label} is {gpu.state}"
        return
    dead = [holder for holder in gpu.holders if holder.kind in ("orphan", "unclaimed", "unattributed")]
    held = sum(holder.used.get(gpu.uuid or "") or 0 for holder in dead)
    rest = gpu.unattributed.size if gpu.unattributed else 0
    if dead:
        pids = ", ".join(str(holder.pid.pid) for holder in dead[:5])
        yield "gpu.held", f"{label}: {held / (1 << 20):.0f} MiB held by pid {pids}"
    elif rest > OVERHEAD and gpu.unattributed and "reserve" not in gpu.unattributed.reason:
        yield "gpu.held", f"{label}: {rest / (1 << 20):.0f} MiB of nobody: {gpu.unattributed.reason}"
    for holder in gpu.holders:
        if holder.kind == "unkillable":
            yield "gpu.stuck", f"{label}: pid {holder.pid.pid}: {holder.why}"
    heat, limit = known(gpu.values.get("temperature")), known(gpu.values.get("temperature_limit"))
    if heat is not None and heat >= (limit - MARGIN_C if limit else HOT_C):
        yield "gpu.hot", f"{label}: {heat} C"
    trouble = [word for word in known(gpu.values.get("throttle")) or [] if word in TROUBLE]
    if trouble:
        yield "gpu.throttled", f"{label}: {', '.join(trouble)}"
    if gpu.ghost:
        yield "gpu.ghost", f"{label}: {gpu.ghost}"
    rows = known(gpu.values.get("remapped")) or {}
    if known(gpu.values.get("ecc_volatile")) or rows.get("pending") or rows.get("failed"):
        yield "gpu.memory-errors", f"{label}: {known(gpu.values.get('ecc_volatile')) or 0} uncorrected; rows {rows}"
