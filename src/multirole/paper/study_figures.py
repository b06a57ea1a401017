"""Figures of a study: curves with and without a change of the number of steps, and what each remedy costs and gains."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from multirole.paper.figures import Plate
from multirole.paper.results import Results
from multirole.paper.study_tables import twins
from multirole.paper.write import STYLE, Table
from multirole.study import Study

COLOURS = ("#b2182b", "#2166ac")
LABELS = ("a step per batch of rows, as the grid", "one step per iteration")
MEASURES = {"change at the peak": ("#666666", "at the peak"), "change at the end": ("#2166ac", "at the end")}


def plot_matched_updates(results: Results, study: Study) -> Figure:
    """Validation accuracy of the cells with twins, seeds thin and their mean thick."""
    found = list(twins(results, study, "updates"))
    columns = min(3, max(1, len(found)))
    rows = -(-len(found) // columns) or 1
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            rows, columns, figsize=(3.5 * columns, 2.7 * rows + 0.4), layout="constrained", sharey=True, squeeze=False
        )
        for axes, twin in zip(grid.flat, found, strict=False):
            for curves, colour, label in zip((twin.usual_curves, twin.changed_curves), COLOURS, LABELS, strict=True):
                for curve in curves:
                    axes.plot(curve.index, 100 * curve, color=colour, lw=0.8, alpha=0.4)
                mean = pd.concat(curves, axis=1).mean(axis=1)
                axes.plot(mean.index, 100 * mean, color=colour, lw=2, marker=".", label=label)
            single = results.outcomes("single", "sp", twin.task, "best")
            if single is not None:
                axes.axhline(100 * single.mean(), color="0.4", ls=":", lw=1, label="single agent's peak")
            axes.set(title=f"{twin.workflow.replace('_', '-')} {twin.policy.upper()} {twin.task}", xlabel="iteration")
        for axes in grid.flat[len(found) :]:
            axes.set_axis_off()
        for axes in grid[:, 0]:
            axes.set_ylabel("validation accuracy (%)")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    plt.close(figure)  # a notebook shows what a cell returns
    return figure


def plot_remedies(remedies: Table) -> Figure:
    """What each remedy changes at the peak and at the end, with intervals, a panel per cell."""
    cells = list(remedies.values.groupby(["workflow", "policy", "task"], sort=False))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, len(cells), figsize=(4.2 * len(cells) + 1.2, 3.4), layout="constrained", squeeze=False
        )
        for axes, ((workflow, policy, task), mine) in zip(grid[0], cells, strict=True):
            names = list(dict.fromkeys(mine["variant"]))[::-1]
            for shift, (measure, (colour, label)) in zip((0.12, -0.12), MEASURES.items(), strict=True):
                of = mine[mine["measure"] == measure].set_index("variant").loc[names]
                at = [i + shift for i in range(len(names))]
                mean, low, high = (100 * of[c].astype(float) for c in ("mean", "low", "high"))
                axes.errorbar(
                    mean, at, xerr=[mean - low, high - mean], fmt="o", ms=4, lw=1.4, color=colour, label=label
                )
            axes.axvline(0, color="0.6", lw=0.8)
            axes.set(yticks=range(len(names)), yticklabels=names, title=f"{workflow.replace('_', '-')} {policy.upper()} {task}",
                     xlabel="accuracy − the grid's (points)")  # fmt: skip
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    plt.close(figure)
    return figure


def study_figures(results: Results, study: Study, made: list[Table]) -> list[Plate]:
    """The figures of those of the study's tables that have one, under the table's name and caption."""
    drawn = {
        "matched_updates": lambda _: plot_matched_updates(results, study),
        "remedies": plot_remedies,
    }
    return [Plate(table.name, drawn[table.name](table), table.caption) for table in made if table.name in drawn]
