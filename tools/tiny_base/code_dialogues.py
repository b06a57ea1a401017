"""Dialogues of tiny_pipe: how its critics write and compare programs, and how its solvers continue.

Programs are compared by the position of their last step, because an error in any move shifts all later positions.
"""

import random
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

from multirole.core.types import Problem
from multirole_study.tasks.tiny_pipe import LARGEST, TAUGHT_MOVE, parse, reads_of, stream
from tiny_base import code_habits as habits
from tiny_base.dialogues import READERS, SHORT_RIGHT, Critic, Lengths, Mix, Review, Script, verdict
from tiny_base.habits import Draft

SHORT_LENGTHS: Lengths = {"long": (1, 2), "wide": (1, 2)}
taught = partial(stream, largest_move=TAUGHT_MOVE)
"""The problems that dialogues are about."""


class CodeCritic(Critic):
    """Writes a program of its own and compares where it ends with where the candidates end."""

    habits = habits
    reviews: ClassVar[Mapping[str, float]] = {"bare": 50, "remark": 20, "line": 16, "wait": 14}
    selections: ClassVar[Mapping[str, float]] = {"bare": 78, "sentence": 13, "wait": 9}

    def compare(self, number: int, draft: Draft, value: int) -> tuple[str, bool]:
        """Where a candidate ends, digit by digit beside where one's own program does, and whether they agree."""
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
        """The fitting program, where it ends, and the program once more."""
        text, value = habits.worked(self.problem, self.rng)
        return text, value, habits.program_in(text)

    def point_out(self, draft: Draft) -> Review | None:
        """The first wrong step of a draft and what it should be; None where there is no wrong step."""
        step = None if draft.is_correct else habits.right_step(self.problem, draft.text)
        return self.correction(*step) if step and step[0] > 1 else None

    def lesson(self) -> Review:
        """Some step of the right program."""
        reads = reads_of(parse(self.problem.question))
        number = self.rng.randrange(1, len(reads)) + 1
        return self.correction(number, reads[number - 1][1])

    def correction(self, number: int, position: int) -> Review:
        """What a step's position should be, behind the mark that an author's own corrections have."""
        move = parse(self.problem.question)[number - 1][1]
        return Review(f"Line {number} \n    # {move:+d} wait {position}\n{verdict(False)}", (number, position))

    def flaw(self, draft: Draft) -> str:
        """No fence, or no steps in it."""
        return "No fence. " if "```" not in draft.text else "No steps. " if draft.text == habits.STUB else ""


class CodeScript(Script):
    """Plays the roles on tiny_pipe; short rows are about problems of few moves."""

    critics = CodeCritic

    @classmethod
    def draw(cls, role: str, rng: random.Random, mix: Mix) -> tuple[Problem, bool]:
        """A problem of the mix, or a short one."""
        is_short = role in READERS and rng.random() < mix.short
        return next(taught("train", rng, SHORT_LENGTHS if is_short else mix.lengths)), is_short

    def given(self, draft: Draft) -> tuple[str, int]:
        """The fitting program with another end, now and then with one far from the draft's."""
        value = habits.claimed(draft.text)
        kind = self.rng.random()
        if kind < 0.2:
            value = self.rng.randint(0, LARGEST)
        elif value is None or kind < 0.45:
            value = habits.slip(value or habits.truth(self.problem), [], self.rng)
        return habits.worked(self.problem, self.rng, value)

    def hint(self) -> Review | None:
        """The wrong step of the draft, or any where it has none."""
        return self.critic.point_out(self.drafts[-1]) or self.critic.lesson()

    def answer_shortly(self) -> str:
        """A program without comments, or none of one's own."""
        return self.write("plain" if self.rng.random() < 0.9 else "stub")

    def go_on(self, found: str | tuple[int, int]) -> str:
        """The whole program, or one with the right step."""
        return found if isinstance(found, str) else habits.go_on(self.problem, found, self.rng)

    def write(self, habit: str) -> str:
        """New text in a habit; about half of the short ones that are quoted are wrong."""
        draft = habits.write(self.problem, habit, self.rng, self.is_quoted)
        while self.is_short and self.is_quoted and habit == "plain" and self.rng.random() < 0.5:
            if draft.is_correct == (self.rng.random() < SHORT_RIGHT):
                break
            draft = habits.write(self.problem, habit, self.rng, self.is_quoted)
        return self.keep(draft)
