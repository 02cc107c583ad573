"""Put our patch into an installed SGLang, and take it out again. Runs on the server's host with the server's Python:

    python -m pipeline.sglang_patches.manage check|apply|revert [--package DIR]

A folder here is one version of SGLang: patch.json has the digest of every file before and after, so nothing is ever
patched by luck. Another version, or a file that somebody changed, is refused before the first byte is written; a run
that was killed half-way can be finished in both directions, because each file is either known-before or known-after.
Backups lie beside the files. Prints one JSON object; exits with 3 where it refuses.

Standard library only, and no `patch` program: slim images have neither it nor a network. Digests make fuzz needless.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BACKUP = ".before-rigbook"
HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
REFUSED = 3


class PatchError(ValueError):
    """Nothing was changed; the message is one sentence for the user."""


@dataclass(frozen=True)
class Patch:
    version: str
    files: dict[str, tuple[str, str]]  # name below the package: digests before and after
    hunks: dict[str, list[str]]  # name: lines of its part of the diff, from the first @@ on
    adds: dict[str, bytes]


def versions() -> list[str]:
    return sorted(path.parent.name for path in HERE.glob("*/patch.json"))


def read_patch(version: str) -> Patch:
    """Raises PatchError where there is none for this version."""
    folder = HERE / version
    if version not in versions():
        raise PatchError(
            f"there is no patch for SGLang {version}, only for {', '.join(versions())}: install one of them"
        )
    raw: dict[str, Any] = json.loads((folder / "patch.json").read_text())
    return Patch(
        version,
        {name: (file["before"], file["after"]) for name, file in raw["files"].items()},
        split((folder / raw["patch"]).read_text()),
        {name: (folder / source).read_bytes() for name, source in raw["adds"].items()},
    )


def installed() -> tuple[Path, str]:
    """The package's folder and its version, without importing it: that takes half a minute and a GPU."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise PatchError(f"{sys.executable} has no SGLang: run this with the Python that serves")
    return Path(next(iter(spec.submodule_search_locations))), importlib.metadata.version("sglang")


def state(package: Path, patch: Patch) -> str:
    """clean, applied, half (of ours, both ways), or PatchError for a file that is neither."""
    seen = set()
    for name, (before, after) in patch.files.items():
        path = package / name
        now = digest(path.read_bytes()) if path.is_file() else "missing"
        if now not in (before, after):
            raise PatchError(
                f"{path} is not the file of SGLang {patch.version} (digest {now[:12]}, expected {before[:12]}): "
                "somebody changed it; reinstall SGLang, or take that change out first"
            )
        seen.add("applied" if now == after else "clean")
    for name, content in patch.adds.items():
        path = package / name
        there = path.read_bytes() if path.is_file() else None
        seen.add("clean" if there is None else "applied" if there == content else "half")
    return seen.pop() if len(seen) == 1 else "half"


def apply(package: Path, patch: Patch) -> bool:
    """Returns whether anything had to be done. The files that others import come first: a half-applied patch starts."""
    if state(package, patch) == "applied":
        return False
    new: dict[str, bytes] = {}
    for name, (before, after) in patch.files.items():
        old = (package / name).read_bytes()
        if digest(old) == before:
            new[name] = patched(old.decode(), patch.hunks[name], name).encode()
            if digest(new[name]) != after:
                raise PatchError(f"the patch of {name} gives another file than it did here: rigbook is damaged")
    for name, content in patch.adds.items():
        write(package / name, content)
    for name, content in new.items():
        write(backup(package / name), (package / name).read_bytes())
        write(package / name, content)
    if state(package, patch) != "applied":
        raise PatchError(f"{package} changed while it was patched: look at it, then try again")
    return True


def revert(package: Path, patch: Patch) -> bool:
    """Returns whether anything had to be done."""
    if state(package, patch) == "clean":
        return False
    old: dict[str, bytes] = {}
    for name, (before, after) in patch.files.items():
        if digest((package / name).read_bytes()) == after:
            kept = backup(package / name)
            old[name] = kept.read_bytes() if kept.is_file() else b""
            if digest(old[name]) != before:
                raise PatchError(f"{kept} is missing or changed: reinstall SGLang {patch.version} to revert")
    for name, content in old.items():
        write(package / name, content)
    for name in patch.files:
        backup(package / name).unlink(missing_ok=True)
    for name in patch.adds:
        (package / name).unlink(missing_ok=True)
    if state(package, patch) != "clean":
        raise PatchError(f"{package} changed while it was reverted: look at it, then try again")
    return True


def split(diff: str) -> dict[str, list[str]]:
    """The lines of a unified diff by file, without its heads."""
    parts: dict[str, list[str]] = {}
    name = ""
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            name = line.removeprefix("+++ b/").split("\t")[0]
            parts[name] = []
        elif name and not line.startswith("--- a/"):
            parts[name].append(line)
    return parts


def patched(text: str, hunks: list[str], name: str) -> str:
    """`text` with the hunks in it. No fuzz and no offset: PatchError where a line is not what the hunk says."""
    lines, out, at = text.splitlines(keepends=True), [], 0
    for line in hunks:
        if head := HUNK.match(line):
            start = int(head[1]) - 1
            out += lines[at:start]
            at = start
        elif line.startswith("+"):
            out.append(line[1:] + "\n")
        else:
            if at >= len(lines) or lines[at].rstrip("\n") != line[1:]:
                raise PatchError(f"line {at + 1} of {name} is not what the patch expects")
            if not line.startswith("-"):
                out.append(lines[at])
            at += 1
    return "".join(out + lines[at:])


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def backup(path: Path) -> Path:
    return path.with_name(path.name + BACKUP)


def write(path: Path, data: bytes) -> None:
    """Whole or not at all, with the mode of what it replaces."""
    temporary = path.with_name(f".{path.name}.rigbook.tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.chmod(path.stat().st_mode & 0o777 if path.exists() else 0o644)
    os.replace(temporary, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Put our patch into an installed SGLang, and take it out again.")
    parser.add_argument("action", choices=("check", "apply", "revert"))
    parser.add_argument("--package", type=Path, help="the sglang folder; found by this Python when left out")
    parser.add_argument("--version", help="of the folder given with --package")
    given = parser.parse_args(argv)
    try:
        package, version = (given.package, given.version or "") if given.package else installed()
        patch = read_patch(version)
        changed = {"check": lambda *_: False, "apply": apply, "revert": revert}[given.action](package, patch)
        report = {"package": str(package), "version": version, "state": state(package, patch), "changed": changed}
    except (PatchError, OSError, importlib.metadata.PackageNotFoundError) as error:
        print(json.dumps({"error": str(error)}))
        return REFUSED
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
