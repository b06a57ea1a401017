"""How the authors of tiny_math's synthetic dialogues work: habits of different quality, and a line checker."""

import random
import re
from itertools import pairwise

from multirole.core.types import Problem
from multirole.tasks.tiny_math import LARGEST, apply, parse

HABITS = {"careful": 0.35, "double": 0.17, "sloppy": 0.10, "guess": 0.24, "skip": 0.06, "no_box": 0.08}
"""Share of each habit among generator answers."""

STRATEGIES = {
    "one step per line": "careful",
    "write every step": "careful",
    "two steps per line": "double",
    "work quickly": "sloppy",
    "guess the result": "guess",
}
QUOTED_AS = {"guess": "blind_guess"}
"""A guess is trained on the right value, but what a model really guesses, and its critics see, is mostly wrong."""

MALFORMED = "No box. "
_SLIP = {"careful": 0.01, "double": 0.02, "sloppy": 0.2, "skip": 0.02, "no_box": 0.02, "perfect": 0.0}
_OPS_PER_LINE = {"double": 2}


def write(problem: Problem, habit: str, rng: random.Random) -> tuple[str, bool]:
    """One answer in a habit and whether it is right: `=expression` lines with ever fewer operations, then the box."""
    value, ops = parse(problem.question)
    if habit in ("guess", "blind_guess"):
        guess = problem.reference if habit == "guess" or rng.random() < 0.15 else rng.randint(0, LARGEST)
        return f"\\boxed{{{guess}}}", guess == problem.reference
    if habit == "skip":
        del ops[rng.randrange(1, len(ops))]
    lines = []
    while ops:
        for _ in range(_OPS_PER_LINE.get(habit, 1)):
            if ops:
                value = apply(value, *ops.pop(0))
                if rng.random() < _SLIP[habit]:
                    value = _slip(value, ops, rng)
        if ops:
            lines.append(f"={value}" + "".join(f"{op}{operand}" for op, operand in ops))
    lines.append(f"={value}" if habit == "no_box" else f"\\boxed{{{value}}}")
    return "\n".join(lines), habit != "no_box" and value == problem.reference


def _slip(value: int, rest: list[tuple[str, int]], rng: random.Random) -> int:
    """A neighbouring value from which the rest stays in range; the value itself when there is none."""

    def stays(start: int) -> bool:
        for op, operand in rest:
            if not 0 <= (start := apply(start, op, operand)) <= LARGEST:
                return False
        return True

    near = [v for v in (value - 2, value - 1, value + 1, value + 2) if 0 <= v <= LARGEST and stays(v)]
    return rng.choice(near) if near else value


def count_lines(text: str) -> int:
    """Lines that a reviewer checks."""
    return len(text.split("\n"))


def wrong_line(problem: Problem, text: str) -> int | None:
    """The first line (from 1) that does not follow from the one before; None when all follow."""
    lines = [problem.question, *(line.removeprefix("=") for line in text.split("\n"))]
    for number, (before, line) in enumerate(pairwise(lines), start=1):
        boxed = re.fullmatch(r"\\boxed\{(\d+)\}", line)
        if not _follows(before, boxed[1] if boxed else line, is_last=boxed is not None):
            return number
    return None


def _follows(before: str, after: str, is_last: bool) -> bool:
    expression = r"\d+([-+*]\d+)*"
    if not (re.fullmatch(expression, before) and re.fullmatch(expression, after)):
        return False
    (value, ops), (claimed, rest) = parse(before), parse(after)
    done = len(ops) - len(rest)
    if done < 1 and not is_last or ops[max(done, 0) :] != rest:
        return False
    for op, operand in ops[:done]:
        value = apply(value, op, operand)
    return value == claimed


def worked(problem: Problem) -> str:
    """A right derivation without a box, so that a box for something else can follow."""
    text, _ = write(problem, "perfect", random.Random(0))
    return text.replace("\\boxed{", "=").removesuffix("}")
