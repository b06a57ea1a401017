"""Drafts and likely errors, which the authors of all dialogues share."""

import random
from collections.abc import Callable
from typing import NamedTuple


class Draft(NamedTuple):
    """An answer and whether it is right."""

    text: str
    is_correct: bool


class Steady(random.Random):
    """A random generator with which no author makes an error."""

    def random(self) -> float:
        """Return 1.0, which is above every probability of an error."""
        return 1.0


def confuse(value: int, largest: int, stays: Callable[[int], bool], rng: random.Random) -> int:
    """Return a likely wrong value, at most `largest`, from which the rest `stays` in range; the value itself if there is none."""
    near = [v for d in (1, 1, 2, 10, 10, 3) for v in (value - d, value + d) if 0 <= v <= largest and stays(v)]
    return rng.choice(near) if near else value
