"""Compares mathematical answers with math-verify: what `math_answer.py` runs in the sandbox, one process per comparison.

The sandbox's workers import this file and call `preload` before they lock themselves in. math-verify's own time limits
are off: they are alarms inside the interpreter, which a long power in C never notices.

How texts are compared:
  * `parse` extracts LaTeX only. Its extraction of plain expressions ends in sympy's `parse_expr`, which evaluates text.
  * Units are not stripped: the list of units contains "c", "t" and "h", so `3t` would equal `3`.
  * `verify` is strict about the names of variables, compares numbers with 50 digits, and takes x > 2 for (2, oo).
  * Every decimal becomes the exact fraction that it denotes, so that 0.333333 is not 1/3.
  * math-verify accepts a set in braces for a tuple or an interval, and an equation between unequal numbers such as
    "43 = 42". Both are wrong here.
"""

import importlib
import logging
import pkgutil
import sys
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.sets import FiniteSet
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

# Packages from which sympy imports inside functions. They are loaded first, because no file can be opened later.
PRELOAD = (
    "assumptions calculus combinatorics concrete core functions integrals logic matrices ntheory polys series sets "
    "simplify solvers tensor"
)
# They fill the parser's tables, which every fork inherits and which take it several hundredths of a second otherwise.
WARM_UP = (
    (r"\frac{1}{2}", "0.5"), (r"\sqrt[3]{27}", r"2\sqrt{2}"), (r"(-\infty,2]\cup[3,4)", r"1\le x<2"),
    (r"\{1,2\}", "(1,2)"), ("x=1,y=2", r"50\%"), ("3x^2+1", r"\frac{x^2-1}{x-1}"), (r"2\pi r^2", r"1.2\times 10^{-3}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\text{yes}"), (r"\sin\frac{\pi}{6}", r"\log_2 8"),
)  # fmt: skip
CONFIG = LatexExtractionConfig(
    try_extract_without_anchor=False,
    boxed_match_priority=0,
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
    ),
)
Value = Any
"""A sympy.Basic or sympy.MatrixBase; sympy has no types."""


def preload() -> None:
    """Import what a comparison may import late, and fill the parser's tables."""
    logging.disable(logging.CRITICAL)
    for package in PRELOAD.split():
        module = importlib.import_module(f"sympy.{package}")
        for found in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
            if not {"tests", "benchmarks", "compatibility", "trace"} & set(found.name.split(".")):
                importlib.import_module(found.name)
    for answer, reference in WARM_UP:
        compare(answer, reference)


def exact(value: Value) -> Value:
    """Return the same value with every decimal written as a fraction."""
    if not (decimals := value.atoms(sympy.Float)):
        return value
    if isinstance(value, (FiniteSet, And)):  # these two remember in which order they were written
        return value.func(*(exact(item) for item in value._unsorted_args), evaluate=False)
    if isinstance(value, Relational):  # unevaluated: 5/2 = 2.5 must stay an equation
        return value.func(exact(value.lhs), exact(value.rhs), evaluate=False)
    return value.xreplace({number: sympy.Rational(str(number)) for number in decimals})


def parse_boxed(text: str) -> Value | None:
    """Return the value of a LaTeX text, or None if it has none."""
    parsed = parse(
        rf"\boxed{{{text}}}", [CONFIG], fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
    )
    return exact(parsed[0]) if parsed else None


def is_false_equation(value: Value) -> bool:
    """Whether the value is an equation, or a chain of them, with two unequal constants in it."""
    return any(
        isinstance(link, sympy.Eq)
        and all(isinstance(side, sympy.Expr) and side.is_number for side in link.args)
        and not verify(link.lhs, link.rhs, numeric_precision=50, timeout_seconds=None)
        for link in (value.args if isinstance(value, sympy.And) else (value,))
    )


def is_set_for_tuple(text: str, value: Value, other: Value) -> bool:
    """Whether the text is a finite set in braces and the other value is ordered or an interval."""
    is_set = text.startswith(r"\{") and isinstance(value, sympy.FiniteSet)
    return is_set and isinstance(other, (sympy.Tuple, sympy.Interval))


def compare(answer: str, reference: str) -> str:
    """Return "correct", "wrong" or "unparsable"; an unparsable reference equals nothing."""
    gold, value = parse_boxed(reference), parse_boxed(answer)
    if value is None:
        return "unparsable"
    if gold is None or is_set_for_tuple(answer, value, gold) or is_set_for_tuple(reference, gold, value):
        return "wrong"
    is_equal = verify(
        gold, value, strict=True, allow_set_relation_comp=True, numeric_precision=50, timeout_seconds=None
    )
    return "correct" if is_equal and not is_false_equation(value) else "wrong"


def judge(answer: str, reference: str) -> str:
    """Compare once; "broken" where a module or a file is missing, which no text can cause."""
    sys.setrecursionlimit(1000)
    try:
        return compare(answer, reference)
    except (MemoryError, RecursionError):
        return "timeout"
    except (ImportError, OSError) as error:
        return f"broken: {error!r}"
    except Exception:  # noqa: BLE001 (whatever sympy says of a text)
        return "unparsable"
