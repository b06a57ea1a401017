"""Dialogues of every role on tiny_pipe, made by running the real workflows with scripted authors.

As in `tiny_base2.dialogues`: solvers write in habits of different quality; critics are right as far as their way of working
allows. A program of one's own decides a verdict or a selection by comparison of where it ends with where the candidates end;
without one, critics tell the truth but for `HASTE`. After a review, a solver uses what the review worked out.
"""

import asyncio
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from tiny_base.dialogues import WORKFLOW_OF, Row

from multirole.core.types import Message, Problem, Turn
from multirole.tasks import tiny_pipe
from multirole.tasks.tiny_pipe import parse, reads_of
from multirole.workflows import WORKFLOWS
from tiny_base2 import code_habits as habits
from tiny_base2.code_habits import Draft
from tiny_base2.dialogues import HASTE, READERS, verdict

SHORT_RIGHT = 0.45
"""Share of right answers among the short ones that critics read while they learn to compare."""
SHORT_LENGTHS: dict[tiny_pipe.Kind, tuple[int, int]] = {"long": (1, 2), "wide": (1, 2)}
Lengths = dict[tiny_pipe.Kind, tuple[int, int]]
Own = Mapping[str, list[Draft]]
"""A model's own answers to one problem: strategy ("" for the plain question) -> graded drafts."""
Pool = list[tuple[Problem, Own]]


@dataclass(frozen=True)
class Mix:
    """How one stage of training is made up: rows by role, and how critics work."""

    roles: Mapping[str, float]
    derive: float
    """Share of judges' replies with a program of their own; the rest is divided in fixed proportions."""
    lengths: Lengths
    short: float = 0.0
    """Share of critics' rows about short problems, from which copying and comparing are learned faster."""
    drill: float = 0.0
    """Share of judges' rows in which the program is given, and ends anywhere: only comparing helps there."""


class Review(NamedTuple):
    """An evaluator's reply, and what it worked out: a program, or one step and its position."""

    text: str
    program: str | None = None
    told: tuple[int, int] | None = None


class Script:
    """A `Call` that plays every role of one episode and keeps what each was asked and replied.

    `role` is whose rows are wanted: what the others write is there to be read, and has more mistakes.
    """

    def __init__(
        self, problem: Problem, rng: random.Random, own: Own | None, role: str, mix: Mix, is_short: bool
    ) -> None:
        self.problem, self.rng, self.own, self.role, self.mix, self.is_short = problem, rng, own, role, mix, is_short
        self.is_quoted = role in READERS
        self.drafts: list[Draft] = []
        self.heard = Review("")
        self.rows: list[Row] = []

    async def __call__(self, role: str, messages: list[Message], slot: int = 0, round: int = 0) -> Turn:
        given = ""
        if role == "generator":
            role = "refiner" if round else role
            self.is_quoted = self.role in READERS and role != self.role
            text = said = self.refine() if round else self.answer()
        elif role == "evaluator":
            given, text = self.drilled() or ("", review(self.problem, self.drafts[-1], self.rng, self.mix.derive).text)
            self.heard = self.overheard()
            said = self.heard.text
        elif role == "worker":
            text = said = self.follow(messages[0]["content"].rpartition("Strategy: ")[2])
        elif role == "aggregator":
            given, text = self.drilled() or ("", select(self.problem, self.drafts, self.rng, self.mix.derive))
            said = text
        else:
            reply = {"synthesizer": synthesize, "orchestrator": plan}[role]
            text = said = reply(self.problem, self.drafts, self.rng)
        self.rows.append(Row(role, list(messages), text, given))
        return Turn(role, slot, round, [], [], [], said, "stop")

    def drilled(self) -> tuple[str, str] | None:
        """A program that ends where some draft does or near it, and what a judge says next; None for most rows."""
        if not self.is_quoted or self.own or self.rng.random() >= self.mix.drill:
            return None
        drafts = self.drafts[-1:] if self.role == "evaluator" else self.drafts
        value = habits.claimed(self.rng.choice(drafts).text)
        kind = self.rng.random()
        if kind < 0.2:
            value = self.rng.randint(0, tiny_pipe.LARGEST)
        elif value is None or kind < 0.45:
            value = habits.slip(value or reads_of(parse(self.problem.question))[-1][1], [], self.rng)
        given, _ = habits.worked(self.problem, self.rng, value)
        said = conclude(drafts[0], value) if self.role == "evaluator" else choose(drafts, value, self.rng)
        return given, f"\n{said}"

    def overheard(self) -> Review:
        """The review that a refiner reads: most often an "Incorrect", with as much worked out as chance has it."""
        draft = self.drafts[-1]
        kind = self.rng.random()
        if kind < 0.2:
            return review(self.problem, draft, self.rng, derive=self.mix.derive)
        if kind < 0.65 and (found := point_out(self.problem, draft) or lesson(self.problem, self.rng)):
            return found
        if kind < 0.85:
            return derivation(self.problem, draft, self.rng)
        return Review(verdict(False))

    def answer(self) -> str:
        """A habit's answer, or an own one, right as often as wrong where both exist."""
        if self.is_short and self.is_quoted:
            return self.write("plain" if self.rng.random() < 0.9 else "stub")
        if self.own is None:
            return self.write(self.rng.choices(list(habits.HABITS), list(habits.HABITS.values()))[0])
        wanted = self.rng.random() < 0.5
        return self.keep(self.rng.choice([d for d in self.own[""] if d.is_correct == wanted] or self.own[""]))

    def refine(self) -> str:
        """Use what the review worked out; after a bare verdict any habit or, more often than at first, a fitting one."""
        if self.heard.program:
            steps = self.heard.program
            return self.keep(Draft(steps, habits.claimed(steps) == reads_of(parse(self.problem.question))[-1][1]))
        if self.heard.told:
            text = habits.go_on(self.problem, self.heard.told, self.rng)
            return self.keep(Draft(text, habits.claimed(text) == reads_of(parse(self.problem.question))[-1][1]))
        if self.rng.random() < 0.6:
            return self.answer()
        return self.write(habits.fitting(self.problem))

    def follow(self, strategy: str) -> str:
        """The habit that the strategy names, or an own answer to it."""
        if self.own and (drafts := self.own.get(strategy)):
            return self.keep(self.rng.choice(drafts))
        return self.write(habits.STRATEGIES[strategy])

    def write(self, habit: str) -> str:
        """New text in a habit; about half of the short ones that are quoted are wrong."""
        draft = habits.write(self.problem, habit, self.rng, self.is_quoted)
        while self.is_short and self.is_quoted and habit == "plain" and self.rng.random() < 0.5:
            if draft.is_correct == (self.rng.random() < SHORT_RIGHT):
                break
            draft = habits.write(self.problem, habit, self.rng, self.is_quoted)
        return self.keep(draft)

    def keep(self, draft: Draft) -> str:
        """Remember a draft for the critics; its text."""
        self.drafts.append(draft)
        return draft.text


def compare(number: int, draft: Draft, value: int) -> tuple[str, bool]:
    """Where a candidate ends, digit by digit beside where one's own program does, and whether they agree."""
    if "```" not in draft.text:
        return f"Solution {number} No fence. ", False
    claimed = habits.claimed(draft.text)
    if claimed is None:
        return f"Solution {number} No steps. ", False
    said = f"Solution {number} {claimed} {claimed // 10}:{value // 10}"
    if claimed // 10 == value // 10:
        said += f" {claimed % 10}:{value % 10}"
    return said + (" ok. " if claimed == value else " is wrong. "), claimed == value


def conclude(draft: Draft, value: int) -> str:
    """The comparison, and the verdict that follows."""
    said, agrees = compare(1, draft, value)
    return said + verdict(agrees)


def derivation(problem: Problem, draft: Draft, rng: random.Random) -> Review:
    """A program of one's own, the comparison, and the verdict that follows."""
    text, value = habits.worked(problem, rng)
    return Review(f"{text}\n{conclude(draft, value)}", program=habits.program_in(text))


def point_out(problem: Problem, draft: Draft) -> Review | None:
    """The first wrong step of a draft and what it should be; None where there is no wrong step."""
    found = None if draft.is_correct else habits.right_step(problem, draft.text)
    return correction(problem, *found) if found and found[0] > 1 else None


def lesson(problem: Problem, rng: random.Random) -> Review:
    """Some step of the right program, in the form of `point_out`."""
    reads = reads_of(parse(problem.question))
    number = rng.randrange(1, len(reads)) + 1
    return correction(problem, number, reads[number - 1][1])


def correction(problem: Problem, number: int, position: int) -> Review:
    """What a step's position should be, behind the mark that an author's own corrections have."""
    move = parse(problem.question)[number - 1][1]
    text = f"Line {number} \n    # {move:+d} wait {position}\n{verdict(False)}"
    return Review(text, told=(number, position))


def review(problem: Problem, draft: Draft, rng: random.Random, derive: float) -> Review:
    """A program and the verdict, or: a bare verdict, a remark, the right step, second thoughts."""
    if rng.random() < derive:
        return derivation(problem, draft, rng)
    style = rng.choices(("bare", "remark", "line", "wait"), (50, 20, 16, 14))[0]
    if style == "line" and (found := point_out(problem, draft)):
        return found
    seems = draft.is_correct != (rng.random() < HASTE)
    if style == "remark":
        flaw = "No fence. " if "```" not in draft.text else "No steps. " if draft.text == habits.STUB else ""
        return Review(("Every line is right. " if seems else flaw or "The result is wrong. ") + verdict(seems))
    return Review(("hmm wait " if style == "wait" else "") + verdict(seems))


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
    """A program and what follows from it, or a number in other ways."""
    if rng.random() < derive:
        text, value = habits.worked(problem, rng)
        return f"{text}\n{choose(drafts, value, rng)}"
    everyone = range(1, len(drafts) + 1)
    right = [i for i, d in enumerate(drafts, start=1) if d.is_correct]
    chosen = rng.choice(everyone if rng.random() < HASTE else right or everyone)
    style = rng.choices(("bare", "sentence", "wait"), (78, 13, 9))[0]
    start = {"sentence": f"Solution {chosen} is right. ", "wait": "hmm wait "}
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


def make_rows(mix: Mix, count: int, rng: random.Random, pool: Pool | None = None) -> list[Row]:
    """`count` rows of a mix, of scripted problems of the train split or from a pool of graded answers.

    Runs its event loop in a thread of its own, since a notebook's thread already has one.
    """
    roles = rng.choices(list(mix.roles), list(mix.roles.values()), k=count)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, _play(roles, rng, mix, pool)).result()


async def _play(roles: list[str], rng: random.Random, mix: Mix, pool: Pool | None) -> list[Row]:
    usual, short = (tiny_pipe.stream("train", rng, lengths, tiny_pipe.TAUGHT_MOVE) for lengths in (mix.lengths, SHORT_LENGTHS))
    rows: list[Row] = []
    while len(rows) < len(roles):
        role = roles[len(rows)]
        is_short = pool is None and role in READERS and rng.random() < mix.short
        problem, own = rng.choice(pool) if pool else (next(short if is_short else usual), None)
        script = Script(problem, rng, own, role, mix, is_short)
        await WORKFLOWS[WORKFLOW_OF[role]]().run(problem, script)
        found = [row for row in script.rows if row.role == role]
        if found and (role != "aggregator" or _is_informative(script.drafts) or rng.random() < 0.15):
            rows.append(found[0] if rng.random() < 0.5 else rng.choice(found))
    return rows


def _is_informative(drafts: list[Draft]) -> bool:
    return 0 < sum(draft.is_correct for draft in drafts) < len(drafts)
