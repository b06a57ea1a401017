"""Validated groups of settings on pydantic: an option's value per preset, its bounds and its help are one line."""

import difflib
import json
import types
from collections.abc import Iterable
from dataclasses import astuple
from typing import Any, Literal, NamedTuple, Self, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

NAMES = {int: "an integer", float: "a finite number", bool: "True or False", str: "a string"}


def option(help: str, default: Any = ..., *, tiny: Any = ..., released_code: Any = ..., **bounds: Any) -> Any:
    """A field with its help and bounds. `tiny` and `released_code` replace the default at those scales and in that preset."""
    presets = {name: value for name, value in (("tiny", tiny), ("released_code", released_code)) if value is not ...}
    return Field(default, description=help, json_schema_extra=presets, **bounds)


class Settings(BaseModel):
    """Frozen, strictly typed fields. Values that do not fit raise a ValueError of one sentence each."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            found = {str(one["loc"][0]): one for one in error.errors()}  # a union reports each of its members
            fields = type(self).model_fields
            raise ValueError(
                "\n".join(
                    unknown_name(name, fields)
                    if one["type"] == "extra_forbidden"
                    else f"`{name}` must be {expected(fields[name])}, got {one['input']!r}."
                    + did_you_mean(one["input"], choices(fields[name].annotation))
                    for name, one in found.items()
                )
            ) from None

    def replace(self, **changes: Any) -> Self:
        """The same settings but for some fields."""
        return type(self)(**dict(self) | changes)


def unknown_name(name: str, known: Iterable[str]) -> str:
    """The message for a name that no setting has."""
    return f"`{name}` is not a known parameter." + (did_you_mean(name, known) or f" Known are {', '.join(known)}.")


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """A sentence naming the nearest known word, or nothing."""
    nearest = difflib.get_close_matches(str(given), list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def choices(annotation: Any) -> tuple[str, ...]:
    """The words of a Literal; none for other types."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def expected(field: FieldInfo) -> str:
    """What a field takes, in words: its type and its bounds, or its choices."""
    if words := choices(field.annotation):
        return f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r}"
    kind, *others = [NAMES[kind] for kind in members(field.annotation) if kind in NAMES]
    signs = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}
    bounds = [f"{signs[type(one)]} {astuple(one)[0]}" for one in field.metadata if type(one) in signs]
    if kind == NAMES[int] and bounds == [">= 1"]:
        return "a positive integer"
    return " or ".join([" ".join([kind, " and ".join(bounds)]).strip(), *others])


def members(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; a type alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


class Parameter(NamedTuple):
    """A line of a notebook's parameter cell. The default None stands for the value of the preset."""

    name: str
    kind: str
    default: object
    help: str

    def __str__(self) -> str:
        default = json.dumps(self.default) if isinstance(self.default, str) else self.default
        return f"{self.name}: {self.kind} = {default}  # {self.help}"


def parameters(*groups: type[Settings]) -> list[Parameter]:
    """Every field of some groups, in their order."""
    listed: dict[str, Parameter] = {}
    for group in groups:
        for name, field in group.model_fields.items():
            kind = members(field.annotation)[0]
            default = "" if field.is_required() else None if field.json_schema_extra else field.default
            name_of_kind = kind.__name__ if kind in NAMES else "str"
            listed.setdefault(name, Parameter(name, name_of_kind, default, field.description or ""))
    return list(listed.values())
