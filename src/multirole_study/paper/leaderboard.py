"""Judge the runs of `studies/credit.yaml` by the rules in its first lines: which credit estimator trains a workflow best, and its roles?

A study of the question `credit` is read here, whatever its arms are called. The grid's cells are the reference, which is `outcome`.

Where the rules are silent, these were chosen before any run: Holm's correction counts all declared arms of a workflow, those without runs as p = 1;
equivalence is two one-sided tests, after Holm as in the other tables; an arm is compared with the single agent like with the reference.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from multirole_study.compare import answers as engine
from multirole_study.compare.arms import find_runs, values_of
from multirole_study.compare.intervals import NO_UNITS, Interval, rank_correlation, t_interval
from multirole_study.compare.looks import Looks
from multirole_study.compare.measures import MEASURES, Measure
from multirole_study.compare.rules import ALPHA, MARGIN
from multirole_study.compare.verdicts import (
    EQUIVALENT,
    NO,
    NOT_MEASURED,
    NOT_RUN,
    UNDECIDED,
    UNEQUAL,
    UNFINISHED,
    WITHOUT_VERDICT,
    YES,
    Rule,
    any_in_all,
    any_of,
)
from multirole_study.labels import WORKFLOW_NAMES, cell_name, file_name
from multirole_study.paper import credit_accuracy_table
from multirole_study.paper.grid import Grid, Study
from multirole_study.paper.output import MISSING, Table, formatted, interval_text, p_cell, verdict_cell
from multirole_study.paper.pack import read_measurement
from multirole_study.paper.results import Results, Run

PLACEBO = credit_accuracy_table.DECLARED["placebo"]
TOLERATED = 0.1
"""The largest relative difference between an arm's sampled tokens and the reference's at which the arm gets a verdict."""
MIN_ARMS = 3
"""The fewest arms of a rank correlation."""
CAPTION = (
    "Not in the paper. Every arm minus `{reference}` in {score} at the last iteration, in points, paired by seed (n), with its 95 % t interval; p is after Holm's "
    f"correction over the {{arms}} arms. Yes or no: p < {ALPHA}. Equivalent: two one-sided tests within {100 * MARGIN:.0f} points, also after Holm. The peak is {{peak}}; "
    "it decides nothing. Tokens are the sampled completion tokens per iteration, those of replays included, relative to `{reference}`'s. An arm with "
    f"more than {100 * TOLERATED:.0f} % more or less has no verdict (unequal tokens), nor has one that lacks the score in any of the {{seeds}} declared seeds (unfinished). The placebo: {{placebo}}. Rules: studies/credit.yaml."
)
ALL = "all workflows"
"""Label of an answer about all workflows together."""


class Score(NamedTuple):
    """A measure by which arms are compared, at the last iteration, and its peak, which decides nothing."""

    title: str
    end: Measure
    peak: Measure
    about_peak: str


SCORES = {
    "accuracy": Score(
        "accuracy", MEASURES["end"], MEASURES["split_half_peak"],
        "chosen on one half of the validation problems and scored on the other",
    ),
    "skill": Score(
        "skill of the judging role", MEASURES["skill"], MEASURES["skill_peak"], "the largest of all evaluations",
    ),
}  # fmt: skip


# ---- comparisons


class Arm(NamedTuple):
    """An estimator in a workflow, or the single agent, with seed -> packed run."""

    name: str
    credit: str
    runs: dict[int, Run]


class Comparison(NamedTuple):
    """An arm against another one, over the seeds that have both. `tokens` are relative to the reference's."""

    arm: Arm
    tokens: float
    end: Interval
    peak: Interval
    gap: Interval
    p_holm: float
    verdict: str


def relative_tokens(arm: Arm, reference: Arm) -> float:
    """Return the arm's sampled tokens per iteration over the reference's, in the seeds of both; NaN without such seeds."""
    seeds = arm.runs.keys() & reference.runs.keys()
    spent = [sum(MEASURES["sampled_tokens"].of(runs[seed]) for seed in seeds) for runs in (arm.runs, reference.runs)]
    return spent[0] / spent[1] if seeds else math.nan


def is_unequal(*tokens: float) -> bool:
    """Return whether any number of tokens, relative to the reference's, differs too much from 1 for a verdict."""
    return any(abs(ratio - 1) > TOLERATED for ratio in tokens)


def question_of(measure: Measure, seeds: list[int]) -> engine.Question:
    """Return the question of a measure: arms are one family of Holm's correction, and an arm is read when it has a run of each seed."""
    rule = Rule(has_margin=measure.has_margin)
    return engine.Question(measure, rule=rule, looks=Looks((len(seeds),)), correction="holm")


def line_of(arm: Arm, other: Arm) -> engine.Line:
    """Return an arm minus another one; both are of one place, whatever their workflows."""
    return engine.Line({("", ""): dict(sorted(arm.runs.items()))}, {("", ""): other.runs})


def compared(arms: list[Arm], other: Arm, reference: Arm, score: Score, seeds: list[int]) -> list[Comparison]:
    """Compare arms with another one, paired by seed and corrected for their number; tokens are compared with the reference's.

    An arm is tested when it has the score in a run of each of `seeds`, as the other one has.
    """
    comparisons, other_tokens = [], relative_tokens(other, reference)
    answers = engine.answers(question_of(score.end, seeds), [line_of(arm, other) for arm in arms])
    for arm, answer in zip(arms, answers, strict=True):
        read, tokens = answer.numbers, relative_tokens(arm, reference)
        peaks = values_of({seed: arm.runs[seed] for seed in read["seed"]}, score.peak)
        is_judged = answer.verdict not in WITHOUT_VERDICT
        verdict = UNEQUAL if is_judged and is_unequal(tokens, other_tokens) else answer.verdict
        end, peak = t_interval(read["value"]), t_interval(peaks)
        comparisons.append(Comparison(arm, tokens, end, peak, answer.interval, answer.p, verdict))
    return comparisons


# ---- boards


@dataclass(eq=False)
class Board:
    """The arms of one cell of the grid, which is the reference. `single` is the single agent with the same tokens; None if none is declared.

    Every arm has a run of each of `seeds` when the study is finished.
    """

    workflow: str
    policy: str
    task: str
    reference: Arm
    arms: list[Arm]
    single: Arm | None
    seeds: list[int]

    @property
    def title(self) -> str:
        """Name the cell, such as "Voting-SP, math"."""
        return cell_name(self.workflow, self.policy, self.task)

    @cached_property
    def against_reference(self) -> dict[str, list[Comparison]]:
        """Return score -> comparison of every arm with the reference."""
        return {
            name: compared(self.arms, self.reference, self.reference, score, self.seeds)
            for name, score in SCORES.items()
        }

    @cached_property
    def against_single(self) -> list[Comparison]:
        """List the comparisons of every arm's accuracy, the reference's included, with the single agent's; none without a single agent."""
        arms = [self.reference, *self.arms] if self.single else []
        return compared(arms, self.single or self.reference, self.reference, SCORES["accuracy"], self.seeds)

    def unjudged(self, arm: Arm, name: str) -> Comparison:
        """Compare an arm with the reference, without a test; the verdict only says why no verdict is possible."""
        (comparison,) = compared([arm], self.reference, self.reference, SCORES[name], self.seeds)
        verdict = comparison.verdict if comparison.verdict in WITHOUT_VERDICT else MISSING
        return comparison._replace(p_holm=math.nan, verdict=verdict)


def boards(results: Results, study: Study) -> list[Board]:
    """Return the arms of every workflow, in the order in which the study declares them.

    The single agent of a workflow is the variant of the single agent whose name has the workflow's.
    """
    grid = study.grid
    by_cell: dict[str, dict[str, Arm]] = {}
    for name, coordinates, cell in study.runs("credit"):
        arm = by_cell.setdefault(coordinates, {}).setdefault(name, Arm(name, cell.credit, {}))
        if run := results.find(cell):
            arm.runs[cell.seed] = run
    all_boards = []
    for workflow, policy, task in product(grid.workflows, grid.policies, grid.tasks):
        cells = [grid.cell(workflow, policy, task, seed) for seed in grid.seeds]
        runs = find_runs(results, cells)
        singles = by_cell.get(f"single sp {task}", {})
        single = next((arm for name, arm in singles.items() if WORKFLOW_NAMES.get(workflow, workflow) in name), None)
        arms = list(by_cell.get(f"{workflow} {policy} {task}", {}).values())
        all_boards.append(
            Board(
                cells[0].workflow_name,
                policy,
                task,
                Arm(cells[0].credit, cells[0].credit, runs),
                arms,
                single,
                study.seeds,
            )
        )
    return all_boards


def placebo_answer(board: Board) -> engine.Answer:
    """Answer whether the placebo ends above the untrained workflow; it is one arm, without a correction."""
    runs = {("", ""): {seed: run for arm in board.arms if arm.credit == PLACEBO for seed, run in arm.runs.items()}}
    end = MEASURES["end"]
    question = engine.Question(
        end, minus_measure=MEASURES["base"], rule=Rule(has_margin=True), looks=Looks((len(board.seeds),))
    )
    (answer,) = engine.answers(question, [engine.Line(runs, runs)])
    return answer


# ---- tables


def p_text(p: float) -> str:
    """Return "p = 0.012"."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def difference_text(line: Comparison) -> str:
    """Return an arm's difference in words, such as "critic +4.0 [+1.0, +7.0], p = 0.012"."""
    return f"{line.arm.name} {interval_text(line.gap, 'difference')}, {p_text(line.p_holm)}"


def board_lines(board: Board, name: str) -> list[Comparison]:
    """Return the reference, every arm and, for accuracy, the single agent, about which there is a separate question."""
    first = board.unjudged(board.reference, name)._replace(gap=NO_UNITS)
    singles = [board.unjudged(board.single, name)] if name == "accuracy" and board.single else []
    return [first, *board.against_reference[name], *singles]


def board_table(board: Board, name: str) -> Table:
    """Build the table of one workflow and score."""
    score, reference = SCORES[name], board.reference
    minus_single = {line.arm.name: line.gap for line in (board.against_single if name == "accuracy" else [])}
    shown, values = [], []
    for line in board_lines(board, name):
        texts = {
            "arm": line.arm.name,
            "n": str(line.end.seeds),
            "tokens": formatted(line.tokens, "similarity") if line.end.seeds and line.tokens > 0 else MISSING,
            "end": interval_text(line.end, "accuracy"),
            "peak": interval_text(line.peak, "accuracy"),
            f"− {reference.name}": interval_text(line.gap, "difference"),
            "p": p_cell(line.p_holm),
            "verdict": verdict_cell(line.verdict),
        }
        if minus_single:
            texts["− single agent"] = interval_text(minus_single.get(line.arm.name, NO_UNITS), "difference")
        shown.append(texts)
        keys = {"workflow": board.workflow, "policy": board.policy, "task": board.task, "score": name}
        keys["arm"] = line.arm.name
        numbers = {"seeds": line.end.seeds, "tokens": line.tokens, "end": line.end.mean, "peak": line.peak.mean}
        gap = {"difference": line.gap.mean, "low": line.gap.low, "high": line.gap.high, "p": line.gap.p}
        values.append(keys | numbers | gap | {"p_holm": line.p_holm, "verdict": line.verdict})
    caption = CAPTION.format(
        reference=reference.name, score=score.title, arms=len(board.arms), peak=score.about_peak,
        seeds=len(board.seeds), placebo=", ".join(f"`{arm.name}`" for arm in board.arms if arm.credit == PLACEBO) or "none",
    )  # fmt: skip
    return Table(file_name(f"leaderboard_{board.workflow}_{board.policy}_{board.task}_{name}"),
                 f"Credit estimators in {board.title}: {score.title}", caption,
                 pd.DataFrame(shown), pd.DataFrame(values))  # fmt: skip


# ---- answers


class Answer(NamedTuple):
    """The answer to a question in one workflow, or in all of them."""

    question: str
    place: str
    verdict: str
    text: str


def any_better(lines: list[Comparison]) -> tuple[str, str]:
    """Say whether any arm is better, and name all that are, or the one with the largest difference. "No" needs a verdict on every arm."""
    verdict = any_of([line.verdict for line in lines])
    if verdict in (NOT_RUN, UNFINISHED):
        return verdict, verdict
    if verdict == YES:
        return verdict, "; ".join(difference_text(line) for line in lines if line.verdict == YES)
    finished = [line for line in lines if line.verdict == UNEQUAL or line.verdict not in WITHOUT_VERDICT]
    largest = max(finished, key=lambda line: (line.verdict != UNEQUAL, line.gap.mean))
    text = f"the largest difference is {difference_text(largest)}"
    return verdict, text + (f" ({UNEQUAL})" if largest.verdict == UNEQUAL else "")


def better_in_all(lines_by_board: list[list[Comparison]]) -> tuple[str, str]:
    """Say whether any estimator that all workflows have is better in all of them."""
    lines_by_credit = [{line.arm.credit: line for line in lines} for lines in lines_by_board]
    credits = [credit for credit in lines_by_credit[0] if all(credit in lines for lines in lines_by_credit)]
    shared = {credit: [lines[credit] for lines in lines_by_credit] for credit in credits}
    verdict = any_in_all([line.verdict for line in lines] for lines in shared.values())
    if verdict in (NOT_RUN, UNFINISHED):
        return verdict, verdict
    if verdict == YES:
        better = [lines for lines in shared.values() if {line.verdict for line in lines} == {YES}]
        return verdict, "; ".join(" and ".join(map(difference_text, lines)) for lines in better)
    return verdict, f"none of {', '.join(credits)}"


def placebo_text(board: Board) -> tuple[str, str]:
    """Say whether the placebo trains at all: if it ends where it began, it does not."""
    answer = placebo_answer(board)
    if answer.verdict in (NOT_RUN, UNFINISHED):
        return answer.verdict, answer.verdict
    verdict = NO if answer.verdict == EQUIVALENT else answer.verdict
    gain = answer.interval
    return verdict, f"{interval_text(gain, 'difference')}, {p_text(gain.p)}, {gain.seeds} runs"


def measured_in(folder: str | Path, grid: Grid) -> pd.DataFrame | None:
    """Read the accuracy of the estimators in a results folder; None if it has none, or if its grid has another base than `grid`."""
    other = Grid.read(folder)
    is_same = (other.scale, other.base) == (grid.scale, grid.base)
    return read_measurement(folder, "credit_accuracy") if is_same else None


def shares_of_effect(measured: pd.DataFrame | None, board: Board) -> dict[int, pd.Series]:
    """Return checkpoint -> credit -> share of the exact effect in the advantage's mean square, of all turns (table credit_accuracy)."""
    if measured is None:
        return {}
    coordinates = ["workflow", "policy", "task"]
    rows = measured[(measured[coordinates] == [getattr(board, name) for name in coordinates]).all(axis=1)]
    if rows.empty:
        return {}
    values = credit_accuracy_table.statistics(rows)
    values = values[(values["role"] == credit_accuracy_table.EVERY) & (values["statistic"] == "effect")]
    return {step: part.groupby("estimator")["value"].mean() for step, part in values.groupby("step")}


def order_answer(board: Board, measured: pd.DataFrame | None) -> tuple[str, str]:
    """Say whether accuracy follows the share of the exact effect, over the arms with equal tokens, at each measured checkpoint."""
    lines = [line for line in board.against_reference["accuracy"] if line.verdict not in WITHOUT_VERDICT]
    if not lines:
        return (UNFINISHED, UNFINISHED) if board.reference.runs else (NOT_RUN, NOT_RUN)
    gaps = {board.reference.credit: 0.0} | {line.arm.credit: line.gap.mean for line in lines}
    verdicts, texts = set(), []
    for step, shares in shares_of_effect(measured, board).items():
        credits = [credit for credit in gaps if credit in shares.index]
        if len(credits) >= MIN_ARMS:
            rho, p = rank_correlation([shares[credit] for credit in credits], [gaps[credit] for credit in credits])
            verdicts.add((YES if rho > 0 else NO) if p < ALPHA else UNDECIDED)
            texts.append(f"{formatted(rho, 'similarity')} at iteration {step}, {p_text(p)}, {len(credits)} arms")
    if not texts:
        return NOT_MEASURED, NOT_MEASURED
    return verdicts.pop() if len(verdicts) == 1 else UNDECIDED, "; ".join(texts)


def answers(all_boards: list[Board], measured: pd.DataFrame | None) -> Iterator[Answer]:
    """Yield the answer to every question of the study, by workflow, and in all of them where that is asked."""
    for name, score in SCORES.items():
        question = f"Does any estimator beat `{all_boards[0].reference.name}` in {score.title}?"
        lines_by_board = [without_placebo(board.against_reference[name]) for board in all_boards]
        for board, lines in zip(all_boards, lines_by_board, strict=True):
            yield Answer(question, board.title, *any_better(lines))
        if len(all_boards) > 1:
            yield Answer(question, ALL, *better_in_all(lines_by_board))
    for board in all_boards:
        yield Answer("Does the placebo train at all (end minus untrained)?", board.title, *placebo_text(board))
    for board in all_boards:
        question = "Does the order of the estimators follow the share of the exact effect (rank correlation)?"
        yield Answer(question, board.title, *order_answer(board, measured))
    for board in all_boards:
        question = "Is any arm above the single agent with the same tokens and steps?"
        yield Answer(question, board.title, *any_better(without_placebo(board.against_single)))


def without_placebo(lines: list[Comparison]) -> list[Comparison]:
    """Return the comparisons of estimators."""
    return [line for line in lines if line.arm.credit != PLACEBO]


def answer_table(all_boards: list[Board], measured: pd.DataFrame | None) -> Table:
    """Build the table of the study's questions."""
    all_answers = list(answers(all_boards, measured))
    shown: dict[str, dict[str, str]] = {}
    for question, place, verdict, text in all_answers:
        row = shown.setdefault(question, {"question": question})
        row[place] = verdict if verdict == text else f"**{verdict}**: {text}"
    caption = (
        "Differences in points with 95 % t intervals over paired seeds; p after Holm's correction over the arms of a workflow, for the placebo and the rank correlation without one. "
        "A question about any arm is answered with no if every arm is worse or equivalent. The rank correlation is Spearman's, over the arms with equal "
        "tokens and a verdict and the reference, with a permutation test; shares of the exact effect are of the table credit_accuracy. Rules: studies/credit.yaml."
    )
    columns = ["question", *(board.title for board in all_boards), *([ALL] if len(all_boards) > 1 else [])]
    return Table("leaderboard_answers", "Which credit estimator trains best?", caption,
                 pd.DataFrame(shown.values(), columns=columns).fillna(MISSING), pd.DataFrame(all_answers))  # fmt: skip
