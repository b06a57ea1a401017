"""Preload modules for programs, and provide the names that programs may use without an import.

A test's process cannot open files, so every importable module must be loaded in advance: the modules below in the zygote,
and those named in a program's text in its manager (`import_ahead`).

Common graders paste `from ... import *` of these modules in front of every program (LiveCodeBench and its copies),
so there are programs that use `List` or `defaultdict` without an import. A program's namespace starts with those of
these names that its text uses; no builtin is replaced.
"""

import ast
import builtins
import contextlib
import locale
import sys
import types

from . import nodes

STARRED = "string re datetime collections heapq bisect copy math random statistics itertools functools operator io json typing"
PRELOADED = (
    STARRED + " sys abc array calendar cmath codecs collections.abc contextlib ctypes dataclasses decimal difflib "
    "encodings.ascii encodings.cp1252 encodings.hex_codec encodings.idna encodings.latin_1 encodings.rot_13 "
    "encodings.unicode_escape encodings.utf_16 encodings.utf_16_be encodings.utf_16_le encodings.utf_32 "
    "encodings.utf_8_sig enum fractions graphlib hashlib inspect locale numbers operator os pprint queue reprlib shutil stat struct textwrap threading time tokenize traceback types "
    "unicodedata warnings weakref zlib _strptime"
)
NOT_PRELOADED = {
    "antigravity",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "test",
    "this",
    "tkinter",
    "turtle",
    "turtledemo",
    "venv",
}
"""Modules that are never preloaded, because they print, open windows or are large."""

NAMES: dict[str, object] = {}
"""Predefined names and their values; filled by `load`."""


def load() -> None:
    """Import the preloaded modules and fill `NAMES`; later modules override earlier names."""
    for module in PRELOADED.split():
        __import__(module)
    for module in STARRED.split():
        public = sys.modules[module]
        names = vars(public).get("__all__") or [name for name in vars(public) if name[0] != "_"]
        NAMES.update({name: getattr(public, name) for name in names if not hasattr(builtins, name)})
    NAMES.update({module: sys.modules[module] for module in [*STARRED.split(), "sys"]} | nodes.CLASSES)
    read_locale()


def read_locale() -> None:
    """Read the files of the environment's locale, which a program that sets it could not open; the current locale stays."""
    current = locale.setlocale(locale.LC_ALL)
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, "")
    locale.setlocale(locale.LC_ALL, current)


def modules_of(source: str) -> set[str]:
    """Return the modules that a program imports by statement or call, from its syntax tree."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.add(node.module)
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function, name = node.func, node.args[0].value
            called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
            if called in ("__import__", "import_module") and isinstance(name, str):
                modules.add(name)
    return modules


def import_ahead(source: str, code: types.CodeType) -> dict[str, object]:
    """Import the modules that a program may import, and return the part of `NAMES` that it uses."""
    names: set[str] = set()
    todo = [code]
    for part in todo:
        names.update(part.co_names)
        todo += [constant for constant in part.co_consts if type(constant) is types.CodeType]
    modules: set[str] = set()
    may_import = {name for name in names - sys.modules.keys() if name.partition(".")[0] in sys.stdlib_module_names}
    if may_import or "__import__" in names or "import_module" in names:
        with contextlib.suppress(
            SyntaxError, ValueError, RecursionError, MemoryError
        ):  # the source may be too large to parse
            modules = modules_of(source)
    if modules & {"concurrent.futures", "asyncio"}:
        modules.add("concurrent.futures.thread")  # imported on first use
    for module in sorted(modules):
        package, _, name = module.rpartition(".")
        top = module.partition(".")[0]
        if top not in sys.stdlib_module_names - NOT_PRELOADED or name in vars(sys.modules.get(package, builtins)):
            continue  # the second: `from package import name`
        with contextlib.suppress(BaseException):  # the program will meet the same
            __import__(module)
    return {name: NAMES[name] for name in names & NAMES.keys()}
