"""Draw the tuning, the scores and the differences of a study such as `studies/rates.yaml`."""

import math
import textwrap
from itertools import pairwise

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multirole_study.compare.intervals import t_interval
from multirole_study.compare.looks import Looks
from multirole_study.compare.rules import ALPHA
from multirole_study.labels import BASE_NAMES, MAP_COLOUR, POLICY_COLOURS, POLICY_NAMES, SINGLE_COLOUR, task_name
from multirole_study.paper.answers_figure import draw_answer
from multirole_study.paper.output import Plate, say_below, styled
from multirole_study.paper.rate_study import Phase, RateStudy
from multirole_study.paper.rate_tables import end, runs_of, scored_problems, tuned
from multirole_study.paper.results import Results, Run

ANSWER_COLOUR = "0.35"
TITLES = {"end": "accuracy at the end", "skill": "skill of the judging role", "growth": "growth of replies"}
"""Measure of a question -> the title of its panel."""
SMALLEST, LARGEST, RING = 2.5, 6.0, 9.0
"""Sizes in points of the mark of the lowest and of the highest learning rate, and of the ring around the one that is scored."""


def seeds_of(phase: Phase) -> str:
    """Return the number of a phase's seeds, such as "3 seeds"."""
    return f"{len(phase.seeds)} seed{'s' * (len(phase.seeds) > 1)}"


def place_of(study: RateStudy, arm: str) -> tuple[str, str]:
    """Return the workflow and the task of an arm."""
    return study.arms[arm].workflow, study.task_of(arm)


def ordered_arms(study: RateStudy) -> list[str]:
    """List the arms that a line trains; those of one workflow and task stand together, in the order of the study."""
    trained = {arm for line in study.lines for arm in line.arms}
    arms = [arm for arm in study.arms if arm in trained]
    places = list(dict.fromkeys(place_of(study, arm) for arm in arms))
    return sorted(arms, key=lambda arm: places.index(place_of(study, arm)))


def kind_of(study: RateStudy, arm: str) -> tuple[str, str]:
    """Return the colour of an arm, and its name in the legend."""
    about = study.arms[arm]
    if about.workflow == "single":
        return SINGLE_COLOUR, "single agent"
    if about.policy in POLICY_COLOURS:
        return POLICY_COLOURS[about.policy], POLICY_NAMES[about.policy]
    return MAP_COLOUR, "another policy"


def sizes(study: RateStudy) -> dict[float, float]:
    """Map every tuned learning rate to the size of its mark, which grows with the rate."""
    rates = sorted(study.rates)
    step = (LARGEST - SMALLEST) / max(1, len(rates) - 1)
    return {rate: SMALLEST + i * step for i, rate in enumerate(rates)}


def draw_tuning(axes: Axes, results: Results, study: RateStudy) -> None:
    """Draw mean accuracy in tuning, a row per arm with a mark per learning rate, and a ring around the rate that is scored."""
    size_of = sizes(study)
    for height, arm in enumerate(ordered_arms(study)):
        chosen, (colour, _) = tuned(results, study, arm), kind_of(study, arm)
        known = {rate: 100 * mean for rate, mean in chosen.means.items() if not math.isnan(mean)}
        if study.arms[arm].rate is not None or not known:
            continue
        axes.hlines(height, min(known.values()), max(known.values()), color=colour, lw=0.8, alpha=0.4)
        for rate, mean in known.items():
            axes.plot(mean, height, "o", ms=size_of[rate], color=colour, mec="white", mew=0.4)
        if chosen.scored in known:
            axes.plot(known[chosen.scored], height, "o", ms=RING, mfc="none", color=colour)
    axes.set_xlabel("accuracy at the end (%)")
    axes.set_title(f"tuning ({seeds_of(study.tuning)} per rate)", fontsize=8)


def draw_scores(axes: Axes, study: RateStudy, runs_of_arms: dict[str, dict[int, Run]]) -> None:
    """Draw the accuracy of every arm that is scored, at its own rate, as a point with its interval over seeds."""
    problems = scored_problems(study)
    for height, (arm, runs) in enumerate(runs_of_arms.items()):
        colour, _ = kind_of(study, arm)
        score = t_interval([100 * end(run, problems) for run in runs.values()])
        if runs:
            axes.plot(score.mean, height, "o", ms=5, color=colour)
        if len(runs) > 1:
            axes.hlines(height, score.low, score.high, color=colour, lw=1.4)
    axes.set_xlabel("accuracy at the end (%)")
    axes.set_title(f"own rate ({len(study.scoring.seeds)} other seeds)", fontsize=8)


def row_label(study: RateStudy, arm: str, n_runs: int) -> str:
    """Return an arm's name with the rate that it is scored at, and what its score lacks."""
    if arm not in {arm for line in study.lines if line.purpose == "scoring" for arm in line.arms}:
        return textwrap.fill(arm, 40)
    rate = study.rate(arm)
    missing = Looks((len(study.scoring.seeds),)).missing(n_runs)
    notes = ["not tuned"] if rate is None else [f"{rate:g}", *([missing] if missing else [])]
    return textwrap.fill(f"{arm} ({', '.join(notes)})", 40)


@styled
def rate_figure(results: Results, study: RateStudy) -> Plate:
    """Draw a row per arm: its accuracy at each learning rate on the left, its score at its own rate on the right."""
    arms = ordered_arms(study)
    runs_of_arms = {arm: runs_of(results, study, arm, study.rate(arm), "scoring") for arm in arms}
    figure = Figure(figsize=(8.6, 1.6 + 0.22 * len(arms)), layout="constrained")
    tuning, scores = figure.subplots(1, 2, sharey=True)
    draw_tuning(tuning, results, study)
    draw_scores(scores, study, runs_of_arms)
    tuning.set_yticks(range(len(arms)), [row_label(study, arm, len(runs)) for arm, runs in runs_of_arms.items()])
    tuning.set_ylim(len(arms) - 0.5, -0.5)
    for height, (above, below) in enumerate(pairwise(arms)):
        if place_of(study, above) != place_of(study, below):
            for axes in (tuning, scores):
                axes.axhline(height + 0.5, color="0.85", lw=0.8, zorder=0)
    handles = [plt.Line2D([], [], ls="", marker="s", color=colour, label=name)
               for colour, name in dict.fromkeys(kind_of(study, arm) for arm in arms)]  # fmt: skip
    handles += [plt.Line2D([], [], ls="", marker="o", ms=size, color="0.35", label=f"rate {rate:g}")
                for rate, size in sizes(study).items()]  # fmt: skip
    handles.append(plt.Line2D([], [], ls="", marker="o", ms=RING, mfc="none", color="0.35", label="scored at"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    base = BASE_NAMES.get(results.grid.base, results.grid.base)
    tasks = " and ".join(dict.fromkeys(task_name(study.task_of(arm)) for arm in arms))
    say_below(
        figure,
        f"{base}, {tasks}; n = {seeds_of(study.tuning)} on the left, {seeds_of(study.scoring)} on the right; means over seeds, "
        "lines on the right 95 % t intervals",
    )
    caption = (
        f"Accuracy at {results.grid.scale} at the last iteration, a row per arm; grey lines divide workflows and tasks. Left: in tuning, a mark per learning rate, larger for a larger rate, mean over "
        f"the tuning seeds; the ring is the rate that the arm is scored at. Right: at its own rate (in brackets), on other seeds and on problems that chose no rate, with "
        f"{100 * (1 - ALPHA):.0f} % t intervals over seeds. Differences and verdicts are in the tables. Rules: {study.rules}."
    )
    return Plate("rates", figure, caption)


def difference_label(arm: str, minus: str) -> str:
    """Name a line, such as "critic − SP, Voting": arms of one name with different beginnings share the rest of it."""
    (first, _, place), (other, _, other_place) = arm.partition(", "), minus.partition(", ")
    if arm == minus:
        return arm
    return f"{first} − {other}, {place}" if place and place == other_place else f"{arm} − {minus}"


def draw_differences(axes: Axes, study: RateStudy, values: pd.DataFrame) -> int:
    """Draw a row per line of some questions, below a heading per question; return the number of rows."""
    asked = {question.name: question.question for question in study.questions}
    labels: list[str] = []
    headings: list[int] = []
    for name, lines in values.groupby("question", sort=False):
        headings.append(len(labels))
        labels.append(asked[str(name)])
        for line in lines.to_dict("records"):
            if line["seeds"]:
                interval = line["low"], line["difference"], line["high"]
                draw_answer(axes, len(labels), interval, line["verdict"], ANSWER_COLOUR)
            labels.append(difference_label(line["arm"], line["minus"]))
    axes.axvline(0, color="0.7", lw=0.8, zorder=0)
    axes.set_yticks(range(len(labels)), labels)
    for row in headings:
        axes.get_yticklabels()[row].set_fontstyle("italic")
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("points")
    return len(labels)


@styled
def differences_figure(results: Results, study: RateStudy, values: pd.DataFrame) -> Plate:
    """Draw the values of `answer_table`: a panel per measure, a row per line with its interval, filled where the verdict is yes or no."""
    measures = values["question"].map({question.name: question.measure for question in study.questions})
    panels = dict(list(values.groupby(measures, sort=False)))
    figure = Figure(layout="constrained")
    n_rows = []
    for (measure, part), axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        n_rows.append(draw_differences(axes, study, part))
        axes.set_title(TITLES.get(str(measure), str(measure)), fontsize=8)
    figure.set_size_inches(5.6 * len(panels), 1.2 + 0.24 * max(n_rows))
    marks = [plt.Line2D([], [], color=ANSWER_COLOUR, marker="o", ls="", mfc=face) for face in (ANSWER_COLOUR, "white")]
    figure.legend(marks, ["verdict: yes or no", "another verdict, or not tested"], loc="outside upper center", ncols=2)
    base = BASE_NAMES.get(results.grid.base, results.grid.base)
    say_below(
        figure,
        f"{base}; n = {seeds_of(study.scoring)}, paired; means over seeds, lines are 95 % t intervals, uncorrected",
    )
    caption = (
        f"Each arm at its own learning rate at {results.grid.scale}, minus another one, paired by seed, with {100 * (1 - ALPHA):.0f} % t intervals over seeds, which are not corrected. Filled: the verdict is yes (above "
        f"zero) or no (below), after Holm's correction over the lines of a question; hollow: another verdict, or no test. Numbers are in rates_answers. Rules: {study.rules}."
    )
    return Plate("rates_differences", figure, caption)
