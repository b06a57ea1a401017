"""Dialogues of every role, made by running the real workflows with scripted authors.

The conversations that a role sees are therefore those of `multirole.workflows` by construction. Answering roles write
in habits of different quality, or quote a `Pool` of a model's own graded answers; critics reply with the truth.
"""

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from types import ModuleType
from typing import NamedTuple

from multirole.core.types import Message, Problem, Turn
from multirole.tasks import tiny_code, tiny_math
from multirole.tasks.tiny_code import TinyCode
from multirole.tasks.tiny_math import TinyMath
from multirole.workflows import WORKFLOWS
from tiny_base import code_habits, math_habits


class Author(NamedTuple):
    """Who writes the dialogues of a task. `lengths` are the fewest and the most operations of scripted problems."""

    task: TinyMath | TinyCode
    habits: ModuleType
    stream: Callable[..., Iterator[Problem]]
    lengths: tuple[int, int]


AUTHORS = {
    TinyMath.name: Author(TinyMath(), math_habits, tiny_math.stream, (3, 6)),
    TinyCode.name: Author(TinyCode(), code_habits, tiny_code.stream, (2, 4)),
}
WORKFLOW_OF = {
    "generator": "single",
    "refiner": "eval_opt",
    "evaluator": "eval_opt",
    "aggregator": "voting",
    "orchestrator": "orch_workers",
    "worker": "orch_workers",
    "synthesizer": "orch_workers",
}
"""Where rows of a role come from; "refiner" is the generator after a review."""


CRITICS = ("evaluator", "aggregator", "synthesizer")


class Draft(NamedTuple):
    """An answer and whether it is right."""

    text: str
    is_correct: bool


Own = Mapping[str, list[Draft]]
"""A model's own answers to one problem: strategy ("" for the plain question) -> graded drafts."""

Source = Iterator[tuple[Problem, Own | None]]
"""Endless problems, with own answers or without."""


class Row(NamedTuple):
    """One training sequence: only `reply` is trained; `given` is how the assistant has begun."""

    role: str
    messages: list[Message]
    reply: str
    given: str = ""


class Script:
    """A `Call` that plays every role of one episode and keeps what each was asked and replied.

    `is_quoted` says that the answers are there to be read by a critic, not to be trained on.
    """

    def __init__(self, problem: Problem, rng: random.Random, own: Own | None, is_quoted: bool) -> None:
        self.problem, self.rng, self.own, self.is_quoted = problem, rng, own, is_quoted
        self.habits = AUTHORS[problem.task].habits
        self.drafts: list[Draft] = []
        self.rows: list[Row] = []

    async def __call__(self, role: str, messages: list[Message], slot: int = 0, round: int = 0) -> Turn:
        if role == "generator":
            role = "refiner" if round else role
            text = said = self.refine() if round else self.answer()
        elif role == "evaluator":
            text = review(self.problem, self.drafts[-1], self.rng)
            heard = self.drafts[-1]._replace(is_correct=self.drafts[-1].is_correct != (self.rng.random() < 0.2))
            said = review(self.problem, heard, self.rng)
        elif role == "worker":
            text = said = self.work(messages[0]["content"].rpartition("Strategy: ")[2])
        else:
            reply = {"aggregator": select, "synthesizer": synthesize, "orchestrator": plan}[role]
            text = said = reply(self.problem, self.drafts, self.rng)
        self.rows.append(Row(role, list(messages), text))
        return Turn(role, slot, round, [], [], [], said, "stop")

    def answer(self) -> str:
        """A habit's answer, or an own one, right as often as wrong where both exist."""
        if self.own is None:
            habit = self.rng.choices(list(self.habits.HABITS), list(self.habits.HABITS.values()))[0]
            return self.write(habit)
        wanted = self.rng.random() < 0.5
        return self.keep(self.rng.choice([d for d in self.own[""] if d.is_correct == wanted] or self.own[""]))

    def refine(self) -> str:
        """After a review: mostly careful work, sometimes any habit or the same text again."""
        kind = self.rng.random()
        if kind < 0.2:
            return self.keep(self.drafts[-1])
        if kind < 0.45:
            return self.answer()
        return self.write("careful")

    def work(self, strategy: str) -> str:
        """The habit that the strategy names, or an own answer to it."""
        if self.own and (drafts := self.own.get(strategy)):
            return self.keep(self.rng.choice(drafts))
        return self.write(self.habits.STRATEGIES[strategy])

    def write(self, habit: str) -> str:
        """New text in a habit."""
        habit = self.habits.QUOTED_AS.get(habit, habit) if self.is_quoted else habit
        return self.keep(Draft(*self.habits.write(self.problem, habit, self.rng)))

    def keep(self, draft: Draft) -> str:
        """Remember a draft for the critics; its text."""
        self.drafts.append(draft)
        return draft.text


def review(problem: Problem, draft: Draft, rng: random.Random) -> str:
    """A bare verdict, a remark with a verdict, a check of every line, or a new solution and then the verdict."""
    habits = AUTHORS[problem.task].habits
    box = "\\boxed{" + ("Correct" if draft.is_correct else "Incorrect") + "}"
    style = rng.choices(("bare", "remark", "lines", "solve"), (38, 26, 10, 26))[0]
    if style == "bare":
        return box
    if style == "solve":
        return f"{habits.worked(problem)}\n{box}"
    wrong = None if draft.is_correct else habits.wrong_line(problem, draft.text)
    if style == "lines" and (wrong or draft.is_correct):
        checked = wrong - 1 if wrong else habits.count_lines(draft.text)
        ok = "".join(f"Line {i} ok. " for i in range(1, checked + 1))
        return ok + (f"Line {wrong} is wrong. " if wrong else "") + box
    if draft.is_correct:
        return f"Every line is right. {box}"
    if AUTHORS[problem.task].task.extract(draft.text) is None:
        return habits.MALFORMED + box
    return (f"Line {wrong} is wrong. " if wrong else "The result is wrong. ") + box


def select(problem: Problem, drafts: list[Draft], rng: random.Random) -> str:
    """A number, a sentence with a number, or a derivation and then a number: a right candidate where there is one."""
    chosen = rng.choice([i for i, d in enumerate(drafts, start=1) if d.is_correct] or range(1, len(drafts) + 1))
    style = rng.choices(("bare", "sentence", "solve"), (75, 15, 10))[0]
    if style == "sentence":
        return f"Solution {chosen} is right. \\boxed{{{chosen}}}"
    return (f"{AUTHORS[problem.task].habits.worked(problem)}\n" if style == "solve" else "") + f"\\boxed{{{chosen}}}"


def synthesize(problem: Problem, drafts: list[Draft], rng: random.Random) -> str:
    """A right candidate's text, or careful new work."""
    right = [draft.text for draft in drafts if draft.is_correct]
    if right and rng.random() < 0.6:
        return rng.choice(right)
    return AUTHORS[problem.task].habits.write(problem, "careful", rng)[0]


def plan(problem: Problem, drafts: list[Draft], rng: random.Random) -> str:
    """Three different strategies in any order."""
    strategies = rng.sample(list(AUTHORS[problem.task].habits.STRATEGIES), 3)
    return "\n".join(f"STRATEGY {i}: {strategy}" for i, strategy in enumerate(strategies, start=1))


def synthetic(task: str, rng: random.Random) -> Source:
    """Problems of the train split whose drafts the script writes itself."""
    author = AUTHORS[task]
    return ((problem, None) for problem in author.stream("train", rng, author.lengths))


def pooled(pool: list[tuple[Problem, Own]], rng: random.Random) -> Source:
    """Problems with own answers, drawn with replacement."""
    return (rng.choice(pool) for _ in repeat(None))


def make_rows(shares: Mapping[str, float], count: int, rng: random.Random, sources: list[Source]) -> list[Row]:
    """`count` rows, roles in proportion to `shares`, sources (one per task) alike.

    Runs its event loop in a thread of its own, since a notebook's thread already has one.
    """
    roles = rng.choices(list(shares), list(shares.values()), k=count)
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, _play(roles, rng, sources)).result()


async def _play(roles: list[str], rng: random.Random, sources: list[Source]) -> list[Row]:
    rows: list[Row] = []
    while len(rows) < len(roles):
        role = roles[len(rows)]
        problem, own = next(rng.choice(sources))
        script = Script(problem, rng, own, is_quoted=role in CRITICS)
        await WORKFLOWS[WORKFLOW_OF[role]]().run(problem, script)
        found = [row for row in script.rows if row.role == role]
        if found and (role != "aggregator" or _is_informative(script.drafts) or rng.random() < 0.15):
            rows.append(rng.choice(found))
    return rows


def _is_informative(drafts: list[Draft]) -> bool:
    return 0 < sum(draft.is_correct for draft in drafts) < len(drafts)
