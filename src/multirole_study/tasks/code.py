"""code: DeepCoder's PrimeIntellect problems, the paper's Code task (sec 4). Hidden tests run in `multirole_sandbox`.

The 16,252 published rows make 15,252 training and 1,000 validation rows: they are shuffled as by `shuffle(seed=42)`, and the
first 1,000 rows are the paper's test split ("validation" here). Before splitting, the authors removed every test that a
reference run had not marked as passed, and every row without remaining tests. The file with these marks
(`coding_dataset_filtering/runtime_results.json`) is not public, so their split cannot be rebuilt.

A question is the problem text in a template that states the answer format, as in LiveCodeBench. Programs have the standard
library but neither numpy nor files; `multirole_sandbox` lists further limits.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any, ClassVar, Literal

from multirole.chat.replies import text_outside_thoughts
from multirole.types import Problem, Reward
from multirole_sandbox import RULES, Limits, Verdict, grade_batch, normalise_tests
from multirole_study.tasks.fences import extract_program
from multirole_study.tasks.sources import BadRow, Published, Row, Source, question_id, text_of

Rule = Literal["fraction", "all_pass"]


def to_problem(row: Row) -> Problem:
    """Convert a row to a problem. Its `tests` choose the template; the reference is JSON text, which saves memory."""
    problem = text_of(row, "problem", "no_question")
    try:
        tests = _tests_of(row, "tests")
    except ValueError as error:
        raise BadRow("unreadable_tests") from error
    names = {test["metadata"]["func_name"] if "metadata" in test else "" for test in tests}
    if len(names) > 1:
        raise BadRow("mixed_tests")
    name = names.pop()  # the authors' template asks for a stdin program even if the tests call a function
    question = _frame("function" if name else "stdin").substitute(problem=problem, func_name=name)
    return Problem(question_id("code", question), "code", question, json.dumps(tests))


@cache
def _frame(name: str) -> Template:
    return Template(files(__package__).joinpath("code_formats", f"{name}.md").read_text(encoding="utf-8").rstrip("\n"))


def n_test(n_rows: int) -> int:
    """Return the number of test rows: 1,000 as in the paper, or a tenth (rounded up) of fewer than 2,000 rows."""
    return 1_000 if n_rows >= 2_000 else math.ceil(n_rows / 10)


SOURCE = Source(
    repo="agentica-org/DeepCoder-Preview-Dataset",
    revision="780aeec7b7716e34f0b9e02bb624fc6ad8384725",
    files=tuple(
        (f"primeintellect/train-0000{i}-of-00005.parquet", sha256)
        for i, sha256 in enumerate((
            "a1efc9d5e9eb6a9977576b08e5349758c8b139131ea5d13ef5c390f2a21db538",
            "2a645ca9e77976f49699ad9c25d79a697203e8811b0887ae256e7301d3e72681",
            "2bd0cc7207fa0aad722cc21a275afd777ab1debb318c4b9a9eccb18f7fee32f0",
            "4503d28636d63dab88e4a07a54b4a8257c9ad2e1663e8cdcb1216e2306550427",
            "b1148bc2f0939843d500e43668e643c619a67f17797358a1ddf8e33c9782a545",
        ))
    ),
    to_problem=to_problem,
    n_test=n_test,
    columns=("problem", "tests"),
    download_gb=1.2,
    note="unfiltered: the authors' runtime filter is not public",
)  # fmt: skip


@dataclass(frozen=True)
class ProgramTask:
    """Base class of tasks whose answers are programs. `reward` is the "fraction" of passed tests (paper A.7) or "all_pass"."""

    reward: Rule = "fraction"

    def extract(self, text: str) -> str | None:
        """Return the program in a reply, or None; see `fences`."""
        return extract_program(text)

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Score by hidden tests. `is_correct` means that all passed; the reason is that of the first failed test."""
        tests = [problem.reference for problem in problems]  # JSON text
        return [
            Reward(0.0, "no_code", False) if v is None else Reward(v.reward, v.reason, v.reason == "passed")
            for v in grade([self.extract(text) for text in texts], tests, self.reward)
        ]


@dataclass(frozen=True)
class Code(ProgramTask, Published):
    """The code task. `data` replaces the download."""

    name: ClassVar[str] = "code"
    source: ClassVar[Source] = SOURCE


def grade(
    programs: Sequence[str | None], tests: Sequence[str], rule: Rule, limits: Limits | None = None
) -> list[Verdict | None]:
    """Run each distinct program once on its tests (JSON text); the verdict is None without a program."""
    pairs = list(zip(programs, tests, strict=True))
    distinct = {(program, text): None for program, text in pairs if program}
    verdicts = grade_batch([program for program, _ in distinct], [text for _, text in distinct], rule, limits)
    verdict_by_pair = dict(zip(distinct, verdicts, strict=True))
    return [verdict_by_pair[program, text] if program else None for program, text in pairs]


def hidden_tests(
    column: str | Sequence[str] = "tests", rule: Rule = "fraction", limits: Limits | None = None
) -> Callable[..., Any]:
    """Make a reward function, in TRL's signature, that runs each completion's last program on the tests in a column.

    A row's tests may have any published form that `multirole_sandbox.published` reads. Tests of several columns are
    concatenated, as for LiveCodeBench's `("public_test_cases", "private_test_cases")`. Functional tests that do not name their function take
    the name in the row's column "fn_name" or "metadata". The reward is the passed fraction, or 1 or 0 under "all_pass"; it
    is 0 without a program.
    """
    if rule not in RULES:  # the sandbox would raise only after a whole rollout
        raise ValueError(f"`rule` must be one of {list(RULES)}, got {rule!r}.")
    names = [column] if isinstance(column, str) else list(column)

    def passed_tests(prompts: list, completions: list, **columns: list[Any]) -> list[float]:
        if missing := [name for name in names if name not in columns]:
            raise ValueError(
                f"hidden_tests(column={column!r}) needs the column {missing[0]!r}, the rows have {sorted(columns)}."
            )
        rows = [{name: values[i] for name, values in columns.items()} for i in range(len(completions))]
        tests = [json.dumps([test for name in names for test in _tests_of(row, name)]) for row in rows]
        texts = [
            one if isinstance(one, str) else one[-1]["content"] for one in completions
        ]  # text or messages, as in TRL
        verdicts = grade([extract_program(text_outside_thoughts(text)) for text in texts], tests, rule, limits)
        return [0.0 if verdict is None else verdict.reward for verdict in verdicts]

    return passed_tests


def _tests_of(row: Row, column: str) -> list[dict]:
    """Return the tests in a column; other columns may name their function. Raises ValueError."""
    metadata = row.get("metadata")
    if isinstance(metadata, str):
        try:
            metadata = json.loads(metadata)
        except ValueError:  # an unrelated column with that name
            metadata = None
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    return normalise_tests(row.get(column, ""), row.get("fn_name") or named)
