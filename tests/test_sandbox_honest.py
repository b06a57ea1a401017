"""Legal programs get exactly what they are due."""

import json
import subprocess
import sys

import pytest
from honest_programs import FUNCTIONS, STDIN
from library_uses import USES

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


def test_the_standard_library_works_as_it_does_outside() -> None:
    environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "HOME": "/"}
    code = (
        "import io, json, sys\ndef run(program):\n    sys.stdout = io.StringIO()\n"
        "    exec(program, {'__name__': '__main__'})\n    return sys.stdout.getvalue()\n"
        "out = sys.stdout\nfound = [run(program) for program in json.load(sys.stdin)]\njson.dump(found, out)"
    )
    given = json.dumps(list(USES.values()))
    command = [sys.executable, "-S", "-c", code]
    outside = subprocess.run(command, input=given, capture_output=True, text=True, env=environment, check=True)
    tests = [[{"input": "", "output": output, "testtype": "stdin"}] for output in json.loads(outside.stdout)]
    verdicts = sandbox.grade_batch(list(USES.values()), tests, limits=LIMITS)
    assert {name: v.reason for name, v in zip(USES, verdicts, strict=True) if v.reward != 1.0} == {}
