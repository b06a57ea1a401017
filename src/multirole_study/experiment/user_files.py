"""Workflows and tasks of one's own: from an object or from "path/to/file.py:Name", checked, and told apart by a digest.

A file may import modules that lie beside it, as a script may. They belong to it: a change in one of them makes another run,
and a module that would be taken for another one of the same name is refused.
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
from multirole_study.experiment.settings import did_you_mean, looked_in


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


def load(spec: str, kind: str) -> Any:
    """The object of a name in a Python file, "path/to/file.py:Name". A changed file or module beside it is loaded anew."""
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
            with _imports_beside(file.resolve()):
                exec(code, vars(module))  # noqa: S102 (a loader would leave a __pycache__ beside the user's file)
        except (Exception, SystemExit) as error:  # the user's own code
            del sys.modules[module_name]
            where = "".join(traceback.format_list(traceback.extract_tb(error.__traceback__)[-1:])).rstrip()
            raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}\n{where}") from error
    members = vars(sys.modules[module_name])
    if name not in members:
        raise ValueError(f"{path} defines no {name!r}, got `{kind}`={spec!r}." + did_you_mean(name, members))
    return members[name]


def _digest(given: object, about: str, code: list[Any]) -> str:
    """The sha256 of what an own workflow or task says of itself (a task: its rows' checksums) and of its files or its source."""
    if isinstance(given, str):
        return _digest_of_files(Path(given.rpartition(":")[0]).expanduser().resolve(), about.encode())
    try:
        return hashlib.sha256(f"{about} {[inspect.getsource(one) for one in code]}".encode()).hexdigest()
    except OSError as error:
        raise ValueError(f"{given!r} must come from a file or a notebook: its source tells its runs apart.") from error


# ---- modules beside a file


def _digest_of_files(file: Path, salt: bytes) -> str:
    """The sha256 of a salt, a file, and the modules beside it that it imports."""
    beside = [path for paths in modules_beside(file).values() for path in paths]
    return hashlib.sha256(b"".join([salt, file.read_bytes(), *(path.read_bytes() for path in beside)])).hexdigest()


def modules_beside(file: Path) -> dict[str, list[Path]]:
    """The modules and packages beside a file that it imports, by itself or through others of them: name -> source files."""
    found: dict[str, list[Path]] = {}
    todo = [file]
    for path in todo:
        for name in sorted(_imported_names(path) - found.keys()):
            module, package = file.parent / f"{name}.py", file.parent / name
            if (package / "__init__.py").is_file():  # Python prefers it
                found[name] = sorted(package.rglob("*.py"))
            elif module.is_file():
                found[name] = [module]
            todo += found.get(name, [])
    return dict(sorted(found.items()))


def _imported_names(path: Path) -> set[str]:
    """The first parts of the names of all modules that a file imports; none where it is not Python, which running it says."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes())))
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


@contextmanager
def _imports_beside(file: Path) -> Iterator[None]:
    """Let a file import the modules beside it; ValueError where the name of one stands for another module in this process.

    Its folder stays on the path, behind all others, for imports inside of functions. No bytecode is written there.
    """
    folder, beside = str(file.parent), modules_beside(file)
    for name, paths in beside.items():
        if other := _other_module(name, paths):
            raise ValueError(
                f"it imports {name!r}, which is {paths[0]}, but in this process {name!r} is {other}. Rename the module beside the "
                "file, or use the two in separate processes."
            )
        for part in [part for part in sys.modules if part == name or part.startswith(f"{name}.")]:
            del sys.modules[part]  # it may have changed
    _beside.update(beside)
    writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_no_bytecode
        sys.path.remove(folder)
        if beside and folder not in sys.path:
            sys.path.append(folder)


def _other_module(name: str, paths: list[Path]) -> str:
    """What else a name stands for: a module of another file of one's own, a loaded one, or one of Python or a package; or ""."""
    if name in _beside:
        return "" if _beside[name][0].parent == paths[0].parent else str(_beside[name][0])
    if name in sys.stdlib_module_names:
        return "a module of Python"
    if name in sys.modules:
        origin = inspect.getattr_static(sys.modules[name], "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        is_installed = spec is not None and "site-packages" in str(spec.origin)
        origin = spec.origin if spec is not None and is_installed else str(paths[0])
    return "" if origin and Path(origin).resolve() in paths else str(origin)


_beside: dict[str, list[Path]] = {}
"""Modules beside files of one's own that this process has loaded: name -> source files."""
