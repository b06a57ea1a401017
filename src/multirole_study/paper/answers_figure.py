"""Draw the answers to the declared questions of `claims_smollm2.yaml`: each line's interval on every base, side by side."""

import math
import textwrap

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multirole_study.labels import PALETTE
from multirole_study.paper.output import STYLE, Plate
from multirole_study.paper.questions import DECLARED

WIDTH = 3
"""Panels side by side."""
MARKERS = ("o", "s", "^", "D", "v", "P")
DECIDED = ("yes", "no")


@plt.rc_context(STYLE)
def answers_figure(columns: list[pd.DataFrame], task: str = DECLARED["task"]) -> Plate:
    """Draw the answers of several bases (`columns_of`): a panel per question, a mark per line and base, filled where the verdict is yes or no."""
    rows = pd.concat(columns, ignore_index=True)
    names = list(dict.fromkeys(rows["base"]))
    n_rows = math.ceil(len(DECLARED["questions"]) / WIDTH)
    figure = Figure(figsize=(3.5 * WIDTH, 2.3 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, WIDTH, squeeze=False).ravel()
    for axes, question in zip(panels, DECLARED["questions"], strict=False):
        _draw(axes, question, rows[rows["question"] == question["name"]], names)
    for axes in panels[len(DECLARED["questions"]) :]:
        axes.axis("off")
    marks = [plt.Line2D([], [], color=PALETTE[i], marker=MARKERS[i], ls="") for i in range(len(names))]
    figure.legend(marks, names, loc="outside upper center", ncols=len(names))
    figure.draw_without_rendering()
    caption = (
        f"The declared questions on {task}, one panel each. Means over seeds with 95 % t intervals, uncorrected. Filled: the verdict is yes (above zero) or no (below); "
        "hollow: another verdict, or none. Numbers are in questions.md. Rules: claims_smollm2.yaml."
    )
    return Plate("answers", figure, caption)


def _draw(axes: Axes, question: dict, rows: pd.DataFrame, bases: list[str]) -> None:
    lines = list(dict.fromkeys(rows["line"]))
    is_relative = any(line.get("metric") == "length_mean" for line in question["lines"])
    for row in rows[rows["seeds"] > 0].to_dict("records"):
        i = bases.index(row["base"])
        height = lines.index(row["line"]) + 0.7 * ((i + 0.5) / len(bases) - 0.5)
        axes.hlines(height, 100 * row["low"], 100 * row["high"], color=PALETTE[i], lw=1.2)
        fill = PALETTE[i] if row["verdict"] in DECIDED else "white"
        axes.plot(100 * row["mean"], height, MARKERS[i], ms=4, color=PALETTE[i], mfc=fill)
    axes.axvline(0, color="0.7", lw=0.8, zorder=0)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_title(textwrap.fill(question["question"].partition(" (")[0], 36), fontsize=7)
    axes.set_xlabel("% of the start" if is_relative else "points", fontsize=7)
