"""math: DAPO-Math-17K, the paper's Math task (paper sec 4). The answer's last `\\boxed{}` is compared by math-verify.

12,704 training and 1,412 validation problems: the 14,116 English rows, split like `train_test_split(test_size=0.1,
seed=42)` of `datasets`. "validation" is the paper's test split. Your own rows: see `sources.py`.
"""

import math
from pathlib import Path

from multirole.core.types import Problem, Reward
from multirole.tasks.math_answer import extract_boxed, grade_answers
from multirole.tasks.sources import Layout, Pin, Row, load, question_id, text_of

NAME = "math"
PIN = Pin(
    repo="open-r1/DAPO-Math-17k-Processed",
    config="en",
    revision="31dd309567e3da778038cc87d868b6097a3ccf68",
    files=(
        ("en/train-00000-of-00001.parquet", "40f672fe8b6dbeee953ae5acc75a38e99144e682450e07c625c87c734ec76285"),
    ),
    rows=14_116,
)  # fmt: skip


def n_test(n_rows: int) -> int:
    """Test rows among n: 10 %, rounded up."""
    return math.ceil(0.1 * n_rows)


def to_problem(row: Row) -> Problem:
    """`prompt` is the question, `solution` the reference answer (text or a number)."""
    question = text_of(row, "prompt", "no_question")
    solution = row.get("solution")
    if isinstance(solution, (int, float)) and not isinstance(solution, bool):
        row = row | {"solution": str(solution)}
    return Problem(question_id(NAME, question), NAME, question, text_of(row, "solution", "no_answer").strip())


LAYOUT = Layout(columns=("prompt", "solution"), optional=(), to_problem=to_problem, n_test=n_test)


def problems(split: str, count: int | None = None, data: str | Path | None = None) -> list[Problem]:
    """The problems of "train" or "validation", in the split's order; `count=None` is all, a smaller count a prefix."""
    return load(PIN, LAYOUT, data).take(split, count)


def describe(data: str | Path | None = None) -> dict[str, object]:
    """What the provenance of a run says about its rows: repository, revision, checksums, counts, what was left out."""
    return load(PIN, LAYOUT, data).description


def extract(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, or None."""
    return extract_boxed(text)


def score_batch(problems: list[Problem], texts: list[str], malformed: float = -0.1) -> list[Reward]:
    """Reward 1 for an equivalent answer, 0 for any other, `malformed` without a box. The reason is the verdict."""
    answers = [extract(text) for text in texts]
    pairs = [
        None if answer is None else (answer, problem.reference)
        for answer, problem in zip(answers, problems, strict=True)
    ]
    distinct = list(dict.fromkeys(pair for pair in pairs if pair is not None))  # one problem's episodes agree often
    verdicts = dict(zip(distinct, grade_answers(distinct), strict=True))
    return [
        Reward(malformed, "no_box", False)
        if pair is None
        else Reward(float(verdicts[pair] == "correct"), verdicts[pair], verdicts[pair] == "correct")
        for pair in pairs
    ]
