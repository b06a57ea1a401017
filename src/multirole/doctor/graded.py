"""For each task: a problem, with answers that its grader must tell apart."""

import json
from dataclasses import dataclass

BOX = "so the answer is \\boxed{%s}."
FENCE = "```python\n%s\n```"


@dataclass(frozen=True)
class Sample:
    """`right` answers `reference` and fails on `other`; `partial` is the reward of `wrong` by the share of tests."""

    reference: object
    other: object
    right: str
    wrong: str
    malformed: str
    partial: float = 0.0


def _stdin(outputs: list[str]) -> str:
    """Hidden tests of a program that reads a number."""
    tests = [{"input": f"{n}\n", "output": f"{o}\n", "testtype": "stdin"} for n, o in enumerate(outputs)]
    return json.dumps(tests)


SAMPLES = {
    "tiny_math": Sample(15, 6, BOX % "15", BOX % "14", "so the answer is 15."),
    "math": Sample("\\frac{1}{2}", "2", BOX % "0.5", BOX % "0.4", "so the answer is 0.5."),
    "tiny_code": Sample(
        {"arguments": [[[]], [[1, 2]]], "expected": [0, 3]},
        {"arguments": [[[]], [[1, 2]]], "expected": [1, 2]},
        FENCE % "def f(xs):\n    return sum(xs)",
        FENCE % "def f(xs):\n    return 0",
        "def f(xs):\n    return sum(xs)",
        partial=0.5,
    ),
    "code": Sample(
        _stdin(["0", "2"]),
        _stdin(["1", "3"]),
        FENCE % "print(2 * int(input()))",
        FENCE % "print(0)",
        "print(2 * int(input()))",
        partial=0.5,
    ),
}
