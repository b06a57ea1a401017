"""Score answers with reasoning-gym. `gym.py` runs this in the sandbox, one process per answer.

Several `score_answer` methods of the package evaluate the answer as Python (`eval`, or sympy's `parse_expr`), so model output must
never reach them in the trainer. The sandbox's workers import this file and call `preload` before they enter the sandbox. What is
evaluated there could still read the reference or write the result itself, so an answer with more than data in it is wrong (`is_data`).
"""

import ast
import base64
import builtins
import importlib
import pickle
import pkgutil
import re
import sys
import types
from typing import Any

LATE = (
    "arc.arc_1d_tasks", "arc.rearc_utils.generators", "arc.rearc_utils.utils", "arithmetic.gsm_symbolic.generators_00_49",
    "arithmetic.gsm_symbolic.generators_50_99", "cognition.needle_data", "games.contrib.sokoban.src.game",
    "games.contrib.sokoban.src.generator", "games.contrib.sokoban.src.utils", "induction.list_functions.generators",
)  # fmt: skip
"""Modules that the package imports inside functions."""
SYMPY = ("core", "parsing", "simplify", "polys", "functions")
AS_PYTHON = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
"""Kinds whose scorer passes the answer to `eval`."""
AS_FORMULA = ("simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown")
"""Kinds whose scorer passes the answer to sympy's `parse_expr`, which knows Python's built-in functions."""
DATA = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Load, ast.UnaryOp, ast.USub)
MATHEMATICS = {"abs", "max", "min", "pow", "round", "sum"}
NEEDS_PYCOSAT = "zebra_puzzles"
"""The only kind that needs the package pycosat, which has to be compiled."""


def load_gym() -> Any:
    """Import reasoning_gym, also without pycosat, which it imports eagerly but only `NEEDS_PYCOSAT` uses."""
    try:
        importlib.import_module("pycosat")
    except ModuleNotFoundError:
        sys.modules["pycosat"] = types.ModuleType("pycosat")
        try:
            return importlib.import_module("reasoning_gym")
        finally:
            del sys.modules["pycosat"]
    return importlib.import_module("reasoning_gym")


def preload() -> None:
    """Import modules that scoring would import later."""
    load_gym()
    for name in LATE:
        importlib.import_module(f"reasoning_gym.{name}")
    for name in SYMPY:
        module = importlib.import_module(f"sympy.{name}")
        for module_info in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            if not {"tests", "benchmarks", "autolev", "fortran", "latex", "c", "sym_expr"} & set(
                module_info.name.split(".")
            ):
                importlib.import_module(module_info.name)


def encode(dataset: Any, entry: dict) -> str:
    """Pickle a generator and one of its entries as base64; an unpicklable generator is replaced by None."""
    try:
        pickled = pickle.dumps((dataset, entry))
    except (AttributeError, pickle.PicklingError):  # it holds a function
        pickled = pickle.dumps((None, entry))
    return base64.b64encode(pickled).decode()


def is_data(kind: str, answer: str) -> bool:
    """Return whether an answer that the kind's scorer evaluates holds no more than data, or a formula: no names of Python, no attributes."""
    if kind in AS_FORMULA:
        words = set(re.findall(r"[^\W\d]\w*", answer))
        is_plain = not re.search(r"\.\s*[^\W\d]|['\"\[{@:]", answer)
        return is_plain and not words & (set(dir(builtins)) - MATHEMATICS) and not any("__" in word for word in words)
    if kind in AS_PYTHON:
        try:
            return all(isinstance(node, DATA) for node in ast.walk(ast.parse(answer.strip(), mode="eval")))
        except (SyntaxError, ValueError, MemoryError, RecursionError):
            return True  # text that `eval` cannot read either
    return True


def score(kind: str, options: dict, answer: str, encoded: str) -> float | str:
    """Score one answer to an encoded entry; "broken: ..." if a module or file is missing, which no answer can cause."""
    try:
        dataset, entry = pickle.loads(base64.b64decode(encoded))
        if dataset is None:
            dataset = load_gym().create_dataset(kind, seed=0, size=1, **options)
        if not is_data(kind, answer) and answer != entry["answer"]:
            return 0.0
        return float(dataset.score_answer(answer, entry))
    except (ImportError, OSError) as error:
        return f"broken: {error!r}"
    except Exception:  # noqa: BLE001 (scorers raise anything on unreadable answers)
        return 0.0
