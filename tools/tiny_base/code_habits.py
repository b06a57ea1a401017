"""How the authors of tiny_code's synthetic dialogues work: habits of different quality, and a line checker."""

import random

from multirole.core.types import Problem
from multirole.tasks.tiny_code import PRIMITIVES, REDUCERS, Reducer, Step, draw_step, extract, parse, run_steps

HABITS = {"careful": 0.27, "nested": 0.18, "unguarded": 0.25, "sloppy": 0.16, "skip": 0.06, "no_fence": 0.08}
"""Share of each habit among generator answers."""

STRATEGIES = {
    "one line per step": "careful",
    "guard the empty list": "careful",
    "one expression": "nested",
    "skip edge cases": "unguarded",
    "work quickly": "sloppy",
}
QUOTED_AS: dict[str, str] = {}
"""Habits that look different when a critic reads them."""

MALFORMED = "No fence. "
_BUG = {
    "careful": 0.02,
    "nested": 0.06,
    "unguarded": 0.03,
    "sloppy": 0.2,
    "skip": 0.02,
    "no_fence": 0.02,
    "perfect": 0.0,
}
_NEIGHBOURS = {"keep even": "keep odd", "keep above": "keep below", "add": "subtract", "drop first": "drop last"}
_NEIGHBOURS |= {b: a for a, b in _NEIGHBOURS.items()} | {
    "take first": "drop last",
    "sort": "reverse",
    "reverse": "sort",
}


def write(problem: Problem, habit: str, rng: random.Random) -> tuple[str, bool]:
    """One answer in a habit, in a ```python fence (but for "no_fence"), and whether it passes the hidden tests."""
    steps, reducer = parse(problem.question)
    steps = [_bug(step, rng) if rng.random() < _BUG[habit] else step for step in steps]
    if rng.random() < _BUG[habit]:
        reducer = rng.choice(REDUCERS)
    if habit == "skip":
        del steps[rng.randrange(len(steps))]
    if habit == "nested":
        body = [f"    return {_nested(steps, reducer)}"]
    else:
        body = _lines(steps, reducer, is_guarded=habit != "unguarded")
    source = "\n".join(["def f(xs):", *body])
    if habit == "no_fence":
        return source, False
    values = [reducer.run(run_steps(steps, xs)) for (xs,) in problem.reference["arguments"]]
    is_safe = habit != "unguarded" or reducer.bare == reducer.guarded
    return f"```python\n{source}\n```", is_safe and values == problem.reference["expected"]


def _bug(step: Step, rng: random.Random) -> Step:
    """A likely confusion: the constant beside it, the mirrored primitive, or any other step."""
    primitive, constant = step
    kind = rng.random()
    if kind < 0.5 and (near := [n for n in primitive.constants if abs(n - constant) == 1]):
        return primitive, rng.choice(near)
    if kind < 0.85 and (twin := _NEIGHBOURS.get(primitive.phrase)):
        other = next(p for p in PRIMITIVES if p.phrase == twin)
        return other, constant if constant in other.constants else rng.choice(other.constants or (0,))
    return draw_step(rng)


def _lines(steps: list[Step], reducer: Reducer, is_guarded: bool = True) -> list[str]:
    body = [f"    xs = {primitive.expression.format(e='xs', n=constant)}" for primitive, constant in steps]
    return [*body, f"    return {(reducer.guarded if is_guarded else reducer.bare).format(e='xs')}"]


def _nested(steps: list[Step], reducer: Reducer) -> str:
    expression = "xs"
    for primitive, constant in steps:
        expression = primitive.expression.format(e=expression, n=constant)
    return reducer.nested.format(e=expression)


def count_lines(text: str) -> int:
    """Lines of the body, which a reviewer checks."""
    return len((extract(text) or text).strip("\n").split("\n")) - 1


def wrong_line(problem: Problem, text: str) -> int | None:
    """The first line (from 1) of a line-by-line answer that differs from the guarded one; None for other shapes."""
    body = (extract(text) or text).removesuffix("\n").split("\n")[1:]
    steps, reducer = parse(problem.question)
    expected = _lines(steps, reducer)
    if len(body) < 2:
        return None
    differ = [i for i, (a, b) in enumerate(zip(body, expected, strict=False), start=1) if a != b]
    return differ[0] if differ else None


def worked(problem: Problem) -> str:
    """A right answer, before some other role's box."""
    return write(problem, "perfect", random.Random(0))[0]
