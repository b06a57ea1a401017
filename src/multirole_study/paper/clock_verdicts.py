"""Judge the runs of `studies/clock.yaml` by the rules of `claims_clock.yaml`: falls by schedule, verdicts, and the power of the design."""

import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml
from scipy.stats import binom, binomtest, fisher_exact
from statsmodels.stats.proportion import confint_proportions_2indep

from multirole_study.falls import first_fall
from multirole_study.labels import WORKFLOW_NAMES, task_name
from multirole_study.paper.claim_measures import climbs_and_falls, soon_falls
from multirole_study.paper.clock_study import MIDDLE, ClockStudy, Line
from multirole_study.paper.output import MISSING, Row, Table, cell_text, formatted, number, pivoted
from multirole_study.paper.results import Results, Run
from multirole_study.paper.statistics import ALPHA, Interval, split_half_peak, t_interval, untested

DECLARED = yaml.safe_load(Path(__file__).with_name("claims_clock.yaml").read_text(encoding="utf-8"))
LOOKS, LEVEL = DECLARED["looks"], DECLARED["level"]
EARLY = 10
"""The iteration of the measure `early`."""
ACCURACIES = ("fall", "end", "peak", "early")
"""Measures that are accuracies or differences of them; the others are counts."""
NOT_RUN, UNDECIDED = "not run", "undecided"
UNKNOWN = f"{MIDDLE}, not yet known"


# ---- measures of a run


def zero_iteration(run: Run) -> float:
    """Return the iteration at which the rate of a cosine with a clock per update call is first 0."""
    return run.cell.max_steps / len(set(run.cell.policy.values()))


def late(run: Run) -> float:
    """Return whether the first fall of a run that ends fallen comes after `zero_iteration`; NaN for another run."""
    fall = first_fall(run.accuracy)
    return float(fall.at > zero_iteration(run)) if fall is not None and fall.is_terminal else math.nan


def chi2_before(run: Run) -> bool:
    """Return whether the generator's chi2 climbs alone and peaks shortly before the run falls terminally."""
    climbs = climbs_and_falls(run, "generator", "chi2_after", flat="aggregator")
    return climbs and soon_falls(run, "generator", "chi2_after")


MEASURES: dict[str, Callable[[Run], float]] = {
    "falls": lambda run: float(run.ends_fallen),
    "fall": lambda run: float(run.accuracy.max() - run.accuracy.iloc[-1]),
    "end": lambda run: float(run.accuracy.iloc[-1]),
    "peak": lambda run: float(split_half_peak(run.correct).mean()),
    "early": lambda run: float(run.accuracy.get(EARLY, math.nan)),  # a run may have diverged before
    "chi2_before": lambda run: float(chi2_before(run)),
    "late": late,
}


# ---- which runs are read


class Place(NamedTuple):
    """A workflow, task and rate of the study; `rate` is None while `middle` is not known."""

    workflow: str
    task: str
    rate: float | None
    name: str
    """The rate as the study writes it."""
    arms: tuple[str, ...]
    """The arms that the study has there."""


def places(study: ClockStudy) -> list[Place]:
    """List where arms are compared, in the study's order."""
    arms_by_place: dict[tuple[str, str, float | None, str], list[str]] = {}
    for line in study.lines:
        if line.purpose == "verdicts":
            for workflow, task in product(line.workflows, line.tasks):
                arms_by_place.setdefault((workflow, task, study.rate(line), str(line.rate)), []).extend(line.arms)
    return [Place(*key, tuple(arm for arm in study.arms if arm in arms)) for key, arms in arms_by_place.items()]


def runs_of(results: Results, study: ClockStudy, place: Place, arm: str, purpose: str = "verdicts") -> dict[int, Run]:
    """Return seed -> packed run of an arm, in the study's order of seeds."""
    if place.rate is None:
        return {}
    cells = {seed: study.cell(arm, place.workflow, place.task, place.rate, seed) for seed in study.seeds(purpose)}
    return {seed: run for seed, cell in cells.items() if (run := results.find(cell))}


def at_last_look(seeds: list[int]) -> list[int]:
    """Cut seeds to the largest look that they reach. Before the first look none is read, so that a line may be packed unfinished."""
    return seeds[: max((look for look in LOOKS if look <= len(seeds)), default=0)]


def read_runs(results: Results, study: ClockStudy, place: Place, arm: str) -> dict[int, Run]:
    """Return seed -> run of an arm, up to the last look that it reaches."""
    runs = runs_of(results, study, place, arm)
    return {seed: runs[seed] for seed in at_last_look(list(runs))}


def reason_unread(results: Results, study: ClockStudy, place: Place, *arms: str) -> str:
    """Say why no run of these arms is read."""
    is_begun = any(runs_of(results, study, place, arm) for arm in arms)
    return f"fewer than {LOOKS[0]} seeds" if is_begun else NOT_RUN


# ---- verdicts


class Answer(NamedTuple):
    """A verdict with its numbers as text, and the numbers: the difference, or the share of one arm, with its interval."""

    verdict: str
    text: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0


def decided(sign: int, p_above: float, p_below: float) -> str:
    """Return the verdict of one-sided tests of a difference above and below zero, for a question that states `sign`."""
    yes, no = (p_above, p_below) if sign > 0 else (p_below, p_above)
    return "yes" if yes < LEVEL else "no" if no < LEVEL else UNDECIDED


def one_sided_fisher(a: int, b: int, n: int, m: int) -> tuple[float, float]:
    """Return the p of a / n above b / m, and of a / n below b / m."""
    outcomes = [[a, n - a], [b, m - b]]
    return float(fisher_exact(outcomes, "greater")[1]), float(fisher_exact(outcomes, "less")[1])


def judged_counts(arm: list[float], minus: list[float], sign: int) -> Answer:
    """Compare how many runs of two arms have a property."""
    a, n, b, m = int(sum(arm)), len(arm), int(sum(minus)), len(minus)
    low, high = confint_proportions_2indep(a, n, b, m, method="newcomb", alpha=ALPHA)
    value = a / n - b / m
    span = f"{formatted(value, 'difference')} [{formatted(low, 'difference')}, {formatted(high, 'difference')}]"
    verdict = decided(sign, *one_sided_fisher(a, b, n, m))
    return Answer(verdict, f"{a} of {n} against {b} of {m}, {span}", value, low, high, n)


def judged_share(arm: list[float], sign: int) -> Answer:
    """Compare the share of runs that have a property with one half; runs with NaN are left out."""
    known = [value for value in arm if not math.isnan(value)]
    if not known:
        return Answer(UNDECIDED, "no run ends fallen", seeds=len(arm))
    count = int(sum(known))
    low, high = binomtest(count, len(known)).proportion_ci(1 - ALPHA)
    verdict = decided(sign, *(binomtest(count, len(known), 0.5, side).pvalue for side in ("greater", "less")))
    text = f"{count} of {len(known)} [{formatted(low, 'rate')}, {formatted(high, 'rate')}] %"
    return Answer(verdict, text, count / len(known), low, high, len(arm))


def judged_differences(arm: pd.Series, minus: pd.Series, sign: int) -> Answer:
    """Compare accuracies of two arms, paired by seed."""
    interval = t_interval((arm - minus).dropna())
    above, below = (interval.p / 2 if interval.mean * side > 0 else 1 - interval.p / 2 for side in (1, -1))
    verdict = decided(sign, above, below)
    if verdict == UNDECIDED and interval.p_match < ALPHA:
        verdict = "equivalent"
    text = f"{cell_text(number('', untested(interval), 'difference'))}, {interval.seeds} seeds"
    return Answer(verdict, text, interval.mean, interval.low, interval.high, interval.seeds)


def answer(results: Results, study: ClockStudy, place: Place, question: dict) -> Answer:
    """Answer one question at one place by the declared rules."""
    measure = MEASURES[question["measure"]]
    names = [question["arm"], *([question["minus"]] if "minus" in question else [])]
    arms = [runs_of(results, study, place, name) for name in names]
    if not all(arms):
        return Answer(NOT_RUN, NOT_RUN)
    common = [seed for seed in study.seeds("verdicts") if all(seed in arm for arm in arms)]
    if not (seeds := at_last_look(common)):
        return Answer(UNDECIDED, f"{len(common)} of {LOOKS[0]} seeds", seeds=len(common))
    values = [[measure(arm[seed]) for seed in seeds] for arm in arms]
    if len(values) == 1:
        return judged_share(values[0], question["sign"])
    if question["measure"] in ACCURACIES:
        return judged_differences(*(pd.Series(series, seeds) for series in values), question["sign"])
    return judged_counts(*values, question["sign"])


def answers(results: Results, study: ClockStudy, place: Place) -> dict[str, Answer]:
    """Return question -> answer at one place, for the questions whose arms the study has there."""
    return {
        question["name"]: answer(results, study, place, question)
        for question in DECLARED["questions"]
        if place.workflow in question.get("workflows", [place.workflow])
        and {question["arm"], question.get("minus", question["arm"])} <= set(place.arms)
    }


def picture(results: Results, study: ClockStudy, place: Place, answers_by_name: dict[str, Answer]) -> str:
    """Say whether the clock makes the paper's picture, from the answers at one place; a dash if SP was not declared there."""
    rules = DECLARED["picture"]
    if not {*rules["needs"], *rules["lacks"]} <= set(answers_by_name):
        return MISSING
    needed, absent = ([answers_by_name[name].verdict for name in rules[kind]] for kind in ("needs", "lacks"))
    if NOT_RUN in (*needed, *absent):
        return NOT_RUN
    if needed[0] == "yes":
        return "made by the clock" if set(needed) == {"yes"} and "yes" not in absent else "within IP only"
    by_arm = [runs_of(results, study, place, arm) for arm in place.arms]
    is_complete = all(len(runs) >= LOOKS[-1] for runs in by_arm)
    has_fall = any(run.ends_fallen for runs in by_arm for run in runs.values())
    return "no cliff to explain" if is_complete and not has_fall else UNDECIDED


# ---- the rate `middle`


def calibrated_rate(results: Results, study: ClockStudy) -> tuple[float | None, str]:
    """Return the rate that the calibration chooses, or None, and a sentence about it."""
    lines = sorted((line for line in study.lines if line.purpose == "calibration"), key=lambda line: -float(line.rate))
    for line in lines:
        runs = calibration_runs(results, study, line)
        if len(runs) < len(line.seeds) * len(line.workflows) * len(line.tasks) * len(line.arms):
            return (
                None,
                f"The rate `{MIDDLE}` is not yet known: {len(runs)} calibration runs at {line.rate:g} are there.",
            )
        if not any(run.ends_fallen for run in runs):
            return float(line.rate), f"The rate `{MIDDLE}` is {line.rate:g}: no calibration run ends fallen there."
    return None, f"There is no rate `{MIDDLE}`: at every rate of the calibration a run ends fallen."


def calibration_runs(results: Results, study: ClockStudy, line: Line) -> list[Run]:
    """Return the packed runs of a line of the calibration."""
    calibrated_places = (
        Place(workflow, task, study.rate(line), str(line.rate), tuple(line.arms))
        for workflow, task in product(line.workflows, line.tasks)
    )
    return [
        run
        for place in calibrated_places
        for arm in line.arms
        for run in runs_of(results, study, place, arm, line.purpose).values()
    ]


# ---- tables


def arm_name(arm: str) -> str:
    """Name an arm in tables and figures, such as "IP, one clock"."""
    return arm[:2].upper() + arm[2:]


def place_keys(place: Place) -> dict[str, str]:
    """Return the keys of a place's lines in a table."""
    return {
        "workflow": place.workflow,
        "task": place.task,
        "rate": UNKNOWN if place.rate is None else f"{place.rate:g}",
    }


def exact_share(count: int, n: int) -> Interval:
    """Return count / n with its exact interval, without tests; NaN for no runs."""
    if not n:
        return untested(t_interval([]))
    low, high = binomtest(count, n).proportion_ci(1 - ALPHA)
    return untested(t_interval([]))._replace(mean=count / n, low=low, high=high, seeds=n)


def fall_rows(results: Results, study: ClockStudy) -> Iterator[Row]:
    """Yield how many runs of every arm end fallen, how far they fall, and where they peak and end."""
    for place in places(study):
        by_arm = {arm: read_runs(results, study, place, arm) for arm in place.arms}
        if any(by_arm.values()):
            for arm, runs in by_arm.items():
                yield from arm_rows(place_keys(place) | {"arm": arm_name(arm)}, list(runs.values()))
        else:
            arms = f"{len(by_arm)} arms, {reason_unread(results, study, place, *by_arm)}"
            yield number("runs", 0, "count", **place_keys(place), arm=arms)


def arm_rows(keys: dict[str, str], runs: list[Run]) -> Iterator[Row]:
    """Yield one line of the table of falls."""
    fallen = sum(run.ends_fallen for run in runs)
    yield number("runs", len(runs), "count", **keys)
    yield number("end fallen", fallen if runs else math.nan, "count", **keys)
    yield number("fall at any time", sum(run.falls for run in runs) if runs else math.nan, "count", **keys)
    yield number("of them, %", exact_share(fallen, len(runs)), "rate", **keys)
    for name, measure, unit in (
        ("best − end", "fall", "rate"),
        ("peak", "peak", "accuracy"),
        ("end", "end", "accuracy"),
    ):
        yield number(name, t_interval([MEASURES[measure](run) for run in runs]), unit, **keys)


def fall_table(results: Results, study: ClockStudy) -> Table:
    """Build the table of falls by schedule and policy."""
    values = pd.DataFrame(fall_rows(results, study))
    caption = (
        f"Falls by schedule and policy at {results.grid.scale}, for each arm's first {LOOKS[0]} or {LOOKS[1]} seeds. A run ends fallen if its last evaluation lies 5 points or "
        "more below the best one before it; best − end is how far. A run that falls may recover. Peaks are chosen on one half of the validation problems and scored on the "
        "other. Shares with exact 95 % intervals, all else with 95 % t intervals over seeds. Under SP all three clocks are one schedule. "
        f"{calibrated_rate(results, study)[1]} Runs: studies/clock.yaml."
    )
    return Table("clock_falls", "Falls by schedule and policy", caption, pivoted(values), values)


def verdict_table(results: Results, study: ClockStudy) -> Table:
    """Build the table of every question's answers; its values have one row for each question and place."""
    shown, values = {}, []
    for place in places(study):
        answers_by_name, keys = answers(results, study, place), place_keys(place)
        column = f"{WORKFLOW_NAMES[place.workflow]}, {task_name(place.task)}"
        for question in DECLARED["questions"]:
            line = shown.setdefault((question["name"], keys["rate"]), {
                "sentence": question["sentence"], "question": question["question"], "rate": keys["rate"]})  # fmt: skip
            if (answer := answers_by_name.get(question["name"])) is not None:
                is_bare = answer.verdict == answer.text
                line[column] = answer.verdict if is_bare else f"**{answer.verdict}**: {answer.text}"
                values.append(keys | {"question": question["name"]} | answer._asdict())
        verdict = picture(results, study, place, answers_by_name)
        line = shown.setdefault(("picture", keys["rate"]), {
            "sentence": "the paper's figure 4", "question": "Is it made by the clock?", "rate": keys["rate"]})  # fmt: skip
        line[column] = verdict if verdict in (NOT_RUN, MISSING) else f"**{verdict}**"
        values.append(keys | {"question": "picture", "verdict": verdict})
    count = sum(value["question"] != "picture" for value in values)
    order = [question["name"] for question in DECLARED["questions"]] + ["picture"]
    lines = [line for name in order for (question, _), line in shown.items() if question == name]
    primary = DECLARED["primary"]
    caption = (
        f"Is the late cliff the learning-rate clock? One verdict is primary: {primary['question']} in {WORKFLOW_NAMES[primary['workflow']]} on "
        f"{task_name(primary['task'])} at {primary['rate']:g}. The others, {count - 1} in all, are not corrected for their number. Verdicts are of the first "
        f"{LOOKS[0]} or {LOOKS[1]} seeds that both arms have, each direction tested at {LEVEL:.1%} at each of these looks. Counts: Fisher's exact test, "
        "difference in points with Newcombe's 95 % interval. Accuracies: difference in points, paired by seed, with its 95 % t interval. One arm: "
        f"share of its runs that end fallen (or of these, whose falls come late) with its exact 95 % interval, against one half. Rules: claims_clock.yaml, version {DECLARED['version']}."
    )
    return Table("clock_verdicts", "Is the late cliff the learning-rate clock?", caption,
                 pd.DataFrame(lines).fillna(MISSING), pd.DataFrame(values))  # fmt: skip


# ---- power


def chance_to_decide(fall_rate: float, other: float, n: int) -> float:
    """Return the probability that n runs of each of two arms decide that `other` is larger, from all outcomes of the test."""
    likely = [[float(binom.pmf(count, n, rate)) for count in range(n + 1)] for rate in (fall_rate, other)]
    counts = product(range(n + 1), repeat=2)
    return sum(likely[0][b] * likely[1][a] for b, a in counts if one_sided_fisher(a, b, n, n)[0] < LEVEL)


def power_table() -> pd.DataFrame:
    """Recompute the declared probabilities of a decision."""
    rows = []
    for design in DECLARED["power"]:
        low, high = design["fall_rates"]
        chances = {f"{n} seeds": round(chance_to_decide(low, high, n), 3) for n in LOOKS}
        rows.append({"one arm falls": low, "the other falls": high} | chances)
    return pd.DataFrame(rows)
