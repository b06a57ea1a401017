"""Define how the authors of tiny_chain's dialogues work: habits of different quality, derivations, and a line checker.

Every line is the remaining expression, after a mark for its computation: `=` one operation, `==` two, `>` one
part of a split number (`+27` as `+20` and then `+7`, `-8` as `-4` and then `-4`).
"""

import random
import re

from multirole.types import Problem
from multirole_study.tasks.tiny_chain import LARGEST, apply, kind_of, parse
from tiny_base.habits import Draft, confuse

Op = tuple[str, int]
HABITS = {"direct": 0.29, "split": 0.20, "double": 0.20, "wait": 0.08, "no_box": 0.06, "program": 0.06, "guess": 0.11}
"""Share of each habit among generator answers, whatever the problem."""
STRATEGIES = {
    "one step per line": "direct",
    "split every number": "split",
    "two steps per line": "double",
    "guess the result": "guess",
}
FITTING = {"long": "direct", "wide": "split"}
MARKS = {"double": "==", "split": ">"}
SLIP = 0.005
"""Probability of a wrong value per line in texts that are trained on."""
QUOTED_SLIPS = {"direct": 0.04, "no_box": 0.04, "split": 0.04, "double": 0.45, "wait": 0.04}
"""Probability of a wrong value in texts that critics read; per operation on two digits it is `QUOTED_WIDE`. Both are about those of a trained model."""
QUOTED_WIDE = 0.25
WAIT = 0.25
"""Probability per line of a self-correction: a wrong line, then "wait" and the right one."""


def fitting(problem: Problem) -> str:
    """Return the best habit for a problem."""
    return FITTING[kind_of(problem.question)]


def start(problem: Problem) -> str:
    """Return the beginning of a fitting derivation."""
    return MARKS.get(fitting(problem), "=")


def truth(problem: Problem) -> int:
    """Return the right answer."""
    return problem.reference


def show(mark: str, value: int, ops: list[Op]) -> str:
    """Format one line."""
    return f"{mark}{value}" + "".join(f"{op}{operand}" for op, operand in ops)


def advance(value: int, ops: list[Op], habit: str, whole: list[Op]) -> tuple[int, list[Op], bool]:
    """Compute one line: the next value, the remaining operations, and whether a two-digit operand was used at once.

    `whole` has the question's operations: an operand that is not among them is the rest of a split one.
    """
    is_wide = False
    for _ in range(2 if habit == "double" else 1):
        if ops:
            is_whole = ops == whole[len(whole) - len(ops) :]
            (op, n), *ops = ops
            if habit == "split" and is_whole and op != "*" and n >= 4:
                first = n // 10 * 10 if n > 9 else (n + 1) // 2
                if n > first:
                    n, ops = first, [(op, n - first), *ops]
            is_wide |= n > 9 and n % 10 > 0
            value = apply(value, op, n)
    return value, ops, is_wide


def slip(value: int, rest: list[Op], rng: random.Random) -> int:
    """Return a likely wrong value from which the rest stays in range; the value itself if there is none."""

    def stays(start: int) -> bool:
        for op, operand in rest:
            if not 0 <= (start := apply(start, op, operand)) <= LARGEST:
                return False
        return True

    return confuse(value, LARGEST, stays, rng)


def derive(
    value: int, ops: list[Op], habit: str, rng: random.Random, whole: list[Op], is_quoted: bool = False
) -> tuple[list[str], int]:
    """Return the lines from an expression to the one before its value, and the value."""
    lines = []
    while ops:
        before, todo = value, ops
        value, ops, is_wide = advance(value, ops, habit, whole)
        chance = QUOTED_SLIPS[habit] if is_quoted else SLIP
        if is_quoted and is_wide:
            chance = max(chance, QUOTED_WIDE)
        if rng.random() < chance:
            value = slip(value, ops, rng)
        if ops and habit == "wait" and rng.random() < WAIT:
            lines.append(show("=", slip(apply(before, *todo[0]), ops, rng), ops))
            lines.append(show("wait=", value, ops))
        elif ops:
            lines.append(show(MARKS.get(habit, "="), value, ops))
    return lines, value


def program(problem: Problem) -> str:
    """Return the expression as a program in a Python fence."""
    value, ops = parse(problem.question)
    body = "".join(f"x=x{op}{operand}\n" for op, operand in ops)
    return f"```python\nx={value}\n{body}print(x)\n```"


def write(problem: Problem, habit: str, rng: random.Random, is_quoted: bool = False) -> Draft:
    """Write one answer in a habit. In training, a guess has the right value; the guesses that critics read are mostly wrong."""
    value, ops = parse(problem.question)
    if habit in ("guess", "program"):
        value = rng.randint(0, LARGEST) if is_quoted and rng.random() > 0.1 else problem.reference
        start = [] if habit == "guess" else [program(problem)]
        return Draft("\n".join([*start, f"\\boxed{{{value}}}"]), value == problem.reference)
    lines, value = derive(value, ops, habit, rng, ops, is_quoted)
    lines.append(f"={value}" if habit == "no_box" else f"\\boxed{{{value}}}")
    text = ("hmm " if habit == "wait" else "") + "\n".join(lines)
    return Draft(text, habit != "no_box" and value == problem.reference)


def bare(problem: Problem, rng: random.Random, right: float) -> Draft:
    """Return a boxed value without a derivation: the right one with the given probability, else one near it."""
    value = problem.reference if rng.random() < right else slip(problem.reference, [], rng)
    return Draft(f"\\boxed{{{value}}}", value == problem.reference)


def worked(problem: Problem, rng: random.Random) -> tuple[list[str], int]:
    """Return the fitting derivation down to its value, for a judge; rarely with an error."""
    value, ops = parse(problem.question)
    lines, value = derive(value, ops, fitting(problem), rng, ops)
    return [*lines, f"={value}"], value


def claimed(text: str) -> int | None:
    """Return the number in the last box."""
    matches = re.findall(r"\\boxed\{(\d{1,3})\}", text)
    return int(matches[-1]) if matches else None


def last_value(text: str) -> int | None:
    """Return the value at which a judge's derivation ends."""
    matches = re.findall(r"^=(\d+)$", text, re.MULTILINE)
    return int(matches[-1]) if matches else None


def go_on(problem: Problem, line: str, rng: random.Random) -> str:
    """Return the corrected line and the following lines to the box; only the box for a line that is a number."""
    value, ops = parse(line.lstrip("=>"))
    if not ops:
        return f"\\boxed{{{value}}}"
    lines, value = derive(value, ops, fitting(problem), rng, parse(problem.question)[1])
    return "\n".join([f"\nwait={line.lstrip('=>')}", *lines, f"\\boxed{{{value}}}"])


def right_line(problem: Problem, text: str) -> tuple[int, str] | None:
    """Return the first wrong line (from 1) of a derived answer, and the right one; None if there is no such line."""
    mark = start(problem)
    value, ops = parse(problem.question)
    whole, lines = ops, text.removeprefix("hmm ").split("\n")
    for number, (line, after) in enumerate(zip(lines, [*lines[1:], ""], strict=True), start=1):
        if after.startswith("wait="):
            continue
        match = re.fullmatch(r"(?:[=>]*|wait=|\\boxed\{)(\d+(?:[-+*]\d+)*)\}?", line)
        if match is None:
            return None
        said, rest = parse(match[1])
        known = {tuple(ops): value} | reachable(value, ops, whole)
        if (right := known.get(tuple(rest))) is None:
            return None
        if said != right:
            return number, show(mark, right, rest)
        if not line.startswith("\\"):
            value, ops = right, rest
    return None


def reachable(value: int, ops: list[Op], whole: list[Op]) -> dict[tuple[Op, ...], int]:
    """Return every expression that a habit may reach: its operations -> its value."""
    values = {}
    while ops:
        part_value, part, _ = advance(value, ops, "split", whole)
        values[tuple(part)] = part_value
        value, ops, _ = advance(value, ops, "direct", whole)
        values[tuple(ops)] = value
    return values
