"""Splits of the generated tasks, disjoint by construction: a hash of the question decides where it belongs."""

import hashlib
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import ClassVar, Literal

from multirole.core.types import Problem

Kind = Literal["long", "wide"]
KINDS: tuple[Kind, ...] = ("long", "wide")
"""The two kinds of problems of a generated task."""
VALIDATION_SHARE = 8
"""One question in eight is for validation."""


def split_of(question: str, share: int = VALIDATION_SHARE) -> str:
    """Return "train" or, for one question in `share`, "validation", by the question alone."""
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
    """Return the first `count` different problems of an endless stream; a smaller count is a prefix of a larger one."""
    check_split(split)
    if count is None:
        raise ValueError("Generated problems have no end, so their `count` must be a positive integer, got None.")
    found: dict[str, Problem] = {}
    drawn = stream(split, random.Random(seed))
    while len(found) < count:
        problem = next(drawn)
        found.setdefault(problem.id, problem)
    return list(found.values())


class Generated:
    """What the generated tasks share; `stream(split, rng)` yields problems without end."""

    name: ClassVar[str]
    stream: ClassVar[Callable[..., Iterator[Problem]]]

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` problems of a split."""
        return first_problems(self.stream, split, count, f"{self.name}/{split}")[:]

    def describe(self) -> dict[str, object]:
        """Return where the problems come from."""
        return {"name": self.name, "is_embedded": True}
