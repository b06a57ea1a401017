"""Draw the tuning and the scores of a study such as `studies/rates.yaml`."""

import math
import textwrap

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multirole_study.compare.intervals import t_interval
from multirole_study.compare.looks import Looks
from multirole_study.compare.rules import ALPHA
from multirole_study.labels import BASE_NAMES, MAP_COLOUR, MARKERS, POLICY_COLOURS, SINGLE_COLOUR, WORKFLOW_MARKERS
from multirole_study.paper.output import Plate, say_below, styled
from multirole_study.paper.rate_study import RateStudy
from multirole_study.paper.rate_tables import end, runs_of, scored_problems, tuned
from multirole_study.paper.results import Results

LINES = ("-", "--", ":", "-.")


def looks(study: RateStudy) -> dict[str, dict[str, str]]:
    """Return the marks of every arm: its colour is that of its policy, or the single agent's, and marker and line differ within one colour."""
    marks, seen = {}, dict.fromkeys([SINGLE_COLOUR, MAP_COLOUR, *POLICY_COLOURS.values()], 0)
    for arm, about in study.arms.items():
        colour = SINGLE_COLOUR if about.workflow == "single" else POLICY_COLOURS.get(about.policy, MAP_COLOUR)
        n, seen[colour] = seen[colour], seen[colour] + 1
        is_plain = about.workflow in WORKFLOW_MARKERS and not about.parameters
        marker = WORKFLOW_MARKERS[about.workflow] if is_plain else MARKERS[3 + n % 3]
        marks[arm] = {"color": colour, "marker": marker, "ls": LINES[n % len(LINES)]}
    return marks


def scored_arms(study: RateStudy) -> list[str]:
    """Return the arms that a line scores, in the order of the study's arms."""
    scored = {arm for line in study.lines if line.purpose == "scoring" for arm in line.arms}
    return [arm for arm in study.arms if arm in scored]


def draw_tuning(axes: Axes, results: Results, study: RateStudy) -> None:
    """Draw mean accuracy over the learning rate, a line per tuned arm with a larger mark at its rate."""
    for arm, look in looks(study).items():
        chosen = tuned(results, study, arm)
        known = {rate: 100 * mean for rate, mean in chosen.means.items() if not math.isnan(mean)}
        if study.arms[arm].rate is not None or not known:
            continue
        axes.plot(list(known), list(known.values()), ms=3, lw=1.2, label=arm, **look)
        if chosen.scored in known:
            axes.plot(chosen.scored, known[chosen.scored], ms=8, mfc="none", **look | {"ls": ""})
    axes.axvline(study.preset, color="0.85", lw=5, zorder=0, label="the preset's rate")
    axes.set_xscale("log", base=2)
    axes.set_xticks(study.rates, [f"{rate:g}" for rate in study.rates])
    axes.set_xlabel("learning rate")
    axes.set_ylabel("accuracy at the end (%)")
    axes.set_title(f"learning rates ({len(study.tuning.seeds)} tuning seeds)", fontsize=8)


def draw_scores(axes: Axes, results: Results, study: RateStudy) -> None:
    """Draw the accuracy of every arm that is scored, at its own rate, as a point with its interval over seeds."""
    problems, labels, marks = scored_problems(study), [], looks(study)
    for height, arm in enumerate(scored_arms(study)):
        look = marks[arm]
        runs = runs_of(results, study, arm, study.rate(arm), "scoring")
        score = t_interval([100 * end(run, problems) for run in runs.values()])
        if runs:
            axes.plot(score.mean, height, ms=5, **look | {"ls": ""})
        if len(runs) > 1:
            axes.hlines(height, score.low, score.high, color=look["color"], lw=1.4)
        missing = Looks((len(study.scoring.seeds),)).missing(len(runs))
        notes = ["not tuned"] if study.rate(arm) is None else [f"{study.rate(arm):g}", *([missing] if missing else [])]
        labels.append(textwrap.fill(f"{arm} ({', '.join(notes)})", 36))
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("accuracy at the end (%)")
    axes.set_title(f"each arm at its own rate ({len(study.scoring.seeds)} other seeds)", fontsize=8)


@styled
def rate_figure(results: Results, study: RateStudy) -> Plate:
    """Draw accuracy over the learning rate on the left, and each arm's score at its own rate on the right."""
    figure = Figure(figsize=(8.6, max(4.8, 1.4 + 0.3 * len(scored_arms(study)))), layout="constrained")
    tuning, scores = figure.subplots(1, 2, width_ratios=[1, 1])
    draw_tuning(tuning, results, study)
    draw_scores(scores, results, study)
    handles, labels = tuning.get_legend_handles_labels()
    handles.append(plt.Line2D([], [], ls="", marker="o", ms=8, mfc="none", color="0.35"))
    figure.legend(handles, [*labels, "the rate that the arm is scored at"], loc="outside upper center", ncols=3)
    seeds = f"n = {len(study.tuning.seeds)} seeds on the left, {len(study.scoring.seeds)} others on the right"
    base = BASE_NAMES.get(results.grid.base, results.grid.base)
    say_below(figure, f"{base}, {study.task}; {seeds}; means over seeds, lines on the right 95 % t intervals")
    caption = (
        f"Accuracy at {results.grid.scale} at the last iteration. Left: over the learning rate, mean over the tuning seeds; the ring is the rate that the arm is scored at, the grey line the preset's. Right: at its own "
        f"rate (in brackets), on other seeds and on problems that chose no rate, with {100 * (1 - ALPHA):.0f} % t intervals over seeds; colours and marks are those of the left. Differences and verdicts are in the tables. "
        f"Rules: {study.rules}."
    )
    return Plate("rates", figure, caption)
