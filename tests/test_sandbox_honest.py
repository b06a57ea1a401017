"""Legal programs get exactly what they are due."""

import pytest
from honest_programs import FUNCTIONS, STDIN

from multirole import sandbox
from multirole.sandbox import Limits

LIMITS = Limits(test_seconds=1.5, memory_bytes=2 << 30)


def check(program: str, tests: list[dict], due: list[bool]) -> None:
    verdict = sandbox.grade(program, tests, limits=LIMITS)
    assert [reason == "passed" for reason in verdict.reasons] == due
    assert verdict.reward == verdict.passed / verdict.total == sum(due) / len(due)


@pytest.mark.parametrize("name", STDIN)
def test_a_program_gets_its_fraction(name: str) -> None:
    program, cases = STDIN[name]
    tests = [{"input": given, "output": expected, "testtype": "stdin"} for given, expected, _ in cases]
    check(program, tests, [is_due for *_, is_due in cases])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gets_its_fraction(name: str) -> None:
    program, function, cases = FUNCTIONS[name]
    metadata = {"func_name": function}
    tests = [
        {"input": given, "output": expected, "testtype": "functional", "metadata": metadata}
        for given, expected, _ in cases
    ]
    check(program, tests, [is_due for *_, is_due in cases])
