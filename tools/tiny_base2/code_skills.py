"""What the base for code, or a trained adapter in every role, can do on validation problems: the facts of the model card.

As `tiny_base2.skills`, with the beginning of a program where a derivation is forced, and with each working habit forced.
"""

from multirole.core.types import Problem
from multirole.tasks.tiny_pipe import KINDS, TinyPipe, kind_of, parse, reads_of
from tiny_base2 import code_dialogues, code_habits, skills
from tiny_base2.code_tokenizer import HEAD
from tiny_base2.skills import Fact, fact

CAP = 176


class Examiner(skills.Examiner):
    """Asks a base for tiny_pipe."""

    task = TinyPipe()
    kind_of = staticmethod(kind_of)
    cap = CAP
    habits, dialogues = code_habits, code_dialogues
    useful, heads = "# ", (HEAD,)

    def start(self, problem: Problem) -> str:
        """The beginning of a program with the fitting mark."""
        return code_habits.start(problem)

    def claimed(self, text: str) -> int | None:
        """Where a program ends."""
        return code_habits.claimed(text)

    def truth(self, problem: Problem) -> int:
        """Where a right program ends."""
        return reads_of(parse(problem.question))[-1][1]

    def solver(self) -> dict[str, Fact]:
        """Also how good each working habit is."""
        facts, forced = super().solver(), {}
        for habit in code_habits.MARKS:
            starts = [code_habits.begin(p, habit) for p in self.problems]
            right = forced[habit] = self.grade(self.problems, self.ask(self.plain, starts))
            facts[f"{habit}, forced"] = fact(right)
            for kind in KINDS:
                facts[f"{habit}, forced, {kind}"] = self.of_kind(right, kind)
        facts["fitting habit, forced"] = fact(forced[fit][i] for i, fit in enumerate(self.fits))
        facts["best habit, forced"] = max((facts[f"{habit}, forced"] for habit in forced), key=lambda of: of["value"])
        return facts

    def refiner(self) -> dict[str, Fact]:
        """Also how often the right line is taken over."""
        facts = super().refiner()
        told = [line.split("\n")[1].strip() for line in self.lines]
        facts["takes over the right line"] = fact(
            any(t in line for line in reply.split("\n"))
            for t, reply in zip(told, self.refined["right line"], strict=True)
        )
        return facts
