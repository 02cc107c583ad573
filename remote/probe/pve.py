"""Which GPUs a Proxmox host's guests are given, by their configuration files. Standard library, Python 3.9 syntax only.

`pct config` and `qm config` start a Perl of about a second each; the files that they read are plain text.
"""

import glob
import os
import re
from typing import Any, Dict, Iterator, List, Optional

ROOT = "/etc/pve"
CGROUPS = "/sys/fs/cgroup"
LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")


def guests(root: str = ROOT, cgroups: str = CGROUPS, run: str = "/run/qemu-server") -> Optional[List[Dict[str, Any]]]:
    """[{kind, id, name, running, nodes, pci, driver}] of guests that are given GPUs; None where this is no Proxmox."""
    if not os.path.isdir(root):
        return None
    found = []
    maps = mappings(os.path.join(root, "mapping/pci.cfg"))
    for path in sorted(glob.glob(os.path.join(root, "lxc/*.conf"))):
        config = _config(path)
        nodes = sorted(set(_nodes(config)))
        if nodes:
            id = os.path.basename(path)[:-5]
            process = _process(os.path.join(cgroups, "lxc", id))
            entry = {"kind": "lxc", "id": id, "name": _first(config, "hostname"), "nodes": nodes, "pci": []}
            found.append(dict(entry, running=process is not None, driver=userland(process) if process else None))
    for path in sorted(glob.glob(os.path.join(root, "qemu-server/*.conf"))):
        config = _config(path)
        pci = sorted({address for value in _values(config, r"hostpci\d+") for address in addresses(value, maps)})
        if pci:
            id = os.path.basename(path)[:-5]
            running = os.path.exists(os.path.join(run, id + ".pid"))
            entry = {"kind": "vm", "id": id, "name": _first(config, "name"), "nodes": [], "pci": pci}
            found.append(dict(entry, running=running, driver=None))
    return found


def _config(path: str) -> List[str]:
    """The lines of the current configuration: snapshots follow in sections of their own."""
    lines = []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("["):
                    break
                if not line.startswith("#"):
                    lines.append(line.rstrip("\n"))
    except OSError:
        pass
    return lines


def _values(config: List[str], key: str) -> List[str]:
    found = [re.match(key + r":\s*(.+)", line) for line in config]
    return [match.group(1).strip() for match in found if match]


def _first(config: List[str], key: str) -> str:
    return (_values(config, key) or [""])[0]


def _nodes(config: List[str]) -> Iterator[str]:
    for value in _values(config, r"dev\d+"):
        path = value.split(",")[0]
        yield from re.findall(r"^(?:path=)?(/dev/nvidia\d+)$", path)
    for value in _values(config, r"lxc\.mount\.entry"):
        yield from re.findall(r"^(/dev/nvidia\d+)\s", value)


def addresses(value: str, maps: Dict[str, List[str]]) -> List[str]:
    """The PCI addresses of a hostpci value: `01:00` (all functions), `0000:01:00.0`, `a;b`, `mapping=NAME`. Of all
    functions only the first is a GPU."""
    found = []
    for part in value.split(","):
        key, equals, rest = part.partition("=")
        if equals and key == "mapping":
            found += maps.get(rest, [])
        elif not equals or key == "host":
            for address in (rest if equals else key).split(";"):
                address = address.strip().lower()
                address = address if address.count(":") == 2 else "0000:" + address
                found.append(address if "." in address else address + ".0")
    return found


def mappings(path: str) -> Dict[str, List[str]]:
    """NAME -> addresses of /etc/pve/mapping/pci.cfg."""
    found: Dict[str, List[str]] = {}
    name = ""
    for line in _config(path):
        if line[:1] not in ("", " ", "\t"):
            name = line.split()[0]
            found[name] = []
        for path_of in re.findall(r"\bpath=([0-9a-fA-F:.]+)", line):
            found.setdefault(name, []).extend(addresses(path_of, {}))
    return found


def _process(folder: str) -> Optional[int]:
    """Any process of a running container; None when it does not run."""
    for where, _, files in os.walk(folder):
        if "cgroup.procs" in files:
            try:
                with open(os.path.join(where, "cgroup.procs")) as file:
                    first = file.readline().strip()
            except OSError:
                continue
            if first.isdigit() and first != "0":
                return int(first)
    return None


def userland(pid: int, root: str = "/proc/%d/root") -> Optional[str]:
    """The version of the NVIDIA libraries that this process's container has; None when it has none."""
    base = root % pid
    for folder in LIBRARIES:
        for path in glob.glob(os.path.join(base, folder, "libnvidia-ml.so.*.*")):
            found = re.search(r"\.so\.(\d+\.\d+(?:\.\d+)?)$", path)
            if found:
                return found.group(1)
    return None
