"""Decide exactly whether two sympy expressions are equal. Runs only in the sandbox, imported by `compare`.

Rational values are compared as fractions. Irrational constants are evaluated with as many digits as the numbers in them
require, so that no fixed number of digits acts as a tolerance. Expressions with variables are compared exactly at rational
points where both are real. Variables under roots and logarithms are positive, as in answer keys.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import sympy
from sympy.core.evalf import evalf
from sympy.core.function import AppliedUndef

MAX_BITS = 1 << 22
"""The largest size of an integer; larger ones are not computed."""
MAX_DIGITS = 20_000
"""The most digits of an evaluation; constants that need more count as unequal."""
LARGEST_FACTORIAL = 100_000
LARGEST_ROOT = 10_000
PRODUCTS = (sympy.factorial, sympy.factorial2, sympy.subfactorial, sympy.gamma, sympy.binomial, sympy.fibonacci)
"""Functions whose number of factors grows with their argument."""
POSITIVE = ("7/3", "11/5", "13/7", "3/11", "17/13", "2/19", "23/5", "29/31")
"""Values of the first, second, ... variable at a point; points rotate and change signs."""
WHOLE = ((2, 5, 4, 9), (5, 8, 3, 7), (8, 4, 7, 10), (3, 7, 9, 6), (7, 9, 12, 5), (6, 2, 5, 8))
"""Integers of the first, second, ... variable at a point: odd and even in different ways, because only integers tell (-1)^m from (-1)^n."""
GRID = 163
"""Number of steps of 1/16 in the finest sample; a prime, so that all variables take different values."""

DIVISORS = {"gcd": sympy.igcd, "lcm": sympy.ilcm}
UNRESOLVED = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)

Value = Any
"""A sympy.Basic; sympy has no types."""


class TooLarge(Exception):
    """A number is too large to compute."""


class NotReal(Exception):
    """An expression is not real or not defined at a point."""


def exact_float(number: sympy.Float) -> sympy.Rational:
    """Return a decimal as the exact fraction that was written."""
    return sympy.Rational(str(number))


def evaluate(value: Value, point: dict[Value, Value], is_real: bool) -> Value:
    """Evaluate an unevaluated tree exactly at a point. Raises TooLarge, and NotReal if `is_real`.

    Odd roots of negative numbers are real.
    """
    if isinstance(value, sympy.Float):
        return exact_float(value)
    if isinstance(value, sympy.Symbol):
        return point.get(value, value)
    if isinstance(value, AppliedUndef):
        return _undefined(value, point, is_real)
    if isinstance(value, UNRESOLVED):
        return value.xreplace({free: point[free] for free in value.free_symbols if free in point}).doit()
    if not value.args:
        return value
    arguments = [evaluate(argument, point, is_real) for argument in value.args]
    _check_sizes(value, arguments)
    if isinstance(value, sympy.Pow):
        base, exponent = arguments
        result = _power(base, exponent, is_real, is_root=not value.exp.free_symbols)
    elif isinstance(value, sympy.log):
        if is_real and not all(argument.is_positive for argument in arguments):
            raise NotReal
        result = sympy.log(*arguments)
    elif isinstance(value, sympy.UnevaluatedExpr):
        result = arguments[0]
    else:
        result = value.func(*arguments)
    if is_real and (result.has(sympy.nan, sympy.zoo) or result.is_real is False):
        raise NotReal
    return result


def _power(base: Value, exponent: Value, is_real: bool, is_root: bool) -> Value:
    if base.is_negative and exponent.is_Rational and not exponent.is_Integer:
        if exponent.q % 2 and is_root:
            return (-1) ** exponent.p * (-base) ** exponent
        if is_real:
            raise NotReal
    if is_real and base.is_negative and not exponent.is_Integer:
        raise NotReal
    return base**exponent


def _check_sizes(value: Value, arguments: list[Value]) -> None:
    """Raise TooLarge before sympy computes a power or a factorial of more than `MAX_BITS`."""
    if isinstance(value, sympy.Pow):
        base, exponent = arguments
        if not exponent.is_Rational:
            return
        is_root = not exponent.is_Integer and exponent.q > LARGEST_ROOT
        bits = max(abs(base.p), base.q).bit_length() * abs(exponent.p) // exponent.q if base.is_Rational else 0
        if is_root or (bits > MAX_BITS and base not in (0, 1, -1)):
            raise TooLarge
    is_product = isinstance(value, PRODUCTS)
    if is_product and any(argument.is_number and not abs(argument) <= LARGEST_FACTORIAL for argument in arguments):
        raise TooLarge


def _undefined(value: Value, point: dict[Value, Value], is_real: bool) -> Value:
    """Return a value for an undefined function: the same number for the same name and arguments."""
    arguments = [evaluate(argument, point, is_real) for argument in value.args]
    name = str(value.func).strip("\\").removeprefix("text{").removesuffix("}").strip()
    if name == "cis" and len(arguments) == 1:
        return sympy.cos(arguments[0]) + sympy.I * sympy.sin(arguments[0])
    if name in DIVISORS and all(argument.is_Integer for argument in arguments):
        return DIVISORS[name](*arguments)
    digest = hashlib.sha256(repr((name, arguments)).encode()).digest()
    return sympy.Rational(int.from_bytes(digest[:4], "big") + 1, 10**9 + 7)


def equal_constants(a: Value, b: Value) -> bool:
    """Return whether two evaluated constants are equal."""
    if a == b:
        return a not in (sympy.nan, sympy.zoo)
    if a.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan) or b.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return False
    if a.is_Rational and b.is_Rational:
        return False
    if a.has(*UNRESOLVED) or b.has(*UNRESOLVED) or a.free_symbols or b.free_symbols:
        return False
    difference = a - b
    if difference.is_Rational:
        return difference == 0
    digits = _digits_needed(difference)
    return digits <= MAX_DIGITS and _is_zero(difference, digits)


def _is_zero(difference: Value, digits: int) -> bool:
    """Return whether the difference is zero at this many digits."""
    bits = int(digits * 3.33) + 64
    for precision in (bits // 16 + 64, bits):  # most differences show early
        real, imaginary, real_accuracy, imaginary_accuracy = evalf(difference, 53, {"maxprec": precision})
        is_nonzero = real is not None and (real_accuracy is None or real_accuracy > 3)
        if is_nonzero or (imaginary is not None and (imaginary_accuracy is None or imaginary_accuracy > 3)):
            return False
    return True


def _digits_needed(value: Value) -> int:
    """Return enough digits to distinguish such numbers: the sum of their sizes times the product of root degrees."""
    digits, roots = 30.0, 1
    for part in sympy.preorder_traversal(value):
        if part.is_Rational:
            digits += (abs(part.p).bit_length() + part.q.bit_length()) * 0.302
        elif part.is_Pow or part.is_Function:
            magnitude = part.evalf(5)
            size = abs(magnitude)
            if size.is_Float and size > 0:
                digits += abs(float(sympy.log(size, 10).evalf(5)))
            if part.is_Pow and part.exp.is_Rational and part.exp.q > 1:
                roots *= part.exp.q
    return int(digits * min(roots, 64))


def points(symbols: list[Value]) -> list[dict[Value, Value]]:
    """Return the points of comparison: positive, mixed-sign, negative, below one, and integer."""
    candidates = []
    for shift, signs in enumerate((1, 1, 1, -1, "mixed", "mixed2", -1, 1)):
        values = {}
        for index, symbol in enumerate(symbols):
            number = sympy.Rational(POSITIVE[(index + shift) % len(POSITIVE)]) + index // len(POSITIVE)
            is_negative = signs == -1 or (signs == "mixed" and index % 2 == 0) or (signs == "mixed2" and index % 2 == 1)
            values[symbol] = -number if is_negative else number
        candidates.append(values)
    for whole in WHOLE:
        turns = [(index % len(whole), index // len(whole)) for index in range(len(symbols))]
        candidates.append({s: sympy.Integer(whole[i] + 3 * turn) for s, (i, turn) in zip(symbols, turns, strict=True)})
    return candidates


def _more_points(symbols: list[Value]) -> Iterator[list[dict[Value, Value]]]:
    """Yield the points of comparison, then points near zero, close to each other, and far away, for formulas that are real there only."""
    yield points(symbols)
    yield [{symbol: value / 16 for symbol, value in point.items()} for point in points(symbols)]
    steps = range(1, GRID)
    yield [{s: sympy.Rational(k * (2 * i + 1) % GRID, 16) for i, s in enumerate(symbols)} for k in steps]
    yield [{symbol: value * 40 for symbol, value in point.items()} for point in points(symbols)]


def _values(
    a: Value, b: Value, symbols: list[Value], is_real: bool = True, is_positive: bool = False
) -> Iterator[tuple[Value, Value]]:
    """Yield the values of two expressions at points where both are defined; further points are tried while there are fewer than two."""
    count = 0
    for candidates in _more_points(symbols):
        for point in candidates:
            if is_positive and any(value < 0 for value in point.values()):
                continue
            try:
                left, right = evaluate(a, point, is_real), evaluate(b, point, is_real)
            except NotReal:
                continue
            if not left.has(sympy.nan, sympy.zoo) and not right.has(sympy.nan, sympy.zoo):
                count += 1
                yield left, right
        if count >= 2:
            return


def equal_expressions(a: Value, b: Value) -> bool:
    """Return whether two expressions are equal at all points where both are real; at least two are required."""
    a, b = (_resolved(_with_imaginary_unit(value)) for value in (a, b))
    if a == b:
        return not a.has(sympy.nan, sympy.zoo)
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    if not symbols:
        return equal_constants(evaluate(a, {}, False), evaluate(b, {}, False))
    is_real = not (a.has(sympy.I) or b.has(sympy.I))
    if a.has(sympy.floor, sympy.ceiling, sympy.Mod) != b.has(sympy.floor, sympy.ceiling, sympy.Mod):
        return False
    is_positive = not is_real or (_has_roots(a) or _has_roots(b)) and not (a.has(sympy.Abs) or b.has(sympy.Abs))
    compared = 0
    for left, right in _values(a, b, symbols, is_real, is_positive):
        if not equal_constants(left, right):
            return False
        compared += 1
    return compared >= 2


def _has_roots(value: Value) -> bool:
    """Return whether a variable is under a root or logarithm, or in an exponent."""
    return any(part.free_symbols for part in value.atoms(sympy.log)) or any(
        part.free_symbols and not part.exp.is_Integer for part in value.atoms(sympy.Pow)
    )


def _resolved(value: Value) -> Value:
    parts = value.atoms(*UNRESOLVED)
    return value.xreplace({part: part.doit() for part in parts}) if parts else value


def ratio_sign(a: Value, b: Value) -> int:
    """Return the sign of the constant factor between two expressions, 0 if there is none."""
    a, b = (_with_imaginary_unit(value) for value in (a, b))
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    factor, compared = None, 0
    for left, right in _values(a, b, symbols):
        if equal_constants(left, sympy.S.Zero) or equal_constants(right, sympy.S.Zero):
            if not (equal_constants(left, sympy.S.Zero) and equal_constants(right, sympy.S.Zero)):
                return 0
            continue
        ratio = left / right
        if factor is not None and not equal_constants(ratio, factor):
            return 0
        factor, compared = ratio, compared + 1
    if factor is None or compared < 2:
        return 0
    return 1 if factor.is_positive else -1


def _with_imaginary_unit(value: Value) -> Value:
    bound = {limit[0] for part in value.atoms(sympy.Sum, sympy.Product, sympy.Integral) for limit in part.limits}
    letters = [symbol for symbol in value.free_symbols if symbol.name == "i" and symbol not in bound]
    return value.xreplace(dict.fromkeys(letters, sympy.I)) if letters else value
