"""Dialogues of tiny_pipe: how its critics write and compare programs, and how its solvers continue.

Programs are compared by the position of their last step, because an error in any move shifts all later positions.
"""

import random
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from multirole.types import Problem
from multirole_study.tasks.tiny_pipe import LARGEST, TAUGHT_MOVE, parse, reads_of, stream
from tiny_base import code_habits as habits
from tiny_base.dialogues import READERS, SHORT_RIGHT, Critic, Lengths, Mix, Review, Script, verdict
from tiny_base.habits import Draft

SHORT_LENGTHS: Lengths = {"long": (1, 2), "wide": (1, 2)}
taught = partial(stream, largest_move=TAUGHT_MOVE)
"""Streams the problems of the dialogues, whose moves are at most `TAUGHT_MOVE`."""


class CodeCritic(Critic):
    """Writes a program and compares the position of its last step with that of each candidate."""

    habits = habits
    reviews: ClassVar[Mapping[str, float]] = {"bare": 50, "remark": 20, "line": 16, "wait": 14}
    selections: ClassVar[Mapping[str, float]] = {"bare": 78, "sentence": 13, "wait": 9}

    def compare(self, number: int, draft: Draft, value: int) -> tuple[str, bool]:
        """Return a candidate's last position next to the derived one, digit by digit, and whether they agree."""
        if "```" not in draft.text:
            return f"Solution {number} No fence. ", False
        claimed = habits.claimed(draft.text)
        if claimed is None:
            return f"Solution {number} No steps. ", False
        text = f"Solution {number} {claimed} {claimed // 10}:{value // 10}"
        if claimed // 10 == value // 10:
            text += f" {claimed % 10}:{value % 10}"
        return text + (" ok. " if claimed == value else " is wrong. "), claimed == value

    def derive(self) -> tuple[str, int, str | None]:
        """Return the derivation, the position at which it ends, and its program, from which a solver can continue."""
        text, value = habits.worked(self.problem, self.rng)
        return text, value, habits.program_in(text)

    def point_out(self, draft: Draft) -> Review | None:
        """Return a review with the first wrong step of a draft and its correction; None if no step is wrong."""
        step = None if draft.is_correct else habits.right_step(self.problem, draft.text)
        return self.correction(*step) if step and step[0] > 1 else None

    def lesson(self) -> Review:
        """Return a review with some step of the right program."""
        reads = reads_of(parse(self.problem.question))
        number = self.rng.randrange(1, len(reads)) + 1
        return self.correction(number, reads[number - 1][1])

    def correction(self, number: int, position: int) -> Review:
        """Return a review with a step's right position, after the mark "wait" of authors' own corrections."""
        move = parse(self.problem.question)[number - 1][1]
        return Review(f"Line {number} \n    # {move:+d} wait {position}\n{verdict(False)}", (number, position))

    def flaw(self, draft: Draft) -> str:
        """Return a remark if the draft has no fence, or no steps in it; else ""."""
        return "No fence. " if "```" not in draft.text else "No steps. " if draft.text == habits.STUB else ""


class CodeScript(Script):
    """Plays the roles on tiny_pipe; short rows are about problems of few moves."""

    critics = CodeCritic

    @classmethod
    def draw(cls, role: str, rng: random.Random, mix: Mix) -> tuple[Problem, bool]:
        """Draw a problem of the mix, or a short one; return it and whether it is short."""
        is_short = role in READERS and rng.random() < mix.short
        return next(taught("train", rng, SHORT_LENGTHS if is_short else mix.lengths)), is_short

    def given(self, draft: Draft) -> tuple[str, int]:
        """Return the fitting program with a changed end, sometimes far from the draft's, and that end."""
        value = habits.claimed(draft.text)
        kind = self.rng.random()
        if kind < 0.2:
            value = self.rng.randint(0, LARGEST)
        elif value is None or kind < 0.45:
            value = habits.slip(value or habits.truth(self.problem), [], self.rng)
        return habits.worked(self.problem, self.rng, value)

    def hint(self) -> Review | None:
        """Return a review with the wrong step of the draft, or with any step if none is wrong."""
        return self.critic.point_out(self.drafts[-1]) or self.critic.lesson()

    def answer_shortly(self) -> str:
        """Return a program without comments, or one without steps."""
        return self.write("plain" if self.rng.random() < 0.9 else "stub")

    def go_on(self, found: str | tuple[int, int]) -> str:
        """Return the reviewer's whole program, or a program that continues from the right step."""
        return found if isinstance(found, str) else habits.go_on(self.problem, found, self.rng)

    def write(self, habit: str) -> str:
        """Return a new answer in a habit; about half of the short quoted ones are wrong."""
        draft = habits.write(self.problem, habit, self.rng, self.is_quoted)
        while self.is_short and self.is_quoted and habit == "plain" and self.rng.random() < 0.5:
            if draft.is_correct == (self.rng.random() < SHORT_RIGHT):
                break
            draft = habits.write(self.problem, habit, self.rng, self.is_quoted)
        return self.keep(draft)
