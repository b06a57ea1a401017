"""Figures of a study: curves with one step per iteration, IP against SP under each setup, what each remedy costs and gains."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from multirole.paper.figures import Plate
from multirole.paper.ledger_table import plot_ledger
from multirole.paper.results import Results
from multirole.paper.study import Study
from multirole.paper.twins import twins
from multirole.paper.write import STYLE, Table

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
            for runs, colour, label in zip((twin.usual, twin.changed), COLOURS, LABELS, strict=True):
                curves = [run.correct.mean() for run in runs]
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
    size = 4.2 * len(cells) + 1.2, 1.2 + 0.34 * max(mine["variant"].nunique() for _, mine in cells)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(cells), figsize=size, layout="constrained", squeeze=False)
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


def plot_policies(policies: Table) -> Figure:
    """IP minus SP in the grid and under each variant, with intervals, a panel per place."""
    places = list(dict.fromkeys(policies.values["at"]))
    with plt.rc_context(STYLE):
        cells = policies.values.groupby(["workflow", "task"], sort=False).ngroups
        variants = list(dict.fromkeys(policies.values["variant"]))
        figure, grid = plt.subplots(
            1, len(places), figsize=(4.4 * len(places), 0.9 + 0.2 * cells * (len(variants) + 1)),
            layout="constrained", sharey=True, squeeze=False,
        )  # fmt: skip
        for axes, place in zip(grid[0], places, strict=True):
            at, ticks = 0, {}
            for (workflow, task), mine in policies.values[policies.values["at"] == place].groupby(
                ["workflow", "task"], sort=False
            ):
                first = mine["variant"].iloc[0]
                rows = [("grid", mine[(mine["measure"] == "grid") & (mine["variant"] == first)])]
                rows += [(name, one) for name, one in mine[mine["measure"] == "variant"].groupby("variant", sort=False)]
                for name, one in rows:
                    mean, low, high = (100 * float(one[column].iloc[0]) for column in ("mean", "low", "high"))
                    colour = COLOURS[0] if name == "grid" else COLOURS[1]
                    axes.errorbar(mean, at, xerr=[[mean - low], [high - mean]], fmt="o", ms=4, lw=1.4, color=colour)
                    ticks[at] = f"{workflow.replace('_', '-')} {task}: {name}"
                    at -= 1
                at -= 0.6
            axes.axvline(0, color="0.6", lw=0.8)
            axes.set(
                yticks=list(ticks), yticklabels=list(ticks.values()), title=f"at the {place}", xlabel="IP − SP (points)"
            )
    plt.close(figure)
    return figure


def study_figures(results: Results, study: Study, made: list[Table]) -> list[Plate]:
    """The figures of those of the study's tables that have one, under the table's name and caption."""
    drawn = {
        "ledger": lambda _: plot_ledger(results, study),
        "matched_updates": lambda _: plot_matched_updates(results, study),
        "policies": plot_policies,
        "remedies": plot_remedies,
    }
    return [Plate(table.name, drawn[table.name](table), table.caption) for table in made if table.name in drawn]
