"""tiny_code: write `f(xs)`, a pipeline of list primitives that ends in a reducer.

A question is a specification such as `keep even, times 3, drop first 2, max or 0`. The answer is the last ```python
fence; it is graded on hidden tests (the empty list among them) by `multirole.sandbox`, which the expected outputs never
enter. Splits are disjoint by a hash of the specification, but not by what the function returns: 74 of the 256 validation problems ask
for the same function as one of the 4,096 for training, and 7 for a constant.
"""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from multirole.core.types import Problem, Reward
from multirole.sandbox import Limits, Verdict
from multirole.tasks.code import Rule, grade
from multirole.tasks.splits import first_problems, split_of

NAME = "tiny_code"
N_TESTS = 8


@dataclass(frozen=True)
class Primitive:
    """One list-to-list step: `expression` is Python over `{e}` (the operand) and `{n}` (a constant)."""

    phrase: str
    expression: str
    constants: tuple[int, ...]
    run: Callable[[list[int], int], list[int]]


@dataclass(frozen=True)
class Reducer:
    """The last step, list to integer: `guarded` and `nested` are right on the empty list, `bare` may not be."""

    phrase: str
    guarded: str
    nested: str
    bare: str
    run: Callable[[list[int]], int]


PRIMITIVES = (
    Primitive("keep even", "[x for x in {e} if x % 2 == 0]", (), lambda xs, n: [x for x in xs if x % 2 == 0]),
    Primitive("keep odd", "[x for x in {e} if x % 2 == 1]", (), lambda xs, n: [x for x in xs if x % 2 == 1]),
    Primitive("keep above", "[x for x in {e} if x > {n}]", (0, 1, 2, 3, 4, 5), lambda xs, n: [x for x in xs if x > n]),
    Primitive("keep below", "[x for x in {e} if x < {n}]", (4, 5, 6, 7, 8, 9), lambda xs, n: [x for x in xs if x < n]),
    Primitive("add", "[x + {n} for x in {e}]", (1, 2, 3, 4, 5), lambda xs, n: [x + n for x in xs]),
    Primitive("subtract", "[x - {n} for x in {e}]", (1, 2, 3, 4, 5), lambda xs, n: [x - n for x in xs]),
    Primitive("times", "[x * {n} for x in {e}]", (2, 3, 4, 5), lambda xs, n: [x * n for x in xs]),
    Primitive("square", "[x * x for x in {e}]", (), lambda xs, n: [x * x for x in xs]),
    Primitive("negate", "[-x for x in {e}]", (), lambda xs, n: [-x for x in xs]),
    Primitive("drop first", "{e}[{n}:]", (1, 2, 3), lambda xs, n: xs[n:]),
    Primitive("drop last", "{e}[:-{n}]", (1, 2, 3), lambda xs, n: xs[:-n]),
    Primitive("take first", "{e}[:{n}]", (2, 3, 4, 5), lambda xs, n: xs[:n]),
    Primitive("every second", "{e}[::2]", (), lambda xs, n: xs[::2]),
    Primitive("reverse", "{e}[::-1]", (), lambda xs, n: xs[::-1]),
    Primitive("sort", "sorted({e})", (), lambda xs, n: sorted(xs)),
)
REDUCERS = (
    Reducer("sum", "sum({e})", "sum({e})", "sum({e})", sum),
    Reducer("count", "len({e})", "len({e})", "len({e})", len),
    Reducer("max or 0", "max({e}) if {e} else 0", "max({e}, default=0)", "max({e})", lambda xs: max(xs, default=0)),
    Reducer("min or 0", "min({e}) if {e} else 0", "min({e}, default=0)", "min({e})", lambda xs: min(xs, default=0)),
    Reducer("first or 0", "{e}[0] if {e} else 0", "next(iter({e}), 0)", "{e}[0]", lambda xs: xs[0] if xs else 0),
    Reducer("last or 0", "{e}[-1] if {e} else 0", "next(reversed({e}), 0)", "{e}[-1]", lambda xs: xs[-1] if xs else 0),
)

Step = tuple[Primitive, int]
"""A primitive with its constant (0 for a primitive without one)."""


def phrase(step: Step) -> str:
    """`keep above 3`, or `sort` for a primitive without a constant."""
    primitive, constant = step
    return f"{primitive.phrase} {constant}" if primitive.constants else primitive.phrase


def draw_step(rng: random.Random) -> Step:
    """A uniformly drawn primitive with a uniformly drawn constant."""
    primitive = rng.choice(PRIMITIVES)
    return primitive, rng.choice(primitive.constants) if primitive.constants else 0


def parse(question: str) -> tuple[list[Step], Reducer]:
    """The steps and the reducer that a question names."""
    *phrases, last = question.split(", ")
    by_phrase = {phrase((p, n)): (p, n) for p in PRIMITIVES for n in (p.constants or (0,))}
    return [by_phrase[name] for name in phrases], next(r for r in REDUCERS if r.phrase == last)


def run_steps(steps: list[Step], xs: list[int]) -> list[int]:
    """The list after every step."""
    for primitive, constant in steps:
        xs = primitive.run(xs, constant)
    return xs


def _sample(rng: random.Random, n_primitives: int) -> Problem:
    steps = [draw_step(rng) for _ in range(n_primitives)]
    reducer = rng.choice(REDUCERS)
    question = ", ".join([*map(phrase, steps), reducer.phrase])
    tests_rng = random.Random(question)
    inputs = [[], *([tests_rng.randint(-9, 15) for _ in range(tests_rng.randint(4, 9))] for _ in range(N_TESTS - 1))]
    expected = [reducer.run(run_steps(steps, xs)) for xs in inputs]
    return Problem(f"{NAME}/{question}", NAME, question, {"arguments": [[xs] for xs in inputs], "expected": expected})


def stream(split: str, rng: random.Random, n_primitives: tuple[int, int] = (3, 4)) -> Iterator[Problem]:
    """Yield problems of one split without end, with repeats; the pair is the least and the largest number of primitives."""
    while True:
        problem = _sample(rng, rng.randint(*n_primitives))
        if split_of(problem.question) == split:
            yield problem


LIMITS = Limits(test_seconds=1.0, full_timeouts=1, memory_bytes=512 << 20, output_bytes=64 << 10)
_verdicts: dict[tuple[str, str, str], Verdict] = {}
"""Verdicts by (program, tests, rule), since rollouts repeat themselves often."""
MOST_VERDICTS = 50_000


def tests_of(problem: Problem) -> dict[str, Any]:
    """Return the hidden tests in a form that the sandbox reads."""
    return {"fn_name": "f", "inputs": problem.reference["arguments"], "outputs": problem.reference["expected"]}


def extract(text: str) -> str | None:
    """Return the body of the last ```python fence, or None."""
    fences = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    return fences[-1] if fences else None


@dataclass(frozen=True)
class TinyCode:
    """The task; `reward` is the "fraction" of passed tests, or "all_pass"."""

    reward: Rule = "fraction"
    name: ClassVar[str] = NAME

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` problems of a split."""
        seed = f"{NAME}/{split}/Difficulty(min_primitives=3, max_primitives=4)"  # names a class of old; results depend on it
        return first_problems(stream, split, count, seed)[:]

    def describe(self) -> dict[str, object]:
        """Return where the problems come from."""
        return {"name": NAME, "is_embedded": True}

    def extract(self, text: str) -> str | None:
        """Return the body of the last ```python fence, or None."""
        return extract(text)

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Score by hidden tests; a program that fails in several ways has the least clean reason."""
        if len(_verdicts) > MOST_VERDICTS:
            _verdicts.clear()
        tests = {problem.id: json.dumps(tests_of(problem)) for problem in problems}
        verdicts = grade(list(map(extract, texts)), [tests[p.id] for p in problems], self.reward, LIMITS, _verdicts)
        return [Reward(0.0, "no_code", False) if verdict is None else _reward(verdict) for verdict in verdicts]


def _reward(verdict: Verdict) -> Reward:
    worst = [reason for reason in ("timeout", "error") if reason in verdict.reasons]
    return Reward(verdict.reward, worst[0] if worst else verdict.reason, verdict.passed == verdict.total)
