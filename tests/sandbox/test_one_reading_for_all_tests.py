"""A problem's tests are read in one way: a program that answers by the reading it sees has one guess, not one for each test."""

import json

import pytest

from multirole_sandbox import grade, grade_batch

DUE = [index % 3 == 0 for index in range(20)]
ROWS = [{str(index + 1): index, str(index + 40): 1} for index in range(20)]
FORMS = {  # APPS and TACO; one JSON value a line, as LiveCodeBench; at any depth; beside other arguments
    "a dict": ({"fn_name": "f", "inputs": [[row] for row in ROWS], "outputs": [[due] for due in DUE]}, "d"),
    "a line": ([{"input": json.dumps(row), "output": json.dumps(due), "metadata": {"func_name": "f"}} for row, due in zip(ROWS, DUE, strict=True)], "d"),
    "nested": ({"fn_name": "f", "inputs": [[[{"a": [row]}]] for row in ROWS], "outputs": [[due] for due in DUE]}, "d[0]['a'][0]"),
    "second": ({"fn_name": "f", "inputs": [[0, row] for row in ROWS], "outputs": DUE}, "d"),
}  # fmt: skip
GUESSES = (
    "any(isinstance(k, int) for k in {d})",
    "all(isinstance(k, str) for k in {d})",
    "any(f.f_locals.get('has_integer_keys') for f in frames())",
    "next(iter({d})) + 0 > 0",
)
FRAMES = "import sys\ndef frames():\n    f = sys._getframe()\n    while f := f.f_back: yield f\n"


@pytest.mark.parametrize(("tests", "place"), FORMS.values(), ids=FORMS)
def test_guessing_by_the_type_of_the_keys_gains_nothing(tests, place: str) -> None:
    programs = [
        f"{FRAMES}def f(*arguments):\n    d = arguments[-1]\n    return {guess}".format(d=place) for guess in GUESSES
    ]
    shares = [verdict.reward for verdict in grade_batch(programs, [tests] * len(programs))]
    assert set(shares) <= {sum(DUE) / 20, 1 - sum(DUE) / 20}, "as a program that always gives the same answer"


def test_each_key_type_passes_where_it_is_meant_and_is_marked_by_itself() -> None:
    tests = {
        "fn_name": "f",
        "inputs": [[{"2": "ab", "3": "c"}], [{"2": "x"}], [{"3": "y"}]],
        "outputs": [["ab"], ["x"], ["-"]],
    }
    assert grade("def f(d): return d.get('2', '-')", tests).reward == 1.0  # digits that were text
    assert grade("def f(d): return d.get(2, '-')", tests).reward == 1.0
    assert grade("def f(d): return d['2']", tests).reasons == ("passed", "passed", "error")
    assert grade("def f(d): return d[2]", tests).reasons == ("passed", "passed", "error")
    mixed = "def f(d): return d[2] if len(d) > 1 else d.get('2', '-')"  # integers in one test, texts in the others
    assert grade(mixed, tests).reasons == ("passed", "wrong_answer", "passed")


def test_wrapped_outputs_are_bare_in_all_tests_or_in_none() -> None:
    tests = {"fn_name": "f", "inputs": [[1], [2], [3]], "outputs": [[[1]], [[2]], [[3]]]}
    assert [grade(f"def f(n): return {value}", tests).reward for value in ("[n]", "[[n]]")] == [1.0, 1.0]
    assert grade("def f(n): return [n] if n < 3 else [[n]]", tests).reasons == ("passed", "passed", "wrong_answer")


def test_an_output_may_be_as_long_as_the_expected_one() -> None:
    length = 17 << 20  # more than `Limits.output_bytes`
    test = [{"input": "", "output": "7" * length}]
    assert grade(f"print('7' * {length})", test).reasons == ("passed",)
    assert grade(f"print('7' * {length - 1})", test).reasons == ("wrong_answer",)
