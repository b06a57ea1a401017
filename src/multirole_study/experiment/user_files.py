"""Load and check user-supplied workflows and tasks, from an object or "path/to/file.py:Name", and hash their code.

A file may import modules in its folder, as a script may. They are part of its digest, so that a change in one of them starts a
new run. A module whose name is already taken by another module is an error.
"""

import ast
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
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
        about = str(user_object.roles)
    else:
        for name in ("problems", "extract", "score", "describe"):
            if inspect.getattr_static(user_object, name, None) is None:
                raise ValueError(
                    f"The task {source!r} has no `{name}`. Write a `multirole_study.tasks.Task`, or an object like it."
                )
        about = str(user_object.describe())
    name = inspect.getattr_static(user_object, "name", None) and user_object.name
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name in builtin:
        raise ValueError(
            f"The name of a {kind} must be a plain identifier such as 'debate' that no built-in {kind} has, got {name!r}."
        )
    return user_object, _digest(source, user_object, about)


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


def _digest(source: object, user_object: object, about: str) -> str:
    """Return the SHA-256 of a description (roles, or a task's row checksums), and of the files or, for an object of this process, of its `_content`."""
    if isinstance(source, str):
        path, _, name = source.rpartition(":")
        return _digest_of_files(Path(path).expanduser().resolve(), f"{about} {name}".encode())
    seen: dict[int, object] = {}
    parts: list[object] = []
    for name, value in [("the class", type(user_object)), *_attributes(user_object)]:
        try:
            parts.append([name, _content(value, seen)])
        except OSError as error:
            raise ValueError(
                f"{source!r} must be defined in a file or a notebook, because its source code is part of the run's id, and that of {name} "
                f"cannot be read ({error})."
            ) from error
    return hashlib.sha256(f"{about} {parts}".encode()).hexdigest()


# ---- objects of this process

PLAIN = (str, int, float, bool, type(None))
"""Kinds of values that are part of an object's digest as they are."""


def _content(value: object, seen: dict[int, object]) -> object:
    """Return what distinguishes a value from others of its kind, as nested lists of text that are the same in every process.

    Functions and classes have their source and the values that they read from outside; partials, bound methods, dataclasses and objects that can
    be called have their parts. Other objects are None, because nothing is known of them. `seen` holds what was met before. Raises
    OSError if a source cannot be read.
    """
    if isinstance(value, PLAIN):
        return repr(value)
    if id(value) in seen:
        return f"object {list(seen).index(id(value))}"
    seen[id(value)] = value

    def each(values: Iterable[object]) -> list[object]:
        return [_content(one, seen) for one in values]

    def parts_of(item: object) -> list[object]:
        return [_content(type(item), seen), *([name, _content(part, seen)] for name, part in _attributes(item))]

    match value:
        case Mapping():
            return [each(pair) for pair in value.items()]
        case list() | tuple():
            return each(value)
        case set() | frozenset():
            return sorted(map(repr, each(value)))
        case functools.partial():
            return each((value.func, value.args, value.keywords))
        case types.MethodType():
            return [_content(value.__func__, seen), parts_of(value.__self__)]
        case types.FunctionType():
            return [inspect.getsource(value), *each(_read_by(value))]
        case type():
            classes = [base for base in value.__mro__ if base.__module__ == value.__module__]
            members = [
                item
                for base in classes
                for name, item in vars(base).items()
                if not name.startswith("__") or inspect.isfunction(item)
            ]
            methods = [
                item for item in members if inspect.isfunction(item) and _source_of(item)
            ]  # others were generated, as by `dataclass`
            if not any(map(_source_of, classes)) and not methods:
                raise OSError(f"the source of class {value.__qualname__} is not available")
            return [
                [*map(_source_of, classes)],
                each(item for item in members if isinstance(item, PLAIN)),
                each(methods),
            ]
    if dataclasses.is_dataclass(value) or callable(value):
        wrapped = getattr(value, "__wrapped__", None)  # as in `functools.cache`
        return [getattr(value, "__qualname__", ""), _content(wrapped, seen), *parts_of(value)]
    return None


def _attributes(item: Any) -> list[tuple[str, object]]:
    """Return the public attributes of an object, and its private functions, by name; without what a dataclass has filled in, which may be the machine's."""
    fields = dataclasses.fields(item) if dataclasses.is_dataclass(item) else ()
    filled = {one.name: repr(one.default_factory()) for one in fields if one.default_factory is not dataclasses.MISSING}
    attributes = [
        (name, value)
        for name, value in sorted(getattr(item, "__dict__", {}).items())
        if name not in filled or repr(value) != filled[name]
    ]
    return [(name, value) for name, value in attributes if not name.startswith("_") or inspect.isfunction(value)]


def _source_of(item: Any) -> str:
    """Return the source of a function or class, the name of one that is not written in Python, or "" if there is none, as of a notebook's classes."""
    try:
        return inspect.getsource(item)
    except TypeError:
        return f"{item.__module__}.{item.__qualname__}"
    except OSError:
        return ""


def _read_by(function: types.FunctionType) -> list[object]:
    """Return the values that a function has or reads: its defaults, what it closes over, and from its module constants, functions and classes."""
    closed = [
        cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()
    ]  # empty before its variable is set
    known = [function.__globals__.get(name) for name in sorted(_globals_read(function.__code__))]
    globals_read = [
        value
        for value in known
        if isinstance(value, PLAIN)
        or (isinstance(value, types.FunctionType | type) and value.__module__ == function.__module__)
    ]
    return [function.__defaults__, function.__kwdefaults__, *closed, *globals_read]


def _globals_read(code: types.CodeType) -> set[str]:
    """Return the global names that code reads, without those of Python such as `__file__`."""
    names = {str(one.argval) for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL"}
    inner = [_globals_read(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {name for name in names.union(*inner) if not name.startswith("__")}


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
