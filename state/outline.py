"""Where a project lies and what its file declares, read without pydantic.

The book must stay readable when `rigbook.toml` is broken or half-edited, and reading it must stay cheap
(validated models cost more time to import than the whole of `rigbook book show` may take). So the read path
takes the few names it needs from the file as they stand; `state.project` is the strict reader for all else.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from state.errors import USAGE, RigbookError

FILE_NAME = "rigbook.toml"

# The order in which the pipeline runs: "done / in progress / not started" is told along it.
STAGES = (
    "prompts",
    "generate",
    "held_self",
    "held_people",
    "tokenize",
    "mix",
    "vocab",
    "hidden",
    "train",
    "export",
    "audit",
    "predict",
)


@dataclass(frozen=True)
class Outline:
    """What the book needs to know of the project file; every field may be empty."""

    name: str = ""
    goal: str = ""
    instructions: tuple[str, ...] = ()
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    envs: dict[str, dict[str, Any]] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    rules: tuple[dict[str, Any], ...] = ()
    target: dict[str, Any] = field(default_factory=dict)
    has_pipeline: bool = False
    problem: str = ""  # why the file could not be read, if it could not


def find(start: Path) -> Path:
    """The nearest directory at or above `start` that holds `rigbook.toml`.

    Raises RigbookError `project.not-found`, exit code 2.
    """
    here = start.resolve()
    for directory in (here, *here.parents):
        if (directory / FILE_NAME).is_file():
            return directory
    raise RigbookError(
        "project.not-found",
        f"no {FILE_NAME} in {here} or above it",
        hint="go to a project folder, name one with -C DIR, or try `rigbook demo`",
        exit_code=USAGE,
    )


def journal_path(root: Path) -> Path:
    """The journal of the project at `root`. It need not exist yet."""
    return root / ".rigbook" / "journal.db"


def parse(text: str) -> dict[str, Any]:
    """The TOML text as tables. Raises `tomllib.TOMLDecodeError`, and nothing else, where it is none."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("lists or tables nested too deeply (at end of document)") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # Python refuses whole numbers of more than 4,300 digits
        raise tomllib.TOMLDecodeError(f"{error} (at end of document)") from None


def read_outline(root: Path) -> Outline:
    """The project file as it stands; never raises, a problem is carried in `.problem`."""
    path = root / FILE_NAME
    try:
        raw = parse(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        return Outline(name=root.name, problem=f"{FILE_NAME} could not be read: {error}")
    return outline_of(raw, fallback_name=root.name)


def outline_of(raw: dict[str, Any], fallback_name: str = "") -> Outline:
    """The outline of an already parsed project file, taking only what has the expected shape."""
    project = _table(raw.get("project"))
    instructions = project.get("instructions")
    rules = raw.get("rules")
    return Outline(
        name=str(project.get("name") or fallback_name),
        goal=str(project.get("goal") or ""),
        instructions=tuple(str(line) for line in instructions) if isinstance(instructions, list) else (),
        hosts=_tables(raw.get("hosts")),
        envs=_tables(raw.get("envs")),
        profiles=_tables(raw.get("profiles")),
        rules=tuple(rule for rule in rules if isinstance(rule, dict)) if isinstance(rules, list) else (),
        target=_table(raw.get("target")),
        has_pipeline=isinstance(raw.get("pipeline"), dict),
    )


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tables(value: Any) -> dict[str, dict[str, Any]]:
    return {name: table for name, table in _table(value).items() if isinstance(table, dict)}
