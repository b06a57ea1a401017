"""Tests in one form, and whether an output is right: plain data only, in the trainer's process.

The form of a test (DeepCoder, LiveCodeBench):
`{"input", "output", "testtype": "stdin" | "functional", "metadata": {"func_name"}}`.
  * stdin: both are text. A list of lines is joined.
  * functional: `input` holds one JSON value per line, one per argument (empty: no arguments); `output` is the JSON of
    the expected value. `func_name` is a method of `class Solution` if the program has one of that name, else a function.
Other published forms are read into it: `type` for `testtype`, with "function_call" and `fn_name` for a call whose
arguments are a list and whose output is a value (PrimeIntellect); a dict `{"inputs", "outputs", "fn_name"?}` (TACO); JSON
text of any of them. Some data wraps every expected value in a list of one: if all functional outputs of a problem are
lists of one, the bare value is right as well.

How stdout is compared. Both sides are stripped and split at line feeds, and each line is stripped; the numbers of lines
must be equal. A line is right if it is the same text, or if its words are the same and its numbers are equal as
numbers: 1.50 and 1.5, 7.0 and 7, 1e3 and 1000. Where the expected number has a point or an exponent, a difference of
1e-9 (relative or absolute) is allowed; a whole number has to be met exactly. Where a line has a word that is not a
number, the spaces between its words must be the same too. LiveCodeBench compares the same way, with three differences:
it has no tolerance (0.1 + 0.2 printed in full fails 0.3), it compares numbers only on lines of nothing else, and it
takes 0101 for 101; numbers with superfluous leading zeros are text here, because outputs such as bit strings are.

How values are compared. Tuples are lists; integers and floats by value, with the same tolerance where the expected
value is a float; true and false are not 1 and 0 (the field, comparing with `==`, takes them); a key of a dict is a
string, as in JSON; NaN equals nothing.

An output is wrong without being read if it is longer than `_LONGER` times the expected output and `_SLACK` bytes more,
so that comparing costs no more than in proportion to the expected output, whatever a program writes.
"""

import json
import math
import re
from decimal import Decimal

TOLERANCE = 1e-9
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_PADDED = re.compile(r"[+-]?0[0-9]")
_MAX_DIGITS = 400
"""A longer number must be the same text, so that arithmetic on what a program printed stays cheap."""
_LONGER, _SLACK = 8, 4096
"""A float takes 20 characters where the expected output may have 3, and "\\u00e9" 6 bytes where it has 1 character."""


def normalise_tests(tests: list[dict] | dict | str) -> list[dict]:
    """Check tests in any of the forms above and return them in the first one; ValueError if they are malformed."""
    try:
        found = json.loads(tests) if isinstance(tests, str) else tests
        if isinstance(found, dict):
            name = found.get("fn_name")
            kind = {"type": "function_call", "fn_name": name} if name else {}
            if not isinstance(found["inputs"], list) or not isinstance(found["outputs"], list):
                raise TypeError("`inputs` and `outputs` must be lists")
            pairs = zip(found["inputs"], found["outputs"], strict=True)
            found = [{"input": given, "output": expected, **kind} for given, expected in pairs]
        if not isinstance(found, list) or not found:
            raise ValueError("a program cannot pass or fail without tests")
        return list(map(_normalise, found))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"Got tests {str(tests)[:200]!r}, which cannot be read ({error!r}). Write a non-empty list of "
            '{"input": str, "output": str, "testtype": "stdin" or "functional", "metadata": {"func_name": str}}.'
        ) from error


def _normalise(test: dict) -> dict:
    given, expected = test["input"], test["output"]
    kind = test.get("testtype") or test.get("type") or "stdin"
    if kind in ("stdin", "stdin_stdout"):
        return {"input": _text(given), "output": _text(expected), "testtype": "stdin"}
    if kind not in ("functional", "function_call"):
        raise ValueError(f"the testtype {kind!r} is unknown")
    if isinstance(given, list):
        given, expected = "\n".join(map(json.dumps, given)), json.dumps(expected)
    name = test.get("fn_name") or (test.get("metadata") or {}).get("func_name")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a functional test needs metadata.func_name, and {name!r} cannot be the name of a function")
    for line in [*given.split("\n")] * bool(given) + [expected]:
        json.loads(line)
    return {"input": given, "output": expected, "testtype": "functional", "metadata": {"func_name": name}}


def _text(value: str | list[str]) -> str:
    text = "\n".join(value) if isinstance(value, list) else value
    if not isinstance(text, str):
        raise TypeError(f"inputs and outputs must be text, not {type(value).__name__}")
    return text


def are_wrapped(tests: list[dict]) -> bool:
    """Whether all functional outputs of a problem are lists of one: the data's way to write a bare value."""
    outputs = [json.loads(test["output"]) for test in tests if test["testtype"] == "functional"]
    return bool(outputs) and all(isinstance(output, list) and len(output) == 1 for output in outputs)


def is_right(output: bytes, test: dict, is_wrapped: bool) -> bool:
    """Whether the output of a program is what a normalised test expects; is_wrapped as of `are_wrapped`."""
    expected = test["output"]
    if len(output) > _LONGER * len(expected) + _SLACK:
        return False
    if test["testtype"] == "functional":
        return _is_right_value(output, json.loads(expected), is_wrapped)
    got = output.decode("utf-8", "replace").strip().split("\n")
    want = expected.strip().split("\n")
    return len(got) == len(want) and all(map(_is_right_line, got, want))


def _is_right_line(got: str, want: str) -> bool:
    got, want = got.strip(), want.strip()
    if got == want:
        return True
    got_words, want_words = got.split(), want.split()
    if len(got_words) != len(want_words) or not all(map(_is_right_word, got_words, want_words)):
        return False
    return all(_NUMBER.fullmatch(word) for word in want_words) or re.findall(r"\s+", got) == re.findall(r"\s+", want)


def _is_right_word(got: str, want: str) -> bool:
    if got == want:
        return True
    if max(len(got), len(want)) > _MAX_DIGITS or not (_NUMBER.fullmatch(got) and _NUMBER.fullmatch(want)):
        return False
    if _PADDED.match(got) or _PADDED.match(want):
        return False
    try:
        first, second = Decimal(got), Decimal(want)
        is_exact = not any(mark in want for mark in ".eE")
        return first == second or (not is_exact and abs(first - second) <= Decimal(TOLERANCE) * max(1, abs(second)))
    except ArithmeticError:
        return False


def _is_right_value(output: bytes, want: object, is_wrapped: bool) -> bool:
    """A function's result, as the JSON that its process left, against the expected value."""
    try:
        got = json.loads(output)
    except (ValueError, RecursionError):  # forged, cut off, or an integer of more than 4300 digits
        return False
    return _is_same(got, want) or (is_wrapped and _is_same(got, want[0]))


def _is_same(got: object, want: object) -> bool:
    """Compare two values made of JSON types, with a stack instead of recursion, because one side is untrusted."""
    pairs = [(got, want)]
    while pairs:
        a, b = pairs.pop()
        if type(a) in (int, float) and type(b) in (int, float):
            if a != b and not (type(b) is float and _is_close(a, b)):
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


def _is_close(a: float, b: float) -> bool:
    try:
        return math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer beyond every float
        return False
