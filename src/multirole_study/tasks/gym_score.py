"""Score answers with reasoning-gym. `gym.py` runs this in the sandbox, one process per answer.

Several `score_answer` methods of the package evaluate the answer as Python (`eval`, or sympy's `parse_expr`), so model output must
never reach them in the trainer. The sandbox's workers import this file and call `preload` before they enter the sandbox. What is
evaluated there could still read the reference or write the result itself, so an answer with more than data in it is wrong (`is_data`).

Some `score_answer` methods of version 0.1.25 accept wrong answers. The kinds in `RIGHT` are scored here, and `is_hedged` and `is_finite`
refuse what others accept. Kinds without a `score_answer` of their own pay len(reference) / len(answer) to an answer that contains the
reference; this partial credit is the package's convention and stays.
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
from collections.abc import Callable
from fractions import Fraction
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
PUZZLE_TARGET = 24
COIN_TOLERANCE = Fraction(1, 10_000)
"""The package's absolute tolerance for a probability."""
_NOT_FINITE = re.compile(r"(?<![a-z])(?:s?nan|inf(?:inity)?)[ij]?(?![a-z])", re.IGNORECASE)
_HEDGE = re.compile(r"\b(?:or|nor|xor|if|unless)\b", re.IGNORECASE)
_FORMULA = re.compile(r"(?:[\d+\-()\s]|\*(?!\*)|/(?!/))+", re.ASCII)
_NUMBER = re.compile(r"-?\s*\d[\d,.]*\w*")


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


def is_finite(answer: str, reference: str) -> bool:
    """Return whether an answer to a numeric problem has no nan or infinity that the reference lacks: a distance to nan counts as zero."""
    is_numeric = re.search(r"\d", reference) and not _NOT_FINITE.search(reference)
    return not (is_numeric and _NOT_FINITE.search(answer))


def is_hedged(kind: str, answer: str) -> bool:
    """Return whether an answer of knights_knaves joins its statements by "or" or a condition; the package reads only names and roles."""
    return kind == "knights_knaves" and bool(_HEDGE.search(answer))


def is_right_formula(answer: str, entry: dict) -> bool:
    """Return whether a formula of the four operations makes exactly 24 of the problem's numbers, each used once."""
    from sympy.parsing.sympy_parser import parse_expr

    numbers = sorted(map(int, re.findall(r"\d+", answer)))
    is_formula = _FORMULA.fullmatch(answer) and numbers == sorted(entry["metadata"]["numbers"])
    return bool(is_formula) and parse_expr(answer.strip()) == PUZZLE_TARGET


def is_right_word(answer: str, entry: dict) -> bool:
    """Return whether an answer is the reference's word, also in `\\text{}` and with a point."""
    word = re.sub(r"\\text\{([^{}]*)\}", r"\1", answer).strip(" .")
    return word.casefold() == entry["answer"].casefold()


def is_right_probability(answer: str, entry: dict) -> bool:
    """Return whether an answer is within the tolerance of the probability, and within a tenth of it, so that 0 is never right."""
    probability = Fraction(entry["answer"])
    return abs(Fraction(answer.replace(",", "")) - probability) <= min(COIN_TOLERANCE, probability / 10)


def is_right_number(answer: str, entry: dict) -> bool:
    """Return whether the only number of an answer, such as "$1,754" or "98 apples", is the reference with its sign."""
    numbers = [re.sub(r"[\s,]", "", number).rstrip(".") for number in _NUMBER.findall(answer.replace("−", "-"))]
    return len(numbers) == 1 and float(numbers[0]) == float(entry["answer"])


RIGHT: dict[str, Callable[[str, dict], bool]] = {
    "puzzle24": is_right_formula,
    "game_of_life_halting": is_right_word,
    "coin_flip": is_right_probability,
    "gsm_symbolic": is_right_number,
}
"""Kinds that are scored here, all or nothing. The package takes 6+6+6+6 for 24 whatever the numbers are, compares the truth value of the
text, pays for a common prefix (0 for 0.25), and reads the first number without its sign."""


def score(kind: str, options: dict, answer: str, encoded: str) -> float | str:
    """Score one answer to an encoded entry; "broken: ..." if a module or file is missing, which no answer can cause."""
    try:
        dataset, entry = pickle.loads(base64.b64decode(encoded))
        if dataset is None:
            dataset = load_gym().create_dataset(kind, seed=0, size=1, **options)
        if answer != entry["answer"]:
            if is_hedged(kind, answer) or not is_data(kind, answer) or not is_finite(answer, entry["answer"] or ""):
                return 0.0
            if kind in RIGHT:
                return float(RIGHT[kind](answer, entry))
        return float(dataset.score_answer(answer, entry))
    except (ImportError, OSError) as error:
        return f"broken: {error!r}"
    except Exception:  # noqa: BLE001 (scorers raise anything on unreadable answers)
        return 0.0
