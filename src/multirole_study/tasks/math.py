"""math: DAPO-Math-17K, the paper's Math task (paper sec 4). `math_answers` compares the last `\\boxed{}` exactly.

12,704 training and 1,412 validation problems: the 14,116 English rows with one row in ten, rounded up, for validation,
which is the paper's test split. User-supplied rows have the columns `prompt` and `solution` (text or a number).

Departures from the released code, whose grader is string equality or a sympy comparison inside the trainer: 2/4 is 1/2
and 84/2 is 42 here; the text after the last `</think>` counts, not after the first, and a thought that is cut off is no
answer; `<|begin_of_box|>` is ignored; `\\boxed {5}` with a space is a box, and so is `\\fbox{5}`.
"""

import math
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar

from math_answers import extract, grade
from math_answers.decide import MAX_CHARACTERS
from multirole.types import Problem, Reward
from multirole_study.tasks.sources import BadRow, Published, Row, Source, fault_of, question_id, text_of

NO_REFERENCE = re.compile(r"[+-]?(?:nan|inf)", re.IGNORECASE | re.ASCII)
"""Text of a missing or overflowed number."""


def to_problem(row: Row) -> Problem:
    """Convert a row to a problem with `prompt` as the question and `solution` as the reference."""
    question, solution = text_of(row, "prompt", "no_question"), row.get("solution")
    if fault := fault_of(solution):
        raise BadRow(fault)
    if isinstance(solution, (int, float, Decimal)) and not isinstance(solution, bool):
        row = row | {"solution": str(solution)}
    reference = text_of(row, "solution", "no_answer").strip()
    if NO_REFERENCE.fullmatch(reference):
        raise BadRow("not_finite")
    if len(reference) > MAX_CHARACTERS:
        raise BadRow("too_long")
    return Problem(question_id("math", question), "math", question, reference)


SOURCE = Source(
    repo="open-r1/DAPO-Math-17k-Processed",
    revision="31dd309567e3da778038cc87d868b6097a3ccf68",
    files=(
        ("en/train-00000-of-00001.parquet", "40f672fe8b6dbeee953ae5acc75a38e99144e682450e07c625c87c734ec76285"),
    ),
    to_problem=to_problem,
    n_test=lambda n_rows: math.ceil(0.1 * n_rows),
    columns=("prompt", "solution"),
    download_gb=0.007,  # the Hub lists 6.27 MB for the file of all languages, of which this is a part
)  # fmt: skip


@dataclass(frozen=True)
class Math(Published):
    """The math task. `data` replaces the download; `malformed_reward` is the reward without a box."""

    malformed_reward: float = -0.1
    name: ClassVar[str] = "math"
    source: ClassVar[Source] = SOURCE

    def extract(self, text: str) -> str | None:
        """Return the content of the last `\\boxed{...}`, or None."""
        return extract(text)

    def score(self, problems: list[Problem], texts: list[str]) -> list[Reward]:
        """Return reward 1 for an equivalent answer, 0 for any other, `malformed_reward` without a box; the reason is the verdict of `math_answers.grade`."""
        boxed = zip(map(extract, texts), problems, strict=True)
        pairs = [None if answer is None else (answer, problem.reference) for answer, problem in boxed]
        verdicts = iter(grade([pair for pair in pairs if pair is not None]))
        graded = ["no_box" if pair is None else next(verdicts) for pair in pairs]
        values = {"correct": 1.0, "no_box": self.malformed_reward}
        return [Reward(values.get(verdict, 0.0), verdict, verdict == "correct") for verdict in graded]
