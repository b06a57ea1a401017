"""Dialogues of tiny_chain: how its critics derive and compare values, and how its solvers continue."""

import random
from collections.abc import Mapping
from typing import ClassVar

from multirole.types import Problem
from multirole_study.tasks.tiny_chain import stream
from tiny_base import math_habits as habits
from tiny_base.dialogues import READERS, SHORT_RIGHT, Critic, Mix, Review, Script, verdict
from tiny_base.habits import Draft, Steady


class MathCritic(Critic):
    """Derives a value line by line and compares it with the boxed ones."""

    habits = habits
    reviews: ClassVar[Mapping[str, float]] = {"bare": 46, "remark": 16, "line": 14, "program": 10, "wait": 14}
    selections: ClassVar[Mapping[str, float]] = {"bare": 72, "sentence": 12, "program": 8, "wait": 8}

    def compare(self, number: int, draft: Draft, value: int) -> tuple[str, bool]:
        """Return a comparison of the boxed value with the derived one, and whether they agree."""
        claimed = habits.claimed(draft.text)
        if claimed is None:
            return f"Solution {number} No box. ", False
        agrees = claimed == value
        return f"Solution {number} {claimed}" + (" ok. " if agrees else " is wrong. "), agrees

    def derive(self) -> tuple[str, int, str]:
        """Return the fitting derivation, its value, and its last line."""
        lines, value = habits.worked(self.problem, self.rng)
        return "\n".join(lines), value, lines[-1]

    def point_out(self, draft: Draft) -> Review | None:
        """Return a review with the first wrong line of a draft and its correction; None if no line is wrong."""
        if "\n" not in draft.text or (line := habits.right_line(self.problem, draft.text)) is None:
            return None
        return correction(*line)

    def lesson(self) -> Review:
        """Return a review with some line of the fitting derivation."""
        lines = habits.worked(self.problem, Steady())[0]
        number = self.rng.randrange(len(lines))
        return correction(number + 1, lines[number])

    def flaw(self, draft: Draft) -> str:
        """Return a remark if the draft has no box; else ""."""
        return "No box. " if habits.claimed(draft.text) is None else ""


def correction(number: int, line: str) -> Review:
    """Return a review with the right line, after the mark "wait" of authors' own corrections."""
    return Review(f"Line {number} \nwait={line.lstrip('=>')}\n{verdict(False)}", line)


class MathScript(Script):
    """Plays the roles on tiny_chain; short rows quote boxes without any work."""

    critics = MathCritic

    @classmethod
    def draw(cls, role: str, rng: random.Random, mix: Mix) -> tuple[Problem, bool]:
        """Draw a problem of the mix; return it and whether the row is short."""
        problem = next(stream("train", rng, mix.lengths))
        return problem, role in READERS and rng.random() < mix.short

    def given(self, draft: Draft) -> tuple[str, int]:
        """Return the fitting derivation with a changed value, and that value."""
        value = habits.claimed(draft.text)
        if value is None or self.rng.random() < 0.45:
            value = habits.slip(value or self.problem.reference, [], self.rng)
        lines = habits.worked(self.problem, Steady())[0]
        return "\n".join([*lines[:-1], f"={value}"]), value

    def hint(self) -> Review | None:
        """Return a review with the wrong line of the draft; with any line in a short row, whose drafts have no lines."""
        return self.critic.lesson() if self.is_short else self.critic.point_out(self.drafts[-1])

    def answer_shortly(self) -> str:
        """Return a box without a derivation."""
        return self.keep(habits.bare(self.problem, self.rng, SHORT_RIGHT))

    def go_on(self, found: str) -> str:
        """Return the reviewer's line and the lines from there to the box."""
        return habits.go_on(self.problem, found, self.rng)
