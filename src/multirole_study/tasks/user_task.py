"""A task of one's own: rows, a reward function with TRL's signature, and optionally answer extraction and prompts."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from multirole.core.types import Problem, Reward
from multirole_study.tasks.sources import DataError, file_of_rows, question_id, read_rows, take
from multirole_study.tasks.splits import check_split

RewardFunction = Callable[..., list[float]]
"""`reward(prompts, completions, **columns)` returns one number per completion; 1 or more counts as correct."""
Data = str | Path | Iterable[Mapping[str, Any]]
"""A file of rows, a `datasets.Dataset`, or a list of dicts; each row has a "prompt" column and any others."""


@runtime_checkable
class TaskLike(Protocol):
    """What training needs of a task; `Math`, `Code`, `TinyChain`, `TinyPipe` and `Task` are tasks."""

    @property
    def name(self) -> str: ...
    def problems(self, split: str, count: int | None = None) -> list[Problem]: ...
    def extract(self, text: str) -> str | None: ...
    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]: ...
    def describe(self) -> dict[str, object]: ...


class RewardError(RuntimeError):
    """A task's reward or extract function failed; nothing was trained on its batch."""


class Task:
    """A task of one's own.

    `prompts` is a folder of <role>.md templates for the built-in workflows, or one of their sets such as "math"; without
    it they use "general", which adds nothing to a row's prompt. `extract` returns the answer in a text, or None where
    there is none; without it, any text that is not blank is an answer.
    """

    def __init__(
        self,
        name: str,
        train: Data,
        validation: Data,
        reward: RewardFunction,
        extract: Callable[[str], str | None] | None = None,
        prompts: str | Path | None = None,
    ) -> None:
        if not callable(reward):
            raise TypeError(
                f"The `reward` of task {name!r} must be one function, got {reward!r}. Let it return the sum of several."
            )
        self.name, self.reward, self._extract = name, reward, extract or (lambda text: text.strip() or None)
        self._prompts = str(prompts or "")
        self._data: dict[str, Data] = {"train": train, "validation": validation}
        self._problems: dict[str, list[Problem]] = {}

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` problems of "train" or "validation", or all of them, in the order of the rows."""
        check_split(split)
        if split not in self._problems:
            self._problems[split] = self._read(self._data[split])
        return take(self._problems[split], split, count)

    def describe(self) -> dict[str, object]:
        """Return the name of the task, and the source, the number and the SHA-256 of each split's rows."""
        return {"name": self.name} | {split: self._describe(split) for split in self._data}

    def extract(self, text: str) -> str | None:
        """Return the answer in a text, or None. Raises RewardError where the function raises or returns anything else."""
        try:
            found = self._extract(text)
        except (Exception, SystemExit) as error:
            raise RewardError(f"The `extract` of task {self.name!r} raised {error!r} on {text[:80]!r}.") from error
        if found is not None and not isinstance(found, str):
            raise RewardError(f"The `extract` of task {self.name!r} must return a text or None, got {found!r}.")
        return found

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Call the reward function once on the batch. Raises RewardError where it raises or returns no numbers."""
        values = self._call(problems, texts) if problems else []
        return [Reward(value, "correct" if value >= 1 else "wrong", value >= 1) for value in values]

    def _call(self, problems: list[Problem], texts: list[str]) -> list[float]:
        ids, prompts = [problem.id for problem in problems], [problem.question for problem in problems]
        columns = {name: [problem.reference.get(name) for problem in problems] for name in problems[0].reference}
        try:
            found = self.reward(prompts=prompts, completions=texts, **columns)
        except (Exception, SystemExit) as error:  # whatever the user's function raises is reported with the problem
            if len(problems) > 1:  # alone, the one that failed is found
                for problem, text in zip(problems, texts, strict=True):
                    self._call([problem], [text])
            raise RewardError(f"The reward of task {self.name!r} raised {error!r} on {', '.join(ids[:3])}.") from error
        values = list(found) if isinstance(found, Iterable) and not isinstance(found, (str, bytes)) else None
        if values is None or len(values) != len(ids):
            raise RewardError(
                f"The reward of task {self.name!r} must return a list with one number per completion, got "
                f"{repr(found)[:80] if values is None else len(values)} for {len(ids)} completions, the first of {ids[0]}."
            )
        return [
            self._number(value, problem, text) for value, problem, text in zip(values, problems, texts, strict=True)
        ]

    def _number(self, value: object, problem: Problem, text: str) -> float:
        try:
            return float(value)  # type: ignore[arg-type]  (numbers, and arrays of one)
        except (TypeError, ValueError):
            raise RewardError(
                f"The reward of task {self.name!r} returned {value!r} and no number for the answer {text[:80]!r} to "
                f"{problem.question[:80]!r} ({problem.id})."
            ) from None

    def _read(self, data: Data) -> list[Problem]:
        problems: dict[str, Problem] = {}
        rows = list(read_rows(file_of_rows(data)) if isinstance(data, (str, Path)) else data)
        columns = dict.fromkeys(name for row in rows for name in row if name != "prompt")  # a row may lack some
        for number, row in enumerate(rows):
            question = row.get("prompt")
            if not isinstance(question, str) or not question.strip():
                raise DataError(
                    f"Each row of task {self.name!r} needs a text in the column 'prompt', but row {number} of "
                    f"{_source(data)} has {question!r}; its columns are {sorted(row)}."
                )
            name = question_id(self.name, question)
            name = f"{name}-{number}" if name in problems else name
            values = {column: row.get(column) for column in columns}
            problems[name] = Problem(name, self._prompts, question, values)
        if not problems:
            raise DataError(f"Each split of task {self.name!r} needs at least one row, got none from {_source(data)}.")
        return list(problems.values())

    def _describe(self, split: str) -> dict[str, object]:
        rows = [{"prompt": problem.question} | problem.reference for problem in self.problems(split)]
        text = json.dumps(rows, sort_keys=True, default=str)
        source = Path(_source(self._data[split])).name  # no home paths in a record
        return {"source": source, "rows": len(rows), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _source(data: Data) -> str:
    return str(data) if isinstance(data, (str, Path)) else f"a {type(data).__name__} in memory"
