"""What every command shares: the global flags, the project at hand, and how data and talk leave the process.

Data goes to stdout, talk to stderr. `--json` prints one document (or one per line where a command streams).
Nothing heavy is imported here: a command pays only for what it uses.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from state.errors import REFUSED, USAGE, RigbookError
from state.harmless import harmless

if TYPE_CHECKING:
    from state.journal import Journal
    from state.project import Project

T = TypeVar("T")


@dataclass
class Context:
    """The flags that work with every command, filled by `tui.cli.main` before a command runs."""

    directory: Path | None = None  # -C DIR
    json: bool = False
    yes: bool = False
    dry_run: bool = False


ctx = Context()


def root() -> Path:
    """The project's directory: `-C DIR` (which must hold rigbook.toml), else found upwards from here."""
    from state.outline import find

    if ctx.directory is not None and not ctx.directory.is_dir():
        raise RigbookError("project.no-directory", f"{ctx.directory} is not a directory", exit_code=USAGE)
    try:
        return find((ctx.directory or Path.cwd()).resolve())
    except FileNotFoundError:
        raise RigbookError(
            "project.no-directory", "the directory we are in was deleted", hint="cd out of it", exit_code=USAGE
        ) from None


def project() -> Project:
    """The loaded rigbook.toml. Raises RigbookError with file, line and key where it is wrong."""
    from state.project import load

    return load(root())


def journal(*, read_only: bool = False) -> Journal:
    """The project's journal, made on first use."""
    from state.journal import Journal
    from state.outline import journal_path

    return Journal.open(journal_path(root()), read_only=read_only)


def emit(data: Any, text: str | None = None) -> None:
    """Print the result: `data` as JSON under --json, else `text` (or the data, indented, where there is none)."""
    if ctx.json or text is None:
        sys.stdout.write(json.dumps(data, ensure_ascii=False, default=str, indent=None if ctx.json else 2) + "\n")
    else:
        text = harmless(text)
        sys.stdout.write(text if text.endswith("\n") or not text else text + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Talk: to stderr, so that it never mixes with data."""
    sys.stderr.write(harmless(text) + "\n")
    sys.stderr.flush()


def interactive() -> bool:
    """Whether a person can be asked: both ends are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def confirm(question: str, flag: str = "--yes") -> None:
    """Return when the user agrees (or gave --yes); otherwise refuse. Unattended, nothing is assumed."""
    if ctx.yes:
        return
    if not interactive():
        raise RigbookError(
            "confirm.unattended", f"{question} Nobody is here to ask.", hint=f"Give {flag}.", exit_code=REFUSED
        )
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise RigbookError("confirm.declined", "Nothing was done.", exit_code=REFUSED)


def actor() -> str:
    """Who types: recorded as the author of notes and decisions."""
    return os.environ.get("RIGBOOK_ACTOR") or os.environ.get("USER") or os.environ.get("LOGNAME") or "person"


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from a command."""
    import asyncio

    return asyncio.run(work)


def table(rows: list[list[str]], header: list[str]) -> str:
    """A plain, aligned table. Cells are text already; the last column is not padded."""
    cells = [header, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["  ".join([*(c.ljust(w) for c, w in zip(row[:-1], widths, strict=False)), row[-1]]) for row in cells]
    return "\n".join(line.rstrip() for line in lines)
