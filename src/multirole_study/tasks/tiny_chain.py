"""tiny_chain: integer arithmetic from left to right in two kinds of problems, every intermediate result in 0..49.

A *long* problem has many operations on one digit, such as `9*4-7+8-5*2-9+6`; a *wide* one has fewer, about half of them on
two digits, such as `9+27-18*2+4`. The kinds need different strategies: splitting numbers into tens and ones helps in a wide
problem and only lengthens a long one. The answer is the content of the last `\\boxed{}`. A hash of the expression decides its split.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from multirole.types import Problem, Reward
from multirole_study.tasks.splits import KINDS, Generated, Kind, split_of

NAME = "tiny_chain"
PROMPTS = "multirole_study:tasks/prompts/tiny_chain"
"""The prompt templates of the roles (`multirole.workflows.prompts`)."""
LARGEST = 49
LENGTHS: dict[Kind, tuple[int, int]] = {"long": (8, 10), "wide": (5, 7)}
"""The smallest and largest number of operations by kind."""
SUMS = [(op, n) for op in "+-" for n in range(1, 10)]
PRODUCTS = [("*", 2), ("*", 3), ("*", 4)]
WIDE = [(op, n) for op in "+-" for n in range(11, 40) if n % 10]
WIDE_SHARE = 0.5


def apply(value: int, op: str, operand: int) -> int:
    """Apply one operation; `op` is "+", "-" or "*"."""
    return value + operand if op == "+" else value - operand if op == "-" else value * operand


def parse(question: str) -> tuple[int, list[tuple[str, int]]]:
    """Parse `7+5*2` to (7, [("+", 5), ("*", 2)])."""
    start = re.match(r"\d+", question)
    if start is None or not re.fullmatch(r"\d+([-+*]\d+)*", question):
        raise ValueError(f"A question must be an expression of + - * over integers such as 7+5*2, got {question!r}.")
    return int(start[0]), [(op, int(number)) for op, number in re.findall(r"([-+*])(\d+)", question)]


def kind_of(question: str) -> Kind:
    """Return "wide" if a question has a two-digit operand, else "long"."""
    return "wide" if any(operand > 9 for _, operand in parse(question)[1]) else "long"


@cache
def _moves(value: int, is_wide: bool) -> list[tuple[str, int]]:
    pool = WIDE if is_wide else SUMS + 3 * PRODUCTS
    return [move for move in pool if 0 <= apply(value, *move) <= LARGEST and (value or move[0] == "+")]


def _sample(rng: random.Random, kind: Kind, n_ops: int) -> Problem:
    value = rng.randint(1, LARGEST)
    question = str(value)
    for _ in range(n_ops):
        wide = _moves(value, True) if kind == "wide" and rng.random() < WIDE_SHARE else []
        op, operand = rng.choice(wide or _moves(value, False))
        question += f"{op}{operand}"
        value = apply(value, op, operand)
    return Problem(f"{NAME}/{question}", PROMPTS, question, value)


def stream(split: str, rng: random.Random, lengths: dict[Kind, tuple[int, int]] | None = None) -> Iterator[Problem]:
    """Yield an endless stream of problems of one split, with repeats; `lengths` are (min, max) operations by kind."""
    while True:
        kind = rng.choice(KINDS)
        problem = _sample(rng, kind, rng.randint(*(lengths or LENGTHS)[kind]))
        if kind_of(problem.question) == kind and split_of(problem.question) == split:
            yield problem


@dataclass(frozen=True)
class TinyChain(Generated):
    """The tiny_chain task. `malformed_reward` is the reward without a box."""

    malformed_reward: float = 0.0
    name: ClassVar[str] = NAME
    stream = staticmethod(stream)

    def extract(self, text: str) -> str | None:
        """Return the content of the last `\\boxed{...}`, or None."""
        boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
        return boxes[-1].strip() if boxes else None

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Return reward 1 for the correct integer, 0 for a wrong one, `malformed_reward` without a box."""
        return [self._score(problem, self.extract(text)) for problem, text in zip(problems, texts, strict=True)]

    def _score(self, problem: Problem, answer: str | None) -> Reward:
        if answer is None:
            return Reward(self.malformed_reward, "no_box", False)
        is_correct = re.fullmatch(r"-?\d{1,9}", answer, re.ASCII) is not None and int(answer) == problem.reference
        return Reward(float(is_correct), "correct" if is_correct else "wrong", is_correct)
