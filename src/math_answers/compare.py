r"""Compare mathematical answers. `grading` runs this in the sandbox, one process per comparison.

The sandbox's workers import this file and call `preload` before they enter the sandbox. math-verify's parser
(latex2sympy2_extended) reads single expressions. The rest is implemented here, because math-verify compares a fixed number of
digits, treats a set as a tuple, and reads lists, bases, upright letters and words differently:

  * A text is split into lists, sets, tuples, intervals and equations here (`read`), then compared part by part.
  * Numbers and expressions are compared exactly (`numbers`).
"""

import importlib
import logging
import pkgutil
import re
import sys
from dataclasses import dataclass
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from latex2sympy2_extended.logic import And
from latex2sympy2_extended.math_normalization import normalize_latex
from latex2sympy2_extended.sets import FiniteSet
from sympy.core.relational import Relational

from math_answers import numbers
from math_answers.numbers import NotReal, TooLarge, equal_expressions

# Packages that sympy imports inside functions. They are preloaded, because no file can be opened later.
PRELOAD = (
    "assumptions calculus combinatorics concrete core functions integrals logic matrices ntheory polys series sets "
    "simplify solvers tensor"
)
# Parsing these fills the parser's tables, which every fork inherits; otherwise each fork spends hundredths of a second.
WARM_UP = (
    (r"\frac{1}{2}", "0.5"), (r"\sqrt[3]{27}", r"2\sqrt{2}"), (r"(-\infty,2]\cup[3,4)", r"1\le x<2"),
    (r"\{1,2\}", "(1,2)"), ("x=1,y=2", r"50\%"), ("3x^2+1", r"\frac{x^2-1}{x-1}"), (r"2\pi r^2", r"1.2\times 10^{-3}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\text{yes}"), (r"\sin\frac{\pi}{6}", r"\log_2 8"), ("x>2", r"\ln x^2"),
    (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"), (r"e^{i\pi}", "2x+y=3"), (r"x\ne2", r"\mathbb{R}\setminus\{2\}"),
)  # fmt: skip
NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
CONVERSION = ConversionConfig(lowercase_symbols=False)
MAX_PARTS = 200
"""The longest list that is parsed; longer ones are compared as text only."""
DEEPEST = 12
"""The deepest nesting of brackets that is parsed."""
_POINT = re.compile(r"([A-Z])(\([^()]*,[^()]*\))")
"""Matches a point with its name, P(1,2)."""
_IN_THE_REALS = re.compile(r"(^|\\mid|\||:|,)\s*[a-z]\s*\\in\s*\\mathbb\{R\}\s*,")
INTERVAL_KINDS = {"()": "round", "[]": "square", "(]": "left-open", "[)": "right-open"}

Value = Any
"""A sympy.Basic or sympy.MatrixBase (sympy has no types), or one of the classes below."""


@dataclass
class Items:
    """Several values: a "list" without brackets, a "set" in braces, or "round", "square", "left-open", "right-open"."""

    kind: str
    values: list[Value]


@dataclass
class Equation:
    """`name` = ... = `right`, where `left` is the value of the text `name`; `middle` are the sides between."""

    name: str
    left: Value
    right: Value
    middle: list[Value]


@dataclass
class Words:
    """Text that is not mathematics."""

    text: str


def preload() -> None:
    """Import modules that a comparison would import later, and fill the parser's tables."""
    logging.disable(logging.CRITICAL)
    for package in PRELOAD.split():
        module = importlib.import_module(f"sympy.{package}")
        for info in pkgutil.walk_packages(module.__path__, module.__name__ + "."):
            if not {"tests", "benchmarks", "compatibility", "trace"} & set(info.name.split(".")):
                importlib.import_module(info.name)
    for answer, reference in WARM_UP:
        compare(answer, reference)


# ---- reading


def split_outside(text: str, separator: str) -> list[str]:
    """Split a text at matches of the pattern outside all brackets."""
    parts, depth, start, position = [], 0, 0, 0
    pattern = re.compile(separator)
    while position < len(text):
        if text[position] == "\\" and text[position + 1 : position + 2] in "{}":
            depth += 1 if text[position + 1] == "{" else -1
            position += 2
            continue
        match = pattern.match(text, position) if depth == 0 else None
        if match and match.end() > position:
            parts.append(text[start:position])
            start = position = match.end()
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[position], 0)
        position += 1
    return [*parts, text[start:]]


def read(text: str, depth: int = 0) -> Value:
    """Parse a normalized text."""
    text = _IN_THE_REALS.sub(lambda match: match[1], text.strip())
    if depth > DEEPEST:
        return Words(text)
    if point := _POINT.fullmatch(text):
        return Equation(point[1], sympy.Symbol(point[1], real=True), read(point[2], depth + 1), [])
    if groups := _parts(text, ";"):
        return Items("list", [_tuple_of(group, depth) for group in groups])
    if parts := _parts(text, r",|\\lor(?![A-Za-z])"):
        values = _flattened([read(part, depth + 1) for part in parts], parts)
        is_union = r"\lor" in text and all(map(_is_relation, values))
        return Items("set" if is_union else "list", values)
    if signs := _signs(text):
        return Items("list", [read(part, depth + 1) for part in signs])
    sides = split_outside(text, r"(?<![<>!:\\])=(?!=)|\\in(?![A-Za-z])|\\colon=|:=|\\equiv(?![A-Za-z])")
    if len(sides) > 1 and all(side.strip() for side in sides):
        left, *middle, right = (read(side, depth + 1) for side in sides)
        return Equation(re.sub(r"\s|\\(?:mathrm|text)|[{}]", "", sides[0]), left, right, middle)
    bracketed = _read_bracketed(text, depth)
    return _read_expression(text) if bracketed is None else bracketed


def _flattened(values: list[Value], parts: list[str]) -> list[Value]:
    r"""Replace the two values of each `\pm` by their members."""
    lists = [
        value.values if isinstance(value, Items) and _signs(part) else [value]
        for value, part in zip(values, parts, strict=True)
    ]
    return [value for members in lists for value in members]


def _parts(text: str, separator: str) -> list[str]:
    parts = [part for part in split_outside(text, separator) if part.strip()]
    return parts if 1 < len(parts) <= MAX_PARTS else []


def _tuple_of(group: str, depth: int) -> Value:
    value = read(group, depth + 1)
    return Items("round", value.values) if isinstance(value, Items) and value.kind == "list" else value


def _signs(text: str) -> list[str]:
    r"""Return the two texts that `\pm` stands for."""
    if (
        not re.search(r"\\[pm]{2}(?![A-Za-z])", text)
        or r"\pm" not in text
        or (text.startswith(r"\{") and _closes_at_end(text))
    ):
        return []
    plus = re.sub(r"\\pm(?![A-Za-z])", "+", re.sub(r"\\mp(?![A-Za-z])", "-", text))
    minus = re.sub(r"\\pm(?![A-Za-z])", "-", re.sub(r"\\mp(?![A-Za-z])", "+", text))
    return [re.sub(r"(^|[=({,])\+", r"\1", plus), minus]


def _read_bracketed(text: str, depth: int) -> Value | None:
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes_at_end(text):
        return _read_braces(text[2:-2].strip(), depth)
    if re.fullmatch(r"\][^\[\](){}]*,[^\[\](){}]*\[", text):  # the French ]1,2[
        text = f"({text[1:-1]})"
    if text and text[0] in "([{" and text[-1] in ")]}" and _closes_at_end(text):
        inside = text[1:-1]
        kind = INTERVAL_KINDS.get(text[0] + text[-1])
        if parts := _parts(inside, "[,;]"):
            values = [read(part, depth + 1) for part in parts]
            if kind is None:
                return Items("set", values)
            return Items(kind, values)
        if text[0] + text[-1] in {"()", "{}"}:
            return read(inside, depth + 1)
    return None


def _closes_at_end(text: str) -> bool:
    depth = 0
    for token in re.finditer(r"\\[{}]|[(\[{}\])]", text):
        depth += 1 if token[0][-1] in "([{" else -1
        if depth == 0:
            return token.end() == len(text)
    return False


def _read_braces(inside: str, depth: int) -> Value:
    if not inside:
        return sympy.S.EmptySet
    built = re.fullmatch(r"([A-Za-z])(?:\\in\s*\\mathbb\{R\})?\s*(?:\\mid|\||:|\\vert|\\colon)(.*)", inside, re.DOTALL)
    if built:
        return read(built[2], depth + 1)
    value = read(inside, depth + 1)
    if isinstance(value, Items) and value.kind == "list":
        return Items("set", value.values)
    return Items("set", [value])


_DIVISORS = re.compile(r"\\(?:operatorname\s*\{|text\s*\{|mathrm\s*\{)?\s*(gcd|lcm)\s*\}?\s*\(([^()]*[A-Za-z][^()]*)\)")
"""Matches gcd and lcm of letters, which sympy would evaluate as those of polynomials: 1 and a product."""


def _as_function(divisor: re.Match[str]) -> str:
    """Return gcd or lcm of letters as an unknown function of its sorted arguments."""
    arguments = sorted(part.strip() for part in divisor[2].split(","))
    return f"{'h' if divisor[1] == 'gcd' else 'H'}({','.join(arguments)})"


_PRIMED = re.compile(
    r"\\text\{[^{}]*\}|(\\[A-Za-z]+|[A-Za-z])(?:_(?:\{([^{}]*)\}|(\w)))?('+|\^\{?(?:\\prime ?)+\}?)|\\[A-Za-z]+"
)
"""Matches x' and f'', whose primes math-verify's parser drops."""


def _as_index(primed: re.Match[str]) -> str:
    """Return a name with primes as a name with an index."""
    if not primed[4] or primed[1].startswith((r"\circ", r"\prime")):
        return primed[0]
    index = primed[2] or primed[3] or ""
    return f"{primed[1]}_{{{index}P{primed[4].count(chr(39)) + primed[4].count('prime')}}}"


_ABOUT = re.compile(r"(?:[A-Za-z](?:_(?:\{[^{}]*\}|\w))?|\\text\{[^{}]*\})\s*\\approx(?![A-Za-z])")
"""Matches x\\approx 3, of which the parser reads the 3; of \\sqrt{2}\\approx 1.4 it reads the exact side."""
_ENDLESS = re.compile(r"(?=[^&]*$)((?=.{0,15}[^\d\s])\S.{0,15}?)\1{59,}", re.DOTALL)
"""Matches one text 60 times in a row, which is no answer and takes the parser seconds; a number or matrix may be so long."""
_BINOMIAL = re.compile(r"\\binom\{(\d{1,18})\}\{(\d{1,18})\}", re.ASCII)
"""Matches a binomial coefficient of numbers, which the parser evaluates."""


def _read_expression(text: str) -> Value:
    """Parse one expression with math-verify; return `Words` if that fails."""
    text = _PRIMED.sub(_as_index, _DIVISORS.sub(_as_function, text))
    if not text or r"\text{" in text and re.fullmatch(r"(\s*\\text\{[^{}]*\}\s*)+", text):
        return Words(text)
    if _ABOUT.match(text) or _ENDLESS.search(text):
        return Words(text)
    if any(min(int(k), int(n) - int(k)) > numbers.LARGEST_FACTORIAL for n, k in _BINOMIAL.findall(text)):
        raise TooLarge
    try:
        value = latex2sympy(
            normalize_latex(text, NORMALIZATION),
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=CONVERSION,
        )
    except (MemoryError, RecursionError):
        raise
    except Exception:  # noqa: BLE001 (the parser raises Exception itself, and sympy anything)
        return Words(text)
    if isinstance(value, (FiniteSet, sympy.Tuple)):
        arguments = value._unsorted_args if isinstance(value, FiniteSet) else value.args
        return Items("set" if isinstance(value, FiniteSet) else "round", list(arguments))
    if isinstance(value, sympy.Eq):
        return Equation(str(value.lhs), value.lhs, value.rhs, [])
    return value if isinstance(value, (sympy.Basic, sympy.MatrixBase)) else Words(text)


# ---- comparing


def equal(gold: Value, value: Value) -> bool:
    """Return whether an answer's value equals the reference's."""
    if isinstance(gold, Equation) or isinstance(value, Equation):
        return _equal_with_equation(gold, value)
    gold, value = _single(gold), _single(value)
    if isinstance(gold, Words) or isinstance(value, Words):
        return isinstance(gold, Words) and isinstance(value, Words) and _spelled(gold.text) == _spelled(value.text)
    if _is_matrix(gold) or _is_matrix(value):
        return _equal_matrices(gold, value)
    if any(_is_relation(side) or _are_relations(side) for side in (gold, value)) and not _are_items(gold, value):
        return _equal_relations(gold, value)
    if isinstance(gold, sympy.Set) or isinstance(value, sympy.Set):
        return _equal_sets(_as_set(gold), _as_set(value))
    if isinstance(gold, Items) and isinstance(value, Items):
        return _equal_items(gold, value)
    if isinstance(gold, sympy.Expr) and isinstance(value, sympy.Expr):
        return equal_expressions(gold, value)
    return False


def _single(value: Value) -> Value:
    """Return the only member of a one-element list or set, else the value; the set of the empty set is not empty."""
    while isinstance(value, Items) and len(value.values) == 1:
        (member,) = value.values
        is_point = isinstance(member, Items) and member.kind == "round" and value.kind == "set"
        if isinstance(member, (Items, Equation, sympy.Set)) and not is_point:
            break
        value = member
    return value


def _spelled(text: str) -> str:
    return re.sub(r"\\text|[\s{}]", "", text)


def _equal_items(gold: Items, value: Items) -> bool:
    kinds = {gold.kind, value.kind}
    if _are_items(gold, value):
        kinds = {"set"}
    if kinds <= {"list", "set"}:
        return _equal_unordered(gold, value, is_set="set" in kinds)
    if "set" in kinds or len(gold.values) != len(value.values):
        return False
    if "list" not in kinds and len(kinds) > 1 and (len(gold.values) == 2 or kinds & {"left-open", "right-open"}):
        return False
    if "list" in kinds and (kinds & {"left-open", "right-open"} or _is_closed_interval(gold)):
        return False
    return all(equal(a, b) for a, b in zip(_in_order(gold), _in_order(value), strict=True))


def _is_closed_interval(items: Items) -> bool:
    """Return whether these are two numbers in square brackets; other lists in such brackets are those of programs."""
    are_numbers = all(isinstance(item, sympy.Expr) and not item.free_symbols for item in items.values)
    return items.kind == "square" and len(items.values) == 2 and are_numbers


def _in_order(items: Items) -> list[Value]:
    """Return the coordinates of a point: "y = 2, x = 1" is (1,2)."""
    names = [item.name for item in items.values if isinstance(item, Equation)]
    if items.kind == "list" and len(set(names)) == len(items.values) and all(len(name) == 1 for name in names):
        return sorted(items.values, key=lambda item: item.name)
    return items.values


def _equal_unordered(gold: Items, value: Items, is_set: bool) -> bool:
    if any(isinstance(item, Words) and "ldots" in item.text for item in gold.values):
        is_same_length = len(gold.values) == len(value.values)
        return is_same_length and all(equal(a, b) for a, b in zip(gold.values, value.values, strict=True))
    golds, values = _named(gold.values), _named(value.values)
    if is_set:
        return all(any(equal(a, b) for b in values) for a in golds) and all(
            any(equal(a, b) for a in golds) for b in values
        )
    if len(golds) != len(values):
        return False
    left = list(values)
    for item in golds:
        match = next((index for index, other in enumerate(left) if equal(item, other)), None)
        if match is None:
            return False
        left.pop(match)
    return True


def _named(values: list[Value]) -> list[Value]:
    """Return the values of "x = 1, 2, 3" without the name, which stands for all of them."""
    names = [item.name for item in values if isinstance(item, Equation)]
    is_one_name = len(set(names)) == 1 and (
        len(names) == len(values) or isinstance(values[0], Equation) and len(names) == 1
    )
    if is_one_name and len(values) > 1:
        return [item.right if isinstance(item, Equation) else item for item in values]
    return values


# ---- equations and relations


CONSTANT_LETTERS = (sympy.I, sympy.E)
"""What the parser reads in I = 42 and e = 42; alone on the left side, such a letter is a name."""


def _equal_with_equation(gold: Value, value: Value) -> bool:
    if isinstance(value, Equation) and _is_false(value):
        return False
    if isinstance(gold, Equation) and isinstance(value, Equation):
        a, b = _oriented(gold), _oriented(value)
        if a.name == b.name and _is_name(a) and equal(a.right, b.right):
            return True
        return _equal_equations(a, b)
    if isinstance(value, Equation):
        value = _oriented(value)
        return not _is_linear_equation(value) and equal(gold, _right_in_order(value))
    gold = _oriented(gold)
    return _is_name(gold) and equal(gold.right, value)


NO_NAMES = frozenset(["false", "true", "none", "nothing", "undefined", "impossible"])


def _right_in_order(equation: Equation) -> Value:
    """Return the right side; that of (y,x) = (3,5) is (5,3), in the order x, y, z."""
    left, right = equation.left, equation.right
    if not (isinstance(left, Items) and isinstance(right, Items) and len(left.values) == len(right.values)):
        return right
    names = [str(item) for item in left.values]
    if len(set(names)) < len(names) or not set(names) <= {"x", "y", "z"}:
        return right
    return Items(
        right.kind, [value for _, value in sorted(zip(names, right.values, strict=True), key=lambda pair: pair[0])]
    )


def _is_false(equation: Equation) -> bool:
    """Return whether the sides of an equation are unequal constants, as in 43 = 42, or the left one is no name, as \\emptyset."""
    left = equation.left
    if left == sympy.S.EmptySet or (isinstance(left, Words) and _spelled(left.text).lower() in NO_NAMES):
        return True
    sides = [side for side in (equation.left, *equation.middle, equation.right) if isinstance(side, sympy.Expr)]
    sides = sides[equation.left in CONSTANT_LETTERS :]
    constants = [side for side in sides if not side.free_symbols and not side.has(sympy.core.function.AppliedUndef)]
    return any(not equal(constants[0], other) for other in constants[1:])


def _oriented(equation: Equation) -> Equation:
    """Swap the sides of an equation such as 5 = x to x = 5."""
    right = equation.right
    if not _is_name(equation) and isinstance(right, sympy.Symbol):
        return Equation(right.name, right, equation.left, equation.middle)
    return equation


def _is_name(equation: Equation) -> bool:
    """Return whether the left side only names the right side: a letter, f(x), (x,y), or words."""
    left = equation.left
    if isinstance(left, Items):
        return all(isinstance(item, sympy.Symbol) for item in left.values)
    if isinstance(left, Words) or left in CONSTANT_LETTERS:
        return True
    if isinstance(left, sympy.Expr):
        return (
            bool(left.free_symbols)
            and not left.atoms(sympy.Number) - {sympy.S.NegativeOne}
            and not left.is_Add
            or (isinstance(left, sympy.core.function.AppliedUndef))
        )
    return False


def _is_linear_equation(equation: Equation) -> bool:
    """Return whether an equation such as x + 1 = 42 has to be solved, so that its right side is no answer."""
    left = equation.left
    if not isinstance(left, sympy.Expr) or len(left.free_symbols) != 1 or isinstance(left, sympy.Symbol):
        return False
    constants = left.atoms(sympy.Number, sympy.NumberSymbol)
    if left.has(sympy.I) and not left.is_Add and not constants:  # letters, such as the length AI, whose I is a point
        return False
    (unknown,) = left.free_symbols
    is_linear = left.is_polynomial(unknown) and sympy.degree(left, unknown) == 1 if left.is_polynomial() else False
    return bool(is_linear) and isinstance(equation.right, sympy.Expr) and not equation.right.free_symbols


def _equal_equations(a: Equation, b: Equation) -> bool:
    sides = (a.left, a.right, b.left, b.right)
    if not all(isinstance(side, sympy.Expr) for side in sides):
        return equal(a.left, b.left) and equal(a.right, b.right)
    first, second = (_numerator(left - right) for left, right in ((a.left, a.right), (b.left, b.right)))
    if first.free_symbols != second.free_symbols or not first.free_symbols:
        return False
    return numbers.ratio_sign(first, second) != 0


def _numerator(value: Value) -> Value:
    functions = value.atoms(sympy.core.function.AppliedUndef)
    value = value.xreplace({function: sympy.Symbol(str(function), real=True) for function in functions})
    value = value.xreplace({number: numbers.exact_float(number) for number in value.atoms(sympy.Float)})
    return sympy.fraction(sympy.together(value.doit()))[0]


def _is_relation(value: Value) -> bool:
    return isinstance(value, (Relational, And, sympy.And))


def _are_relations(value: Value) -> bool:
    return isinstance(value, Items) and all(map(_is_relation, value.values))


def _are_items(gold: Value, value: Value) -> bool:
    return _are_relations(gold) and _are_relations(value)


def _equal_relations(gold: Value, value: Value) -> bool:
    if _is_relation(gold) and _is_relation(value):
        a, b = _links(gold), _links(value)
        if {s for link in a for s in link.free_symbols} != {s for link in b for s in link.free_symbols}:
            return False
        if len(a) == len(b) and all(_equal_links(x, y) for x, y in zip(a, b, strict=True)):
            return True
        if len(a) == len(b) and all(_equal_links(x, y) for x, y in zip(a, reversed(b), strict=True)):
            return True
    return any(_equal_sets(x, y) for x in _sets_of(gold) for y in _sets_of(value))


def _links(value: Value) -> list[Relational]:
    links = (
        list(value._unsorted_args)
        if isinstance(value, And)
        else list(value.args)
        if isinstance(value, sympy.And)
        else [value]
    )
    return [link.reversed if isinstance(link, (sympy.Gt, sympy.Ge)) else link for link in links]


def _equal_links(a: Relational, b: Relational) -> bool:
    if type(a) is not type(b):
        return False
    sign = numbers.ratio_sign(a.lhs - a.rhs, b.lhs - b.rhs)
    return sign > 0 or (sign < 0 and isinstance(a, sympy.Ne))


def _exact(value: Value) -> Value:
    return value.xreplace({number: numbers.exact_float(number) for number in value.atoms(sympy.Float)})


def _sets_of(value: Value) -> list[Value]:
    """Return the sets that a relation, a list of relations or an interval may denote."""
    if _is_relation(value):
        links = [link.func(_exact(link.lhs).doit(), _exact(link.rhs).doit()) for link in _links(value)]
        if len({symbol for link in links for symbol in link.free_symbols}) != 1:
            return []
        return [sympy.And(*links).as_set()]
    if isinstance(value, Items) and all(_is_relation(item) or isinstance(item, sympy.Set) for item in value.values):
        parts = [_sets_of(item)[:1] for item in value.values]
        if not all(parts):
            return []
        sets = [part[0] for part in parts]
        return [sympy.Union(*sets)] if value.kind == "set" else [sympy.Union(*sets), sympy.Intersection(*sets)]
    converted = _as_set(value)
    return [converted] if converted is not None else []


# ---- sets


def _as_set(value: Value) -> Value | None:
    """Convert a value to a set: a set, an interval from a bracketed pair, or a finite set from a list; else None."""
    if isinstance(value, sympy.Set):
        return _evaluated_set(value)
    if not isinstance(value, Items):
        return sympy.FiniteSet(_number(value)) if isinstance(value, sympy.Expr) else None
    if value.kind in {"set", "list"}:
        if all(isinstance(item, sympy.Expr) for item in value.values):
            return sympy.FiniteSet(*map(_number, value.values))
        return None
    if len(value.values) != 2 or not all(isinstance(item, sympy.Expr) for item in value.values):
        return None
    start, end = map(_number, value.values)
    return sympy.Interval(start, end, value.kind in {"round", "left-open"}, value.kind in {"round", "right-open"})


def _number(value: Value) -> Value:
    return numbers.evaluate(value, {}, False)


def _evaluated_set(value: Value) -> Value:
    if isinstance(value, sympy.Interval):
        return sympy.Interval(_number(value.start), _number(value.end), value.left_open, value.right_open)
    if isinstance(value, sympy.FiniteSet):
        return sympy.FiniteSet(*map(_number, value.args))
    if isinstance(value, (sympy.Union, sympy.Intersection, sympy.Complement)):
        return value.func(*map(_evaluated_set, value.args))
    return value


def _equal_sets(gold: Value | None, value: Value | None) -> bool:
    if gold is None or value is None:
        return False
    if gold == value:
        return True
    pieces, others = _pieces(gold), _pieces(value)
    if pieces is not None and others is not None:
        return len(pieces) == len(others) and all(
            a[2:] == b[2:] and equal_expressions(a[0], b[0]) and equal_expressions(a[1], b[1])
            for a, b in zip(pieces, others, strict=True)
        )
    return (gold - value) == sympy.S.EmptySet and (value - gold) == sympy.S.EmptySet


def _pieces(value: Value) -> list[tuple[Value, Value, bool, bool]] | None:
    """Return a set's intervals and points in order as (start, end, is_left_open, is_right_open); else None."""
    pieces: list[tuple[Value, Value, bool, bool]] = []
    for part in value.args if isinstance(value, sympy.Union) else (value,):
        if isinstance(part, sympy.Interval):
            pieces.append((part.start, part.end, bool(part.left_open), bool(part.right_open)))
        elif isinstance(part, sympy.FiniteSet):
            pieces += [(point, point, False, False) for point in part.args]
        elif part is not sympy.S.EmptySet:
            return None
    return sorted(pieces, key=lambda piece: sympy.default_sort_key(piece[0].evalf(30)))


# ---- matrices


def _is_matrix(value: Value) -> bool:
    return isinstance(value, (sympy.MatrixBase, sympy.MatrixExpr))


def _equal_matrices(gold: Value, value: Value) -> bool:
    gold, value = (side.doit() if _is_matrix(side) else side for side in (gold, value))
    if isinstance(gold, sympy.MatrixBase) and isinstance(value, sympy.MatrixBase):
        return gold.shape == value.shape and all(map(equal_expressions, gold.flat(), value.flat()))
    matrix, other = (gold, value) if isinstance(gold, sympy.MatrixBase) else (value, gold)
    if isinstance(matrix, sympy.MatrixBase) and (rows := _rows(other)):
        return _equal_matrices(matrix, sympy.Matrix(rows))
    is_vector = isinstance(matrix, sympy.MatrixBase) and 1 in matrix.shape
    if not is_vector or not isinstance(other, Items) or other.kind not in {"round", "square", "list"}:
        return False
    return len(other.values) == len(matrix) and all(map(equal, matrix.flat(), other.values))


def _rows(value: Value) -> list[list[Value]]:
    """Return the rows of a matrix that is written as a list of lists, [[1,2],[3,4]]; else nothing."""
    if not isinstance(value, Items) or value.kind != "square":
        return []
    rows = [row.values for row in value.values if isinstance(row, Items) and row.kind == "square"]
    is_matrix = len(rows) == len(value.values) and len({len(row) for row in rows}) == 1
    return rows if is_matrix and all(isinstance(item, sympy.Expr) for row in rows for item in row) else []


# ---- verdicts


def compare(answer: str, reference: str, scales: str = "1", integer: str = "") -> str:
    """Return "correct", "wrong" or "unparsable". The answer may be multiplied by any of `scales` (texts of numbers, ";").

    `integer`: a letter that stands for every integer, so that both sides are sets of numbers.
    """
    gold, value = read(reference), read(answer)
    if isinstance(value, Words) and not isinstance(gold, Words):
        return "unparsable"
    for scale in scales.split(";"):
        if scale == "1" and equal(gold, value):
            return "correct"
        if scale != "1" and equal(gold, _scaled(value, read(scale))):
            return "correct"
    return "correct" if integer and equal_progressions(gold, value, integer) else "wrong"


def equal_progressions(gold: Value, value: Value, integer: str) -> bool:
    """Return whether two expressions have the same values for all integers of a letter: -\\pi/4+k\\pi and 3\\pi/4+k\\pi."""
    if isinstance(gold, Equation) and isinstance(value, Equation) and gold.name != value.name:
        return False
    gold, value = (side.right if isinstance(side, Equation) and _is_name(side) else side for side in (gold, value))
    if not (isinstance(gold, sympy.Expr) and isinstance(value, sympy.Expr)):
        return False
    lines = []
    for side in (gold, value):
        symbols = [symbol for symbol in side.free_symbols if symbol.name == integer]
        if len(symbols) != 1 or side.free_symbols - set(symbols):
            return False
        points = [numbers.evaluate(side, {symbols[0]: sympy.Integer(k)}, False) for k in (0, 1, 2, 5)]
        step = points[1] - points[0]
        if not (
            equal_expressions(points[2], points[0] + 2 * step) and equal_expressions(points[3], points[0] + 5 * step)
        ):
            return False
        lines.append((points[0], step))
    (start, step), (other, other_step) = lines
    is_same_step = equal_expressions(step, other_step) or equal_expressions(step, -other_step)
    return (
        is_same_step
        and not equal_expressions(step, sympy.S.Zero)
        and sympy.simplify((start - other) / step).is_Integer is True
    )


def _scaled(value: Value, factor: Value) -> Value:
    if isinstance(value, Items):
        return Items(value.kind, [_scaled(item, factor) for item in value.values])
    if isinstance(value, Equation):
        return Equation(value.name, value.left, _scaled(value.right, factor), [])
    return sympy.Mul(value, factor, evaluate=False) if isinstance(value, sympy.Expr) else value


def judge(answers: list[str], reference: str, scales: str, integer: str) -> str:
    """Compare an answer, in each of its forms, with a reference; "broken: ..." if a module or file is missing, which no text can cause."""
    sys.setrecursionlimit(1000)
    try:
        verdicts = [compare(answer, reference, scales, integer) for answer in answers]
        return "correct" if "correct" in verdicts else verdicts[0]
    except (MemoryError, RecursionError, TooLarge):
        return "timeout"
    except NotReal:
        return "wrong"
    except (ImportError, OSError) as error:
        return f"broken: {error!r}"
    except Exception:  # noqa: BLE001 (sympy raises anything on unreadable text)
        return "unparsable"
