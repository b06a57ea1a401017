"""User-supplied tasks: rows, a reward function with TRL's signature, and optional answer extraction and prompts."""

import hashlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from multirole.chat.messages import conversation_of
from multirole.types import MAX_REWARD, Message, Problem, Reward, check_columns
from multirole.workflows.prompts import folder_of
from multirole_study.tasks.sources import DataError, broken_value, file_of_rows, question_id, read_rows, take
from multirole_study.tasks.splits import check_split

RewardFunction = Callable[..., list[float]]
"""`reward(prompts, completions, **columns)` returns one finite number per completion; 1 or more counts as correct."""
Data = str | Path | Iterable[Mapping[str, Any]]
"""A file of rows, a `datasets.Dataset`, or a list of dicts. Each row has a "prompt" column and any other columns; a
column that only some rows have is None in the others."""


@runtime_checkable
class TaskLike(Protocol):
    """The interface that training needs; `Math`, `Code`, `TinyChain`, `TinyPipe` and `Task` implement it."""

    @property
    def name(self) -> str: ...
    def problems(self, split: str, count: int | None = None) -> list[Problem]: ...
    def extract(self, text: str) -> str | None: ...
    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]: ...
    def describe(self) -> dict[str, object]: ...


class RewardError(RuntimeError):
    """A task's reward or extract function failed; nothing was trained on its batch."""


class Task:
    """A user-supplied task.

    `prompts` is a folder of <role>.md templates for the built-in workflows, or the name of one of their sets, such as
    "math"; the default "general" adds nothing to a row's prompt. `extract` returns the answer in a text, or None; by
    default any non-blank text is an answer.
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
        self.name, self.reward, self.extractor = name, reward, extract or (lambda text: text.strip() or None)
        self._prompts = str(prompts or "")
        is_own = not folder_of(self._prompts).is_relative_to(folder_of("").parent)
        self.prompt_set = "" if is_own else folder_of(self._prompts).name
        """The set of the library's templates; "" for a folder of one's own, which `describe` has."""
        self._data: dict[str, Data] = {"train": train, "validation": validation}
        self._problems: dict[str, list[Problem]] = {}
        self._read_at: list[tuple[int, int]] = []
        """Time and size of each file of rows when it was read."""
        self._places: dict[str, str] = {}
        """Problem id -> place of its row, for error messages."""

    def problems(self, split: str, count: int | None = None) -> list[Problem]:
        """Return the first `count` problems of "train" or "validation", or all of them, in the order of the rows."""
        check_split(split)
        files = [file_of_rows(data).stat() for data in self._data.values() if isinstance(data, (str, Path))]
        if self._read_at != (read_at := [(file.st_mtime_ns, file.st_size) for file in files]):
            self._problems, self._places, self._read_at = {}, {}, read_at
        if split not in self._problems:
            self._problems[split] = self._read(split)
        return take(self._problems[split], split, count)

    def describe(self) -> dict[str, object]:
        """Return the task's name, the source, count and SHA-256 of each split's rows, and the SHA-256 of each of its own templates."""
        paths = [] if self.prompt_set else sorted(folder_of(self._prompts).glob("*.md"))
        templates = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
        splits = {split: self._describe(split) for split in self._data}
        return {"name": self.name} | splits | ({"prompts": templates} if templates else {})

    def extract(self, text: str) -> str | None:
        """Return the answer in a text, or None. Raises RewardError if `extract` raises or returns another type."""
        try:
            answer = self.extractor(text)
        except (Exception, SystemExit) as error:
            raise RewardError(f"The `extract` of task {self.name!r} raised {error!r} on {text[:80]!r}.") from error
        if answer is not None and not isinstance(answer, str):
            raise RewardError(f"The `extract` of task {self.name!r} must return a text or None, got {answer!r}.")
        return answer

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Call the reward function once on the batch. Raises RewardError if it raises or does not return numbers."""
        values = self._call(problems, texts) if problems else []
        return [Reward(value, "correct" if value >= 1 else "wrong", value >= 1) for value in values]

    def _call(self, problems: list[Problem], texts: list[str]) -> list[float]:
        prompts = list(map(_prompt_of, problems))
        names = dict.fromkeys(name for problem in problems for name in problem.reference)
        columns = {name: [problem.reference.get(name) for problem in problems] for name in names}
        try:
            returned = self.reward(prompts=prompts, completions=texts, **columns)
            values = list(returned) if _is_list_like(returned) else None
        except (Exception, SystemExit) as error:  # whatever the user's function raises is reported with the row
            if len(problems) > 1:  # call one by one, to find the failing row
                for problem, text in zip(problems, texts, strict=True):
                    self._call([problem], [text])
            raise RewardError(
                f"The reward of task {self.name!r} raised {error!r} on {self._rows_of(problems)}."
            ) from error
        if values is None or len(values) != len(problems):
            raise RewardError(
                f"The reward of task {self.name!r} must return a list with one number per completion. It returned "
                f"{_short(returned) if values is None else f'{len(values)} of them'} for {len(problems)} completions, of "
                f"{self._rows_of(problems)}."
            )
        return [self._number(value, problem) for value, problem in zip(values, problems, strict=True)]

    def _number(self, value: object, problem: Problem) -> float:
        """Convert one reward to a float. Raises RewardError unless it is a finite number in the allowed range."""
        try:
            number = math.nan if isinstance(value, (str, bytes)) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: a tensor of several numbers
            number = math.nan
        if not abs(number) <= MAX_REWARD:
            raise RewardError(
                f"The reward of task {self.name!r} must return numbers between {-MAX_REWARD:g} and {MAX_REWARD:g}. It returned "
                f"{_short(value)} for {self._rows_of([problem])}."
            )
        return number

    def _rows_of(self, problems: list[Problem]) -> str:
        """Name the first problems' rows for error messages: file, row number, and id if any."""
        return ", ".join(self._places.get(problem.id, problem.id) for problem in problems[:3])

    def _read(self, split: str) -> list[Problem]:
        """Return a split's problems, named by their prompts. A row whose prompt another one has is also named by its number or its split."""
        data = self._data[split]
        rows = self._checked_rows(data)
        trained = {} if split == "train" else {problem.id: problem.reference for problem in self.problems("train")}
        columns = list(
            dict.fromkeys(name for row in rows for name in row if name != "prompt")
        )  # columns of all rows, not only of the first
        problems: dict[str, Problem] = {}
        for number, row in enumerate(rows):
            *history, question = conversation_of(row["prompt"])
            text = json.dumps([*history, question], sort_keys=True) if history else question["content"]
            name = question_id(self.name, text)
            reference = {column: row.get(column) for column in columns}
            names = (name, f"{name}-{number}", f"{name}-{split}", f"{name}-{split}-{number}")
            name = next(one for one in names if one not in problems and trained.get(one, reference) == reference)
            problems[name] = Problem(name, self._prompts, question["content"], reference, history)
            place = _place(number, row, data)
            self._places[name] = f"{self._places[name]} or {place}" if name in self._places else place
        return list(problems.values())

    def _checked_rows(self, data: Data) -> list[Mapping[str, Any]]:
        """Return all rows of a split. Raises DataError for the first invalid row."""
        rows = list(read_rows(file_of_rows(data)) if isinstance(data, (str, Path)) else data)
        for number, row in enumerate(rows):
            place = _place(number, row, data)
            prompt = row.get("prompt")
            if not isinstance(prompt, (str, list)) or not prompt or (isinstance(prompt, str) and not prompt.strip()):
                raise DataError(
                    f"Each row of task {self.name!r} needs a text in the column 'prompt', or messages, but {place} has {_short(prompt)}; "
                    f"its columns are {sorted(row)}."
                )
            try:
                conversation_of(prompt)
            except ValueError as error:
                raise DataError(f"Task {self.name!r}: {place} cannot be a prompt: {error}") from error
            for column, value in row.items():
                if wrong := broken_value(value):
                    raise DataError(
                        f"The rows of task {self.name!r} must be finite numbers and valid text, but the column {column!r} of "
                        f"{place} holds {wrong}. Correct the row, or leave the value out (null)."
                    )
            check_columns(f"Task {self.name!r}: {place}", row)
        if not rows:
            raise DataError(f"Each split of task {self.name!r} needs at least one row, got none from {_source(data)}.")
        return rows

    def _describe(self, split: str) -> dict[str, object]:
        rows = [{"prompt": _prompt_of(problem)} | problem.reference for problem in self.problems(split)]
        text = json.dumps(rows, sort_keys=True, default=str)
        source = Path(_source(self._data[split])).name  # no home paths in a record
        return {"source": source, "rows": len(rows), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _source(data: Data) -> str:
    return str(data) if isinstance(data, (str, Path)) else f"a {type(data).__name__} in memory"


def _prompt_of(problem: Problem) -> str | list[Message]:
    """Return the prompt as a reward function gets it: its text, or its messages if there are several."""
    return problem.messages if problem.history else problem.question


def _place(number: int, row: Mapping[str, Any], data: Data) -> str:
    """Describe a row: its number from 0, its id if any, and its file."""
    name = f" (id {row['id']!r})" if isinstance(row.get("id"), (str, int)) else ""
    return f"row {number}{name} of {_source(data)}"


def _is_list_like(returned: object) -> bool:
    """Return whether a reward function returned an ordered collection: a list, an array, a generator."""
    return isinstance(returned, Iterable) and not isinstance(returned, (str, bytes, Mapping, AbstractSet))


def _short(value: object) -> str:
    """Format a value for an error message, with its type."""
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns that it was never awaited
        return "a coroutine (a task's reward is a plain function, not `async def`)"
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return text if value is None else f"{text} ({type(value).__name__})"
