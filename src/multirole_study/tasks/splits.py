"""Split the generated tasks by a hash of the question, so that splits are disjoint by construction."""

import hashlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import ClassVar, Literal

from multirole.types import Problem

Kind = Literal["long", "wide"]
KINDS: tuple[Kind, ...] = ("long", "wide")
"""The two kinds of problems in a generated task."""
VALIDATION_SHARE = 8
"""One question in eight belongs to the validation split."""


def split_of(question: str, share: int = VALIDATION_SHARE) -> str:
    """Return the split of a question: "validation" for one in `share`, else "train"."""
    digest = hashlib.sha256(question.encode()).digest()
    return "validation" if digest[0] % share == 0 else "train"


def check_split(split: str) -> None:
    """Raise ValueError unless the split is "train" or "validation"."""
    if split not in ("train", "validation"):
        raise ValueError(f"`split` must be 'train' or 'validation', got {split!r}.")


@cache
def first_problems(
    stream: Callable[[str, random.Random], Iterator[Problem]], split: str, count: int | None, seed: str
) -> list[Problem]:
    """Return the first `count` distinct problems of an endless stream; a smaller count gives a prefix."""
    check_split(split)
    if count is None:
        raise ValueError("Generated problems are endless, so `count` must be a positive integer, got None.")
    problems: dict[str, Problem] = {}
    candidates = stream(split, random.Random(seed))
    while len(problems) < count:
        problem = next(candidates)
        problems.setdefault(problem.id, problem)
    return list(problems.values())


class Generated:
    """Base class of generated tasks; `stream(split, rng)` yields problems endlessly."""

    name: ClassVar[str]
    stream: ClassVar[Callable[..., Iterator[Problem]]]

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` problems of a split."""
        return first_problems(self.stream, split, count, f"{self.name}/{split}")[:]

    def describe(self) -> dict[str, object]:
        """Return the task's name, marked as embedded."""
        return {"name": self.name, "is_embedded": True}
