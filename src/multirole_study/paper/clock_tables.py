"""Judge the runs of `studies/clock.yaml` by the rules of `claims_clock.yaml`: falls by schedule, verdicts, and the power of the design."""

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

from multirole_study.compare import answers as engine
from multirole_study.compare.arms import find_runs
from multirole_study.compare.intervals import chance_to_decide, exact_share, t_interval
from multirole_study.compare.looks import Looks
from multirole_study.compare.measures import MEASURES
from multirole_study.compare.verdicts import NO_NUMBERS, NOT_RUN, UNDECIDED, YES, Rule
from multirole_study.labels import WORKFLOW_NAMES, task_name
from multirole_study.paper.clock_study import MIDDLE, ClockStudy, Line
from multirole_study.paper.output import MISSING, Row, Table, formatted, interval_text, number, pivoted, verdict_cell
from multirole_study.paper.results import Results, Run

DECLARED = yaml.safe_load(Path(__file__).with_name("claims_clock.yaml").read_text(encoding="utf-8"))
LEVEL = DECLARED["level"]
LOOKS = Looks(tuple(DECLARED["looks"]), shows_unfinished=False, before_first=UNDECIDED)
"""Before the first look no run is read, so that a line may be packed unfinished."""
NAMES = {"peak": "split_half_peak"}
"""Word of claims_clock.yaml -> measure, where they differ."""
HALF = 0.5
UNKNOWN = f"{MIDDLE}, not yet known"


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
    seeds = study.seeds(purpose)
    return find_runs(results, (study.cell(arm, place.workflow, place.task, place.rate, seed) for seed in seeds))


def read_runs(results: Results, study: ClockStudy, place: Place, arm: str) -> dict[int, Run]:
    """Return seed -> run of an arm, up to the last look that it reaches."""
    runs = runs_of(results, study, place, arm)
    return dict(list(runs.items())[: LOOKS.read(len(runs))])


def reason_unread(results: Results, study: ClockStudy, place: Place, *arms: str) -> str:
    """Say why no run of these arms is read."""
    is_begun = any(runs_of(results, study, place, arm) for arm in arms)
    return f"fewer than {LOOKS.at[0]} seeds" if is_begun else NOT_RUN


# ---- verdicts


class Answer(NamedTuple):
    """A verdict with its numbers as text, and the numbers: the difference, or the share of one arm, with its interval."""

    verdict: str
    text: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    seeds: int = 0


def question_of(declared: dict) -> engine.Question:
    """Return a declared question: counts of two arms, the share of one arm against one half, or a difference of accuracies."""
    measure = MEASURES[NAMES.get(declared["measure"], declared["measure"])]
    kind = "share" if "minus" not in declared else "mean" if measure.has_margin else "shares"
    rule = Rule(HALF * (kind == "share"), sign=declared["sign"], alpha=2 * LEVEL, has_margin=kind == "mean")
    return engine.Question(measure, estimate=kind, rule=rule, looks=LOOKS)


def answer(results: Results, study: ClockStudy, place: Place, declared: dict) -> Answer:
    """Answer one question at one place by the declared rules."""
    names = [declared["arm"], *([declared["minus"]] if "minus" in declared else [])]
    arms = [{place[:2]: runs_of(results, study, place, name)} for name in names]
    (answered,) = engine.answers(question := question_of(declared), [engine.Line(*arms)])
    if answered.verdict in NO_NUMBERS:
        return Answer(answered.verdict, answered.verdict)
    if not len(answered.numbers):
        return Answer(answered.verdict, f"{answered.pairs} of {LOOKS.at[0]} seeds", seeds=answered.pairs)
    interval = answered.interval
    seeds = interval.seeds if question.estimate == "mean" else len(answered.numbers)
    return Answer(answered.verdict, answered.text or text_of(answered), *interval[:3], seeds)


def text_of(given: engine.Answer) -> str:
    """Format a difference of accuracies, or the share of one arm."""
    value, low, high, *_, n = given.interval
    if given.unit == "seeds":
        return f"{interval_text(given.interval, 'difference')}, {n} seeds"
    if not n:
        return "no run ends fallen"
    return f"{round(value * n)} of {n} [{formatted(low, 'rate')}, {formatted(high, 'rate')}] %"


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
    if needed[0] == YES:
        return "made by the clock" if set(needed) == {YES} and YES not in absent else "within IP only"
    by_arm = [runs_of(results, study, place, arm) for arm in place.arms]
    is_complete = all(len(runs) >= LOOKS.at[-1] for runs in by_arm)
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
    if not lines:
        return None, f"There is no rate `{MIDDLE}`: the study has no calibration."
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
        ("peak", "split_half_peak", "accuracy"),
        ("end", "end", "accuracy"),
    ):
        yield number(name, t_interval([MEASURES[measure].of(run) for run in runs]), unit, **keys)


def fall_table(results: Results, study: ClockStudy) -> Table:
    """Build the table of falls by schedule and policy."""
    values = pd.DataFrame(fall_rows(results, study))
    caption = (
        f"Falls by schedule and policy at {results.grid.scale}, for each arm's first {LOOKS.at[0]} or {LOOKS.at[1]} seeds. A run ends fallen if its last evaluation lies 5 points or "
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
        line[column] = verdict_cell(verdict)
        values.append(keys | {"question": "picture", "verdict": verdict})
    count = sum(value["question"] != "picture" for value in values)
    order = [question["name"] for question in DECLARED["questions"]] + ["picture"]
    lines = [line for name in order for (question, _), line in shown.items() if question == name]
    primary = DECLARED["primary"]
    caption = (
        f"Is the late cliff the learning-rate clock? One verdict is primary: {primary['question']} in {WORKFLOW_NAMES[primary['workflow']]} on "
        f"{task_name(primary['task'])} at {primary['rate']:g}. The others, {count - 1} in all, are not corrected for their number. Verdicts are of the first "
        f"{LOOKS.at[0]} or {LOOKS.at[1]} seeds that both arms have, each direction tested at {LEVEL:.1%} at each of these looks. Counts: Fisher's exact test, "
        "difference in points with Newcombe's 95 % interval. Accuracies: difference in points, paired by seed, with its 95 % t interval. One arm: "
        f"share of its runs that end fallen (or of these, whose falls come late) with its exact 95 % interval, against one half. Rules: claims_clock.yaml, version {DECLARED['version']}."
    )
    return Table("clock_verdicts", "Is the late cliff the learning-rate clock?", caption,
                 pd.DataFrame(lines).fillna(MISSING), pd.DataFrame(values))  # fmt: skip


# ---- power


def power_table() -> pd.DataFrame:
    """Recompute the declared probabilities of a decision."""
    rows = []
    for design in DECLARED["power"]:
        low, high = design["fall_rates"]
        chances = {f"{n} seeds": round(chance_to_decide(low, high, n, LEVEL), 3) for n in LOOKS.at}
        rows.append({"one arm falls": low, "the other falls": high} | chances)
    return pd.DataFrame(rows)
