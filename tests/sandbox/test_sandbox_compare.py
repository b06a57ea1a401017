"""The comparison rules and the normalised form of tests, against cases computed by hand."""

import json
import time

import pytest

from multirole_sandbox.compare import are_wrapped, is_right
from multirole_sandbox.published import normalise_tests


def is_right_text(output: bytes, expected: str) -> bool:
    return is_right(output, {"output": expected, "testtype": "stdin"})


def is_right_value(output: bytes, expected: str, is_bare: bool = False) -> bool:
    return is_right(output, {"output": expected, "testtype": "functional"}, is_bare)


@pytest.mark.parametrize(
    ("got", "want", "is_right"),
    [
        ("3", "3", True),
        ("3\n", "3", True),
        (" 3 \r\n\n\n", "3\n", True),
        ("\n3", "3", True),
        ("1 2\n3", "1 2\n3\n", True),
        ("1 2 \n 3", "1 2\n3", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("1 2", "1\n2", False),
        ("1\n\n2", "1\n2", True),  # hendrycks/apps leaves blank lines out
        ("2 1", "1 2", False),
        ("1 1 2", "1 2", False),
        ("", "", True),
        ("", "0", False),
        ("0", "", False),
        ("yes", "YES", False),
        ("a  b", "a b", False),
        ("*   *", "* *", False),
        ("1.50", "1.5", True),
        ("7.0", "7", True),
        ("+7", "7", True),
        ("-0", "0", True),
        ("1e3", "1000", True),
        (".5", "0.5", True),
        ("0.30000000000000004", "0.3", True),
        ("1000000000.5", "1000000000.4", True),
        ("0.3001", "0.3", False),
        ("0.33333", "0.3333333333", False),
        ("0.333333", "0.333333333333", True),  # LiveCodeBench#129, NVIDIA-NeMo/Gym#2956: judges allow 1e-6
        ("1.414214", "1.4142135623730951", True),
        ("333.3333333333", "333.33333333333331", True),
        ("123456789.123", "123456789.123456", True),
        ("1e-07", "0.0000001", True),
        ("0.333334", "0.33333", True),
        ("0.333336", "0.33333", False),
        ("0.3334", "0.333333333333", False),
        ("1.00001", "1.0", False),
        ("3.0000001", "3", False),
        ("[0.333333, 1]", "[0.3333333333, 1]", True),
        ("[0.3334, 1]", "[0.3333333333, 1]", False),
        ("(1.50,2)", "(1.5,2)", True),
        ("[01]", "[1]", False),
        ("v1.10", "v1.1", False),
        ("1000000001", "1000000000", False),
        ("1e18", "1000000000000000007", False),
        ("1000000000000000000.0", "1000000000000000007", False),
        ("2.880067194370825e+18", "2880067194370816120", False),
        ("1e18", "1000000000000000000", True),
        ("1000000000000000007", "1e18", True),
        ("3.0000000001", "3", False),
        ("3", "3.0000000001", True),
        ("10000000000000000000001", "10000000000000000000000", False),
        ("0101", "101", False),
        ("101", "0101", False),
        ("0101", "0101", True),
        ("nan", "nan", True),
        ("nan", "0.0", False),
        ("inf", "1e999", False),
        ("1e9999", "1e9998", False),
        ("1_000", "1000", False),
        ("١", "1", False),
        ("0x10", "16", False),
        ("Case 1: 2.50", "Case 1: 2.5", True),
        ("Case  1: 2.50", "Case 1: 2.5", False),
        ("3.0.0", "3.0", False),
        ("9" * 500 + ".0", "9" * 500, False),
        ("\ufffd", "é", False),
    ],
)
def test_text(got: str, want: str, is_right: bool) -> None:
    assert is_right_text(got.encode(), want) is is_right


def test_bytes_that_are_no_text_are_wrong() -> None:
    assert not is_right_text(b"\xff\xfe3", "3")


@pytest.mark.parametrize(
    ("got", "want", "is_right"),
    [
        ("3", "3", True),
        ("3.0", "3", True),
        ("3", "3.0", True),
        ("3.0000000001", "3", False),
        ("3.0000000001", "3.0", True),
        ("3", "3.0000000001", True),
        ("1e18", "1000000000000000007", False),
        ("2.880067194370825e+18", "2880067194370816120", False),
        ("1e18", "1000000000000000000", True),
        ("[1e18]", "[1000000000000000007]", False),
        ("3.0001", "3.0", False),
        ("0.3333333333333333", "0.33333", True),  # LeetCode rounds to five decimals
        ("2.500004", "2.50000", True),
        ("2.500006", "2.50000", False),
        ("0.3333333333333333", "0.33", False),
        ("[0.333333, 0.666667]", "[0.33333333333, 0.66666666667]", True),
        ("4", "3", False),
        ("true", "1", False),
        ("1", "true", False),
        ("0", "false", False),
        ("null", "0", False),
        ("null", "[]", False),
        ('"3"', "3", False),
        ("[1, [2]]", "[1, [2]]", True),
        ("[1, 2]", "[2, 1]", False),
        ("[1]", "[1, 1]", False),
        ('{"a": 1.5}', '{"a": 1.5}', True),
        ('{"a": 1, "b": 2}', '{"a": 1}', False),
        ("NaN", "NaN", False),
        ("Infinity", "1", False),
        ("1e999", "Infinity", True),
        ("9007199254740993", "9007199254740992", False),
        (str(10**400), "1.5", False),
        ("[" * 5000 + "]" * 5000, "[]", False),
        ("3 ", "3", True),
        ("3, 4", "3", False),
        ("", "null", False),
        ("\x80\x04garbage", "1", False),
        ("9" * 5000, "1", False),
    ],
)
def test_values(got: str, want: str, is_right: bool) -> None:
    assert is_right_value(got.encode(), want) is is_right


def test_no_other_number_is_near_one_beyond_all_floats() -> None:
    assert not is_right_value(b"5", "1e400")


def test_an_exponent_of_hundreds_of_digits_is_compared_as_the_float_that_it_is() -> None:
    digits = "9" * 300
    assert not is_right_value(b"5", f"1e{digits}") and is_right_value(b"0", f"1e-{digits}")
    assert not is_right_value(b"0.1", f"[1e-{digits}]")


@pytest.mark.parametrize("kind", ["stdin", "functional"])
def test_an_output_that_is_too_long_for_the_expected_one_is_not_read(kind: str) -> None:
    for flood in (b"[" + b"[]," * 5_000_000 + b"[]]", b"1 " * 8_000_000, b"\n" * (16 << 20), b"9" * (16 << 20)):
        started = time.perf_counter()
        assert not is_right(flood, {"output": "[1]", "testtype": kind}, is_bare=kind == "functional")
        assert time.perf_counter() - started < 0.1


def test_an_integer_longer_than_every_expected_one_is_not_converted() -> None:
    """The conversion takes quadratic time, minutes for these digits."""
    started, zeros = time.process_time(), "0, " * 200_000
    assert not is_right_value(b"9" * 2_000_000, f"[{zeros}1]")
    assert not is_right_value(b"-" + b"9" * 2_000_000, f"[{zeros}1]")
    assert time.process_time() - started < 2
    digits = "7" * 6000
    assert is_right_value(f"[-{digits}, null]".encode(), f"[-{digits}, null]")
    assert not is_right_value(f"[-{digits}, 7{digits}]".encode(), f"[-{digits}, null]")


def test_a_long_form_of_the_expected_output_is_not_too_long() -> None:
    values = [n / 10 for n in range(10_000)]
    inexact = json.dumps([value * (1 + 1e-12) for value in values], indent=1).encode()
    assert is_right_value(inexact, json.dumps(values, separators=(",", ":")))
    assert is_right_text("\n".join(f"{v:.15f}" for v in values).encode(), "\n".join(map(str, values)))
    assert is_right_value(json.dumps("é" * 9999).encode(), json.dumps("é" * 9999, ensure_ascii=False))
    assert is_right_text(b"1" + b" \n" * 2000, "1")


def test_a_wrapped_expected_value_counts_only_where_all_are_wrapped() -> None:
    def tests(*outputs: object) -> list[dict]:
        return normalise_tests({"fn_name": "f", "inputs": [[1]] * len(outputs), "outputs": list(outputs)})

    assert are_wrapped(tests([1], [[2]])) and not are_wrapped(tests([1], [1, 2])) and not are_wrapped(tests([1], 2))
    assert not are_wrapped(normalise_tests([call_test("1", "[1]")]))  # JSON lines are not wrapped
    assert is_right_value(b"1", "[1]", is_bare=True) and is_right_value(b"[1]", "[1]")
    assert not is_right_value(b"1", "[1]") and not is_right_value(b"2", "[1]", is_bare=True)


def stdin_test(stdin: str, expected: str) -> dict:
    return {"input": stdin, "output": expected, "testtype": "stdin"}


def call_test(arguments: str, expected: str, **metadata: object) -> dict:
    return {"input": arguments, "output": expected, "testtype": "functional", "metadata": {"func_name": "f"} | metadata}


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ([{"input": "1\n2", "output": "3"}], [stdin_test("1\n2", "3")]),
        ([{"type": "stdin_stdout", "fn_name": None, "input": "1\n", "output": "2"}], [stdin_test("1\n", "2")]),
        ([{"testtype": "stdin_stdout", "input": ["1", "2"], "output": ["3", "4"]}], [stdin_test("1\n2", "3\n4")]),
        ({"inputs": ["1", "2"], "outputs": ["3", "4"]}, [stdin_test("1", "3"), stdin_test("2", "4")]),
        ([call_test('[1]\n"a"', "null")], [call_test('[1]\n"a"', "null")]),
        (
            [{"type": "function_call", "fn_name": "f", "input": [[1, 2], "a"], "output": [["b"]]}],
            [call_test('[1, 2]\n"a"', '[["b"]]', is_wrapped=True)],
        ),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1], [1, 2]]}, [call_test("1", "[1]"), call_test("2", "[1, 2]")]),
        ({"fn_name": "f", "inputs": [[]], "outputs": [[7]]}, [call_test("", "[7]", is_wrapped=True)]),
    ],
)  # fmt: skip
def test_every_published_form_is_normalised(tests: object, expected: list[dict]) -> None:
    assert normalise_tests(tests) == normalise_tests(json.dumps(tests)) == expected


@pytest.mark.parametrize(
    "tests",
    [
        [],
        {},
        None,
        "no json",
        "[]",
        [{}],
        [1],
        [{"input": "1"}],
        [{"input": 1, "output": "1"}],
        [{"input": "1", "output": None}],
        [{"input": "1", "output": "1", "testtype": "guess"}],
        [{"input": "1", "output": "1", "testtype": "functional"}],
        [{"input": "1", "output": "1", "testtype": "functional", "metadata": {"func_name": "1 + f"}}],
        [{"input": "x", "output": "1", "testtype": "functional", "metadata": {"func_name": "f"}}],
        [{"input": "1", "output": "x", "testtype": "functional", "metadata": {"func_name": "f"}}],
        [{"type": "function_call", "fn_name": "f", "input": 3, "output": [4]}],
        {"inputs": ["1", "2"], "outputs": ["1"]},
        {"inputs": "1", "outputs": "1"},
        {"inputs": ["1"]},
        {"inputs": [], "outputs": []},
    ],
)
def test_malformed_tests_are_refused_and_never_graded(tests: object) -> None:
    with pytest.raises(ValueError, match="Write a non-empty list"):
        normalise_tests(tests)
