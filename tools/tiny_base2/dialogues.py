"""Dialogues of every role, made by running the real workflows with scripted authors.

Solvers write in habits of different quality; critics are right as far as their way of working allows. A derivation of one's
own decides a verdict or a selection by comparison with what was claimed; where nothing is derived, critics tell the truth
but for `HASTE`. After a review, a solver goes on from the last line that the review worked out.
"""

import asyncio
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from tiny_base.dialogues import WORKFLOW_OF, Row

from multirole.core.types import Message, Problem, Turn
from multirole.tasks import tiny_chain
from multirole.workflows import WORKFLOWS
from tiny_base2 import habits
from tiny_base2.habits import Draft

READERS = ("evaluator", "aggregator", "synthesizer", "refiner")
"""Roles whose rows quote drafts that slip as a model's do."""
HASTE = 0.06
"""Chance that a verdict or a selection without a derivation is not the truth."""
SHORT_RIGHT = 0.45
"""Share of right answers among the bare ones that critics read while they learn to compare."""
Own = Mapping[str, list[Draft]]
"""A model's own answers to one problem: strategy ("" for the plain question) -> graded drafts."""
Source = Iterator[tuple[Problem, Own | None]]


@dataclass(frozen=True)
class Mix:
    """How one stage of training is made up: rows by role, and how critics work."""

    roles: Mapping[str, float]
    derive: float
    """Share of judges' replies with a derivation; the rest is divided in fixed proportions."""
    lengths: dict[tiny_chain.Kind, tuple[int, int]]
    short: float = 0.0
    """Share of critics' rows that quote bare answers: short rows, from which copying and comparing are learned faster."""
    drill: float = 0.0
    """Share of judges' rows in which the derivation is given, and ends at any value: only comparing helps there."""


class Review(NamedTuple):
    """An evaluator's reply and the last line that it worked out, "" where it worked out none."""

    text: str
    line: str


class Script:
    """A `Call` that plays every role of one episode and keeps what each was asked and replied.

    `role` is whose rows are wanted: what the others write is there to be read, and has more mistakes.
    """

    def __init__(self, problem: Problem, rng: random.Random, own: Own | None, role: str, mix: Mix) -> None:
        self.problem, self.rng, self.own, self.role, self.mix = problem, rng, own, role, mix
        self.is_quoted = role in READERS
        self.is_short = self.is_quoted and own is None and rng.random() < mix.short
        self.drafts: list[Draft] = []
        self.line = ""
        self.rows: list[Row] = []

    async def __call__(self, role: str, messages: list[Message], slot: int = 0, round: int = 0) -> Turn:
        given = ""
        if role == "generator":
            role = "refiner" if round else role
            self.is_quoted = self.role in READERS and role != self.role
            text = said = self.refine() if round else self.answer()
        elif role == "evaluator":
            given, text = self.drilled() or ("", review(self.problem, self.drafts[-1], self.rng, self.mix.derive).text)
            said, self.line = self.overheard()
        elif role == "worker":
            text = said = self.work(messages[0]["content"].rpartition("Strategy: ")[2])
        elif role == "aggregator":
            given, text = self.drilled() or ("", select(self.problem, self.drafts, self.rng, self.mix.derive))
            said = text
        else:
            reply = {"synthesizer": synthesize, "orchestrator": plan}[role]
            text = said = reply(self.problem, self.drafts, self.rng)
        self.rows.append(Row(role, list(messages), text, given))
        return Turn(role, slot, round, [], [], [], said, "stop")

    def drilled(self) -> tuple[str, str] | None:
        """A derivation that ends at some draft's value or near it, and what a judge says next; None for most rows."""
        if not self.is_quoted or self.own or self.rng.random() >= self.mix.drill:
            return None
        drafts = self.drafts[-1:] if self.role == "evaluator" else self.drafts
        value = habits.boxed(self.rng.choice(drafts).text)
        if value is None or self.rng.random() < 0.45:
            value = habits.slip(value or self.problem.reference, [], self.rng)
        lines = habits.worked(self.problem, habits.Steady())[0]
        given = "\n".join([*lines[:-1], f"={value}"])
        if self.role == "evaluator":
            said, agrees = compare(1, drafts[0], value)
            return given, f"\n{said}{verdict(agrees)}"
        return given, f"\n{choose(drafts, value, self.rng)}"

    def overheard(self) -> Review:
        """The review that a refiner reads: most often an "Incorrect", with as much worked out as chance has it."""
        draft = self.drafts[-1]
        kind = self.rng.random()
        if kind < 0.2:
            return review(self.problem, draft, self.rng, derive=self.mix.derive)
        line = None
        if kind < 0.65:
            line = lesson(self.problem, self.rng) if self.is_short else point_out(self.problem, draft)
        if line:
            return line
        if kind < 0.85:
            return derivation(self.problem, draft, self.rng)
        return Review("\\boxed{Incorrect}", "")

    def answer(self) -> str:
        """A habit's answer, or an own one, right as often as wrong where both exist."""
        if self.is_short and self.is_quoted:
            return self.keep(habits.bare(self.problem, self.rng, SHORT_RIGHT))
        if self.own is None:
            return self.write(self.rng.choices(list(habits.HABITS), list(habits.HABITS.values()))[0])
        wanted = self.rng.random() < 0.5
        return self.keep(self.rng.choice([d for d in self.own[""] if d.is_correct == wanted] or self.own[""]))

    def refine(self) -> str:
        """Go on from what the review worked out; after a bare verdict any habit or, more often than at first, a fitting one."""
        if self.line:
            text = habits.go_on(self.problem, self.line, self.rng)
            return self.keep(Draft(text, habits.boxed(text) == self.problem.reference))
        if self.rng.random() < 0.6:
            return self.answer()
        return self.write(habits.fitting(self.problem))

    def work(self, strategy: str) -> str:
        """The habit that the strategy names, or an own answer to it."""
        if self.own and (drafts := self.own.get(strategy)):
            return self.keep(self.rng.choice(drafts))
        return self.write(habits.STRATEGIES[strategy])

    def write(self, habit: str) -> str:
        """New text in a habit."""
        return self.keep(habits.write(self.problem, habit, self.rng, self.is_quoted))

    def keep(self, draft: Draft) -> str:
        """Remember a draft for the critics; its text."""
        self.drafts.append(draft)
        return draft.text


def compare(number: int, draft: Draft, value: int) -> tuple[str, bool]:
    """A derived value beside a candidate's, spelled out, and whether they agree."""
    claimed = habits.boxed(draft.text)
    if claimed is None:
        return f"Solution {number} No box. ", False
    agrees = claimed == value
    return f"Solution {number} {claimed}" + (" ok. " if agrees else " is wrong. "), agrees


def verdict(is_correct: bool) -> str:
    """The box of a verdict."""
    return "\\boxed{" + ("Correct" if is_correct else "Incorrect") + "}"


def derivation(problem: Problem, draft: Draft, rng: random.Random) -> Review:
    """A derivation of one's own, the comparison, and the verdict that follows."""
    lines, value = habits.worked(problem, rng)
    said, agrees = compare(1, draft, value)
    return Review("\n".join([*lines, said + verdict(agrees)]), lines[-1])


def point_out(problem: Problem, draft: Draft) -> Review | None:
    """The first wrong line of a draft and what it should be; None where there is no wrong line."""
    if "\n" not in draft.text or (found := habits.right_line(problem, draft.text)) is None:
        return None
    return correction(*found)


def lesson(problem: Problem, rng: random.Random) -> Review:
    """Some line of the fitting derivation, in the form of `point_out`."""
    lines = habits.worked(problem, habits.Steady())[0]
    number = rng.randrange(len(lines))
    return correction(number + 1, lines[number])


def correction(number: int, line: str) -> Review:
    """What a line should be, behind the mark that an author's own corrections have."""
    return Review(f"Line {number} \nwait={line.lstrip('=>')}\n{verdict(False)}", line)


def review(problem: Problem, draft: Draft, rng: random.Random, derive: float) -> Review:
    """A derivation and the verdict, or: a bare verdict, a remark, the right line, a program and a verdict, second thoughts."""
    if rng.random() < derive:
        return derivation(problem, draft, rng)
    style = rng.choices(("bare", "remark", "line", "program", "wait"), (46, 16, 14, 10, 14))[0]
    if style == "line" and (found := point_out(problem, draft)):
        return found
    seems = draft.is_correct != (rng.random() < HASTE)
    if style == "program":
        return Review(f"{habits.program(problem)}\n{verdict(seems)}", "")
    if style == "remark":
        has_box = habits.boxed(draft.text) is not None
        remark = "Every line is right. " if seems else "The result is wrong. " if has_box else "No box. "
        return Review(remark + verdict(seems), "")
    return Review(("hmm wait " if style == "wait" else "") + verdict(seems), "")


def choose(drafts: list[Draft], value: int, rng: random.Random) -> str:
    """The comparison with candidate after candidate until one agrees; a right one where none does."""
    said = ""
    for number, draft in enumerate(drafts, start=1):
        remark, agrees = compare(number, draft, value)
        said += remark
        if agrees:
            return f"{said}\\boxed{{{number}}}"
    right = [i for i, d in enumerate(drafts, start=1) if d.is_correct]
    return f"{said}\\boxed{{{rng.choice(right or range(1, len(drafts) + 1))}}}"


def select(problem: Problem, drafts: list[Draft], rng: random.Random, derive: float) -> str:
    """A derivation and what follows from it, or a number in other ways."""
    right = [i for i, d in enumerate(drafts, start=1) if d.is_correct]
    everyone = range(1, len(drafts) + 1)
    if rng.random() < derive:
        lines, value = habits.worked(problem, rng)
        return "\n".join([*lines, choose(drafts, value, rng)])
    chosen = rng.choice(everyone if rng.random() < HASTE else right or everyone)
    style = rng.choices(("bare", "sentence", "program", "wait"), (72, 12, 8, 8))[0]
    start = {
        "sentence": f"Solution {chosen} is right. ",
        "program": habits.program(problem) + "\n",
        "wait": "hmm wait ",
    }
    return f"{start.get(style, '')}\\boxed{{{chosen}}}"


def synthesize(problem: Problem, drafts: list[Draft], rng: random.Random) -> str:
    """A right candidate's text, or new work that fits."""
    right = [draft.text for draft in drafts if draft.is_correct]
    if right and rng.random() < 0.6:
        return rng.choice(right)
    return habits.write(problem, habits.fitting(problem), rng).text


def plan(problem: Problem, drafts: list[Draft], rng: random.Random) -> str:
    """Three different strategies in any order."""
    strategies = rng.sample(list(habits.STRATEGIES), 3)
    return "\n".join(f"STRATEGY {i}: {strategy}" for i, strategy in enumerate(strategies, start=1))


def synthetic(rng: random.Random, lengths: dict[tiny_chain.Kind, tuple[int, int]]) -> Source:
    """Problems of the train split whose drafts the script writes itself."""
    return ((problem, None) for problem in tiny_chain.stream("train", rng, lengths))


def pooled(pool: list[tuple[Problem, Own]], rng: random.Random) -> Source:
    """Problems with own answers, drawn with replacement."""
    return (rng.choice(pool) for _ in repeat(None))


def make_rows(mix: Mix, count: int, rng: random.Random, source: Source | None = None) -> list[Row]:
    """`count` rows of a mix, of scripted problems or from a source.

    Runs its event loop in a thread of its own, since a notebook's thread already has one.
    """
    roles = rng.choices(list(mix.roles), list(mix.roles.values()), k=count)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, _play(roles, rng, source or synthetic(rng, mix.lengths), mix)).result()


async def _play(roles: list[str], rng: random.Random, source: Source, mix: Mix) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < len(roles):
        role = roles[len(rows)]
        problem, own = next(source)
        script = Script(problem, rng, own, role, mix)
        await WORKFLOWS[WORKFLOW_OF[role]]().run(problem, script)
        found = [row for row in script.rows if row.role == role]
        if found and (role != "aggregator" or _is_informative(script.drafts) or rng.random() < 0.15):
            rows.append(found[0] if rng.random() < 0.5 else rng.choice(found))
    return rows


def _is_informative(drafts: list[Draft]) -> bool:
    return 0 < sum(draft.is_correct for draft in drafts) < len(drafts)
