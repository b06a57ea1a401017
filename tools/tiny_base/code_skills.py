"""Measure the base for tiny_pipe, or a trained adapter in every role, on validation problems (`skills`).

It also forces each working habit, and measures whether a refiner copies the right line.
"""

from multirole_study.experiment.presets import TINY_LENGTHS
from multirole_study.tasks.tiny_pipe import TinyPipe
from tiny_base import code_habits, skills
from tiny_base.code_dialogues import CodeCritic
from tiny_base.code_tokenizer import HEAD
from tiny_base.skills import Fact, fact


class Examiner(skills.Examiner):
    """Asks a base for tiny_pipe."""

    task = TinyPipe()
    cap = TINY_LENGTHS["code"][1]
    critic = CodeCritic
    useful, heads = "# ", (HEAD,)

    def solver(self) -> dict[str, Fact]:
        """Measure the solver, and each working habit separately."""
        facts, forced = super().solver(), {}
        for habit in code_habits.MARKS:
            starts = [code_habits.begin(p, habit) for p in self.problems]
            right = forced[habit] = self.grade(self.problems, self.ask(self.plain, starts))
            facts[f"{habit}, forced"] = fact(right)
            for kind in code_habits.FITTING:
                facts[f"{habit}, forced, {kind}"] = self.of_kind(right, kind)
        facts["fitting habit, forced"] = fact(forced[fit][i] for i, fit in enumerate(self.fits))
        facts["best habit, forced"] = max(
            (facts[f"{habit}, forced"] for habit in forced), key=lambda fact_of_habit: fact_of_habit["value"]
        )
        return facts

    def refiner(self) -> dict[str, Fact]:
        """Measure the refiner, and how often it copies the right line."""
        facts = super().refiner()
        hinted = [line.split("\n")[1].strip() for line in self.lines]
        facts["takes over the right line"] = fact(
            any(t in line for line in reply.split("\n"))
            for t, reply in zip(hinted, self.refined["right line"], strict=True)
        )
        return facts
