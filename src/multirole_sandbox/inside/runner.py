"""Run one test in its process: standard streams, a namespace, the program, a normal interpreter exit.

No verdict is decided here. The process returns bytes and an exit code; forging both gains a program nothing, because it never
has the expected output. A function's result is returned as JSON.
"""

import atexit
import builtins
import dis
import io
import json
import os
import re
import sys
import threading
import types
from _thread import _count as count_threads
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Self

from . import nodes, wire

OPEN = builtins.open
INTEGER = re.compile("0|-?[1-9][0-9]*")
RECURSION_LIMIT = 50_000  # as common graders set it
RESULT = 3  # the descriptor for a function's result


def open_streams() -> None:
    """Open stdin, stdout and stderr over descriptors 0, 1, 2, once; every test's process inherits them."""
    for target in (0, 1, 2):  # memory files, as in tests, because a stream checks only once whether it can seek
        file = os.memfd_create("stream")
        os.dup2(file, target)
        os.close(file)
    text = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, buffering=1 << 15, **text)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1 << 15, **text)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", **(text | {"errors": "backslashreplace"}))  # noqa: SIM115


def code_of(error: BaseException) -> int:
    """Return the exit code for an uncaught exception of a program."""
    if isinstance(error, SystemExit):
        is_fine = error.code is None or (isinstance(error.code, int) and not error.code)
        return wire.FINE if is_fine else wire.FAILED
    if isinstance(error, MemoryError):
        return wire.NO_MEMORY
    return wire.FORBIDDEN if isinstance(error, PermissionError) else wire.FAILED


def open_by_name(file: object, *arguments: object, **options: object) -> io.IOBase:
    """Open a file as `open` does, and also the standard streams by name, because no path can be opened."""
    names = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2, "/dev/fd/0": 0, "/dev/fd/1": 1}
    name = os.fspath(file) if isinstance(file, os.PathLike) else file
    return OPEN(os.dup(names[name]) if type(name) is str and name in names else file, *arguments, **options)


def whole_map(mmap: Any) -> type:
    """Return a subclass of `mmap.mmap` whose length 0 is a file's size, which the C code asks by a call that takes a path."""

    class WholeMap(mmap):
        def __new__(cls, fileno: int, length: int, *arguments: object, **options: Any) -> Self:
            length = length or os.fstat(fileno).st_size - options.get("offset", 0)
            return super().__new__(cls, fileno, length, *arguments, **options)

    return WholeMap


def is_open(stream: io.TextIOWrapper) -> bool:
    """Return whether a stream is neither closed nor detached from its buffer."""
    try:
        return not stream.closed
    except ValueError:  # detached
        return False


class Program:
    """A compiled program, prepared in the manager and run in its forks.

    Copying the memory pages that a fork writes to is most of a test's cost, so all possible work is done before the fork.
    """

    def __init__(self, code: types.CodeType, names: dict[str, object], source: str) -> None:
        self.code, self.names, self.stdout = code, names, sys.stdout
        self.has_nodes = bool(nodes.named_in(source))
        self.may_hold_files = "open" in source or "__del__" in source or "IO" in source
        self.modules = [types.ModuleType("__main__"), types.ModuleType("solution")]
        for module in self.modules:
            vars(module).update(names, __builtins__=builtins, __file__="/program.py")
        if "/dev/" in source:
            builtins.open = io.open = open_by_name
        if "mmap" in source and "mmap" in sys.modules:
            sys.modules["mmap"].mmap = whole_map(sys.modules["mmap"].mmap)
        sys.setrecursionlimit(RECURSION_LIMIT)

    def run(self, function: str, has_integer_keys: bool = False) -> int:
        """Run one test, including interpreter shutdown; return the exit code."""
        module, stdout = self.modules[bool(function)], self.stdout
        sys.modules[module.__name__] = module
        code = self.execute(vars(module), function, integer_keys if has_integer_keys else None)
        try:
            if count_threads():
                threading._shutdown()  # waits for the program's threads
            atexit._run_exitfuncs()
            if sys.stdout is not stdout and sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
            if self.may_hold_files:
                vars(module).clear()  # files that it opened write their last bytes now
            if is_open(stdout):
                stdout.flush()
        except BaseException as error:  # noqa: BLE001 (hooks and streams of the program)
            code = code or code_of(error) or wire.FAILED
        return code

    def execute(self, namespace: dict[str, object], function: str, of_dict: Callable[[dict], dict] | None) -> int:
        """Run the program, and its function (if named) on the arguments from stdin, with dicts converted by `of_dict`."""
        try:
            if not function:
                exec(self.code, namespace)  # noqa: S102 (the purpose of this process)
                return wire.FINE
            lines = sys.stdin.read()
            arguments = [json.loads(line, object_hook=of_dict) for line in lines.split("\n")] if lines else []
            exec(self.code, namespace)  # noqa: S102
            called = self.find(namespace, function)
            if self.has_nodes:
                value = nodes.without_node(called, called(*nodes.with_nodes(called, arguments, namespace)))
            else:
                value = called(*arguments)
            with OPEN(RESULT, "w", closefd=False) as file:
                file.write(json.dumps(value, default=plain_value))
            return wire.FINE
        except BaseException as error:  # noqa: BLE001 (the boundary to untrusted code: SystemExit too ends here)
            code = code_of(error)
            return (code or wire.FAILED) if function else code

    def find(self, namespace: dict[str, object], function: str) -> Callable:
        """Return the method of `class Solution` with this name, else the function, else the method of any class.

        A predefined name is the program's function only if the program binds it.
        """
        solution = namespace.get("Solution")
        if isinstance(solution, type) and hasattr(solution, function):
            return getattr(solution(), function)
        is_predefined = function in self.names and namespace.get(function) is self.names[function]
        if function in namespace and not (is_predefined and not binds(self.code, function)):
            return namespace[function]
        classes = (
            member
            for member in namespace.values()
            if isinstance(member, type) and member.__module__ == namespace["__name__"]
        )
        return getattr(next(member for member in classes if function in vars(member))(), function)


def binds(code: types.CodeType, name: str, stores: tuple[str, ...] = ("STORE_NAME", "STORE_GLOBAL")) -> bool:
    """Return whether a program binds a global name by assignment, definition or import, also of `*`."""
    module = ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            module = step.argval
        is_star = "IMPORT_STAR" in (
            step.opname,
            step.argrepr.removeprefix("INTRINSIC_"),
        )  # the latter since Python 3.12
        if (is_star and hasattr(sys.modules.get(module), name)) or (step.opname in stores and step.argval == name):
            return True
    parts = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return any(binds(part, name, ("STORE_GLOBAL",)) for part in parts)


def has_integers(keys: Iterable[str]) -> bool:
    """Return whether all keys are integers as JSON writes them."""
    return all(map(INTEGER.fullmatch, keys))


def integer_keys(value: dict[str, object]) -> dict:
    """Convert the keys of a dict to integers if all of them are; otherwise return it unchanged."""
    return {int(key): item for key, item in value.items()} if has_integers(value) else value


def plain_value(value: object) -> int | float | list:
    """Convert a Decimal or Fraction to a number, because common graders compare with `==`, and a node to a list. Raises TypeError otherwise."""
    if not isinstance(value, (Decimal, Fraction)):
        return nodes.values_of(value)
    return int(value) if value == int(value) else float(value)
