"""The map over several hosts: a container's own look joined to its host's, and what guests would do to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from remote.gpus import Gpu, GuestPid, Holder, Look
from state.project import Host


def warnings(seen: Mapping[str, Any], gpus: Sequence[Gpu]) -> list[tuple[str, str]]:
    """What a Proxmox host's guests would do to each other: (check id, message). Pure."""
    guests = seen.get("guests") or []
    found: list[tuple[str, str]] = []
    by_pci = {gpu.pci: gpu for gpu in gpus if gpu.pci}
    groups: dict[str, list[str]] = {}
    for device in seen["pci"]:
        if device["iommu_group"] is not None:
            groups.setdefault(device["iommu_group"], []).append(device["pci"])
    for vm in guests:
        if vm["kind"] != "vm" or vm["running"]:
            continue
        # Binding takes every device of the group, whether the VM is given it or not.
        taken = set(vm["pci"]) | {
            pci for members in groups.values() if set(members) & set(vm["pci"]) for pci in members
        }
        for pci in sorted(taken & set(by_pci)):
            gpu = by_pci[pci]
            users = _users(gpu, guests)
            if users and gpu.driver != "vfio-pci":
                beside = "" if pci in vm["pci"] else " (it is in the same IOMMU group)"
                found.append(("gpu.vm-takes", f"starting VM {vm['id']} takes {_label(gpu)} from {users}{beside}"))
    for gpu in gpus:
        sharing = [guest for guest in guests if guest["running"] and _node(gpu) in guest["nodes"]]
        if len(sharing) > 1:
            names = ", ".join(f"CT {guest['id']}" for guest in sharing)
            found.append(("gpu.shared", f"{_label(gpu)} is given to {names}"))
    module = seen["nvml"].get("kernel_module")
    for guest in guests:
        if module and guest["driver"] and guest["driver"] != module:
            text = f"CT {guest['id']} has the libraries of driver {guest['driver']}, the host runs {module}"
            found.append(("gpu.driver-mismatch", text))
    return found


def _node(gpu: Gpu) -> str:
    return f"/dev/nvidia{gpu.values.get('minor')}"


def _label(gpu: Gpu) -> str:
    index = gpu.values.get("index")
    return f"GPU {index} ({gpu.pci})" if index is not None else f"GPU {gpu.pci}"


def _users(gpu: Gpu, guests: Sequence[Mapping[str, Any]]) -> str:
    """Whoever uses a GPU or could at any moment: its holders, and running containers that have it."""
    owners = {_name(holder.owner) for holder in gpu.holders if holder.kind != "protected"}
    owners |= {f"CT {guest['id']}" for guest in guests if guest["running"] and _node(gpu) in guest["nodes"]}
    return ", ".join(sorted(owners))


def _name(owner: str) -> str:
    kind, _, id = owner.partition(":")
    return {"lxc": "CT ", "vm": "VM "}.get(kind, f"{kind} " if id else kind) + id.partition("/")[0]


def machines(seen: Mapping[str, Any], gpus: Sequence[Gpu]) -> list[Gpu]:
    """Cards that are passed through, with the VM that has them: by its process, else by its configuration."""
    owners = {pci: f"vm:{g['id']}" for g in seen.get("guests") or [] if g["kind"] == "vm" for pci in g["pci"]}
    groups = {device["pci"]: device["iommu_group"] for device in seen["pci"]}
    for p in seen["holders"]["processes"]:
        if (p["guest"] or {}).get("kind") != "vm":
            continue
        held = {node.rpartition("/")[2] for node in p["nodes"] if node.startswith("/dev/vfio/")}
        owners.update({pci: f"vm:{p['guest']['id']}" for pci, group in groups.items() if group in held})
    return [
        replace(gpu, owner=owners.get(gpu.pci or "", gpu.owner)) if gpu.state == "passed-through" else gpu
        for gpu in gpus
    ]


def join(looks: Sequence[Look], hosts: Mapping[str, Host]) -> list[Look]:
    """The host sees every process and its container only its own; but only the container knows its jobs. So each
    holder that both see gets the container's word, matched by the container's number for it and its start time."""
    by_name = {look.host: look for look in looks}
    out = []
    for look in looks:
        inside: dict[tuple[GuestPid, int], Holder] = {}
        for name, host in hosts.items():
            if host.on == look.host and host.kind == "lxc" and host.vmid and name in by_name:
                for gpu in by_name[name].gpus:
                    for holder in gpu.holders:
                        inside[GuestPid(f"lxc:{host.vmid}", holder.pid.pid), holder.starttime] = holder
        gpus = tuple(replace(gpu, holders=tuple(_joined(h, inside) for h in gpu.holders)) for gpu in look.gpus)
        out.append(replace(look, gpus=gpus))
    return out


def _joined(holder: Holder, inside: Mapping[tuple[GuestPid, int], Holder]) -> Holder:
    if holder.inner is None:
        return holder
    guest = GuestPid(holder.inner.guest.partition("/")[0], holder.inner.pid)
    known = inside.get((guest, holder.starttime))
    # What is protected seen from outside (a container's first process) stays so.
    if known is None or holder.kind == "protected":
        return holder
    return replace(holder, kind=known.kind, why=f"{known.why} (seen from inside)", run=known.run, job=known.job)


def reset_plan(gpu: Gpu, look: Look) -> tuple[list[str], list[str]]:
    """(steps, what stands against it) of resetting a GPU. It is planned and never carried out by us."""
    target = gpu.pci or gpu.uuid or "?"
    against = [
        f"pid {holder.pid.pid} has it open ({holder.kind}): {holder.command[:60]}"
        for holder in gpu.holders
        if "nvidia-persistenced" not in holder.command
    ]
    if gpu.driver != "nvidia":
        against.append(f"its driver here is {gpu.driver}: a machine that is given a GPU resets it itself")
    if known_true(gpu.values.get("mig")):
        against.append("MIG is on: its instances go first, and a guest cannot do it")
    if look.state != "ok":
        against.append(f"NVML is {look.state}")
    steps = [
        "end the work that holds it, and look again: rigbook clean, rigbook gpus",
        "stop whatever looks at it, this program's --watch and the app, too: one open nvidia-smi is enough to refuse",
        f"nvidia-smi -i {target} -pm 0",
        f"nvidia-smi -i {target} --gpu-reset    (cards before Ampere that are linked by NVLink: all of them together; "
        "Ampere with NVSwitch: fabric manager must run)",
        f"nvidia-smi -i {target} -pm {1 if gpu.values.get('persistence') == 1 else 0}    (as it was)",
        "rigbook gpus: its state is ok, its memory free, no new Xid",
    ]
    return steps, against


def known_true(value: Any) -> bool:
    return value is True
