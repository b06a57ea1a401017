"""Validated groups of settings, built on pydantic. One line declares an option's defaults, bounds and help."""

import ast
import difflib
import json
import math
import re
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from multirole_study.experiment.old_names import OLD_NAMES, with_current_names

CHECKED = ConfigDict(extra="forbid")
"""Configuration of a pydantic dataclass whose fields a file declares."""


class UserError(ValueError):
    """Invalid request; shown without a traceback by notebooks and the command line."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows."""
        return [str(self)]


class UnfinishedRun(UserError):
    """Something outside of this process ended a run. What it has saved stays, and the same command continues from there."""

    def __init__(self, reason: object) -> None:
        super().__init__(f"{reason} The run is not finished. The same command continues from its newest checkpoint.")


@contextmanager
def user_errors() -> Iterator[None]:
    """Convert ValueError and OSError to UserError, as a context manager or a decorator."""
    try:
        yield
    except UserError:
        raise
    except ValidationError as error:
        raise UserError("\n".join(map(_in_words, error.errors()))) from error
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _in_words(error: Any) -> str:
    """Return a sentence for one error of a pydantic dataclass."""
    name, cause = ".".join(map(str, error["loc"])), error.get("ctx", {}).get("error")
    if cause is not None:
        return str(cause)
    if error["type"] == "unexpected_keyword_argument":
        return f"`{name}` is not a known field."
    if error["type"].startswith("missing"):
        return f"`{name}` is missing."
    return f"`{name}` {_must(error)}, got {error['input']!r}."


def _must(error: Any) -> str:
    """Return pydantic's message as the rest of a sentence, such as "must be a valid integer"."""
    return re.sub("^[A-Z][a-z]+ should", "must", error["msg"].partition(", unable to parse")[0])


def option(
    help: str,
    default: Any = ...,
    *,
    tiny: Any = ...,
    smollm2: Any = ...,
    qwen: Any = ...,
    released: Any = ...,
    recommended: Any = ...,
    **bounds: Any,
) -> Any:
    """Declare a field with its help and bounds. `tiny`, `smollm2`, `qwen`, `released` and `recommended` override the default there."""
    replacements = {"tiny": tiny, "smollm2": smollm2, "qwen": qwen, "released": released, "recommended": recommended}
    presets = {name: value for name, value in replacements.items() if value is not ...}
    return Field(default, description=help, json_schema_extra=presets, **bounds)


class Settings(BaseModel):
    """Base class of frozen, strictly typed settings. Invalid values raise a ValueError with one sentence per field."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        fields, values = type(self).model_fields, with_current_names(values)
        read = {
            name: read_number(value, fields[name].annotation) if name in fields else value
            for name, value in values.items()
        }
        try:
            super().__init__(**read)
        except ValidationError as error:
            errors_by_field = {
                str(detail["loc"][0]): detail for detail in error.errors()
            }  # a union reports each of its members
            raise ValueError(
                "\n".join(self._sentence(name, detail) for name, detail in errors_by_field.items())
            ) from None

    @classmethod
    def _sentence(cls, name: str, error: Any) -> str:
        if error["type"] == "extra_forbidden":
            return unknown_name(name, cls.model_fields)
        raw = error["input"]
        return f"`{name}` {_must(error)}, got {raw!r}." + did_you_mean(raw, choices(cls.model_fields[name].annotation))

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed."""
        return type(self)(**dict(self) | changes)


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown setting. A name that is like an earlier one gets the present one."""
    known = list(known)
    nearest = nearest_word(name, [*known, *(old for old, new in OLD_NAMES.items() if new in known)])
    advice = f" Did you mean {OLD_NAMES.get(nearest, nearest)!r}?" if nearest else f" Known are {', '.join(known)}."
    return f"`{name}` is not a known parameter." + advice


def looked_in(path: str | Path) -> str:
    """Return a clause that says where a relative path was looked for; empty for an absolute path."""
    return "" if Path(path).expanduser().is_absolute() else f", which is looked for in {Path.cwd()}"


def refuse_repeats(name: str, values: Sequence[object]) -> None:
    """Raise ValueError if a list of `name` has a value twice."""
    if len(set(values)) < len(values):
        raise ValueError(f"{name} must not repeat, got {values}.")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a sentence that suggests the nearest known word, or an empty string."""
    nearest = nearest_word(name, known)
    return f" Did you mean {nearest!r}?" if nearest else ""


def nearest_word(name: object, known: Iterable[str]) -> str:
    """Return the known word that is most like a name, whatever its case, or an empty string."""
    words = {word.lower(): word for word in known}
    return next((words[word] for word in difflib.get_close_matches(str(name).lower(), words, n=1)), "")


def choices(annotation: Any) -> tuple[str, ...]:
    """Return the members of a Literal; empty for other types."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def value(text: str) -> object:
    """Parse the VALUE of `-p NAME VALUE`: a Python constant (1e-3, None, True) if possible, else the text, as for "0,30"."""
    try:
        constant = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):  # TypeError: a dict with a dict as key
        return text
    return constant if constant is None or isinstance(constant, bool | int | float | str | dict | list) else text


def read_number(raw: object, annotation: Any) -> object:
    """Convert text to numbers where the field holds numbers, and whole floats to integers where it holds integers.

    YAML 1.1, which papermill and Snakemake read, parses 1e-3 as text (hiyouga/LlamaFactory#4014), and -p, JSON and quotes
    produce 1e3, "64" or "{'judge': 0.1}". Anything else is returned unchanged, so that the error message shows it.
    """
    is_union = get_origin(annotation) in (Union, types.UnionType)
    kinds = {get_origin(kind) or kind: kind for kind in (get_args(annotation) if is_union else (annotation,))}
    if str in kinds or not kinds.keys() & {int, float, bool, dict}:
        return raw
    parsed = (
        value(raw.strip().capitalize() if raw.strip().lower() in BOOLEAN_WORDS else raw.strip())
        if isinstance(raw, str)
        else raw
    )
    if isinstance(parsed, dict) and dict in kinds:
        return {name: read_number(item, get_args(kinds[dict])[1]) for name, item in parsed.items()}
    if (
        isinstance(parsed, float)
        and int in kinds
        and float not in kinds
        and parsed.is_integer()
        and abs(parsed) < 2**53
    ):
        return int(parsed)
    is_finite = parsed is not None and (not isinstance(parsed, float) or math.isfinite(parsed))
    return parsed if type(parsed) in (kinds.keys() | ({int} if float in kinds else set())) and is_finite else raw


BOOLEAN_WORDS = ("true", "false")


class Parameter(NamedTuple):
    """One line of a notebook's parameter cell. The default None means the preset's value."""

    name: str
    kind: str
    default: object
    help: str

    def __str__(self) -> str:
        default = json.dumps(self.default) if isinstance(self.default, str) else self.default
        return f"{self.name}: {self.kind} = {default}  # {self.help}"


def parameters(*groups: type[Settings]) -> list[Parameter]:
    """List the fields of settings groups, in order, without duplicates."""
    listed: dict[str, Parameter] = {}
    for group in groups:
        for name, field in group.model_fields.items():
            is_union = get_origin(field.annotation) in (Union, types.UnionType)
            kind = get_args(field.annotation)[0] if is_union else field.annotation
            default = None if field.json_schema_extra else field.default
            name_of_kind = kind.__name__ if kind in (int, float, bool) else "str"
            words = f": {', '.join(choices(kind))}" if choices(kind) else ""
            if (
                default is not None and name in OLD_NAMES.values()
            ):  # with None, a value under the earlier name is the only one
                default, words = None, f", {default} by default"
            listed.setdefault(name, Parameter(name, name_of_kind, default, f"{field.description}{words}"))
    return list(listed.values())
