"""Draw the answers to the declared questions of `claims_smollm2.yaml`: each line's interval on every base, side by side."""

import math
import textwrap
from itertools import cycle

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multirole_study.labels import BASE_COLOURS, BASE_NAMES, MARKERS
from multirole_study.paper.output import Plate, how_many, say_below, styled
from multirole_study.paper.questions import DECLARED

WIDTH = 3
"""Panels side by side."""
DECIDED = ("yes", "no")


@styled
def answers_figure(columns: list[pd.DataFrame], task: str = DECLARED["task"]) -> Plate:
    """Draw the answers of several bases (`columns_of`): a panel per question, a mark per line and base, filled where the verdict is yes or no."""
    rows = pd.concat(columns, ignore_index=True)
    looks = dict(zip(dict.fromkeys(rows["base"]), cycle(zip(BASE_COLOURS, MARKERS, strict=False)), strict=False))
    n_rows = math.ceil(len(DECLARED["questions"]) / WIDTH)
    figure = Figure(figsize=(3.5 * WIDTH, 2.3 * n_rows), layout="constrained")
    panels = figure.subplots(n_rows, WIDTH, squeeze=False).ravel()
    for axes, question in zip(panels, DECLARED["questions"], strict=False):
        _draw(axes, question, rows[rows["question"] == question["name"]], looks)
    for axes in panels[len(DECLARED["questions"]) :]:
        axes.axis("off")
    marks = [plt.Line2D([], [], color=colour, marker=marker, ls="") for colour, marker in looks.values()]
    marks += [plt.Line2D([], [], color="0.35", marker="o", ls="", mfc=face) for face in ("0.35", "white")]
    names = [*(BASE_NAMES.get(base, base) for base in looks), "verdict: yes or no", "another verdict, or none"]
    figure.legend(marks, names, loc="outside upper center", ncols=len(names))
    seeds = rows[rows["seeds"] > 0].groupby("base", sort=False)["seeds"]
    counts = [f"{BASE_NAMES.get(base, base)} {how_many(of_base)}" for base, of_base in seeds]
    say_below(figure, f"task {task}; means over seeds, 95 % t intervals; seeds: {', '.join(counts)}")
    caption = (
        f"The declared questions on {task}, one panel each. Means over seeds with 95 % t intervals, uncorrected. Filled: the verdict is yes (above zero) or no (below); "
        "hollow: another verdict, or none. Numbers are in questions.md. Rules: claims_smollm2.yaml."
    )
    return Plate("answers", figure, caption)


def draw_answer(
    axes: Axes, height: float, interval: tuple[float, float, float], verdict: str, colour: str, marker: str = "o"
) -> None:
    """Draw a (low, mean, high) in points as a mark on a line, filled where the verdict is yes or no."""
    low, mean, high = (100 * value for value in interval)
    axes.hlines(height, low, high, color=colour, lw=1.2)
    axes.plot(mean, height, marker, ms=4, color=colour, mfc=colour if verdict in DECIDED else "white")


def _draw(axes: Axes, question: dict, rows: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> None:
    """Draw one question; `looks`: base -> colour and marker."""
    lines, bases = list(dict.fromkeys(rows["line"])), list(looks)
    is_relative = any(line.get("metric") == "length_mean" for line in question["lines"])
    for row in rows[rows["seeds"] > 0].to_dict("records"):
        colour, marker = looks[row["base"]]
        height = lines.index(row["line"]) + 0.7 * ((bases.index(row["base"]) + 0.5) / len(bases) - 0.5)
        draw_answer(axes, height, (row["low"], row["mean"], row["high"]), row["verdict"], colour, marker)
    axes.axvline(0, color="0.7", lw=0.8, zorder=0)
    if not (rows["seeds"] > 0).any():
        axes.set_xticks([0])
        axes.text(0.5, 0.5, "not run", ha="center", transform=axes.transAxes, style="italic", color="0.45")
    axes.set_yticks(range(len(lines)), lines)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_title(textwrap.fill(question["question"].partition(" (")[0], 36), fontsize=7)
    axes.set_xlabel("% of the start" if is_relative else "points", fontsize=7)
