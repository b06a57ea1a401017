"""Compare a program's output with the expected output, as plain data. Tests are in the form of `published`.

stdout. Both sides are split at line feeds, each line is stripped, and blank lines are dropped (as in APPS and TACO);
the number of lines must be equal. A line is correct if it is the same text, or if its words are the same and its
numbers are equal as numbers: 1.50 and 1.5, 7.0 and 7, 1e3 and 1000. Brackets and commas separate the numbers of a word,
so that [1.0, 2] is [1, 2]; [1,2], which is one word, is not. If a line has a word that is not a number, the spaces between its words must
be equal too. LiveCodeBench compares the same way, but it has no tolerance (LiveCodeBench/LiveCodeBench#129, #133), it
compares numbers only on lines that contain nothing else, and it takes 0101 for 101; here numbers with superfluous
leading zeros are text, because outputs such as bit strings are text.

Tolerance. Whole numbers must be equal. If the expected number has a decimal point or an exponent, a difference of 1e-6
(relative or absolute) is allowed, as judges do (NVIDIA-NeMo/Gym#2956; numpy's `allclose`, with which APPS and TACO
compare, allows ten times as much); if it has five decimals, as LeetCode's do, the tolerance is half a unit of the
fifth.

Returned values. Tuples count as lists. Integers and floats are compared by value, with the same tolerance if the expected
value is a float. true and false are not 1 and 0 (graders that compare with `==` accept them). Keys of a dict are strings,
as in JSON. NaN equals nothing.

An output longer than `_LONGER` times the expected output plus `_SLACK` bytes is wrong and is not read, so that the cost
of comparing is proportional to the expected output.
"""

import json
import math
import re
from decimal import Decimal

from multirole_sandbox.published import LONGEST_INT, parse_integer

TOLERANCE = Decimal("1e-6")
ROUNDED = 5
"""Decimals to which LeetCode rounds expected numbers."""
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_PADDED = re.compile(r"[+-]?0[0-9]")
_PUNCTUATION = re.compile(r"([\[\](){},;])")
_HALF_A_UNIT = Decimal(10) ** -ROUNDED / 2
_MAX_DIGITS = 400
"""Longer numbers are compared as text, so that arithmetic on untrusted output stays cheap."""
_TOO_LONG = object()
"""A number that equals no value."""
_LONGER, _SLACK = 8, 4096
"""A float may take 20 characters instead of 3, and "\\u00e9" takes 6 bytes instead of 1 character."""


def are_wrapped(tests: list[dict]) -> bool:
    """Return whether a problem's expected values are wrapped in one-element lists (`published`)."""
    return all(test.get("metadata", {}).get("is_wrapped", False) for test in tests)


def longest_output(test: dict) -> int:
    """Return the number of bytes that the output of a test may have."""
    return _LONGER * len(test["output"]) + _SLACK


def is_right(output: bytes, test: dict, is_bare: bool = False) -> bool:
    """Return whether a program's output matches a normalised test; with `is_bare`, the only member of its expected value."""
    expected = test["output"]
    if len(output) > longest_output(test):
        return False
    if test["testtype"] == "functional":
        value = json.loads(expected, parse_int=parse_integer, parse_float=Expected)
        longest = max(map(len, re.findall("[0-9]+", expected)), default=0)
        return _is_right_value(output, value[0] if is_bare else value, max(longest, LONGEST_INT))
    got, want = _lines(output.decode("utf-8", "replace")), _lines(expected)
    return len(got) == len(want) and all(map(_is_right_line, got, want))


def _lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.split("\n")) if line]


def _is_right_line(got: str, want: str) -> bool:
    if got == want:
        return True
    got_words, want_words = got.split(), want.split()
    if len(got_words) != len(want_words) or not all(map(_is_right_word, got_words, want_words)):
        return False
    return all(_NUMBER.fullmatch(word) for word in want_words) or re.findall(r"\s+", got) == re.findall(r"\s+", want)


def _is_right_word(got: str, want: str) -> bool:
    if got == want:
        return True
    got_parts, want_parts = _PUNCTUATION.split(got), _PUNCTUATION.split(want)
    return len(got_parts) == len(want_parts) and all(map(_is_right_number, got_parts, want_parts))


def _is_right_number(got: str, want: str) -> bool:
    """Return whether two texts are equal, or equal as numbers by the rules above."""
    if got == want:
        return True
    if max(len(got), len(want)) > _MAX_DIGITS or not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(want)):
        return False
    if _PADDED.match(got) or _PADDED.match(want):
        return False
    try:
        first, second = Decimal(got), Decimal(want)
        is_whole = not any(mark in want for mark in ".eE")
        return first == second or (not is_whole and abs(first - second) <= _tolerance(second))
    except ArithmeticError:
        return False


def _tolerance(want: Decimal) -> Decimal:
    """Return the allowed distance from an expected number that is not whole."""
    relative = TOLERANCE * max(1, abs(want))
    return max(relative, _HALF_A_UNIT) if want.as_tuple().exponent == -ROUNDED else relative


class Expected(float):
    """An expected float with its tolerance."""

    def __init__(self, text: str) -> None:
        try:
            self.tolerance = float(_tolerance(Decimal(text)))
        except ArithmeticError:  # an exponent that only a float reads, as 0 or infinity
            self.tolerance = float(TOLERANCE)

    def is_near(self, got: float) -> bool:
        """Return whether a program's number is within the tolerance."""
        try:
            return math.isfinite(self) and abs(got - self) <= self.tolerance
        except OverflowError:  # an integer too large for a float
            return False


def _is_right_value(output: bytes, want: object, most_digits: int) -> bool:
    """Return whether a function's result, as the JSON that its process wrote, equals the expected value.

    An integer of more than `most_digits` is wrong and is not converted, which takes quadratic time.
    """

    def read_integer(digits: str) -> object:
        return parse_integer(digits) if len(digits.removeprefix("-")) <= most_digits else _TOO_LONG

    try:
        got = json.loads(output, parse_int=read_integer)
    except (ValueError, RecursionError):  # forged or cut off
        return False
    return _is_same(got, want)


def _is_same(got: object, want: object) -> bool:
    """Compare two JSON values iteratively, because deep nesting in untrusted output could overflow the stack."""
    pairs = [(got, want)]
    while pairs:
        a, b = pairs.pop()
        if type(a) in (int, float) and type(b) in (int, float, Expected):
            if a != b and not (type(b) is Expected and b.is_near(a)):
                return False
        elif type(a) is not type(b):
            return False
        elif type(a) is list:
            if len(a) != len(b):
                return False
            pairs.extend(zip(a, b, strict=True))
        elif type(a) is dict:
            if a.keys() != b.keys():
                return False
            pairs.extend((a[key], b[key]) for key in b)
        elif a != b:
            return False
    return True
