"""Programs within the limits get their exact verdicts, right or wrong."""

import json
import subprocess
import sys

from honest_programs import FUNCTIONS, STDIN
from library_uses import USES

import multirole_sandbox as sandbox
from multirole_sandbox import Limits

LIMITS = Limits(test_seconds=1.5, memory_bytes=2 << 30)


def check(programs: dict[str, tuple[str, list[dict], list[bool]]]) -> None:
    """Check that each program passes exactly the tests that it should pass."""
    texts, tests, due = zip(*programs.values(), strict=True)
    verdicts = dict(zip(programs, sandbox.grade_batch(texts, tests, limits=LIMITS), strict=True))
    passed = {name: [reason == "passed" for reason in verdict.reasons] for name, verdict in verdicts.items()}
    assert passed == dict(zip(programs, due, strict=True))
    assert all(v.reward == sum(passed[n]) / len(passed[n]) for n, v in verdicts.items())


def test_programs_get_their_fraction() -> None:
    check({
        name: (program, [{"input": i, "output": o, "testtype": "stdin"} for i, o, _ in cases], [due for *_, due in cases])
        for name, (program, cases) in STDIN.items()
    })  # fmt: skip


def test_functions_get_their_fraction() -> None:
    def tests(function: str, cases: list) -> list[dict]:
        more = {"testtype": "functional", "metadata": {"func_name": function}}
        return [{"input": stdin, "output": expected, **more} for stdin, expected, _ in cases]

    check({
        name: (program, tests(function, cases), [due for *_, due in cases])
        for name, (program, function, cases) in FUNCTIONS.items()
    })  # fmt: skip


def test_the_standard_library_works_as_it_does_outside() -> None:
    environment = {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "HOME": "/"}
    code = (
        "import io, json, sys\ndef run(program):\n    sys.stdout = io.StringIO()\n"
        "    exec(program, {'__name__': '__main__'})\n    return sys.stdout.getvalue()\n"
        "out = sys.stdout\nfound = [run(program) for program in json.load(sys.stdin)]\njson.dump(found, out)"
    )
    stdin = json.dumps(list(USES.values()))
    command = [sys.executable, "-S", "-c", code]
    outside = subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, check=True)
    tests = [[{"input": "", "output": output, "testtype": "stdin"}] for output in json.loads(outside.stdout)]
    verdicts = sandbox.grade_batch(list(USES.values()), tests, limits=LIMITS)
    assert {name: v.reason for name, v in zip(USES, verdicts, strict=True) if v.reward != 1.0} == {}
