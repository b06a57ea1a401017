"""Validated groups of settings on pydantic: an option's value per preset, its bounds and its help are one line."""

import ast
import difflib
import json
import math
import re
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError


class Refused(ValueError):
    """What was asked for cannot work. Notebooks and the command line show the sentence and no traceback."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows."""
        return [str(self)]


@contextmanager
def refusing() -> Iterator[None]:
    """Within it, and in what it decorates, a ValueError or OSError is a refusal."""
    try:
        yield
    except Refused:
        raise
    except (ValueError, OSError) as error:
        raise Refused(str(error)) from error


def option(
    help: str, default: Any = ..., *, tiny: Any = ..., smollm2: Any = ..., released: Any = ..., **bounds: Any
) -> Any:
    """A field with its help and bounds. `tiny`, `smollm2` and `released` replace the default at that scale and in that preset."""
    given = {"tiny": tiny, "smollm2": smollm2, "released": released}
    presets = {name: value for name, value in given.items() if value is not ...}
    return Field(default, description=help, json_schema_extra=presets, **bounds)


class Settings(BaseModel):
    """Frozen, strictly typed fields. Values that do not fit raise a ValueError of one sentence each."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **given: Any) -> None:
        fields = type(self).model_fields
        read = {
            name: read_number(value, fields[name].annotation) if name in fields else value
            for name, value in given.items()
        }
        try:
            super().__init__(**read)
        except ValidationError as error:
            found = {str(one["loc"][0]): one for one in error.errors()}  # a union reports each of its members
            raise ValueError("\n".join(self._sentence(name, one) for name, one in found.items())) from None

    @classmethod
    def _sentence(cls, name: str, error: Any) -> str:
        if error["type"] == "extra_forbidden":
            return unknown_name(name, cls.model_fields)
        problem, given = re.sub("^[A-Z][a-z]+ should", "must", error["msg"]), error["input"]
        return f"`{name}` {problem}, got {given!r}." + did_you_mean(given, choices(cls.model_fields[name].annotation))

    def replace(self, **changes: Any) -> Self:
        """The same settings but for some fields."""
        return type(self)(**dict(self) | changes)


def unknown_name(name: str, known: Iterable[str]) -> str:
    """The message for a name that no setting has."""
    return f"`{name}` is not a known parameter." + (did_you_mean(name, known) or f" Known are {', '.join(known)}.")


def looked_in(path: str | Path) -> str:
    """Where a relative path was looked for, in words; nothing for an absolute one."""
    return "" if Path(path).expanduser().is_absolute() else f", which is looked for in {Path.cwd()}"


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """A sentence naming the nearest known word, or nothing."""
    words = {word.lower(): word for word in known}
    nearest = difflib.get_close_matches(str(given).lower(), words, n=1)
    return f" Did you mean {words[nearest[0]]!r}?" if nearest else ""


def choices(annotation: Any) -> tuple[str, ...]:
    """The words of a Literal; none for other types."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def value(text: str) -> object:
    """`-p NAME VALUE`: a Python constant where it reads as one (1e-3, None, True), else the text, as of "0,30"."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return text if isinstance(found, tuple) else found


def read_number(given: object, annotation: Any) -> object:
    """A field's value with numbers that were given as text read, and whole floats as integers where the field has those.

    YAML 1.1, which papermill and Snakemake read, takes 1e-3 for text (hiyouga/LlamaFactory#4014), and -p, JSON and quotes
    leave 1e3, "64" or "{'judge': 0.1}". What is no finite number stays as it was given, to be refused with that.
    """
    is_union = get_origin(annotation) in (Union, types.UnionType)
    kinds = {get_origin(kind) or kind: kind for kind in (get_args(annotation) if is_union else (annotation,))}
    if str in kinds or not kinds.keys() & {int, float, bool, dict}:
        return given
    found = (
        value(given.strip().capitalize() if given.strip().lower() in WORDS else given.strip())
        if isinstance(given, str)
        else given
    )
    if isinstance(found, dict) and dict in kinds:
        return {name: read_number(one, get_args(kinds[dict])[1]) for name, one in found.items()}
    if isinstance(found, float) and int in kinds and float not in kinds and found.is_integer() and abs(found) < 2**53:
        return int(found)
    is_finite = found is not None and (not isinstance(found, float) or math.isfinite(found))
    return found if type(found) in (kinds.keys() | ({int} if float in kinds else set())) and is_finite else given


WORDS = ("true", "false")


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
            is_union = get_origin(field.annotation) in (Union, types.UnionType)
            kind = get_args(field.annotation)[0] if is_union else field.annotation
            default = None if field.json_schema_extra else field.default
            name_of_kind = kind.__name__ if kind in (int, float, bool) else "str"
            words = f": {', '.join(choices(kind))}" if choices(kind) else ""
            listed.setdefault(name, Parameter(name, name_of_kind, default, f"{field.description}{words}"))
    return list(listed.values())
