"""Generate dialogues of every role by running the real workflows with scripted authors.

Each role therefore sees the conversations of `multirole.workflows`. Solvers write in habits of different quality; critics are as accurate
as their way of working allows. A critic that derives the value compares it with the claimed one to give a verdict or
selection; a critic that derives nothing is right except with probability `HASTE`. After a review, a solver continues from the
review's derivation.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

from multirole.types import Message, Problem, Turn
from multirole.workflows import WORKFLOWS
from tiny_base.ask import finish
from tiny_base.habits import Draft

WORKFLOW_OF = {
    "generator": "single",
    "refiner": "eval_opt",
    "evaluator": "eval_opt",
    "aggregator": "voting",
    "orchestrator": "orch_workers",
    "worker": "orch_workers",
    "synthesizer": "orch_workers",
}
"""Role -> the workflow whose episodes give its rows; "refiner" is the generator after a review."""
READERS = ("evaluator", "aggregator", "synthesizer", "refiner")
"""Roles whose rows quote drafts with a model's frequency of errors."""
HASTE = 0.06
"""Probability that a verdict or a selection without a derivation is wrong."""
SHORT_RIGHT = 0.45
"""Share of right answers among the short ones that critics read while they learn to compare."""
Lengths = Mapping[str, tuple[int, int]]
"""Kind of problem -> the smallest and largest number of operations or moves."""
Own = Mapping[str, list[Draft]]
"""A model's own answers to one problem: strategy ("" for the plain question) -> graded drafts."""
Pool = list[tuple[Problem, Own]]


class Row(NamedTuple):
    """One training sequence: only `reply` is trained; `given` is the forced beginning of the assistant's text."""

    role: str
    messages: list[Message]
    reply: str
    given: str = ""


@dataclass(frozen=True)
class Mix:
    """The mix of one stage of training: rows by role, and how critics work."""

    roles: Mapping[str, float]
    derive: float
    """Share of judges' replies with a derivation; the rest is divided in fixed proportions."""
    lengths: Lengths
    short: float = 0.0
    """Fraction of critics' rows that are short, from which copying and comparing are learned faster."""
    drill: float = 0.0
    """Fraction of judges' rows with a given derivation that ends at an arbitrary value, so that only comparing helps."""
    vain: float = 0.0
    """Fraction of judges' own derivations after which they conclude as if there had been none."""


class Review(NamedTuple):
    """An evaluator's reply, and the result of its derivation; None without a derivation."""

    text: str
    found: Any = None


def verdict(is_correct: bool) -> str:
    """Return the box of a verdict."""
    return "\\boxed{" + ("Correct" if is_correct else "Incorrect") + "}"


class Critic:
    """Writes the replies of judges, planners and synthesizers to one problem. A task's subclass derives and compares drafts."""

    habits: ClassVar[ModuleType]
    reviews: ClassVar[Mapping[str, float]]
    """Style -> weight, for reviews without a derivation."""
    selections: ClassVar[Mapping[str, float]]
    """Style -> weight, for selections without a derivation."""

    def __init__(self, problem: Problem, rng: random.Random) -> None:
        self.problem, self.rng = problem, rng

    def compare(self, number: int, draft: Draft, value: int) -> tuple[str, bool]:
        """Return a comparison of a derived value with a candidate's, as text, and whether they agree."""
        raise NotImplementedError

    def derive(self) -> tuple[str, int, Any]:
        """Return a derivation, the value at which it ends, and what a solver can continue from."""
        raise NotImplementedError

    def point_out(self, draft: Draft) -> Review | None:
        """Return a review with the first wrong line of a draft and its correction; None if no line is wrong."""
        raise NotImplementedError

    def lesson(self) -> Review:
        """Return a review with some line of the fitting derivation, in the form of `point_out`."""
        raise NotImplementedError

    def flaw(self, draft: Draft) -> str:
        """Return a remark on the form of a wrong draft, or "" if its form is right."""
        raise NotImplementedError

    def conclude(self, draft: Draft, value: int) -> str:
        """Return the comparison and the verdict that follows."""
        text, agrees = self.compare(1, draft, value)
        return text + verdict(agrees)

    def derivation(self, draft: Draft) -> Review:
        """Return a review with a derivation, the comparison, and the verdict that follows."""
        text, value, hint = self.derive()
        return Review(f"{text}\n{self.conclude(draft, value)}", hint)

    def seems_right(self, draft: Draft) -> bool:
        """Return a judgment without a derivation, which is wrong with probability `HASTE`."""
        return draft.is_correct != (self.rng.random() < HASTE)

    def pick(self, drafts: list[Draft]) -> int:
        """Return the number of a right candidate, or with probability `HASTE` of any, chosen without a derivation."""
        everyone = _all(drafts)
        return self.rng.choice(everyone if self.rng.random() < HASTE else _right(drafts) or everyone)

    def is_vain(self, vain: float) -> bool:
        """Return whether a derivation is written in vain; draws nothing if none is."""
        return vain > 0 and self.rng.random() < vain

    def review(self, draft: Draft, derive: float, vain: float = 0.0) -> Review:
        """Return a review: with probability `derive` a derivation and its verdict, else a verdict in one of the styles `reviews`."""
        if self.rng.random() < derive:
            if not self.is_vain(vain):
                return self.derivation(draft)
            text, _, hint = self.derive()
            return Review(f"{text}\n{verdict(self.seems_right(draft))}", hint)
        style = self.rng.choices(list(self.reviews), list(self.reviews.values()))[0]
        if style == "line" and (step := self.point_out(draft)):
            return step
        seems = self.seems_right(draft)
        start = {"wait": "hmm wait "}.get(style, "")
        if style == "program":
            start = f"{self.habits.program(self.problem)}\n"
        if style == "remark":
            start = "Every line is right. " if seems else self.flaw(draft) or "The result is wrong. "
        return Review(start + verdict(seems))

    def choose(self, drafts: list[Draft], value: int) -> str:
        """Return the comparisons with the candidates until one agrees, and its number; the number of a right one if none agrees."""
        text = ""
        for number, draft in enumerate(drafts, start=1):
            remark, agrees = self.compare(number, draft, value)
            text += remark
            if agrees:
                return f"{text}\\boxed{{{number}}}"
        return f"{text}\\boxed{{{self.rng.choice(_right(drafts) or _all(drafts))}}}"

    def select(self, drafts: list[Draft], derive: float, vain: float = 0.0) -> str:
        """Return a selection: with probability `derive` from a derivation, else in one of the styles `selections`."""
        if self.rng.random() < derive:
            text, value, _ = self.derive()
            if not self.is_vain(vain):
                return f"{text}\n{self.choose(drafts, value)}"
            return f"{text}\n\\boxed{{{self.pick(drafts)}}}"
        chosen = self.pick(drafts)
        style = self.rng.choices(list(self.selections), list(self.selections.values()))[0]
        start = {"sentence": f"Solution {chosen} is right. ", "wait": "hmm wait "}.get(style, "")
        if style == "program":
            start = f"{self.habits.program(self.problem)}\n"
        return f"{start}\\boxed{{{chosen}}}"

    def synthesize(self, drafts: list[Draft]) -> str:
        """Return a right candidate's text, or a new answer in the fitting habit."""
        right = [draft.text for draft in drafts if draft.is_correct]
        if right and self.rng.random() < 0.6:
            return self.rng.choice(right)
        return self.habits.write(self.problem, self.habits.fitting(self.problem), self.rng).text

    def plan(self) -> str:
        """Return three different strategies in random order."""
        strategies = self.rng.sample(list(self.habits.STRATEGIES), 3)
        return "\n".join(f"STRATEGY {i}: {strategy}" for i, strategy in enumerate(strategies, start=1))


def _all(drafts: list[Draft]) -> list[int]:
    return list(range(1, len(drafts) + 1))


def _right(drafts: list[Draft]) -> list[int]:
    return [number for number, draft in enumerate(drafts, start=1) if draft.is_correct]


class Script:
    """A `Call` that plays every role of one episode and keeps each turn's messages and reply.

    Only the rows of `role` are used; the other roles' texts are read by it and have more mistakes. With `is_short`, the texts that it
    reads are short. A task's subclass defines its critics and the specifics of its solvers.
    """

    critics: ClassVar[type[Critic]]

    def __init__(
        self, problem: Problem, rng: random.Random, own: Own | None, role: str, mix: Mix, is_short: bool
    ) -> None:
        self.problem, self.rng, self.own, self.role, self.mix, self.is_short = problem, rng, own, role, mix, is_short
        self.critic, self.habits = self.critics(problem, rng), self.critics.habits
        self.is_quoted = role in READERS
        self.drafts: list[Draft] = []
        self.heard = Review("")
        self.rows: list[Row] = []

    @classmethod
    def draw(cls, role: str, rng: random.Random, mix: Mix) -> tuple[Problem, bool]:
        """Draw a train problem for a row of a role; return it and whether the row is short."""
        raise NotImplementedError

    def given(self, draft: Draft) -> tuple[str, int]:
        """Return a derivation that ends at a draft's value or near it, and that value."""
        raise NotImplementedError

    def hint(self) -> Review | None:
        """Return a review with only the right line, or None."""
        raise NotImplementedError

    def answer_shortly(self) -> str:
        """Return a short answer for a critic to read."""
        raise NotImplementedError

    def go_on(self, found: Any) -> str:
        """Return a solver's answer that continues from what a review worked out."""
        raise NotImplementedError

    async def __call__(self, role: str, messages: list[Message], slot: int = 0, round: int = 0) -> Turn:
        given = ""
        if role == "generator":
            role = "refiner" if round else role
            self.is_quoted = self.role in READERS and role != self.role
            text = said = self.refine() if round else self.answer()
        elif role == "evaluator":
            given, text = self.drilled() or (
                "",
                self.critic.review(self.drafts[-1], self.mix.derive, self.mix.vain).text,
            )
            self.heard = self.overheard()
            said = self.heard.text
        elif role == "worker":
            text = said = self.follow(messages[0]["content"].rpartition("Strategy: ")[2])
        elif role == "aggregator":
            given, text = self.drilled() or ("", self.critic.select(self.drafts, self.mix.derive, self.mix.vain))
            said = text
        else:
            text = said = self.critic.plan() if role == "orchestrator" else self.critic.synthesize(self.drafts)
        self.rows.append(Row(role, list(messages), text, given))
        return Turn(role, slot, round, [], [], [], said, "stop")

    def drilled(self) -> tuple[str, str] | None:
        """Return a given derivation and a judge's continuation, for the fraction `drill` of the rows; None for the others."""
        if not self.is_quoted or self.own or self.rng.random() >= self.mix.drill:
            return None
        drafts = self.drafts[-1:] if self.role == "evaluator" else self.drafts
        draft, value = self.given(self.rng.choice(drafts))
        is_verdict = self.role == "evaluator"
        said = self.critic.conclude(drafts[0], value) if is_verdict else self.critic.choose(drafts, value)
        return draft, f"\n{said}"

    def overheard(self) -> Review:
        """Return the review that a refiner reads: mostly an "Incorrect", with a derivation, only the right line, or neither, at random."""
        draft = self.drafts[-1]
        kind = self.rng.random()
        if kind < 0.2:
            return self.critic.review(draft, self.mix.derive)
        if kind < 0.65 and (hint := self.hint()):
            return hint
        return self.critic.derivation(draft) if kind < 0.85 else Review(verdict(False))

    def answer(self) -> str:
        """Return an answer in a random habit, or one of the model's own answers: a right or a wrong one equally often, if both exist."""
        if self.is_short and self.is_quoted:
            return self.answer_shortly()
        if self.own is None:
            return self.write(self.rng.choices(list(self.habits.HABITS), list(self.habits.HABITS.values()))[0])
        is_right_wanted = self.rng.random() < 0.5
        return self.keep(self.rng.choice([d for d in self.own[""] if d.is_correct == is_right_wanted] or self.own[""]))

    def refine(self) -> str:
        """Return an answer that continues from the review; after a bare verdict a new one, more often in the fitting habit than at first."""
        if self.heard.found:
            text = self.go_on(self.heard.found)
            return self.keep(Draft(text, self.habits.claimed(text) == self.habits.truth(self.problem)))
        if self.rng.random() < 0.6:
            return self.answer()
        return self.write(self.habits.fitting(self.problem))

    def follow(self, strategy: str) -> str:
        """Return an answer in the habit that the strategy names, or one of the model's own answers under it."""
        if self.own and (drafts := self.own.get(strategy)):
            return self.keep(self.rng.choice(drafts))
        return self.write(self.habits.STRATEGIES[strategy])

    def write(self, habit: str) -> str:
        """Return a new answer in a habit."""
        return self.keep(self.habits.write(self.problem, habit, self.rng, self.is_quoted))

    def keep(self, draft: Draft) -> str:
        """Keep a draft for the critics and return its text."""
        self.drafts.append(draft)
        return draft.text


def make_rows(script: type[Script], mix: Mix, count: int, rng: random.Random, pool: Pool | None = None) -> list[Row]:
    """Return `count` rows of a mix, from scripted train problems, or with replacement from a pool of the model's own answers."""
    roles = rng.choices(list(mix.roles), list(mix.roles.values()), k=count)
    return finish(_play(script, roles, rng, mix, pool))


async def _play(script: type[Script], roles: list[str], rng: random.Random, mix: Mix, pool: Pool | None) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < len(roles):
        role = roles[len(rows)]
        if pool:
            (problem, own), is_short = rng.choice(pool), False
        else:
            (problem, is_short), own = script.draw(role, rng, mix), None
        call = script(problem, rng, own, role, mix, is_short)
        await WORKFLOWS[WORKFLOW_OF[role]]().run(problem, call)
        role_rows = [row for row in call.rows if row.role == role]
        if role_rows and (role != "aggregator" or _is_informative(call.drafts) or rng.random() < 0.15):
            rows.append(role_rows[0] if rng.random() < 0.5 else rng.choice(role_rows))
    return rows


def _is_informative(drafts: list[Draft]) -> bool:
    return 0 < len(_right(drafts)) < len(drafts)
