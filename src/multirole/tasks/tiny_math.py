"""tiny_math: integer arithmetic evaluated strictly left to right, every intermediate result in 0..20.

A question is an expression such as `7+5*2-9`, read as ((7+5)*2)-9. The answer is the content of the last `\\boxed{}`.
Train and validation are disjoint by construction: a hash of the expression decides its split.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import repeat

from multirole.core.types import Problem, Reward
from multirole.tasks.splits import distinct, only

NAME = "tiny_math"
LARGEST = 20


@dataclass(frozen=True)
class Difficulty:
    """Number of operations, both ends included."""

    min_ops: int = 4
    max_ops: int = 6

    def __post_init__(self) -> None:
        if not 3 <= self.min_ops <= self.max_ops:
            raise ValueError(
                f"got {self}: fewer than 3 operations, or an empty range, cannot give thousands of distinct problems; "
                "write 3 <= min_ops <= max_ops"
            )


def apply(value: int, op: str, operand: int) -> int:
    """One operation; `op` is "+", "-" or "*"."""
    return value + operand if op == "+" else value - operand if op == "-" else value * operand


def parse(question: str) -> tuple[int, list[tuple[str, int]]]:
    """`7+5*2` -> (7, [("+", 5), ("*", 2)])."""
    start = re.match(r"\d+", question)
    if start is None or not re.fullmatch(r"\d+([-+*]\d+)*", question):
        raise ValueError(f"got {question!r}: not an expression of + - * over integers; write for example 7+5*2")
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


def stream(split: str, rng: random.Random, difficulty: Difficulty = Difficulty()) -> Iterator[Problem]:
    """Endless problems of one split (repeats are possible)."""
    return only(split, (_sample(rng, rng.randint(difficulty.min_ops, difficulty.max_ops)) for _ in repeat(None)))


def problems(split: str, count: int, difficulty: Difficulty = Difficulty()) -> list[Problem]:
    """The first `count` distinct problems of a split; a smaller count is a prefix of a larger one."""
    return list(_problems(split, count, difficulty))


@cache
def _problems(split: str, count: int, difficulty: Difficulty) -> tuple[Problem, ...]:
    return distinct(stream(split, random.Random(f"{NAME}/{split}/{difficulty}"), difficulty), count)


def describe() -> dict[str, object]:
    """Where the problems come from, for the record."""
    return {"name": NAME, "is_embedded": True}


def extract(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, or None."""
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return boxes[-1].strip() if boxes else None


def score_batch(problems: list[Problem], texts: list[str], malformed: float = 0.0) -> list[Reward]:
    """Reward 1 for the right integer, 0 for a wrong one, `malformed` without a box."""
    return [_score(problem, text, malformed) for problem, text in zip(problems, texts, strict=True)]


def _score(problem: Problem, text: str, malformed: float) -> Reward:
    answer = extract(text)
    if answer is None:
        return Reward(malformed, "no_box", False)
    is_correct = re.fullmatch(r"-?\d{1,9}", answer, re.ASCII) is not None and int(answer) == problem.reference
    return Reward(float(is_correct), "correct" if is_correct else "wrong", is_correct)
