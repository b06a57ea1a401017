"""Answer a question about arms: the one engine behind every table of verdicts.

A question is asked of lines: an arm, or an arm minus another one, paired by seed. The lines of a question are one family of its correction. Each
line becomes an interval (`estimates`) of the seeds that its looks read (`looks`), and a verdict by the question's rule (`verdicts`).

    peaks = Question(MEASURES["peak"], rule=Rule(has_margin=True), looks=Looks((5, 10)), correction="holm")
    answers(peaks, [Line({place: runs_of_ip}, {place: runs_of_sp})])
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd

from multirole_study.compare.arms import Runs, numbers_of
from multirole_study.compare.corrections import CORRECTIONS
from multirole_study.compare.estimates import ESTIMATES, Estimate
from multirole_study.compare.intervals import NO_UNITS, Interval
from multirole_study.compare.looks import Looks
from multirole_study.compare.measures import Measure
from multirole_study.compare.verdicts import NOT_MEASURED, NOT_TESTED, UNDECIDED, Rule, decide


@dataclass(frozen=True)
class Question:
    """What is asked of every line: a measure, how it is estimated, when it is read, and by which rule it is decided."""

    measure: Measure
    options: Mapping[str, Any] = field(default_factory=dict)
    minus_measure: Measure | None = None
    estimate: str = "mean"
    estimated_by: Mapping[str, object] = field(default_factory=dict)
    """Options of the estimate, such as its margin."""
    rule: Rule = field(default_factory=Rule)
    looks: Looks = field(default_factory=Looks)
    correction: str = "none"
    is_tested: bool = True

    def numbers(self, arm: Runs, minus: Runs | None) -> pd.DataFrame:
        """Return the numbers of all runs of a line."""
        return numbers_of(self.measure, arm, minus, minus_measure=self.minus_measure, **self.options)

    def estimated(self, numbers: pd.DataFrame) -> Estimate:
        """Return the estimate from the numbers that are read."""
        return ESTIMATES[self.estimate](numbers, **self.estimated_by)


class Line(NamedTuple):
    """An arm, and the arm that is subtracted from it; None where the arm itself is judged."""

    arm: Runs
    minus: Runs | None = None


class Answer(NamedTuple):
    """A verdict on a line with what it follows from.

    `p` is after correction, NaN without a verdict. `pairs` counts the runs (or pairs of runs) that there are, `numbers` has those that
    are read, and `text` is how the estimate is written where its kind has words of its own.
    """

    verdict: str
    interval: Interval
    p: float
    pairs: int
    numbers: pd.DataFrame
    text: str = ""
    unit: str = "seeds"


def answers(question: Question, lines: Iterable[Line]) -> list[Answer]:
    """Answer a question for each of its lines, which are one family of its correction."""
    return judged(question, [question.numbers(*line) for line in lines])


def judged(question: Question, numbers: Sequence[pd.DataFrame]) -> list[Answer]:
    """Answer a question from the numbers of each of its lines."""
    there = [part if question.measure.is_partial else part.dropna() for part in numbers]
    read = [_read(question, part) for part in there]
    missing = [
        NOT_MEASURED if len(part) and not len(known) else question.looks.missing(len(known))
        for part, known in zip(numbers, there, strict=True)
    ]
    estimates = [question.estimated(part) if len(part) else Estimate(NO_UNITS) for part in read]
    if not question.is_tested:
        missing = [why or NOT_TESTED for why in missing]
    intervals = [
        NO_UNITS if why else estimate.interval for estimate, why in zip(estimates, missing, strict=True)
    ]  # a line without a verdict counts in the correction
    ps = _corrected(question, [interval.p for interval in intervals])
    p_matches = _corrected(question, [interval.p_match for interval in intervals])
    answered = []
    for part, pairs, estimate, why, p, p_match in zip(read, there, estimates, missing, ps, p_matches, strict=True):
        rule = question.rule._replace(alpha=question.looks.alpha(len(part), question.rule.alpha))
        verdict = why or estimate.verdict or decide(estimate.interval._replace(p=p, p_match=p_match), rule)
        answered.append(Answer(verdict, estimate.interval, p, len(pairs), part, estimate.text, estimate.unit))
    return answered


def _corrected(question: Question, p_values: list[float]) -> list[float]:
    """Return the p-values of a family after the question's correction; NaN, the p of a line that is not tested, stays NaN."""
    correct = CORRECTIONS[question.correction]
    return [math.nan if math.isnan(p) else after for p, after in zip(p_values, correct(p_values), strict=True)]


def _read(question: Question, numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers that the question's looks read."""
    if not question.looks.stages:
        return question.looks.of(numbers)
    read = numbers.iloc[:0]
    for stage in question.looks.stages:
        more = numbers[numbers["seed"].isin(stage)]
        if len(read) and len(more) < len(stage):
            return read
        read = pd.concat([read, more]) if len(read) else more
        if len(more) < len(stage) or decide(question.estimated(read).interval, question.rule) != UNDECIDED:
            return read
    return read
