"""The pydantic twins of `state.tables`: they name every problem of a file at once, and describe the keys.

Generated from the structs, so that there is one definition. Slow to make, so only for a file that does not fit, the
JSON schema and `rigbook config explain`.
"""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Meta
from msgspec.structs import fields
from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from state.tables import Table


class Twin(BaseModel):
    """A struct's twin: the same keys, types, limits and words."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    struct: ClassVar[type[Table]]

    @model_validator(mode="after")
    def _checked(self) -> Twin:
        check = getattr(self.struct, "__post_init__", None)
        if check is not None:
            check(self)  # it only reads, and the names are the same
        return self


@cache
def twin(struct: type[Table]) -> type[Twin]:
    """The pydantic model of a table."""
    hints = get_type_hints(struct, include_extras=True)
    keys: dict[str, Any] = {}
    for key in fields(struct):
        annotation, *metas = get_args(hints[key.name])
        (meta,) = (item for item in metas if isinstance(item, Meta))
        given = _limits(meta)
        if key.default_factory is not NODEFAULT:
            factory = key.default_factory
            made = twin(factory) if isinstance(factory, type) and issubclass(factory, Table) else factory
            given["default_factory"] = made
        elif key.default is not NODEFAULT:
            given["default"] = key.default
        keys[key.name] = (_swapped(annotation), Field(description=meta.description, **given))
    model: type[Twin] = create_model(struct.__name__, __base__=Twin, __doc__=struct.__doc__, **keys)
    model.struct = struct
    return model


def _swapped(annotation: Any) -> Any:
    """The annotation with twins in the structs' places, and pydantic's limits in msgspec's."""
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return twin(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[_swapped(arguments[0]), Field(**_limits(arguments[1]))]
    if origin in (dict, list):
        return origin[tuple(_swapped(item) for item in arguments)]
    if origin in (Union, UnionType):
        return Union[tuple(_swapped(item) for item in arguments)]  # noqa: UP007
    return annotation


def _limits(meta: Meta) -> dict[str, Any]:
    names = ("ge", "gt", "le", "lt", "min_length", "max_length")
    return {name: value for name in names if (value := getattr(meta, name)) is not None}
