"""Measure a base, or a trained adapter in every role, on validation problems: the facts of the model card.

Three samples of the solver per problem are the drafts and candidates for the other roles. A "forced" reply has a fixed
beginning: a derivation's mark, or an open box. Intervals are 95 %, normal, over problems.
"""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import fmean, pstdev
from typing import Any, ClassVar, TypedDict

import numpy as np
from transformers import PreTrainedTokenizerFast

from multirole.engines.protocol import Engine
from multirole.types import Message, Problem
from multirole.workflows import EvalOpt, OrchWorkers, Single, Voting
from multirole.workflows.eval_opt import parse_verdict
from multirole.workflows.voting import parse_selection
from multirole_study.signatures import turn_signature
from tiny_base.ask import Reply, asked, complete
from tiny_base.dialogues import Critic
from tiny_base.habits import Draft, Steady

BARE = "\\boxed{"


class Fact(TypedDict):
    """A measured number with its interval over `n` problems."""

    value: float
    low: float
    high: float
    n: int


def fact(values: Iterable[float]) -> Fact:
    """Return the mean of values, one per problem, as a fact."""
    if not (numbers := list(values)):
        return Fact(value=0.0, low=0.0, high=0.0, n=0)
    mean, half = fmean(numbers), 1.96 * pstdev(numbers) / sqrt(len(numbers))
    return Fact(value=round(mean, 4), low=round(mean - half, 4), high=round(mean + half, 4), n=len(numbers))


def balanced(right: Sequence[float], is_correct: Sequence[bool]) -> Fact:
    """Return the mean of two means: over correct drafts and over incorrect ones."""
    parts = [[r for r, c in zip(right, is_correct, strict=True) if c == label] for label in (True, False)]
    if not all(parts):
        return fact([])
    mean = fmean(map(fmean, parts))
    half = 1.96 / 2 * sqrt(sum(pstdev(part) ** 2 / len(part) for part in parts))
    return Fact(value=round(mean, 4), low=round(mean - half, 4), high=round(mean + half, 4), n=len(right))


class Examiner:
    """Samples replies of one role after another from an engine's base. A task's subclass knows the form of its answers."""

    task: ClassVar[Any]
    cap: ClassVar[int]
    """Largest number of reply tokens."""
    critic: ClassVar[type[Critic]]
    useful: ClassVar[str]
    """Text that every derivation contains and no other answer does."""
    heads: ClassVar[tuple[str, ...]]
    """How a judge's reply with a derivation begins."""

    def __init__(self, engine: Engine, tokenizer: PreTrainedTokenizerFast, count: int, seed: int = 0) -> None:
        self.engine, self.tokenizer, self.seed, self.habits = engine, tokenizer, seed, self.critic.habits
        self.problems = self.task.problems("validation", count)
        self.plain = [asked(Single(), p, {}, ("generator", 0, 0)) for p in self.problems]
        self.samples = [self.ask(self.plain) for _ in range(3)]
        self.right = [self.grade(self.problems, texts) for texts in self.samples]
        self.starts = [self.habits.start(p) for p in self.problems]
        self.fits = [self.habits.fitting(p) for p in self.problems]
        self.natural: dict[str, list[Reply]] = {"generator": [reply for texts in self.samples for reply in texts]}

    def ask(self, asks: Sequence[list[Message]], forced: str | Sequence[str] = "") -> list[Reply]:
        """Sample replies; every call uses other random numbers."""
        self.seed += 1
        return complete(self.engine, self.tokenizer, asks, forced, self.cap, self.seed)

    def grade(self, problems: Sequence[Problem], texts: Sequence[str]) -> list[bool]:
        """Return whether each text answers its problem."""
        return [bool(reward.is_correct) for reward in self.task.score(list(problems), list(texts))]

    def of_kind(self, values: Iterable[float], kind: str) -> Fact:
        """Return the mean over the problems of a kind."""
        return fact(value for value, fit in zip(values, self.fits, strict=True) if fit == self.habits.FITTING[kind])

    def is_derivation(self, text: str) -> bool:
        """Return whether a judge's reply begins with its own derivation."""
        return text.startswith(self.heads)

    def solver(self) -> dict[str, Fact]:
        """Measure accuracy, the gain of three tries, and lengths."""
        per_problem = list(zip(*self.right, strict=True))
        useful = [
            reply.n_tokens
            for texts, right in zip(self.samples, self.right, strict=True)
            for reply, is_right in zip(texts, right, strict=True)
            if is_right and self.useful in reply
        ]
        facts = {
            "accuracy": fact(fmean(right) for right in per_problem),
            "pass@3 - pass@1": fact(any(right) - fmean(right) for right in per_problem),
            "tokens": fact(reply.n_tokens for texts in self.samples for reply in texts),
            "cut off": fact(reply.is_cut for reply in self.samples[0]),
            "tokens of right derivations": fact(useful),
            "p95 of right derivations": fact([float(np.percentile(useful, 95))] if useful else []),
        }
        for kind in self.habits.FITTING:
            facts[f"accuracy, {kind}"] = self.of_kind(map(fmean, per_problem), kind)
        return facts

    def aggregator(self) -> dict[str, Fact]:
        """Measure selections among three samples of which some, but not all, are right."""
        places = [i for i, right in enumerate(zip(*self.right, strict=True)) if 0 < sum(right) < 3]
        asks = []
        for i in places:
            drafts = {("generator", slot, 0): str(self.samples[slot][i]) for slot in range(3)}
            asks.append(asked(Voting(), self.problems[i], drafts, ("aggregator", 0, 0)))

        def chosen(replies: Sequence[str]) -> list[bool]:
            picks = [parse_selection(reply, 3, box_rule="first_literal") for reply in replies]
            return [how != "unparsed" and self.right[k][i] for i, (k, how) in zip(places, picks, strict=True)]

        derived, bare = self.ask(asks, [self.starts[i] for i in places]), self.ask(asks, BARE)
        natural = self.natural["aggregator"] = self.ask(asks)
        with_it, without = chosen(derived), chosen(bare)
        works, followed = [], []
        for i, reply in zip(places, derived, strict=True):
            value, claims = (
                self.habits.last_value(reply),
                [self.habits.claimed(str(texts[i])) for texts in self.samples],
            )
            works.append(value == self.habits.truth(self.problems[i]))
            if value in claims and value is not None:
                followed.append(claims[parse_selection(reply, 3, box_rule="first_literal")[0]] == value)
        return {
            "chance": fact(fmean(right[i] for right in self.right) for i in places),
            "with a derivation": fact(with_it),
            "without": fact(without),
            "with - without": fact(a - b for a, b in zip(with_it, without, strict=True)),
            "as it comes": fact(chosen(natural)),
            "its derivation is right": fact(works),
            "right where its derivation is": fact(r for r, w in zip(with_it, works, strict=True) if w),
            "selects what agrees with its derivation": fact(followed),
            "derives": fact(self.is_derivation(reply) for reply in natural),
            "tokens of a bare selection": fact(reply.n_tokens + 1 for reply in bare),
        }

    def evaluator(self) -> dict[str, Fact]:
        """Measure verdicts on the first sample of every problem."""
        asks = []
        for problem, draft in zip(self.problems, self.samples[0], strict=True):
            asks.append(asked(EvalOpt(), problem, {("generator", 0, 0): str(draft)}, ("evaluator", 0, 0)))
        truth = self.right[0]

        def scored(replies: Sequence[str]) -> list[bool]:
            expected = ["correct" if is_right else "incorrect" for is_right in truth]
            return [
                parse_verdict(reply, "first_literal") == want for reply, want in zip(replies, expected, strict=True)
            ]

        derived, bare = self.ask(asks, self.starts), self.ask(asks, BARE)
        natural = self.natural["evaluator"] = self.ask(asks)
        with_it, without = scored(derived), scored(bare)
        return {
            "with a derivation": balanced(with_it, truth),
            "without": balanced(without, truth),
            "with - without": balanced([a - b for a, b in zip(with_it, without, strict=True)], truth),
            "as it comes": balanced(scored(natural), truth),
            "says what follows from its derivation": fact(
                (parse_verdict(reply, "first_literal") == "correct")
                == (self.habits.claimed(str(draft)) == self.habits.last_value(reply))
                for draft, reply in zip(self.samples[0], derived, strict=True)
            ),
            "derives": fact(self.is_derivation(reply) for reply in natural),
        }

    def refiner(self) -> dict[str, Fact]:
        """Measure repairs of wrong drafts with a wrong line and a wrong end, after reviews of different detail."""
        self.lines: list[str] = []
        problems, asks = [], {"derivation": [], "right line": [], "empty": []}
        for texts, right in zip(self.samples[:2], self.right[:2], strict=True):
            for problem, text, is_right in zip(self.problems, map(str, texts), right, strict=True):
                critic, draft = self.critic(problem, Steady()), Draft(text, False)
                if is_right or (line := critic.point_out(draft)) is None:
                    continue
                whole = critic.derivation(draft).text
                if parse_verdict(whole, "first_literal") == "correct":
                    continue
                problems.append(problem)
                self.lines.append(line.text)
                for name, review in (("derivation", whole), ("right line", line.text), ("empty", f"{BARE}Incorrect}}")):
                    earlier = {("generator", 0, 0): text, ("evaluator", 0, 0): review}
                    asks[name].append(asked(EvalOpt(), problem, earlier, ("generator", 0, 1)))
        self.refined = {name: self.ask(item) for name, item in asks.items()}
        right = {name: self.grade(problems, item) for name, item in self.refined.items()}
        facts = {f"after {name}": fact(item) for name, item in right.items()}
        for name in ("derivation", "right line"):
            facts[f"{name} - empty"] = fact(a - b for a, b in zip(right[name], right["empty"], strict=True))
        return facts

    def worker(self) -> dict[str, Fact]:
        """Measure accuracy under each strategy, and under the fitting one compared with the other working one."""
        right: dict[str, list[bool]] = {}
        names = {habit: strategy for strategy, habit in self.habits.STRATEGIES.items()}
        for habit, strategy in names.items():
            plan = {("orchestrator", 0, 0): f"STRATEGY 1: {strategy}"}
            asks = [asked(OrchWorkers(), p, plan, ("worker", 0, 0)) for p in self.problems]
            right[habit] = self.grade(self.problems, self.ask(asks))
        first, second = self.habits.FITTING.values()
        opposite = {first: second, second: first}
        gains = [right[fit][i] - right[opposite[fit]][i] for i, fit in enumerate(self.fits)]
        facts = {"fitting - unfitting": fact(gains)}
        for kind in self.habits.FITTING:
            facts |= {f"{names[habit]}, {kind}": self.of_kind(values, kind) for habit, values in right.items()}
            facts[f"fitting - unfitting, {kind}"] = self.of_kind(gains, kind)
        return facts

    def signatures(self) -> dict[str, Fact]:
        """Measure how often the paper's signatures occur in free replies."""
        facts = {}
        for role, replies in self.natural.items():
            signs = [turn_signature(reply, reply.n_tokens) for reply in replies]
            rates = {
                "boxed": [sign.is_boxed for sign in signs],
                "terse": [sign.is_terse for sign in signs],
                "hedging": [sign.is_hedging for sign in signs],
                "code fence": [sign.form == "code_fence" for sign in signs],
            }
            if role != "generator":
                rates["derives"] = [self.is_derivation(reply) for reply in replies]
            if role == "evaluator":
                rates["Correct"] = [sign.verdict == "correct" for sign in signs]
            facts |= {f"{role}, {name}": fact(values) for name, values in rates.items()}
        return facts

    def examine(self) -> dict[str, dict[str, Fact]]:
        """Measure everything."""
        parts = (self.solver, self.aggregator, self.evaluator, self.refiner, self.worker, self.signatures)
        return {part.__name__: part() for part in parts}
