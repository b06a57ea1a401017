"""Draw what was learnt on one page each: workflows against a single agent by budget, and isolated against shared adapters.

Both figures have a group of marks per model, task and learning rate, and a panel per budget or checkpoint. A mark is a mean over seeds with
its 95 % t interval. What was not run is named in its place.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, product

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from multirole_study.compare.intervals import Interval
from multirole_study.labels import (
    BASE_NAMES,
    POLICY_COLOURS,
    POLICY_NAMES,
    TASK_COLOURS,
    TASK_NAMES,
    TASKS_OF_BASES,
    WORKFLOW_MARKERS,
    WORKFLOW_NAMES,
)
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.output import STYLE, how_many
from multirole_study.paper.results import Results

NOT_RUN = "not run"
COLUMNS = ["group", "panel", "mark", "mean", "low", "high", "seeds"]
NAMES = WORKFLOW_NAMES | TASK_NAMES | POLICY_NAMES
Look = dict[str, object]
Mark = tuple[str, str]


def line(group: str, panel: str, mark: Mark, interval: Interval) -> dict[str, object]:
    """Return a row of a figure's numbers: a mark of a group in a panel, as fractions; an interval without seeds was not run."""
    return dict(zip(COLUMNS, (group, panel, mark, *interval[:3], interval.seeds), strict=True))


def group_name(results: Results, task: str | None = None, rate: str = "") -> str:
    """Name a group by its base model, the task as it is at that scale, and the learning rate."""
    base = BASE_NAMES.get(results.grid.base, results.grid.base)
    words = [base, *([TASKS_OF_BASES.get((results.grid.scale, task), task)] if task else []), *([rate] if rate else [])]
    return ", ".join(words)


def gains_by_budget(rows: list[dict[str, object]], groups: Sequence[str], budgets: Sequence[str]) -> Figure:
    """Draw a workflow's accuracy minus the single agent's, a panel per budget; a mark is (workflow, policy)."""
    looks = {
        (workflow, policy): {"marker": WORKFLOW_MARKERS[workflow], "color": POLICY_COLOURS[policy]}
        for workflow, policy in product(WORKFLOWS, POLICIES)
    }
    shapes = [_entry(WORKFLOW_NAMES[name], marker=WORKFLOW_MARKERS[name], color="0.35") for name in WORKFLOWS]
    colours = [_entry(POLICY_NAMES[name], marker="", ls="-", lw=4, color=POLICY_COLOURS[name]) for name in POLICIES]
    sides = "agent higher", "workflow higher"
    return _panels(rows, groups, budgets, looks, [*shapes, *colours], sides, "workflow minus single agent, points")


def sharing_by_regime(rows: list[dict[str, object]], groups: Sequence[str], places: Sequence[str]) -> Figure:
    """Draw accuracy under IP minus that under SP, a panel per checkpoint; a mark is (task, workflow)."""
    looks = {
        (task, workflow): {"marker": WORKFLOW_MARKERS[workflow], "color": TASK_COLOURS[task]}
        for task, workflow in product(TASK_NAMES, WORKFLOWS)
    }
    shapes = [_entry(WORKFLOW_NAMES[name], marker=WORKFLOW_MARKERS[name], color="0.35") for name in WORKFLOWS]
    colours = [_entry(TASK_NAMES[name], marker="", ls="-", lw=4, color=TASK_COLOURS[name]) for name in TASK_NAMES]
    return _panels(rows, groups, places, looks, [*shapes, *colours], ("SP higher", "IP higher"), "IP minus SP, points")  # fmt: skip


@plt.rc_context(STYLE)
def _panels(
    rows: list[dict[str, object]], groups: Sequence[str], panels: Sequence[str], looks: dict[Mark, Look],
    legend: list[Line2D], sides: tuple[str, str], label: str,
) -> Figure:  # fmt: skip
    """Draw a panel for each of `panels`, with equal limits, and in each a group of marks for each of `groups`; `sides` name the two sides of zero."""
    numbers = pd.DataFrame(rows, columns=COLUMNS)
    figure = Figure(figsize=(7.6, 1.3 + 0.6 * len(groups)), layout="constrained")
    grid = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, panel in zip(grid, panels, strict=True):
        axes.axvline(0, color="0.35", lw=1)
        for height, group in enumerate(groups):
            here = numbers[(numbers["panel"] == panel) & (numbers["group"] == group) & (numbers["seeds"] > 0)]
            _draw_group(axes, height, {row["mark"]: row for row in here.to_dict("records")}, looks)
        for height in range(1, len(groups)):
            axes.axhline(height - 0.5, color="0.85", lw=0.8)
        axes.set_title(panel, fontsize=8.5, pad=13)
        axes.tick_params(axis="y", length=0)
    for axes in grid:
        look = {"transform": axes.transAxes, "fontsize": 6.5, "color": "0.35", "va": "bottom"}
        axes.text(0, 1.005, f"← {sides[0]}", ha="left", **look)
        axes.text(1, 1.005, f"{sides[1]} →", ha="right", **look)
    figure.supxlabel(f"{label}: mean over seeds, 95 % t interval", fontsize=8)
    grid[0].set_yticks(range(len(groups)), [_group_label(numbers, group) for group in groups])
    grid[0].set_ylim(len(groups) - 0.5, -0.5)
    one_seed = [_entry("one seed", marker="o", mfc="white", color="0.35")] if (numbers["seeds"] == 1).any() else []
    figure.legend(handles=[*legend, *one_seed], loc="outside upper center", ncols=len(legend) + 1, columnspacing=1.4)
    figure.draw_without_rendering()
    return figure


def _draw_group(axes: Axes, middle: float, numbers: dict[Mark, dict[str, float]], looks: dict[Mark, Look]) -> None:
    """Draw the marks of a group around a height, in percentage points, each in a place of its own; neighbours that are missing are called not run."""
    heights = {mark: middle + 0.8 * ((i + 0.5) / len(looks) - 0.5) for i, mark in enumerate(looks)}
    for mark, row in numbers.items():
        look = looks[mark]
        axes.hlines(heights[mark], 100 * row["low"], 100 * row["high"], color=look["color"], lw=1.6)
        face = look["color"] if row["seeds"] > 1 else "white"
        axes.plot(100 * row["mean"], heights[mark], ms=4.2, mfc=face, ls="", **look)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    look = {"va": "center", "fontsize": 6.5, "style": "italic", "color": "0.45", "bbox": box}
    for marks in _missing(list(looks), set(numbers)):
        at = sum(heights[mark] for mark in marks) / len(marks)
        if len(marks) == len(looks):
            axes.text(0, at, NOT_RUN, ha="center", **look)
        else:  # beside the marks of the group
            text = f"{_what(marks)}: {NOT_RUN}"
            axes.text(0.02, at, text, transform=axes.get_yaxis_transform(), **look)


def _missing(marks: list[Mark], there: set[Mark]) -> Iterator[list[Mark]]:
    """Yield the marks that are not there: all of them, or neighbours with the same first part, such as a task."""
    if not there:
        yield marks
        return
    for (is_there, _), neighbours in groupby(marks, key=lambda mark: (mark in there, mark[0])):
        if not is_there:
            yield list(neighbours)


def _what(marks: list[Mark]) -> str:
    """Name what all marks share, such as their task."""
    shared = [part for part, *others in zip(*marks, strict=True) if {part} == {part, *others}]
    return ", ".join(NAMES[part] for part in shared)


def _group_label(numbers: pd.DataFrame, group: str) -> str:
    """Label a group with its number of seeds."""
    seeds = numbers.loc[(numbers["group"] == group) & (numbers["seeds"] > 0), "seeds"]
    base, _, rest = group.partition(", ")
    return f"{base}\n{rest}, n = {how_many(seeds)}" if len(seeds) else group


def _entry(label: str, marker: str, ls: str = "", **look: object) -> Line2D:
    """Create an entry of the legend."""
    return Line2D([], [], label=label, marker=marker, ls=ls, **look)
