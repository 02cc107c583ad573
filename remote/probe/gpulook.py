"""Everything about a host's GPUs in one answer: NVML, holders, PCI. Standard library and Python 3.9 syntax only."""

import os
import re
import time
from typing import Any, Dict, List, Optional

from remote.probe import holders, nvml, pve, whose

SCANNER = holders.Scanner()
XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),?(.*)")
_last: Dict[str, Any] = {}


def gpu_look(jobs: str, **more: Any) -> Dict[str, Any]:
    return look(os.path.expanduser(jobs), **more)


def look(
    jobs: str,
    interpreters: Optional[List[str]] = None,
    max_age: float = 0.0,
    deep: bool = False,
    events: bool = True,
) -> Dict[str, Any]:
    """{nvml, holders, pci, services, xid, at}. Holders may be up to `max_age` seconds old: their scan costs more than
    NVML, and a figure a second does not need it."""
    began, used = time.monotonic(), time.process_time()
    gpus = nvml.read()
    named = {entry["pid"] for gpu in gpus["gpus"] for entry in nvml.listed(gpu)}
    known = _last.get("holders")
    fresh = known is not None and began - float(_last["at"]) < max_age and not deep and named <= _last["named"]
    if not fresh or known is None:
        known = whose.gpu_processes(SCANNER, jobs, interpreters or [], named, deep)
        _last.update(holders=known, at=began, named=named)
    return {
        "nvml": gpus,
        "holders": known,
        "pci": pci(),
        "xid": xid() if events else None,
        "guests": _guests(began),
        "services": services(),
        "at": time.time(),
        "seconds": round(time.monotonic() - began, 6),
        "cpu_seconds": round(time.process_time() - used, 6),
    }


# By the 15 characters that the kernel keeps of a name.
SERVICES = {"nvidia-persiste": "persistenced", "nv-fabricmanage": "fabricmanager", "nvidia-cuda-mps": "mps"}


def services() -> Dict[str, Optional[int]]:
    """NVIDIA's own services, by pid: what keeps a driver loaded, NVSwitches routed, contexts shared."""
    found: Dict[str, Optional[int]] = dict.fromkeys(SERVICES.values())
    for pid, now in SCANNER.table.items():
        name = SERVICES.get(now.comm)
        if name is not None:
            found[name] = pid
    return found


def _guests(now: float) -> Optional[List[Dict[str, Any]]]:
    """Configurations seldom change: they are read again after half a minute."""
    if now - _last.get("guests_at", -60.0) >= 30.0:
        _last.update(guests=pve.guests(), guests_at=now)
    found: Optional[List[Dict[str, Any]]] = _last["guests"]
    return found


def pci(root: str = "/sys/bus/pci/devices") -> List[Dict[str, Any]]:
    """NVIDIA's display and 3D controllers with the driver that has them: nvidia, vfio-pci (a virtual machine), none."""
    found = []
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return []
    for name in names:
        folder = os.path.join(root, name)
        if holders._word(folder + "/vendor") != "0x10de" or not holders._word(folder + "/class").startswith("0x03"):
            continue
        driver, group = holders._link(folder + "/driver"), holders._link(folder + "/iommu_group")
        found.append(
            {
                "pci": name,
                "device": holders._word(folder + "/device"),
                "driver": os.path.basename(driver) if driver else None,
                "iommu_group": os.path.basename(group) if group else None,
            }
        )
    return found


_kmsg = -1
_lines: List[Dict[str, Any]] = []


def xid(path: str = "/dev/kmsg") -> Optional[List[Dict[str, Any]]]:
    """The driver's error lines in the kernel log: [{pci, xid, text, uptime}], None where we may not read it. The log
    stays open, so that every line is read once."""
    global _kmsg
    try:
        if _kmsg < 0:
            _kmsg = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        while True:
            try:
                line = os.read(_kmsg, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # the ring went on under us
            if not line:
                break
            match = XID.search(line)
            if match:
                stamp = line.split(",", 3)[2:3]
                when = int(stamp[0]) / 1e6 if stamp and stamp[0].isdigit() else None
                address = nvml.address(match.group(1) + ("" if "." in match.group(1) else ".0"))
                text = match.group(3).strip()[:200]
                _lines.append({"pci": address, "xid": int(match.group(2)), "text": text, "uptime": when})
                del _lines[:-200]
    except OSError:
        return None
    return list(_lines)
