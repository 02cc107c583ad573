"""Reading `rigbook.toml`: every other room sees the project through this module.

Strict means: an unknown key, a bad type or a dangling reference is an error with file, line, key and the nearest
valid name, and all of them are told at once.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from state.errors import USAGE, RigbookError
from state.outline import FILE_NAME, STAGES, find, journal_path, outline_of, parse
from state.tables import Action, Env, Host, Pipeline, Profile, Project, Secret, Speculative, Target
from state.toml_positions import nearest_line, positions, underscored

__all__ = [
    "FILE_NAME",
    "STAGES",
    "Action",
    "Env",
    "Host",
    "Pipeline",
    "Profile",
    "Project",
    "Secret",
    "Speculative",
    "Target",
    "find",
    "journal_path",
    "load",
    "loads",
]


def load(root: Path) -> Project:
    """The project in `root`. Raises RigbookError `project.invalid` (exit code 2) that lists every problem."""
    path = root / FILE_NAME
    try:
        text = path.read_text("utf-8-sig")  # some editors put a byte order mark first
    except FileNotFoundError:
        raise RigbookError("project.not-found", f"no {FILE_NAME} in {root}", exit_code=USAGE) from None
    except UnicodeDecodeError as error:
        raise _invalid([f"{FILE_NAME}: byte {error.start} is not UTF-8"]) from None
    except OSError as error:
        raise _invalid([f"{FILE_NAME}: {error.strerror}"]) from None
    return loads(text, root)


def loads(text: str, root: Path) -> Project:
    """As `load`, from text that need not be on disk yet."""
    try:
        raw = parse(text)
    except tomllib.TOMLDecodeError as error:
        raise _invalid([_syntax_problem(error, text)]) from None
    lines = positions(text)
    origin = _Origin(raw, lines)
    problems: list[tuple[int, str]] = []
    merged = dict(raw)
    if isinstance(raw.get("profiles"), dict):
        merged["profiles"] = _resolve_profiles(raw["profiles"], origin, problems)
    merged = _spelled(merged, Project)
    try:
        project = msgspec.convert(merged, Project, strict=True)
    except msgspec.ValidationError as error:
        problems += [origin.problem(item) for item in _complaints(merged, error)]
        problems += _dangling(merged, origin)
        raise _invalid(_told(problems)) from None
    problems += _dangling(merged, origin)
    if problems:
        raise _invalid(_told(problems))
    project.__dict__.update(root_=root.resolve(), outline_=outline_of(raw, fallback_name=root.name))
    return project


def _spelled(raw: Any, kind: Any) -> Any:
    """`raw` with every known key in its underscored spelling. A key in both spellings stays as it is: unknown."""
    if isinstance(raw, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        table: dict[str, Any] = {}
        for name, value in raw.items():
            other = name.replace("-", "_")
            key = other if other in hints and other not in raw else name
            table[key] = _spelled(value, hints.get(key))
        return table
    inner = next((item for item in get_args(kind) if isinstance(item, type) and issubclass(item, msgspec.Struct)), None)
    if inner is None:
        return raw
    if isinstance(raw, list):
        return [_spelled(item, inner) for item in raw]
    if isinstance(raw, dict) and get_origin(kind) is dict:
        return {name: _spelled(value, inner) for name, value in raw.items()}
    return _spelled(raw, inner)


def _complaints(merged: dict[str, Any], first: msgspec.ValidationError) -> list[dict[str, Any]]:
    """Everything that is wrong with the tables. msgspec stops at the first problem, its pydantic twins do not."""
    from pydantic import ValidationError

    from state.models import twin

    try:
        twin(Project).model_validate(merged)
    except ValidationError as error:
        return _one_per_union(error.errors())
    return [{"loc": (), "type": "value_error", "msg": str(first)}]


def _one_per_union(errors: Iterable[Any]) -> list[dict[str, Any]]:
    """A value that fits no member of a union is one problem, not one per member."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for error in errors:
        path = error["loc"]
        if path and _is_union_label(path[-1]):
            error = {**error, "loc": path[:-1], "type": "union", "msg": "must be a text, a number or true/false"}
        kept.setdefault((error["loc"], error["type"]), error)
    return list(kept.values())


def _told(problems: list[tuple[int, str]]) -> list[str]:
    """Sorted by line. What several profiles inherit is told once, at the place where it is written."""
    seen: set[tuple[int, str]] = set()
    lines = []
    for line, text in sorted(set(problems)):
        key, _, what = text.partition(": ")
        if (line, what) not in seen or not key.startswith("profiles."):
            lines.append(f"{FILE_NAME}:{line}: {text}")
        seen.add((line, what))
    return lines


def _invalid(problems: list[str]) -> RigbookError:
    head = "" if len(problems) == 1 else f"{len(problems)} problems in {FILE_NAME}\n  "
    return RigbookError(
        "project.invalid",
        head + "\n  ".join(problems),
        hint="`rigbook config explain KEY` says what a key means; `rigbook config check` looks again",
        exit_code=USAGE,
    )


def _syntax_problem(error: tomllib.TOMLDecodeError, text: str) -> str:
    message = str(error)
    what, _, where = message.rpartition(" (at ")
    where = where.rstrip(")")
    # tomllib says "at line 3, column 5" or "at end of document"
    line = where[5:].partition(",")[0] if where.startswith("line ") else str(text.count("\n") + 1)
    return f"{FILE_NAME}:{line}: not valid TOML: {what[:1].lower()}{what[1:] or message}"


class _Origin:
    """Where a key of the merged document was written: its own line, or that of the profile it came from."""

    def __init__(self, raw: dict[str, Any], lines: dict[tuple[str | int, ...], int]) -> None:
        self.raw = raw
        self.lines = lines
        # A key may be written with - or _: look it up by one spelling.
        self.spelled = {tuple(underscored(part) for part in path): line for path, line in lines.items()}

    def line(self, path: tuple[str | int, ...]) -> int:
        seen: set[str] = set()
        while True:
            spelled = tuple(underscored(part) for part in path)
            if spelled in self.spelled:
                return self.spelled[spelled]
            if len(path) < 2 or path[0] != "profiles":
                break
            table = self.raw.get("profiles", {}).get(path[1], {})
            parent = table.get("extends") if isinstance(table, dict) else None
            if not isinstance(parent, str) or parent in seen:
                break
            seen.add(parent)
            if (found := self._in_parent(path, parent)) is None:
                break
            path = found
        return nearest_line(self.spelled, tuple(underscored(part) for part in path))

    def _in_parent(self, path: tuple[str | int, ...], parent: str) -> tuple[str | int, ...] | None:
        moved = ("profiles", parent, *path[2:])
        spelled = tuple(underscored(part) for part in moved)
        if spelled in self.spelled:
            return moved
        table = self.raw["profiles"].get(parent)
        further = isinstance(table, dict) and isinstance(table.get("extends"), str)
        return moved if further else None

    def problem(self, error: dict[str, Any]) -> tuple[int, str]:
        """One pydantic error as (line, "key: what is wrong")."""
        path = tuple(error["loc"])
        key = _dotted(path)
        kind = error["type"]
        if kind == "extra_forbidden":
            from state.config_help import keys_at

            name, known = str(path[-1]), keys_at(path[:-1])
            near = difflib.get_close_matches(name.replace("-", "_"), known, 1, cutoff=0.55)
            advice = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            return self.line(path), f"{key}: unknown key; {advice}"
        if kind == "missing":
            return self.line(path[:-1]), f"{key}: missing; it must be given"
        return self.line(path), f"{key}: {_plain_words(error)}"


def _is_union_label(part: str | int) -> bool:
    return part in ("str", "int", "float", "bool")


def _plain_words(error: dict[str, Any]) -> str:
    kind, context, value = error["type"], error.get("ctx") or {}, error.get("input")
    shown = repr(value) if not isinstance(value, dict | list) else type(value).__name__
    wanted = {
        "string_type": "a text in quotes",
        "int_type": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list [...]",
        "dict_type": "a table",
        "model_type": "a table",
        "model_attributes_type": "a table",
    }.get(kind)
    if wanted:
        return f"must be {wanted}, not {_toml_name(value)} {shown}"
    if kind == "literal_error":
        options = [option.strip(" '") for option in context["expected"].replace(" or ", ",").split(",")]
        near = difflib.get_close_matches(str(value), options, 1)
        return f"{shown} is not one of {context['expected']}" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind == "union":
        return f"{error['msg']}, not {_toml_name(value)} {shown}"
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    message = error["msg"]
    return f"{message[:1].lower()}{message[1:]}, not {shown}"


def _toml_name(value: Any) -> str:
    names = {bool: "the truth value", int: "the number", float: "the number", str: "the text", list: "a", dict: "a"}
    return names.get(type(value), type(value).__name__)


def _resolve_profiles(raw: dict[str, Any], origin: _Origin, problems: list[tuple[int, str]]) -> dict[str, Any]:
    """Each profile merged over the chain it extends. A cycle or an unknown parent becomes a problem."""
    resolved: dict[str, Any] = {}
    for name, table in raw.items():
        chain, current = [table], table
        seen = [name]
        while isinstance(current, dict) and isinstance(current.get("extends"), str):
            parent = current["extends"]
            if parent in seen:
                loop = " → ".join([*seen[seen.index(parent) :], parent])
                problems.append((origin.line(("profiles", name, "extends")), f"profiles.{name}.extends: cycle {loop}"))
                break
            if parent not in raw:
                if current is table:
                    problems.append(_unknown_reference(("profiles", name, "extends"), parent, raw, "profile", origin))
                break
            seen.append(parent)
            current = raw[parent]
            chain.append(current)
        if all(isinstance(link, dict) for link in chain):
            merged: dict[str, Any] = {}
            for link in reversed(chain):
                merged = _merge(merged, link)
            resolved[name] = merged
        else:
            resolved[name] = table
    return resolved


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


# Which key refers to which table: (path with * for any name, table, what it is called).
_REFERENCES = (
    (("hosts", "*", "on"), "hosts", "host"),
    (("envs", "*", "host"), "hosts", "host"),
    (("profiles", "*", "env"), "envs", "env"),
    (("pipeline", "host"), "hosts", "host"),
    (("pipeline", "env"), "envs", "env"),
    (("pipeline", "generate", "profile"), "profiles", "profile"),
    (("pipeline", "generate", "endpoints", "*", "key"), "secrets", "secret"),
    (("actions", "*", "host"), "hosts", "host"),
    (("secrets", "*", "host"), "hosts", "host"),
)


def _dangling(raw: dict[str, Any], origin: _Origin) -> list[tuple[int, str]]:
    """Names that refer to nothing, and guests that nobody could reach. Works on raw, maybe ill-typed, tables."""
    problems = []
    for pattern, table, what in _REFERENCES:
        known = raw.get(table)
        for path, value in _matches(raw, pattern):
            if path == ("pipeline", "generate", "profile") and value == "":
                continue  # no server of our own
            if isinstance(value, str) and value not in (known if isinstance(known, dict) else {}):
                problems.append(_unknown_reference(path, value, known if isinstance(known, dict) else {}, what, origin))
    hosts = raw.get("hosts")
    for name, host in hosts.items() if isinstance(hosts, dict) else ():
        if isinstance(host, dict) and (text := _no_way(host)):
            problems.append((origin.line(("hosts", name)), f"hosts.{name}{text}"))
    return problems


def _no_way(host: dict[str, Any]) -> str:
    """Why nobody could reach this host, or ""."""
    kind, route, guest = host.get("kind"), host.get("route"), "on" in host and "vmid" in host
    if route == "ssh" and "ssh" not in host:
        return '.ssh: missing; route = "ssh" needs it'
    for name, needed in (("pct", "lxc"), ("agent", "vm")):
        if route == name and not (kind == needed and guest):
            return f'.route: "{name}" is for kind = "{needed}" with on and vmid'
    if "ssh" in host or route is not None:
        return ""
    if kind in ("proxmox", "linux"):
        return f".ssh: missing; a {kind} needs it"
    if kind == "vm" and not guest:
        return ".ssh: missing; a vm needs either ssh, or on and vmid (then only its guest agent can be asked)"
    if kind == "lxc" and not guest:
        return ": an lxc needs either ssh, or on and vmid (then it is reached by `pct exec`)"
    return ""


def _matches(
    raw: Any, pattern: tuple[str, ...], path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if not pattern:
        yield path, raw
    elif isinstance(raw, list) and pattern[0] == "*":
        for number, item in enumerate(raw):
            yield from _matches(item, pattern[1:], (*path, number))
    elif isinstance(raw, dict):
        names = list(raw) if pattern[0] == "*" else [pattern[0]] if pattern[0] in raw else []
        for name in names:
            yield from _matches(raw[name], pattern[1:], (*path, name))


def _unknown_reference(
    path: tuple[str | int, ...], value: str, known: dict[str, Any], what: str, origin: _Origin
) -> tuple[int, str]:
    near = difflib.get_close_matches(value, known, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(known) or 'none'}"
    return origin.line(path), f"{_dotted(path)}: no {what} named {value!r}; {advice}"


def _dotted(path: Iterable[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
