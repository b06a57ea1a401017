"""gym: problems of the package `reasoning-gym`, which has 106 kinds with difficulty options.

A task is named `gym:KIND`, or `gym:KIND?OPTION=VALUE&OPTION=VALUE` with options of that kind's configuration, such as
`gym:products?min_digits=1&max_digits=2`; `seed=1` draws other problems. The package generates and scores them.

Splits: training and validation use different generator seeds, and a hash of the question decides its split, so that no question is in
both. Different seeds alone would not separate the splits, because in most kinds problem i of seed s equals problem i-1 of seed s+1.
No question occurs twice in a split.

The answer is the content of the last `\\boxed{}`. Without a box, `fallback="last_number"` uses the last number of the reply and
multiplies its score by `unboxed_reward`; `fallback="none"` uses nothing.
"""

import ast
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import multirole_sandbox as sandbox
from math_answers import extract
from multirole.chat.replies import text_outside_thoughts
from multirole.extras import install_advice
from multirole.types import Problem, Reward
from multirole_sandbox import Limits, SandboxError
from multirole_study.tasks.gym_score import NEEDS_PYCOSAT, encode, load_gym
from multirole_study.tasks.sources import question_id
from multirole_study.tasks.splits import check_split, split_of

PREFIX = "gym:"
PROMPTS = "multirole_study:tasks/prompts/gym"
"""The prompt templates of the roles (`multirole.workflows.prompts`)."""
SPLITS = ("train", "validation")
PROBLEMS_PER_SEED = 500
"""The number of problems per generator seed."""
SEEDS, SEED_RANGE = 100, 10**7
"""The number of task seeds, and the number of generator seeds per task seed and split."""
MAX_REJECTED = 2000
"""A kind counts as exhausted after this many consecutive duplicates or problems of the other split."""
SET_ORDERED = ("isomorphic_strings", "polynomial_multiplication", "ransom_note")
"""Kinds that iterate over Python sets, whose order differs between processes unless PYTHONHASHSEED is set."""
MAX_CHARACTERS = 1000
LIMITS = Limits(
    test_seconds=4.0,
    idle_factor=15.0,
    problem_seconds=86_400.0,
    full_timeouts=1_000_000,
    memory_bytes=1 << 30,
    output_bytes=4096,
    workers=min(2, Limits().workers),  # each holds the package and sympy
)
NUMBER = re.compile(r"(?:(?<![\d.])-)?(?:\d{1,3}(?:,\d{3})++(?!\d)|\d++)(?:\.\d+)?", re.ASCII)
"""Matches a number of a text: the 5 of 12-5 is not negative, and 1,234 is one number. Lists have spaces: 100,200 is one as well."""

Fallback = Literal["none", "last_number"]
Options = tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Gym:
    """A task with one kind of reasoning-gym problem.

    Args:
        kind: the package's name of the kind, such as "products".
        options: (name, value) pairs of the kind's configuration, sorted by name.
        seed: selects the problems, 0 to 99.
        malformed_reward: reward of a reply without an answer.
        fallback: how to find the answer in a reply without a box.
        unboxed_reward: factor on the score of an unboxed answer.
        prompts: the roles' prompts (`multirole.workflows.prompts`): "math" for the paper's, in place of those for models that cannot reason.
    """

    kind: str
    options: Options = ()
    seed: int = 0
    malformed_reward: float = 0.0
    fallback: Fallback = "none"
    unboxed_reward: float = 1.0
    prompts: str = PROMPTS

    @property
    def name(self) -> str:
        """The kind as an identifier."""
        return f"gym_{self.kind}"

    @property
    def spec(self) -> str:
        """The task's canonical name `gym:KIND?...`, with sorted options; equal tasks have equal names."""
        options = [*self.options, *([("seed", self.seed)] * bool(self.seed))]
        return f"{PREFIX}{self.kind}" + ("?" + "&".join(f"{k}={v}" for k, v in options) if options else "")

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` different problems of "train" or "validation"; a smaller count is a prefix of a larger one."""
        check_split(split)
        if count is None:
            raise ValueError(
                f"The problems of {self.spec!r} are endless, so `count` must be a positive integer, got None."
            )
        return _draw(self.kind, self.options, self.seed, split, count, self.prompts)[:]

    def describe(self) -> dict[str, object]:
        """Return the package's version, the kind, its options and the seed."""
        about = {"package": "reasoning-gym", "version": version("reasoning-gym"), "kind": self.kind}
        return {"name": self.name} | about | {"options": dict(self.options), "seed": self.seed}

    def extract(self, text: str) -> str | None:
        """Return the answer in a text, or None."""
        return self._answer(text)[0]

    def _answer(self, text: str) -> tuple[str | None, bool]:
        """Return the answer and whether it was in a box."""
        boxed = extract(text)
        if boxed is not None or self.fallback == "none" or "\\boxed" in text:
            return boxed, True
        numbers = NUMBER.findall(text_outside_thoughts(text))
        return (numbers[-1].replace(",", "") if numbers else None), False

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Score answers with the package; an answer is correct if its score is 1."""
        answers = [self._answer(text) for text in texts]
        references = {
            (problem.id, answer): problem.reference
            for problem, (answer, _) in zip(problems, answers, strict=True)
            if answer and len(answer) <= MAX_CHARACTERS
        }
        scores = dict(
            zip(references, self._scores([(answer, entry) for (_, answer), entry in references.items()]), strict=True)
        )
        return [
            self._reward(answer, is_boxed, scores.get((problem.id, answer or ""), 0.0))
            for problem, (answer, is_boxed) in zip(problems, answers, strict=True)
        ]

    def _reward(self, answer: str | None, is_boxed: bool, score: float) -> Reward:
        if answer is None:
            return Reward(self.malformed_reward, "no_box" if self.fallback == "none" else "no_answer", False)
        word = "correct" if score >= 1 else "partly" if score > 0 else "wrong"
        share = 1.0 if is_boxed else self.unboxed_reward
        return Reward(share * score, word if is_boxed else f"{word}_unboxed", score >= 1)

    def _scores(self, answers: list[tuple[str, Any]]) -> list[float]:
        options = dict(self.options)
        dataset = load_gym().create_dataset(self.kind, seed=0, size=1, **options)
        arguments = [[self.kind, options, answer, encode(dataset, entry)] for answer, entry in answers]
        scores = []
        for reason, output in sandbox.call(Path(__file__).parent, "gym_score", "score", arguments, LIMITS):
            if reason == "passed" and output.startswith(b'"broken: '):
                raise SandboxError(f"reasoning-gym could not score inside the sandbox: {json.loads(output)}")
            scores.append(_score_of(output) if reason == "passed" else 0.0)
        return scores


def _score_of(output: bytes) -> float:
    """Return the score that a scorer has written; 0 for anything but a number from 0 to 1."""
    try:
        score = json.loads(output)
    except ValueError:
        return 0.0
    return float(score) if type(score) in (int, float) and 0 <= score <= 1 else 0.0


def is_gym(task: object) -> bool:
    """Return whether a task is a name that starts with `gym:`."""
    return isinstance(task, str) and task.startswith(PREFIX)


@cache
def parse(spec: str) -> Gym:
    """Parse `gym:KIND?OPTION=VALUE`. Raises ValueError for an unknown kind or option or an invalid value."""
    kind, _, query = spec.removeprefix(PREFIX).partition("?")
    config = _config_of(kind, spec)
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    options: dict[str, object] = {}
    for pair in filter(None, query.split("&")):
        name, equals, text = pair.partition("=")
        if not equals or name == "size" or name not in defaults:
            known = sorted(defaults.keys() - {"size"})
            raise ValueError(
                f"`task` {spec!r} has {pair!r}, which is not an option of {kind}.{_nearest(name, known)} Options are {', '.join(known)}."
            )
        options[name] = _value(text)
    seed = options.pop("seed", 0)
    if type(seed) is not int or not 0 <= seed < SEEDS:
        raise ValueError(f"`task` {spec!r} has the seed {seed!r}. Write a whole number from 0 to {SEEDS - 1}.")
    for name, value in options.items():
        if type(value) in (dict, set):
            raise ValueError(
                f"`task` {spec!r} has {name}={value!r}. A value must be a number, a text, or a list of these."
            )
        default = defaults[name]
        if isinstance(default, (bool, int, float)) and type(value) not in (
            type(default),
            int if type(default) is float else type(default),
        ):
            raise ValueError(
                f"`task` {spec!r} has {name}={value!r}, which must have the type of its default, {default!r}."
            )
    task = Gym(kind, tuple(sorted(options.items())), seed)
    try:
        load_gym().create_dataset(kind, seed=0, size=1, **options)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"`task` {spec!r} has invalid options: {error}. Correct their values.") from error
    return task


def _config_of(kind: str, spec: str) -> Any:
    try:
        kinds = load_gym().factory.DATASETS
    except ModuleNotFoundError as error:
        raise ValueError(install_advice(error, f"`task` {spec!r}") or str(error)) from error
    if kind not in kinds:
        raise ValueError(
            f"`task` {spec!r} names no kind of reasoning-gym problem.{_nearest(kind, kinds)} There are {len(kinds)}, such as "
            "chain_sum, products, letter_counting and gcd; `reasoning_gym.factory.DATASETS` lists them."
        )
    if kind == NEEDS_PYCOSAT:
        try:
            __import__("pycosat")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"`task` {spec!r} needs the package pycosat: pip install pycosat (it needs a C compiler)."
            ) from error
    if kind in SET_ORDERED and not os.environ.get("PYTHONHASHSEED", "random").isdecimal():
        raise ValueError(
            f"`task` {spec!r} draws different problems in each process. Set PYTHONHASHSEED=0 in the environment before Python starts, as "
            "the Makefile does."
        )
    return kinds[kind][1]


def _nearest(word: str, known: Any) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _value(text: str) -> object:
    """Parse a Python constant, or return the text. Lists become tuples, so that a task can be hashed."""
    try:
        return _hashable(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return text


def _hashable(value: object) -> object:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _drawn(kind: str, options: Options, seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the generator's entries for a split; they still include questions of the other split."""
    start = SEED_RANGE * (len(SPLITS) * seed + SPLITS.index(split))
    for block in range(start, start + SEED_RANGE, PROBLEMS_PER_SEED):
        dataset = load_gym().create_dataset(kind, seed=block, size=PROBLEMS_PER_SEED, **dict(options))
        yield from (dataset[i] for i in range(PROBLEMS_PER_SEED))


@cache
def _draw(kind: str, options: Options, seed: int, split: str, count: int, prompts: str) -> list[Problem]:
    """Return the first `count` distinct problems of a split. Raises ValueError if the kind has fewer."""
    problems: dict[str, Problem] = {}
    n_rejected = 0
    for entry in _drawn(kind, options, seed, split):
        question = entry["question"]
        if question in problems or split_of(question) != split:
            n_rejected += 1
        else:
            n_rejected = 0
            problems[question] = Problem(question_id(f"gym_{kind}", question), prompts, question, entry)
        if len(problems) == count or n_rejected == MAX_REJECTED:
            break
    if len(problems) < count:
        option = "n_train" if split == "train" else "n_validation"
        raise ValueError(
            f"gym:{kind} with the options {dict(options)} has about {len(problems)} distinct {split} problems, got count={count}. "
            f"Write {option}={len(problems)} or less, or use options with more problems."
        )
    return list(problems.values())
