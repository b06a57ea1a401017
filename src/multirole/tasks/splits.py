"""Splits of the generated tasks, disjoint by construction: a hash of the question decides where it belongs."""

import hashlib
import random
from collections.abc import Callable, Iterator
from functools import cache

from multirole.core.types import Problem

VALIDATION_SHARE = 8
"""One question in eight is for validation."""


def split_of(question: str) -> str:
    """Return "train" or "validation", by the question alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return "validation" if digest[0] % VALIDATION_SHARE == 0 else "train"


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
