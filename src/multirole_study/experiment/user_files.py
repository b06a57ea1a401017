"""Workflows and tasks of one's own: from an object or from "path/to/file.py:Name", checked, and told apart by a digest.

A file may import the modules beside it, as a script may. They are part of its digest.
"""

import ast
import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from multirole.core.types import check_workflow
from multirole_study.experiment.settings import did_you_mean


def own_object(kind: str, given: object, builtin: Collection[str]) -> tuple[Any, str] | None:
    """The user's workflow or task (`kind`) and its digest; None for a built-in one's name."""
    if isinstance(given, str) and given in builtin:
        return None
    if isinstance(given, str) and ".py:" not in given:
        raise ValueError(
            f"`{kind}` must be one of {', '.join(builtin)}, or one of your own as 'path/to/file.py:Name', got {given!r}."
            + did_you_mean(given, builtin)
        )
    own: Any = load(given, kind) if isinstance(given, str) else given
    if isinstance(own, type):
        try:
            own = own()
        except (Exception, SystemExit) as error:  # the user's own code
            raise ValueError(
                f"`{kind}` is the class {own.__name__}, which cannot be called without arguments ({type(error).__name__}: {error}). "
                f"Pass an object, such as one that the file names `mine = {own.__name__}(...)`."
            ) from error
    if kind == "workflow":
        check_workflow(own)
        about, code = str(own.roles), list[Any]([type(own)])
    else:
        for name in ("problems", "extract", "score", "describe"):
            if inspect.getattr_static(own, name, None) is None:
                raise ValueError(
                    f"The task {given!r} has no `{name}`. Write a `multirole_study.tasks.Task`, or an object like it."
                )
        about, code = str(own.describe()), [type(own), *filter(inspect.isfunction, vars(own).values())]
    name = inspect.getattr_static(own, "name", None) and own.name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name in builtin:
        raise ValueError(
            f"The name of a {kind} must be a plain identifier such as 'debate' that no built-in {kind} has, got {name!r}."
        )
    return own, _digest(given, about, code)


def _module_name(file: Path) -> str:
    """The name under which a user's file is loaded; a changed file has another."""
    return f"{file.stem}_{hashlib.sha256(file.read_bytes()).hexdigest()[:8]}"


def load(spec: str, kind: str) -> Any:
    """The object of a name in a Python file, "path/to/file.py:Name". A changed file is loaded anew."""
    path, _, name = spec.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"`{kind}` must name an existing file, got {spec!r}.")
    module_name = _module_name(file)
    if module_name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(module_name, file)
        assert module_spec is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(module_spec)
        try:
            code = compile(file.read_bytes(), file, "exec", dont_inherit=True)
            with modules_beside(file):
                exec(code, vars(module))  # noqa: S102 (a loader would leave a __pycache__ beside the user's file)
        except (Exception, SystemExit) as error:  # the user's own code
            del sys.modules[module_name]
            where = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-1:])).rstrip()
            raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}\n{where}") from error
    members = vars(sys.modules[module_name])
    if name not in members:
        raise ValueError(f"{path} defines no {name!r}, got `{kind}`={spec!r}." + did_you_mean(name, members))
    return members[name]


@contextmanager
def modules_beside(file: Path) -> Iterator[None]:
    """Let code import the modules beside `file`, after those that are installed; also later, from within its functions.

    Within it, no bytecode is written beside them.
    """
    folder, writes = str(file.resolve().parent), sys.dont_write_bytecode
    if folder not in sys.path:
        sys.path.append(folder)
    sys.dont_write_bytecode = True
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes


def imported_files(file: Path) -> list[Path]:
    """The modules and packages beside `file` that its import statements name, and those that these name."""
    folder, found, waiting = file.parent, set[Path](), [file]
    while waiting:
        statements = list(ast.walk(ast.parse(waiting.pop().read_bytes())))
        named = [alias.name for one in statements if isinstance(one, ast.Import) for alias in one.names]
        named += [one.module for one in statements if isinstance(one, ast.ImportFrom) and one.module and not one.level]
        for name in {name.partition(".")[0] for name in named}:
            module, package = folder / f"{name}.py", folder / name
            new = {module} if module.is_file() else set(package.rglob("*.py"))
            waiting += new - found - {file}
            found |= new - {file}
    return sorted(found)


def _digest(given: object, about: str, code: list[Any]) -> str:
    """The sha256 of what an own workflow or task says of itself (a task: its rows' checksums) and of its file or its source."""
    if isinstance(given, str):
        file = Path(given.rpartition(":")[0]).expanduser()
        code_of_all = b"".join(one.read_bytes() for one in (file, *imported_files(file)))
        return hashlib.sha256(about.encode() + code_of_all).hexdigest()
    try:
        return hashlib.sha256(f"{about} {[inspect.getsource(one) for one in code]}".encode()).hexdigest()
    except OSError as error:
        raise ValueError(f"{given!r} must come from a file or a notebook: its source tells its runs apart.") from error
