"""Check datasets, and make problems of their rows."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from datasets import Dataset, IterableDataset

from multirole.chat.messages import conversation_of
from multirole.inputs.reward_functions import check_signature
from multirole.inputs.streams import IndexedRows, StreamedRows, first_row, is_transformed, read_whole
from multirole.types import Problem, check_columns

INDEX = "_index"
"""Column that carries a row's index in the dataset through TRL's data loader."""


def check_dataset(name: str, dataset: Any, reward_funcs: Iterable[Any] = ()) -> None:
    """Raise ValueError or TypeError if a dataset's rows are not prompts, or a reward function cannot take its columns."""
    if dataset is None:
        raise ValueError(
            f"`{name}` is required: the workflow plays its prompts. `Dataset.from_list` makes one of a list of rows."
        )
    if not isinstance(dataset, (Dataset, IterableDataset)):
        is_dict = isinstance(dataset, dict)
        advice = (
            f"Pass one of its splits, {list(dataset)}." if is_dict else "`Dataset.from_list` converts a list of rows."
        )
        raise TypeError(f"`{name}` must be a `Dataset` or `IterableDataset`, got `{type(dataset).__name__}`. {advice}")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"`{name}` is empty.")
    if is_transformed(dataset) or not dataset.column_names:  # a stream may not know its columns
        columns = list(first_row(name, dataset))
    else:
        columns = list(dataset.column_names)
    if "prompt" not in columns:
        raise ValueError(f'`{name}` needs a "prompt" column; it has {columns}.')
    if images := {"image", "images"} & set(columns):
        raise ValueError(
            f"`{name}` has a column {images.pop()!r}, but only text prompts are supported. Remove or rename it."
        )
    if INDEX in columns:
        raise ValueError(f"`{name}` has a column {INDEX!r}, where the trainer stores row indices. Rename it.")
    check_columns(f"`{name}`", columns)
    if isinstance(dataset, Dataset):  # the rows of a stream are checked as they are read
        check_prompts(name, dataset)
        if "id" in columns and not is_transformed(
            dataset
        ):  # a transform may draw ids, which are checked where they are used
            check_ids(f"`{name}`", (problem_name(name, i) for i, name in enumerate(dataset["id"])))
    for function in reward_funcs:
        check_signature(function, name, columns)


def checked_evaluation(dataset: Any, reward_funcs: Iterable[Any], argument: str = "eval_dataset") -> Any:
    """Check an evaluation set, or a dict of several, as `check_dataset` does, and read streams into datasets."""
    named = dataset if isinstance(dataset, dict) else {"": dataset}
    checked = {}
    for key, evaluation_set in named.items():
        name = f"{argument}[{key!r}]" if isinstance(dataset, dict) else argument
        check_dataset(name, evaluation_set, reward_funcs)
        checked[key] = (
            read_whole(name, evaluation_set) if isinstance(evaluation_set, IterableDataset) else evaluation_set
        )
    return checked if isinstance(dataset, dict) else checked[""]


def to_problems(rows: Iterable[dict[str, Any]]) -> list[Problem]:
    """Convert each row to a problem. The optional columns "id" and "task" give its name and its prompt templates."""
    problems = [to_problem(row, i) for i, row in enumerate(rows)]
    check_ids("the dataset", (problem.id for problem in problems))
    return problems


def to_problem(row: dict[str, Any], index: int) -> Problem:
    """Convert a row of a dataset to a problem, named by its "id" or else by its index."""
    columns = {name: value for name, value in row.items() if name not in ("prompt", INDEX)}
    try:
        *history, question = conversation_of(row["prompt"])
    except ValueError as error:
        raise ValueError(f"Row {index}: {error}") from error
    name = problem_name(row.get("id"), index)
    return Problem(name, str(row.get("task") or ""), question["content"], columns, history, row["prompt"])


def to_row(problem: Problem) -> dict[str, Any]:
    """Return the row that a problem was made of (`to_problem`), or one with its prompt, id and task if it was made otherwise."""
    if problem.prompt is None:
        prompt = problem.messages if problem.history else problem.question
        return {"prompt": prompt, "id": problem.id, "task": problem.task}
    return problem.reference | {"prompt": problem.prompt}


def problem_name(name: Any, index: int) -> str:
    """Return the name of a problem: its "id" or else its index."""
    return str(index if name is None else name)


class Problems(Sequence[Problem]):
    """The problems of a training set's rows. Each is made when it is read, so that a large set takes no memory."""

    def __init__(self, rows: IndexedRows | StreamedRows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Problem]:
        return (to_problem(row, i) for i, row in enumerate(self.rows))

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        at = range(len(self))[index]
        return to_problem(self.rows[at], at) if isinstance(at, int) else [to_problem(self.rows[i], i) for i in at]


def check_ids(name: str, ids: Iterable[str]) -> None:
    """Raise ValueError if two rows of a dataset have one id."""
    for problem_id, count in Counter(ids).items():
        if count > 1:
            raise ValueError(
                f'The "id" column of {name} names {count} rows {problem_id!r}, but an id seeds the sampling of its problem and groups its episodes. '
                "Make ids unique, or leave the column out."
            )


def check_prompts(name: str, dataset: Dataset) -> None:
    """Raise ValueError for a prompt that is neither text nor a conversation of texts that ends with a user message."""
    prompts = (row["prompt"] for row in dataset) if is_transformed(dataset) else dataset["prompt"]
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, str):
            try:
                conversation_of(prompt)
            except ValueError as error:
                raise ValueError(f"Row {index} of `{name}`: {error}") from error
