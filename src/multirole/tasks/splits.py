"""Splits of the generated tasks, disjoint by construction: a hash of the question decides where it belongs."""

import hashlib
from collections.abc import Iterator

from multirole.core.types import Problem

SPLITS = ("train", "validation")
VALIDATION_SHARE = 8
"""One question in eight is for validation."""


def split_of(question: str) -> str:
    """ "train" or "validation"; depends on the question alone."""
    digest = hashlib.sha256(question.encode()).digest()
    return "validation" if digest[0] % VALIDATION_SHARE == 0 else "train"


def only(split: str, drawn: Iterator[Problem]) -> Iterator[Problem]:
    """The problems of one split among those drawn."""
    if split not in SPLITS:
        raise ValueError(f"got split={split!r}: the generated tasks have no such split; write 'train' or 'validation'")
    return (problem for problem in drawn if split_of(problem.question) == split)


def distinct(drawn: Iterator[Problem], count: int) -> tuple[Problem, ...]:
    """The first `count` different problems."""
    found: dict[str, Problem] = {}
    while len(found) < count:
        problem = next(drawn)
        found.setdefault(problem.id, problem)
    return tuple(found.values())
