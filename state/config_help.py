"""What the keys of `rigbook.toml` mean: `rigbook config schema` and `rigbook config explain KEY`."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from state.errors import USAGE, RigbookError
from state.models import twin
from state.outline import FILE_NAME
from state.tables import Project as Tables
from state.toml_positions import underscored

Project = twin(Tables)


def schema() -> dict[str, Any]:
    """JSON schema of the file, for editors."""
    return Project.model_json_schema()


def explain(key: str = "") -> list[dict[str, Any]]:
    """What `key` and the keys below it mean: dicts of key, type, default (absent when required), text.

    A name of your own (a host, a profile) may stand in the key or be written as `*`. Raises RigbookError
    `config.unknown-key`.
    """
    parts = tuple(part for part in key.split(".") if part)
    documented = list(_documented(Project, ()))
    wanted = [entry for entry in documented if _covers(parts, tuple(entry["key"].split(".")))]
    if wanted:
        return wanted
    names = [entry["key"] for entry in documented]
    near = difflib.get_close_matches(key, names, 3, cutoff=0.4)
    raise RigbookError(
        "config.unknown-key",
        f"no key {key!r} in {FILE_NAME}",
        hint=f"near it: {', '.join(near)}" if near else f"tables: {', '.join(Project.model_fields)}",
        exit_code=USAGE,
    )


def _covers(asked: tuple[str, ...], key: tuple[str, ...]) -> bool:
    """Is `key` the asked one or below it?"""
    pairs = zip(asked, key, strict=False)
    return len(asked) <= len(key) and all(b == "*" or underscored(a) == underscored(b) for a, b in pairs)


def _documented(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for name, field in model.model_fields.items():
        here = (*path, name)
        inner, is_map, is_list = _inner_model(field)
        entry: dict[str, Any] = {"key": ".".join(here), "type": _type_name(field), "text": field.description or ""}
        if not field.is_required():
            default = field.get_default(call_default_factory=True)
            if not isinstance(default, BaseModel):
                entry["default"] = default
        yield entry
        if inner:
            yield from _documented(inner, (*here, "*") if is_map or is_list else here)


def _inner_model(field: FieldInfo) -> tuple[type[BaseModel] | None, bool, bool]:
    annotation = field.annotation
    origin, args = get_origin(annotation), get_args(annotation)
    for candidate in (annotation, *args):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate, origin is dict, origin is list
    return None, False, False


def _type_name(field: FieldInfo) -> str:
    inner, is_map, is_list = _inner_model(field)
    if inner:
        return "tables by name" if is_map else "list of tables" if is_list else "table"
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return " | ".join(str(option) for option in get_args(annotation))
    optional = [arg for arg in get_args(annotation) if arg is not type(None)]
    if optional and type(None) in get_args(annotation):
        annotation = optional[0]
    words = {str: "text", int: "whole number", float: "number", bool: "true/false"}
    if annotation in words:
        return words[annotation]
    if get_origin(annotation) is list:
        return f"list of {words.get(get_args(annotation)[0], 'values')}s"
    return "table of values"


def keys_at(path: tuple[str | int, ...]) -> list[str]:
    """The keys that the table at `path` may have."""
    model: type[BaseModel] = Project
    parts = list(path)
    while parts:
        field = model.model_fields.get(str(underscored(parts.pop(0))))
        inner, is_map, is_list = _inner_model(field) if field else (None, False, False)
        if inner is None:
            return []
        if (is_map or is_list) and parts:
            parts.pop(0)
        model = inner
    return list(model.model_fields)
