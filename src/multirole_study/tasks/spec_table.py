"""Tables of functions that a sentence of English describes, as problems with hidden tests.

Functions are compared by their outputs on a set of inputs, so that two sentences for the same function count once, and a hash of these
outputs decides the split: no validation function is in the training split under another sentence. A function's tests distinguish it from
every other one of its table with the same arguments, and have the table's edge cases.
"""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import ClassVar, NamedTuple

from multirole.types import Problem
from multirole_study.tasks.code import ProgramTask
from multirole_study.tasks.sources import question_id, take
from multirole_study.tasks.splits import check_split, split_of

Arguments = tuple
Function = Callable[..., object]
N_PROBES = 200
"""The number of inputs that distinguish functions and supply the tests."""


class Spec(NamedTuple):
    """A signature, the sentence that describes the return value, and the function."""

    signature: str
    sentence: str
    function: Function


@dataclass(frozen=True, eq=False)
class Table:
    """A table of functions.

    Args:
        name: of the task.
        prompts: the roles' prompts (`multirole.workflows.prompts`).
        question: a template with `sentence` and `signature`.
        groups: generators of the functions.
        inputs: generators of random arguments by signature.
        edges: arguments by signature that every function is tested on.
        validation_share: one function in so many belongs to the validation split.
        n_tests: the smallest number of tests.
    """

    name: str
    prompts: str
    question: str
    groups: Sequence[Callable[[], Iterator[Spec]]]
    inputs: Mapping[str, Callable[[random.Random], Arguments]]
    n_tests: int
    edges: Mapping[str, Sequence[Arguments]] = field(default_factory=dict)
    validation_share: int = 6

    @cache  # noqa: B019  (tables are made once, at import)
    def probes(self, signature: str) -> list[Arguments]:
        """Return the inputs that distinguish functions with this signature, edge cases first."""
        rng, edges = random.Random(f"{self.name}/{signature}/probes"), [*self.edges.get(signature, ())]
        return edges + [self.inputs[signature](rng) for _ in range(N_PROBES - len(edges))]

    def behaviour(self, spec: Spec) -> tuple[str, ...]:
        """Return the function's output for each probe as JSON; equal outputs mean the same function."""
        return tuple(json.dumps(spec.function(*arguments)) for arguments in self.probes(spec.signature))

    @cache  # noqa: B019
    def specs(self) -> dict[tuple[str, tuple[str, ...]], Spec]:
        """Return the distinct functions of the table by signature and behaviour."""
        distinct: dict[tuple[str, tuple[str, ...]], Spec] = {}
        for group in self.groups:
            for spec in group():
                distinct.setdefault((spec.signature, self.behaviour(spec)), spec)
        return distinct

    def tests_of(self, spec: Spec) -> list[dict]:
        """Choose hidden tests that distinguish the function from every other one, with varied outputs if possible."""
        outputs = self.behaviour(spec)
        chosen = [*range(len(self.edges.get(spec.signature, ())))]
        rivals = [rival for signature, rival in self.specs() if signature == spec.signature and rival != outputs]
        rivals = [rival for rival in rivals if all(rival[i] == outputs[i] for i in chosen)]
        while rivals:  # the probe that excludes most of the other functions
            equal = [column.count(output) for column, output in zip(zip(*rivals, strict=True), outputs, strict=True)]
            best = equal.index(min(equal))
            chosen.append(best)
            rivals = [rival for rival in rivals if rival[best] == outputs[best]]
        while len(chosen) < self.n_tests:  # the first probe whose output is the rarest among the tests so far
            outputs_so_far = [outputs[i] for i in chosen]
            chosen.append(min(set(range(N_PROBES)) - set(chosen), key=lambda i: (outputs_so_far.count(outputs[i]), i)))
        call = {"testtype": "functional", "metadata": {"func_name": "f"}}
        inputs = self.probes(spec.signature)
        return [{"input": "\n".join(map(json.dumps, inputs[i])), "output": outputs[i]} | call for i in chosen]

    def to_problem(self, spec: Spec) -> Problem:
        """Return the problem that asks for a function."""
        question = self.question.format(sentence=spec.sentence, signature=spec.signature)
        return Problem(question_id(self.name, question), self.prompts, question, json.dumps(self.tests_of(spec)))

    @cache  # noqa: B019
    def problems(self) -> dict[str, list[Problem]]:
        """Return the problems by split, shuffled."""
        splits: dict[str, list[Problem]] = {"train": [], "validation": []}
        for key, spec in self.specs().items():
            splits[split_of(json.dumps(key), self.validation_share)].append(self.to_problem(spec))
        for split, problems in splits.items():
            random.Random(f"{self.name}/{split}").shuffle(problems)
        return splits


@dataclass(frozen=True)
class TableTask(ProgramTask):
    """Base class of the tasks of a table."""

    name: ClassVar[str]
    table: ClassVar[Table]

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` problems of "train" or "validation", or all of them."""
        check_split(split)
        return take(self.table.problems()[split], split, count)

    def describe(self) -> dict[str, object]:
        """Return the task's name and the number of functions."""
        return {"name": self.name, "is_embedded": True, "functions": len(self.table.specs())}
