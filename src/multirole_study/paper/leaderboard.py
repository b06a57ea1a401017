"""Judge the runs of `studies/credit.yaml` by the rules in its first lines: which credit estimator trains a workflow best, and its roles?

A study of the question `credit` is read here, whatever its arms are called. The grid's cells are the reference, which is `outcome`.

Where the rules are silent, these were chosen before any run: Holm's correction counts all declared arms of a workflow, those without runs as p = 1;
equivalence is two one-sided tests, after Holm as in the other tables; an arm is compared with the single agent like with the reference.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import pearsonr, permutation_test, rankdata

from multirole_study.labels import WORKFLOW_NAMES, cell_name
from multirole_study.paper import credit_accuracy_table
from multirole_study.paper.comparisons import NOT_RUN, UNDECIDED, UNFINISHED, decided, judged, progress
from multirole_study.paper.grid import Study
from multirole_study.paper.output import MISSING, Table, cell_text, formatted, number
from multirole_study.paper.results import Results, Run
from multirole_study.paper.skill_tables import SKILL_MEASURES
from multirole_study.paper.statistics import ALPHA, MARGIN, Interval, difference, split_half_peak, t_interval

PLACEBO = credit_accuracy_table.DECLARED["placebo"]
TOLERATED = 0.1
"""The largest relative difference between an arm's sampled tokens and the reference's at which the arm gets a verdict."""
MIN_ARMS = 3
"""The fewest arms of a rank correlation."""
RESAMPLES = 9999
"""The largest number of permutations in a rank correlation's test; if more are possible, so many are drawn at random."""
CAPTION = (
    "Not in the paper. Every arm minus `{reference}` in {score} at the last iteration, in points, paired by seed (n), with its 95 % t interval; p is after Holm's "
    f"correction over the {{arms}} arms. Better or worse: p < {ALPHA}. Equivalent: two one-sided tests within {100 * MARGIN:.0f} points, also after Holm. The peak is {{peak}}; "
    "it decides nothing. Tokens are the sampled completion tokens per iteration, those of replays included, relative to `{reference}`'s. An arm with "
    f"more than {100 * TOLERATED:.0f} % more or less has no verdict (unequal tokens), nor has one that lacks the score in any of the {{seeds}} declared seeds (unfinished). The placebo: {{placebo}}. Rules: studies/credit.yaml."
)
NOT_MEASURED, UNEQUAL = "not measured", "unequal tokens"
WITHOUT_VERDICT = (NOT_RUN, UNFINISHED, UNEQUAL)
ALL = "all workflows"
"""Label of an answer about all workflows together."""


# ---- measures of a run


def sampled_tokens(run: Run) -> float:
    """Return the completion tokens that an iteration samples, on average, replays included."""
    metrics = run.table("metrics")
    replayed = metrics.get("sampled_tokens", pd.Series(math.nan, metrics.index))
    return float(replayed.fillna(metrics["completion_tokens"]).mean())


def skill(run: Run) -> pd.Series:
    """Return evaluated step -> skill of the judging role, where it has a case; empty for a workflow without one."""
    measure, *_ = SKILL_MEASURES.get(run.cell.workflow, ("",))
    rows = run.table("skills").reindex(columns=["measure", "step", "skill"])
    return rows[rows["measure"] == measure].set_index("step")["skill"].sort_index()


def skill_peak(run: Run) -> float:
    """Return the largest skill at a trained checkpoint."""
    series = skill(run)
    return float(series[series.index > 0].max())


class Score(NamedTuple):
    """A number by which arms are compared: its value at the last iteration, and its peak, which decides nothing."""

    title: str
    end: Callable[[Run], float]
    peak: Callable[[Run], float]
    about_peak: str


SCORES = {
    "accuracy": Score(
        "accuracy", lambda run: run.at("end"), lambda run: float(split_half_peak(run.correct).mean()),
        "chosen on one half of the validation problems and scored on the other",
    ),
    "skill": Score(
        "skill of the judging role", lambda run: skill(run).get(run.steps["end"], math.nan), skill_peak,
        "the largest of all evaluations",
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
    spent = [sum(sampled_tokens(runs[seed]) for seed in seeds) for runs in (arm.runs, reference.runs)]
    return spent[0] / spent[1] if seeds else math.nan


def is_unequal(*tokens: float) -> bool:
    """Return whether any number of tokens, relative to the reference's, differs too much from 1 for a verdict."""
    return any(abs(ratio - 1) > TOLERATED for ratio in tokens)


def values_by_seed(arm: Arm, measure: Callable[[Run], float]) -> pd.Series:
    """Return seed -> a measure of an arm's runs, for the runs that have it."""
    return pd.Series({seed: measure(run) for seed, run in sorted(arm.runs.items())}, dtype=float).dropna()


def compared(arms: list[Arm], other: Arm, reference: Arm, score: Score, seeds: list[int]) -> list[Comparison]:
    """Compare arms with another one, paired by seed and corrected for their number; tokens are compared with the reference's.

    An arm is tested when it has the score in a run of each of `seeds`, as the other one has.
    """
    other_ends, other_tokens = values_by_seed(other, score.end), relative_tokens(other, reference)
    intervals = []
    for arm in arms:
        ends, peaks = values_by_seed(arm, score.end), values_by_seed(arm, score.peak)
        both = ends.index.intersection(other_ends.index)
        intervals.append((t_interval(ends[both]), t_interval(peaks.reindex(both)), difference(ends, other_ends)))
    comparisons = []
    missing = [progress(gap.seeds, seeds) for *_, gap in intervals]
    verdicts = judged([gap for *_, gap in intervals], missing)
    for arm, (end, peak, gap), (p, verdict) in zip(arms, intervals, verdicts, strict=True):
        tokens = relative_tokens(arm, reference)
        if verdict not in (NOT_RUN, UNFINISHED) and is_unequal(tokens, other_tokens):
            verdict = UNEQUAL
        comparisons.append(Comparison(arm, tokens, end, peak, gap, p, verdict))
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
        runs = {cell.seed: run for cell in cells if (run := results.find(cell))}
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


def placebo_gain(board: Board) -> Interval:
    """Return what the placebo gains over the untrained workflow, in accuracy at the end of its runs."""
    runs = [run for arm in board.arms if arm.credit == PLACEBO for run in arm.runs.values()]
    return t_interval([run.at("end") - run.at("base") for run in runs])


# ---- tables


def interval_text(interval: Interval, unit: str) -> str:
    """Return a mean with its interval, as in other tables."""
    return cell_text(number("", interval, unit))


def p_text(p: float) -> str:
    """Return "p = 0.012"."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def difference_text(line: Comparison) -> str:
    """Return an arm's difference in words, such as "critic +4.0 [+1.0, +7.0], p = 0.012"."""
    return f"{line.arm.name} {interval_text(line.gap, 'difference')}, {p_text(line.p_holm)}"


def board_lines(board: Board, name: str) -> list[Comparison]:
    """Return the reference, every arm and, for accuracy, the single agent, about which there is a separate question."""
    first = board.unjudged(board.reference, name)._replace(gap=t_interval([]))
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
            "tokens": formatted(line.tokens, "similarity") if line.end.seeds else MISSING,
            "end": interval_text(line.end, "accuracy"),
            "peak": interval_text(line.peak, "accuracy"),
            f"− {reference.name}": interval_text(line.gap, "difference"),
            "p": MISSING if math.isnan(line.p_holm) else f"{line.p_holm:.3f}",
            "verdict": line.verdict if line.verdict in (MISSING, NOT_RUN) else f"**{line.verdict}**",
        }
        if minus_single:
            texts["− single agent"] = interval_text(minus_single.get(line.arm.name, t_interval([])), "difference")
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
    return Table(f"leaderboard_{board.workflow}_{board.policy}_{board.task}_{name}",
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
    with_runs = [line for line in lines if line.verdict != NOT_RUN]
    if not with_runs:
        return NOT_RUN, NOT_RUN
    if better := [line for line in with_runs if line.verdict == "better"]:
        return "yes", "; ".join(map(difference_text, better))
    if all(line.verdict == UNFINISHED for line in with_runs):
        return UNFINISHED, UNFINISHED
    finished = [line for line in with_runs if line.verdict != UNFINISHED]
    largest = max(finished, key=lambda line: (line.verdict != UNEQUAL, line.gap.mean))
    is_no = all(line.verdict in ("worse", "equivalent") for line in lines)
    text = f"the largest difference is {difference_text(largest)}"
    return "no" if is_no else UNDECIDED, text + (f" ({UNEQUAL})" if largest.verdict == UNEQUAL else "")


def better_in_all(lines_by_board: list[list[Comparison]]) -> tuple[str, str]:
    """Say whether any estimator that all workflows have is better in all of them."""
    lines_by_credit = [{line.arm.credit: line for line in lines} for lines in lines_by_board]
    credits = [credit for credit in lines_by_credit[0] if all(credit in lines for lines in lines_by_credit)]
    shared = {credit: [lines[credit] for lines in lines_by_credit] for credit in credits}
    verdicts = {credit: {line.verdict for line in lines} for credit, lines in shared.items()}
    if all({NOT_RUN, UNFINISHED} & kinds for kinds in verdicts.values()):
        why = UNFINISHED if any(UNFINISHED in kinds for kinds in verdicts.values()) else NOT_RUN
        return why, why
    if better := [credit for credit, kinds in verdicts.items() if kinds == {"better"}]:
        return "yes", "; ".join(" and ".join(map(difference_text, shared[credit])) for credit in better)
    is_no = all({"worse", "equivalent"} & kinds for kinds in verdicts.values())
    return "no" if is_no else UNDECIDED, f"none of {', '.join(credits)}"


def placebo_answer(board: Board) -> tuple[str, str]:
    """Say whether the placebo ends above the untrained workflow."""
    gain = placebo_gain(board)
    if why := progress(gain.seeds, board.seeds):
        return why, why
    verdict = {"better": "yes", "worse": "no", "equivalent": "no"}.get(decided(gain, gain.p, gain.p_match), UNDECIDED)
    return verdict, f"{interval_text(gain, 'difference')}, {p_text(gain.p)}, {gain.seeds} runs"


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


def rank_correlation(x: list[float], y: list[float]) -> tuple[float, float]:
    """Return Spearman's correlation and its two-sided p by permutation, exact if there are at most `RESAMPLES` permutations."""
    ranks = rankdata(y)

    def statistic(permuted: np.ndarray, axis: int) -> np.ndarray:
        return pearsonr(permuted, np.broadcast_to(ranks, permuted.shape), axis=axis).statistic

    test = permutation_test(
        (rankdata(x),), statistic, permutation_type="pairings", n_resamples=RESAMPLES, rng=np.random.default_rng(0)
    )
    return float(test.statistic), float(test.pvalue)


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
            verdicts.add(("yes" if rho > 0 else "no") if p < ALPHA else UNDECIDED)
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
        yield Answer("Does the placebo train at all (end minus untrained)?", board.title, *placebo_answer(board))
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


def leaderboard_tables(all_boards: list[Board], measured: pd.DataFrame | None) -> list[Table]:
    """Build the answers, and one table for each workflow and score."""
    parts = [board_table(board, score) for board, score in product(all_boards, SCORES)]
    return [answer_table(all_boards, measured), *parts]
