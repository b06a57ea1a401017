"""Choose each arm's learning rate and judge the runs of a study such as `studies/rates.yaml` by the rules in its first lines."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from multirole_study.compare.answers import Answer, Question, judged
from multirole_study.compare.arms import find_runs, mean_by_seed, of_whole_seeds
from multirole_study.compare.intervals import t_interval, untested
from multirole_study.compare.looks import Looks
from multirole_study.compare.measures import MEASURES, tokens_of_requests
from multirole_study.compare.rules import ALPHA, MARGIN
from multirole_study.compare.verdicts import Rule
from multirole_study.labels import task_name
from multirole_study.paper.output import (
    MISSING,
    Row,
    Table,
    formatted,
    interval_text,
    number,
    p_cell,
    pivoted,
    verdict_cell,
)
from multirole_study.paper.rate_study import Purpose, RateQuestion, RateStudy
from multirole_study.paper.results import Results, Run

AT_THE_EDGE = "; a better one may lie beyond"


# ---- runs and their measures


def runs_of(results: Results, study: RateStudy, arm: str, rate: float | None, purpose: Purpose) -> dict[int, Run]:
    """Return seed -> packed run of an arm at a rate."""
    seeds = [] if rate is None else study.phase(purpose).seeds
    return find_runs(results, (study.cell(arm, rate, seed, purpose) for seed in seeds))


def scored_problems(study: RateStudy) -> list[str]:
    """Return the names of the problems that score, of each task: those of the scoring runs that no tuning run is validated on."""
    names: list[str] = []
    for arm in tasks_of(study).values():
        tuning, scoring = (study.first_cell(arm, purpose) for purpose in ("tuning", "scoring"))
        problems = scoring.make_task().problems("validation", scoring.n_validation)
        names += [problem.id for problem in problems[tuning.n_validation :]]
    return names


def tasks_of(study: RateStudy) -> dict[str, str]:
    """Map every task of the study to an arm that has it."""
    return {study.task_of(arm): arm for arm in study.arms}


def scored_on(study: RateStudy, problems: list[str]) -> str:
    """Say on how many problems arms are scored, such as "512 validation problems of each task"."""
    tasks = tasks_of(study)
    return f"{len(problems) // len(tasks)} validation problems" + " of each task" * (len(tasks) > 1)


def end(run: Run, problems: list[str] | None = None) -> float:
    """Return accuracy at the last iteration, on some of the validation problems or on all."""
    return MEASURES["end"].of(run, problems=problems)


# ---- tuning


class Tuned(NamedTuple):
    """The tuning of one arm: rate -> mean accuracy and runs, and the rate that is chosen; None before all runs are there.

    `scored` is the rate that the arm is scored at: the one that is written under `chosen`, or before that the tuned one.
    """

    means: dict[float, float]
    runs: dict[float, int]
    rate: float | None
    is_at_edge: bool
    scored: float | None


def tuned(results: Results, study: RateStudy, arm: str) -> Tuned:
    """Choose the rate of an arm by the declared rule: the largest mean accuracy at the end, and of equal ones the smaller rate."""
    ends = {
        rate: [end(run) for run in runs_of(results, study, arm, rate, "tuning").values()]
        for rate in sorted(study.rates)
    }
    means = {rate: sum(values) / len(values) if values else math.nan for rate, values in ends.items()}
    is_complete = all(len(values) == len(study.tuning.seeds) for values in ends.values())
    rate = max(means, key=lambda rate: means[rate]) if is_complete else None
    return Tuned(
        means,
        {rate: len(values) for rate, values in ends.items()},
        rate,
        rate in (min(study.rates), max(study.rates)),
        study.chosen.get(arm, rate),
    )


def tuning_sentences(results: Results, study: RateStudy) -> Iterator[str]:
    """Yield a sentence about the rate of every arm that is tuned, and another one if a different rate is written under `chosen`."""
    for arm, about in study.arms.items():
        if about.rate is None:
            chosen = tuned(results, study, arm)
            n, planned = sum(chosen.runs.values()), len(study.rates) * len(study.tuning.seeds)
            if chosen.rate is None:
                yield f"{arm}: {n} of {planned} tuning runs are there."
            else:
                yield f"{arm}: {chosen.rate:g}{AT_THE_EDGE if chosen.is_at_edge else ''}."
            if chosen.rate is not None and study.chosen.get(arm, chosen.rate) != chosen.rate:
                yield f"{arm} is scored at {study.chosen[arm]:g}, which its tuning did not choose: correct `chosen`."


def tuning_table(results: Results, study: RateStudy) -> Table:
    """Build the table of accuracies by rate."""
    shown, values = [], []
    for arm, about in study.arms.items():
        if about.rate is not None:
            continue
        chosen = tuned(results, study, arm)
        texts = {"arm": arm}
        for rate, mean in chosen.means.items():
            text = MISSING if math.isnan(mean) else f"{formatted(mean, 'accuracy')} ({chosen.runs[rate]})"
            texts[f"{rate:g}"] = f"**{text}**" if rate == chosen.scored else text
            values.append(
                {"arm": arm, "rate": rate, "seeds": chosen.runs[rate], "accuracy": mean, "chosen": rate == chosen.rate}
            )
        gap = math.nan if chosen.rate is None else chosen.means[chosen.rate] - chosen.means[study.preset]
        texts["chosen − preset"] = MISSING if math.isnan(gap) else formatted(gap, "difference")
        texts["at the end of the list"] = MISSING if chosen.rate is None else "yes" if chosen.is_at_edge else "no"
        shown.append(texts)
    caption = (
        f"Not in the paper. Mean accuracy at the last iteration by learning rate, in %, on the {results.grid.scale} tuning problems and seeds "
        f"{study.tuning.seeds[0]} to {study.tuning.seeds[-1]} (number of runs). Bold: the rate that the arm is scored at. The difference from the preset's {study.preset:g} has no test, since the "
        f"rate was chosen here. At the end of the list a better rate may lie beyond. Nothing here scores. Rules: {study.rules}."
    )
    return Table("rates_tuning", "Each arm's learning rate", caption, pd.DataFrame(shown), pd.DataFrame(values))


# ---- scoring


def arm_rows(results: Results, study: RateStudy, problems: list[str]) -> Iterator[Row]:
    """Yield rate, runs, score and costs of every arm."""
    for arm in study.arms:
        rate = study.rate(arm)
        runs = runs_of(results, study, arm, rate, "scoring")
        keys = {"arm": arm, "rate": MISSING if rate is None else f"{rate:g}"}
        yield number("runs", len(runs), "count", **keys)
        score = untested(t_interval([end(run, problems) for run in runs.values()]))
        yield number("accuracy", score, "accuracy", **keys)
        costs = pd.DataFrame([costs_of(run) for run in runs.values()], columns=COSTS)
        for name, mean in costs.mean().items():
            yield number(str(name), mean, "count", **keys)


COSTS = ["iterations", "optimizer steps", "tokens sampled", "tokens read"]


def costs_of(run: Run) -> dict[str, float]:
    """Return what training a run has cost; its evaluations are not counted."""
    metrics = run.table("metrics")
    tokens = [tokens_of_requests(run, kind).sum() for kind in ("sampled", "read")]
    return dict(zip(COSTS, (len(metrics), metrics["optimizer_steps"].sum(), *tokens), strict=True))


def arm_table(results: Results, study: RateStudy, problems: list[str]) -> Table:
    """Build the table of scores."""
    values = pd.DataFrame(arm_rows(results, study, problems))
    caption = (
        f"Not in the paper. Accuracy at the last iteration at each arm's own learning rate, in %, on {scored_on(study, problems)} that chose no rate, at {results.grid.scale}, "
        f"with 95 % t intervals over seeds. Iterations, optimizer steps of all adapters and tokens are means over runs, of training alone. Rules: {study.rules}."
    )
    return Table("rates_scores", "Accuracy at each arm's own learning rate", caption, pivoted(values), values)


def question_of(study: RateStudy, declared: RateQuestion, problems: list[str]) -> Question:
    """Return a declared question: its lines are one family of Holm's correction, and each is read when it has all seeds."""
    measure = MEASURES[declared.measure]
    options = declared.options | ({"problems": problems} if declared.measure == "end" else {})
    rule, looks = Rule(has_margin=measure.has_margin), Looks((len(study.scoring.seeds),))
    return Question(measure, options, rule=rule, looks=looks, correction="holm", is_tested=declared.tested)


Pairs = list[tuple[str, str]]
"""Arms, each with the arm that is subtracted from it."""


def lines_of(study: RateStudy, question: RateQuestion) -> list[Pairs]:
    """List the lines of a question: one for each of its pairs, or one of all pairs that it pools, or of those of a task."""
    if not question.pooled:
        return [[pair] for pair in question.pairs]
    if question.pooled is True:
        return [question.pairs]
    by_task: dict[str, Pairs] = {}
    for pair in question.pairs:
        by_task.setdefault(study.task_of(pair[0]), []).append(pair)
    return list(by_task.values())


def compared(results: Results, study: RateStudy, declared: RateQuestion, problems: list[str]) -> list[Answer]:
    """Answer one question for each of its lines."""

    def runs(arm: str) -> dict[int, Run]:
        return runs_of(results, study, arm, study.rate(arm), "scoring")

    question = question_of(study, declared, problems)

    def numbers(arm: str, minus: str) -> pd.DataFrame:
        place = study.arms[arm].workflow, study.task_of(arm)
        return question.numbers({place: runs(arm)}, {place: runs(minus)})

    parts = [[numbers(*pair) for pair in line] for line in lines_of(study, declared)]
    if declared.pooled:
        return judged(question, [mean_by_seed(of_whole_seeds(line, study.scoring.seeds)) for line in parts])
    return judged(question, [part for (part,) in parts])


def line_names(study: RateStudy, question: RateQuestion, line: Pairs) -> tuple[str, str]:
    """Name the arm of a line and what is subtracted from it; of arms that are pooled their number, of several tasks that task."""
    if not question.pooled:
        return line[0]
    where = f", {task_name(study.task_of(line[0][0]))}" if question.pooled == "by task" else ""
    name, others = f"{len(line)} arm{'s' * (len(line) > 1)}, pooled{where}", {minus for _, minus in line}
    return name, min(others) if len(others) == 1 else name


def answer_table(results: Results, study: RateStudy, problems: list[str]) -> Table:
    """Build the table of the study's questions."""
    shown, values = [], []
    for question in study.questions:
        unit = MEASURES[question.measure].unit
        answers = compared(results, study, question, problems)
        for pairs, line in zip(lines_of(study, question), answers, strict=True):
            (arm, minus), gap = line_names(study, question, pairs), line.interval
            shown.append(
                {
                    "question": question.question,
                    "arm": arm,
                    "minus": minus,
                    "n": str(line.pairs),
                    "difference": interval_text(gap, unit),
                    "p": p_cell(line.p),
                    "verdict": verdict_cell(line.verdict),
                }
            )
            values.append(
                {"question": question.name, "arm": arm, "minus": minus, "seeds": line.pairs}
                | {"difference": gap.mean, "low": gap.low, "high": gap.high}
                | {"p_holm": line.p, "verdict": line.verdict}
            )
    units = {MEASURES[question.measure].unit for question in study.questions}
    growth = " The growth of replies is in points of the start's length." * ("change" in units)
    pooled = " A pooled line has one number per seed, the mean over its arms." * any(q.pooled for q in study.questions)
    alone = " A line that is not tested is shown with its interval alone." * any(not q.tested for q in study.questions)
    caption = (
        f"Not in the paper. Every arm at its own learning rate at {results.grid.scale}, minus another one, paired by seed (n), with 95 % t intervals over seeds. Accuracy is read at the last "
        f"iteration on {scored_on(study, problems)} that chose no rate; differences are in points.{growth}{pooled} Yes or no: p < {ALPHA} after Holm's "
        f"correction over the lines of a question. Equivalent: two one-sided tests within {100 * MARGIN:.0f} points, also after Holm.{alone} A line without all "
        f"{len(study.scoring.seeds)} seeds has no test (unfinished). Rules: {study.rules}."
    )
    return Table(
        "rates_answers",
        "Comparisons at each arm's own learning rate",
        caption,
        pd.DataFrame(shown),
        pd.DataFrame(values),
    )
