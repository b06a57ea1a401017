"""Load and check user-supplied workflows and tasks, from an object or "path/to/file.py:Name", and hash their code.

A file may import modules in its folder, as a script may. They are part of its digest, so that a change in one of them starts a
new run. A module whose name is already taken by another module is an error.
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

from multirole.types import check_workflow
from multirole_study.experiment.settings import did_you_mean, looked_in


def load_user_object(kind: str, source: object, builtin: Collection[str]) -> tuple[Any, str] | None:
    """Return a user-supplied workflow or task (`kind`) and its digest; None for the name of a built-in."""
    if isinstance(source, str) and source in builtin:
        return None
    if isinstance(source, str) and ".py:" not in source:
        raise ValueError(
            f"`{kind}` must be one of {', '.join(builtin)}, or one of your own as 'path/to/file.py:Name', got {source!r}."
            + did_you_mean(source, builtin)
        )
    user_object: Any = load(source, kind) if isinstance(source, str) else source
    if isinstance(user_object, type):
        try:
            user_object = user_object()
        except (Exception, SystemExit) as error:  # the user's own code
            raise ValueError(
                f"`{kind}` is the class {user_object.__name__}, which cannot be called without arguments ({type(error).__name__}: {error}). "
                f"Pass an object, such as one that the file names `mine = {user_object.__name__}(...)`."
            ) from error
    if kind == "workflow":
        try:
            check_workflow(user_object)
        except TypeError as error:  # such as a structure that is made of tuples
            raise ValueError(f"The workflow {source!r} cannot be used: {error}") from error
        about, code = str(user_object.roles), list[Any]([type(user_object)])
    else:
        for name in ("problems", "extract", "score", "describe"):
            if inspect.getattr_static(user_object, name, None) is None:
                raise ValueError(
                    f"The task {source!r} has no `{name}`. Write a `multirole_study.tasks.Task`, or an object like it."
                )
        about, code = (
            str(user_object.describe()),
            [type(user_object), *filter(inspect.isfunction, vars(user_object).values())],
        )
    name = inspect.getattr_static(user_object, "name", None) and user_object.name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name in builtin:
        raise ValueError(
            f"The name of a {kind} must be a plain identifier such as 'debate' that no built-in {kind} has, got {name!r}."
        )
    return user_object, _digest(source, user_object, about, code)


def load(spec: str, kind: str) -> Any:
    """Load an object from a Python file, "path/to/file.py:Name"; reload it if the file or a sibling module changed."""
    path, _, name = spec.rpartition(":")
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"`{kind}` must name an existing file, got {spec!r}{looked_in(path)}.")
    module_name = f"{file.stem}_{_digest_of_files(file.resolve(), str(file.resolve()).encode())[:8]}"
    if module_name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(module_name, file)
        assert module_spec is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(module_spec)
        try:
            code = compile(file.read_bytes(), file, "exec", dont_inherit=True)
            with _sibling_imports(file.resolve()):
                exec(code, vars(module))  # noqa: S102 (a loader would leave a __pycache__ in the user's folder)
        except (Exception, SystemExit) as error:  # the user's own code
            del sys.modules[module_name]
            position = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-1:])).rstrip()
            raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}\n{position}") from error
    members = vars(sys.modules[module_name])
    if name not in members:
        raise ValueError(f"{path} defines no {name!r}, got `{kind}`={spec!r}." + did_you_mean(name, members))
    return members[name]


PLAIN = (str, int, float, bool, type(None))
"""Kinds of attributes that are part of an object's digest."""


def _digest(source: object, user_object: object, about: str, code: list[Any]) -> str:
    """Return the SHA-256 of a description (roles, or a task's row checksums), of the files or source code, and of what tells objects apart.

    That is the object's name in its file or, for an object of this process, its public plain attributes.
    """
    if isinstance(source, str):
        path, _, name = source.rpartition(":")
        return _digest_of_files(Path(path).expanduser().resolve(), f"{about} {name}".encode())
    attributes = sorted(getattr(user_object, "__dict__", {}).items())
    plain = {name: value for name, value in attributes if not name.startswith("_") and isinstance(value, PLAIN)}
    try:
        return hashlib.sha256(f"{about} {plain} {[inspect.getsource(item) for item in code]}".encode()).hexdigest()
    except OSError as error:
        raise ValueError(
            f"{source!r} must be defined in a file or a notebook, because its source code is part of the run's id."
        ) from error


# ---- modules in the same folder


def _digest_of_files(file: Path, salt: bytes) -> str:
    """Return the SHA-256 of a salt, a file, and the modules in its folder that it imports."""
    neighbours = [path for paths in sibling_modules(file).values() for path in paths]
    return hashlib.sha256(b"".join([salt, file.read_bytes(), *(path.read_bytes() for path in neighbours)])).hexdigest()


def sibling_modules(file: Path) -> dict[str, list[Path]]:
    """Return the modules and packages in a file's folder that it imports, directly or not: name -> source files."""
    sources: dict[str, list[Path]] = {}
    todo = [file]
    for path in todo:
        for name in sorted(_imported_names(path) - sources.keys()):
            module, package = file.parent / f"{name}.py", file.parent / name
            if (package / "__init__.py").is_file():  # Python prefers it
                sources[name] = sorted(package.rglob("*.py"))
            elif module.is_file():
                sources[name] = [module]
            todo += sources.get(name, [])
    return dict(sorted(sources.items()))


def _imported_names(path: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports; empty if it is not valid Python."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


@contextmanager
def _sibling_imports(file: Path) -> Iterator[None]:
    """Let a file import the modules in its folder. Raises ValueError if such a name already means another module.

    The folder stays at the end of sys.path for imports inside functions. No bytecode is written there.
    """
    folder, neighbours = str(file.parent), sibling_modules(file)
    for name, paths in neighbours.items():
        if conflicting := _other_module(name, paths):
            raise ValueError(
                f"it imports {name!r}, which is {paths[0]}, but in this process {name!r} is {conflicting}. Rename the module next to the "
                "file, or use the two in separate processes."
            )
        for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
            del sys.modules[part]  # it may have changed
    _loaded_siblings.update(neighbours)
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_no_bytecode
        sys.path.remove(folder)
        if neighbours and folder not in sys.path:
            sys.path.append(folder)


def _other_module(name: str, paths: list[Path]) -> str:
    """Describe another module that already has this name (user-supplied, loaded, standard library or package), or ""."""
    if name in _loaded_siblings:
        return "" if _loaded_siblings[name][0].parent == paths[0].parent else str(_loaded_siblings[name][0])
    if name in sys.stdlib_module_names:
        return "a module of Python"
    if name in sys.modules:
        origin = inspect.getattr_static(sys.modules[name], "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        is_installed = spec is not None and "site-packages" in str(spec.origin)
        origin = spec.origin if spec is not None and is_installed else str(paths[0])
    return "" if origin and Path(origin).resolve() in paths else str(origin)


_loaded_siblings: dict[str, list[Path]] = {}
"""Modules in the folders of user-supplied files that this process has loaded: name -> source files."""
