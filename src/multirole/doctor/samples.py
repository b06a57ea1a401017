"""For each built-in task, answers that its grader must tell apart."""

import json
from typing import NamedTuple

BOX = "so the answer is \\boxed{%s}."
FENCE = "```python\n%s\n```"


class Sample(NamedTuple):
    """`right` is correct for `reference` and not for `other`; `wrong` is not correct for `reference`."""

    reference: object
    other: object
    right: str
    wrong: str


def _tests(first: object, second: object) -> dict[str, object]:
    return {"arguments": [[[]], [[1, 2]]], "expected": [first, second]}


def _programs(*outputs: str) -> str:
    return json.dumps([{"input": f"{n}\n", "output": f"{o}\n", "testtype": "stdin"} for n, o in enumerate(outputs)])


SUM, ZERO = FENCE % "def f(xs):\n    return sum(xs)", FENCE % "def f(xs):\n    return 0"
SAMPLES = {
    "tiny_math": Sample(15, 6, BOX % "15", BOX % "14"),
    "math": Sample("\\frac{1}{2}", "2", BOX % "0.5", BOX % "0.4"),
    "tiny_code": Sample(_tests(0, 3), _tests(1, 2), SUM, ZERO),
    "code": Sample(_programs("0", "2"), _programs("1", "3"), FENCE % "print(2 * int(input()))", FENCE % "print(0)"),
}
