"""tiny_math: integer arithmetic evaluated strictly left to right, every intermediate result in 0..20.

A question is an expression such as `7+5*2-9`, read as ((7+5)*2)-9. The answer is the content of the last `\\boxed{}`.
Train and validation are disjoint by construction: a hash of the expression decides its split.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from multirole.core.types import Problem, Reward
from multirole.tasks.splits import first_problems, split_of

NAME = "tiny_math"
LARGEST = 20


def apply(value: int, op: str, operand: int) -> int:
    """Apply one operation; `op` is "+", "-" or "*"."""
    return value + operand if op == "+" else value - operand if op == "-" else value * operand


def parse(question: str) -> tuple[int, list[tuple[str, int]]]:
    """Parse `7+5*2` to (7, [("+", 5), ("*", 2)])."""
    start = re.match(r"\d+", question)
    if start is None or not re.fullmatch(r"\d+([-+*]\d+)*", question):
        raise ValueError(f"A question must be an expression of + - * over integers such as 7+5*2, got {question!r}.")
    return int(start[0]), [(op, int(number)) for op, number in re.findall(r"([-+*])(\d+)", question)]


def _sample(rng: random.Random, n_ops: int) -> Problem:
    value = rng.randint(1, LARGEST)
    question = str(value)
    for _ in range(n_ops):
        moves = [("+", n) for n in range(1, 10)] + [("-", n) for n in range(1, 10)] + 3 * [("*", 2), ("*", 3)]
        moves = [move for move in moves if 0 <= apply(value, *move) <= LARGEST and (value or move[0] == "+")]
        op, operand = rng.choice(moves)
        question += f"{op}{operand}"
        value = apply(value, op, operand)
    return Problem(f"{NAME}/{question}", NAME, question, value)


def stream(split: str, rng: random.Random, n_ops: tuple[int, int] = (4, 6)) -> Iterator[Problem]:
    """Yield problems of one split without end, with repeats; `n_ops` are the least and the largest number of operations."""
    while True:
        problem = _sample(rng, rng.randint(*n_ops))
        if split_of(problem.question) == split:
            yield problem


@dataclass(frozen=True)
class TinyMath:
    """The task; `malformed_reward` is for an answer without a box."""

    malformed_reward: float = 0.0
    name: ClassVar[str] = NAME

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` problems of a split."""
        seed = f"{NAME}/{split}/Difficulty(min_ops=4, max_ops=6)"  # names a class of old; results depend on it
        return first_problems(stream, split, count, seed)[:]

    def describe(self) -> dict[str, object]:
        """Return where the problems come from."""
        return {"name": NAME, "is_embedded": True}

    def extract(self, text: str) -> str | None:
        """Return the content of the last `\\boxed{...}`, or None."""
        boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
        return boxes[-1].strip() if boxes else None

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Return reward 1 for the right integer, 0 for a wrong one, `malformed_reward` without a box."""
        return [self._score(problem, self.extract(text)) for problem, text in zip(problems, texts, strict=True)]

    def _score(self, problem: Problem, answer: str | None) -> Reward:
        if answer is None:
            return Reward(self.malformed_reward, "no_box", False)
        is_correct = re.fullmatch(r"-?\d{1,9}", answer, re.ASCII) is not None and int(answer) == problem.reference
        return Reward(float(is_correct), "correct" if is_correct else "wrong", is_correct)
