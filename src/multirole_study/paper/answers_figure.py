"""Draw the answers to the declared questions of `claims_smollm2.yaml`: each line's interval on every base, side by side."""

import math
import textwrap
from itertools import cycle

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
    looks = dict(zip(dict.fromkeys(rows["base"]), cycle(zip(PALETTE, MARKERS, strict=True)), strict=False))
    n_rows = math.ceil(len(DECLARED["questions"]) / WIDTH)
    figure = Figure(figsize=(3.5 * WIDTH, 2.3 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, WIDTH, squeeze=False).ravel()
    for axes, question in zip(panels, DECLARED["questions"], strict=False):
        _draw(axes, question, rows[rows["question"] == question["name"]], looks)
    for axes in panels[len(DECLARED["questions"]) :]:
        axes.axis("off")
    marks = [plt.Line2D([], [], color=colour, marker=marker, ls="") for colour, marker in looks.values()]
    figure.legend(marks, list(looks), loc="outside upper center", ncols=len(looks))
    figure.draw_without_rendering()
    caption = (
        f"The declared questions on {task}, one panel each. Means over seeds with 95 % t intervals, uncorrected. Filled: the verdict is yes (above zero) or no (below); "
        "hollow: another verdict, or none. Numbers are in questions.md. Rules: claims_smollm2.yaml."
    )
    return Plate("answers", figure, caption)


def _draw(axes: Axes, question: dict, rows: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> None:
    """Draw one question; `looks`: base -> colour and marker."""
    lines, bases = list(dict.fromkeys(rows["line"])), list(looks)
    is_relative = any(line.get("metric") == "length_mean" for line in question["lines"])
    for row in rows[rows["seeds"] > 0].to_dict("records"):
        colour, marker = looks[row["base"]]
        height = lines.index(row["line"]) + 0.7 * ((bases.index(row["base"]) + 0.5) / len(bases) - 0.5)
        axes.hlines(height, 100 * row["low"], 100 * row["high"], color=colour, lw=1.2)
        axes.plot(
            100 * row["mean"], height, marker, ms=4, color=colour, mfc=colour if row["verdict"] in DECIDED else "white"
        )
    axes.axvline(0, color="0.7", lw=0.8, zorder=0)
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_title(textwrap.fill(question["question"].partition(" (")[0], 36), fontsize=7)
    axes.set_xlabel("% of the start" if is_relative else "points", fontsize=7)
