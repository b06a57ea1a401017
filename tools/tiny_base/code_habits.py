"""Define how the authors of tiny_pipe's dialogues work: habits of different quality, derivations, and a line checker.

A program may have a comment before every line, after a mark for its content: `# +27` is the move alone, `## +27+20=32+7` the
move and its computation in parts. Without comments a move must be read and added at once.
"""

import random
import re
from typing import NamedTuple

from multirole.types import Problem
from multirole_study.tasks.tiny_pipe import FOLDS, LARGEST, TESTS, Step, extract, kind_of, parse, reads_of, run
from tiny_base.code_tokenizer import HEAD
from tiny_base.habits import Draft, confuse

HABITS = {"comment": 0.28, "split": 0.22, "plain": 0.21, "wait": 0.08, "no_fence": 0.09, "stub": 0.12}
"""Share of each habit among generator answers, whatever the problem."""
STRATEGIES = {
    "comment every move": "comment",
    "split every move": "split",
    "no comments": "plain",
    "skip the steps": "stub",
}
FITTING = {"long": "comment", "wide": "split"}
MARKS = {"comment": "]\n    # ", "split": "]\n    ## ", "plain": "]\n    r"}
"""Habit -> the text that follows the first position of a program."""
STUB = "```python\ndef f(xs):\n    return sum(xs)\n```"
SLIPS = {"one": 0.03, "half": 0.045, "wide": 0.14}
"""Probability of a wrong sum in texts that are trained on: if the summand has one digit or is a multiple of ten, is half of a one-digit
number, or has two digits."""
STEADY_SLIP = 0.006
"""Probability of a wrong sum in a judge's own program, for any summand."""
QUOTED_SLIPS = {"one": 0.05, "half": 0.08, "wide": 0.25}
QUOTED_PLAIN = 0.2
"""Probabilities of a wrong sum in texts that critics read, and their minimum in programs without comments."""
WAIT = 0.25
"""Probability per line of a self-correction: a wrong position, "wait", and the right one."""


def fitting(problem: Problem) -> str:
    """Return the best habit for a problem."""
    return FITTING[kind_of(problem.question)]


def start(problem: Problem) -> str:
    """Return the beginning of a judge's own derivation."""
    return begin(problem, fitting(problem))


def truth(problem: Problem) -> int:
    """Return the position at which the last step of a right program begins."""
    return reads_of(parse(problem.question))[-1][1]


def begin(problem: Problem, habit: str) -> str:
    """Return the beginning of an answer in a habit."""
    return f"{HEAD}{parse(problem.question)[0][1]}{MARKS[habit]}"


def parts(move: int) -> list[int]:
    """Split a move into tens and ones, or into two halves."""
    sign, n = (1, move) if move > 0 else (-1, -move)
    first = n // 10 * 10 if n > 9 else (n + 1) // 2 if n > 3 else n
    return [sign * part for part in (first, n - first) if part]


def slip(value: int, rest: list[int], rng: random.Random) -> int:
    """Return a likely wrong value from which the other moves stay in range; the value itself if there is none."""

    def stays(cursor: int) -> bool:
        for move in rest:
            cursor += move
            if not 0 <= cursor <= LARGEST:
                return False
        return True

    return confuse(value, LARGEST, stays, rng)


def chance(habit: str, move: int, part: int, is_quoted: bool) -> float:
    """Return the probability that a sum with `part` of a move is wrong."""
    kind = "wide" if abs(part) > 9 and part % 10 else "half" if part != move and abs(move) < 10 else "one"
    if not is_quoted:
        return SLIPS[kind]
    return max(QUOTED_SLIPS[kind], QUOTED_PLAIN if habit == "plain" else 0.0)


class Work(NamedTuple):
    """The lines of a program's body from the first position on, and the position of each step."""

    lines: list[str]
    positions: list[int]


def work(
    steps: list[Step],
    habit: str,
    rng: random.Random,
    is_quoted: bool = False,
    slips: float | None = None,
    known_step: tuple[int, int] | None = None,
) -> Work:
    """Work out all steps in a habit. `slips` replaces its probability of a wrong sum; `known_step` is a step (from 1) and its position."""
    cursor = steps[0][1]
    lines, positions = [f"{cursor}]"], [cursor]
    for number, (word, move) in enumerate(steps[1:], start=2):
        note, rest = f"{move:+d}", [m for _, m in steps[number:]]
        sums = parts(move) if habit == "split" else [move]
        for i, part in enumerate(sums, start=1):
            cursor += part
            if rng.random() < (chance(habit, move, part, is_quoted) if slips is None else slips):
                cursor = slip(cursor, [sum(sums[i:]), *rest], rng)
            if len(sums) > 1:
                note += f"{part:+d}" if i == len(sums) else f"{part:+d}={cursor}"
        if known_step and known_step[0] == number:
            note, cursor = f"{move:+d} wait {known_step[1]}", known_step[1]
        elif habit == "wait" and rng.random() < WAIT:
            note += f" {slip(cursor, rest, rng)} wait {cursor}"
        if habit != "plain":
            lines.append(("    ## " if habit == "split" else "    # ") + note)
        is_last = number == len(steps)
        lines.append(f"    return r + sum(xs[{cursor}:])" if is_last else f"    r {FOLDS[word]}= xs[{cursor}]")
        positions.append(cursor)
    return Work(lines, positions)


def fence(lines: list[str]) -> str:
    """Return a program in a Python fence."""
    return HEAD + "\n".join([*lines, "```"])


def write(problem: Problem, habit: str, rng: random.Random, is_quoted: bool = False) -> Draft:
    """Write one answer in a habit."""
    if habit == "stub":
        return Draft(STUB, False)
    steps = parse(problem.question)
    lines, positions = work(steps, "comment" if habit == "no_fence" else habit, rng, is_quoted)
    if habit == "no_fence":
        return Draft(HEAD.removeprefix("```python\n") + "\n".join(lines), False)
    reads = [(sign, position) for (sign, _), position in zip(reads_of(steps), positions, strict=True)]
    is_correct = [run(reads, xs) for xs in TESTS] == problem.reference["expected"]
    return Draft(("hmm " if habit == "wait" else "") + fence(lines), is_correct)


def worked(problem: Problem, rng: random.Random, end: int | None = None) -> tuple[str, int]:
    """Return a judge's fitting program and where its last step begins, rarely with an error. `end` replaces that position."""
    lines, positions = work(parse(problem.question), fitting(problem), rng, slips=STEADY_SLIP)
    value = positions[-1] if end is None else end
    return f"{fence([*lines[:-1], f'    return r + sum(xs[{value}:])'])}\n={value}", value


def claimed(text: str) -> int | None:
    """Return the position at which the last step of an answer's program begins; None without a fence or steps."""
    matches = re.findall(r"return r \+ sum\(xs\[(\d{1,3}):\]\)", extract(text) or "")
    return int(matches[-1]) if matches else None


def last_value(text: str) -> int | None:
    """Return the position at which a judge's derivation ends."""
    matches = re.findall(r"^=(\d{1,3})$", text, re.MULTILINE)
    return int(matches[-1]) if matches else None


def program_in(text: str) -> str | None:
    """Return the last program with its fence, as another role would copy it."""
    body = extract(text)
    return None if body is None else f"```python\n{body}```"


def go_on(problem: Problem, known_step: tuple[int, int], rng: random.Random) -> str:
    """Return the fitting program with one step computed by another role."""
    return fence(work(parse(problem.question), fitting(problem), rng, known_step=known_step).lines)


def right_step(problem: Problem, text: str) -> tuple[int, int] | None:
    """Return the first step (from 1) with a wrong position, and the right one; None if there is no such step."""
    positions = [int(position) for position in re.findall(r"xs\[(\d{1,3})", extract(text) or text)]
    truth = [position for _, position in reads_of(parse(problem.question))]
    if len(positions) < 2:
        return None
    return next(((n, b) for n, (a, b) in enumerate(zip(positions, truth, strict=False), start=1) if a != b), None)
