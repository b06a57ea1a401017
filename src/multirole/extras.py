"""Say how to install a package that an optional part needs."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Any

DISTRIBUTIONS = {"yaml": "pyyaml", "IPython": "ipython", "reasoning_gym": "reasoning-gym"}
"""Module -> the distribution that brings it, where their names differ."""


def install_advice(error: ModuleNotFoundError, user: str) -> str | None:
    """Return a sentence that names the package that is not installed and how to install it; None if the package is there.

    Args:
        user: what needs the package, such as "`from_openai`".
    """
    module = str(error.name).partition(".")[0]
    if error.name is None or find_spec(module) is not None:
        return None
    extra = extra_of(module)
    advice = "install it" if extra is None else command_for(extra)
    return f"{user} needs the package {module}, which is not installed: {advice}."


def command_for(extra: str) -> str:
    """Say how to install an extra of this project, to end a sentence with."""
    return f"run `pip install '.[{extra}]'` in a clone of the repository"


def extra_of(module: str) -> str | None:
    """Return the first extra of this project that has a package, such as "study" for "tabulate"; None if none has."""
    try:
        texts = requires("multirole") or []
    except PackageNotFoundError:  # a working tree on PYTHONPATH
        return None
    distribution = DISTRIBUTIONS.get(module, module).replace("_", "-")
    for text in texts:
        extra, name = re.search(r"extra == ['\"]([\w-]+)", text), re.match(r"[\w.-]+", text)
        if extra and name and name[0].lower().replace("_", "-") == distribution:
            return extra[1]
    return None


@contextmanager
def needed_by(user: str) -> Iterator[None]:
    """Context manager: importing a package that is not installed raises ModuleNotFoundError with `install_advice`."""
    try:
        yield
    except ModuleNotFoundError as error:
        advice = install_advice(error, user)
        if advice is None:
            raise
        raise ModuleNotFoundError(advice, name=error.name) from error


def import_named(option: str, name: str, place: str) -> Any:
    """Import the object at `place`, "module:attribute", which `name` means in an option; ValueError if it cannot be imported."""
    module, _, attribute = place.partition(":")
    try:
        with needed_by("it"):
            return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise ValueError(f"`{option}={name!r}` cannot be loaded: {reason}.") from error
