"""Figure 6: the diagnostics of cells whose validation falls, one column per cell, one row per diagnostic."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from multirole.diagnostics.names import POLICY_NAMES, ROLE_COLOURS
from multirole.paper.dynamics import POOLED, role_series
from multirole.paper.measures import over_first, typical, validation
from multirole.paper.results import Key, Results

ROWS = {
    "chi2": "χ² during\nthe update",
    "chi2_after": "χ² after\nthe update",
    "perplexity": "perplexity\n/ first",
    "grad_norm": "gradient norm\n/ first",
    "validation": "validation\naccuracy",
}
"""What is drawn, from the top."""
CHI2, RATIOS = ("chi2", "chi2_after"), ("perplexity", "grad_norm")
"""What is drawn as it is, since its first value is next to nothing, and what is drawn over its first value."""
LEAST_RATIO = 0.03
"""Ratios below are cut off: without a difference in reward the gradient is zero."""


@dataclass(frozen=True)
class Column:
    """A cell, the runs of it that are drawn, and whether their alarms are, too."""

    title: str
    workflow: str
    policy: str
    task: str
    seeds: tuple[int, ...]
    has_alarms: bool = False

    def runs(self) -> list[Key]:
        """Their coordinates."""
        return [Key(self.workflow, self.policy, self.task, seed) for seed in self.seeds]


def draw(figure: Figure, results: Results, columns: list[Column], colours: dict[str, str]) -> list[list[Axes]]:
    """Draw every column and return the axes, row by row; `colours` are of the policies, SP's also of its adapter."""
    alarms = [_alarms(results, column) for column in columns]
    strip = {"alarms": 0.2 + 0.25 * max(rung["alarm"].nunique() for rung in alarms)}
    heights = strip if any(column.has_alarms for column in columns) else {}
    heights = heights | dict.fromkeys(ROWS, 1) | {"validation": 1.3}
    grid = figure.subplots(len(heights), len(columns), sharex=True, squeeze=False, height_ratios=list(heights.values()))
    for column, rung, axes in zip(columns, alarms, grid.T, strict=True):
        panels = dict(zip(heights, axes, strict=True))
        series = [role_series(results, run) for run in column.runs()]
        roles = series[0] if series else {}
        handles = [_draw_role(panels, role, [run[role] for run in series], colours) for role in roles]
        for name in RATIOS:
            panels[name].axhline(1, color="0.75", lw=0.7, zorder=0)
            log_axis(panels[name], LEAST_RATIO)
        for name in CHI2:
            _chi2_axis(panels[name])
        _draw_validation(panels["validation"], results, column, colours)
        if column.has_alarms:
            _draw_alarms(panels, results, column, rung)
        look = {"title_fontproperties": {"weight": "bold", "size": 8}, "fontsize": 7, "columnspacing": 1.2}
        above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2}
        axes[0].legend(handles=handles, title=column.title, **look, **above)
        axes[-1].set_xlabel("iteration")
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
        for panel in axes:
            panel.tick_params(labelsize=7.5)
    for name, label in ROWS.items():
        grid[list(heights).index(name)][0].set_ylabel(label, fontsize=8.5)
    figure.align_ylabels()
    return grid.tolist()


def log_axis(axes: Axes, least: float = 0.0) -> None:
    """A logarithmic y, cut at `least`, with a few plain numbers whatever its span; to be called once all is drawn."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    low = max(low, least)
    axes.set_ylim(low, high)
    decades = np.log10(high / low)
    subs = (1,) if decades > 3 else (1, 3) if decades > 1 else (1, 1.5, 2, 3, 5, 7)
    axes.yaxis.set_major_locator(LogLocator(subs=subs) if decades > 0.5 else MaxNLocator(4))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _chi2_axis(axes: Axes) -> None:
    """Linear below 0.01, where estimates may be negative, logarithmic above."""
    axes.set_yscale("symlog", linthresh=0.01)
    if axes.lines:
        low, high = axes.dataLim.intervaly
        axes.set_ylim(min(1.5 * low, -0.003), max(1.5 * high, 0.03))


def _draw_role(panels: dict[str, Axes], name: str, runs: list[pd.DataFrame], colours: dict[str, str]) -> Line2D:
    """One role's diagnostics, a thin line per seed and a thick one for what is typical; returns its legend entry."""
    label = "shared adapter" if name == POOLED else runs[0]["role"].iloc[0]
    colour, lw = (colours["sp"], 2.2) if name == POOLED else (ROLE_COLOURS[label], 1.4)
    for diagnostic in (*CHI2, *RATIOS):
        axes, is_ratio = panels[diagnostic], diagnostic in RATIOS
        curves = pd.concat([over_first(run[diagnostic]) if is_ratio else run[diagnostic] for run in runs], axis=1)
        axes.plot(curves, color=colour, lw=0.6, alpha=0.4)
        axes.plot(typical(curves), color=colour, lw=lw)
    return Line2D([], [], color=colour, lw=lw, label=label)


def _draw_validation(axes: Axes, results: Results, column: Column, colours: dict[str, str]) -> None:
    """The cell's validation and, in the same seeds, that of its match under the other policy."""
    for policy, colour in colours.items():
        points = validation(results, column.workflow, policy, column.task)
        points = points[[seed for seed in points if seed in column.seeds]]
        if points.size:
            axes.plot(points, color=colour, lw=0.5, alpha=0.4)
            axes.plot(points.mean(axis=1), color=colour, lw=1.6, marker="o", ms=3, label=POLICY_NAMES[policy])
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    if axes.lines:
        axes.legend(fontsize=8, ncols=2, loc="lower left", frameon=True, edgecolor="none", framealpha=0.8)


def _alarms(results: Results, column: Column) -> pd.DataFrame:
    """The alarms of a column's runs, in the order they rang; none where they are not drawn."""
    table, runs = results.table("alarms"), column.runs() if column.has_alarms else []
    if table.empty:
        return pd.DataFrame(columns=["iteration", "alarm", "role"])
    return table[table[list(Key._fields)].apply(tuple, axis=1).isin(runs)].sort_values("iteration", kind="stable")


def _draw_alarms(panels: dict[str, Axes], results: Results, column: Column, rung: pd.DataFrame) -> None:
    """Alarms by name in their strip, each with a thin line through every panel; dashed is where validation peaks."""
    for run in column.runs():
        for axes in panels.values():
            axes.axvline(results.steps(run)["best"], color="0.3", lw=0.9, ls="--", zorder=0)
    names = list(rung["alarm"].unique())
    for alarm in rung.to_dict("records"):
        colour = ROLE_COLOURS[alarm["role"]]
        panels["alarms"].scatter(alarm["iteration"], names.index(alarm["alarm"]), 20, color=colour, zorder=3)
        for axes in panels.values():
            axes.axvline(alarm["iteration"], color=colour, lw=0.6, alpha=0.6, zorder=0)
    for at, name in enumerate(names):
        panels["alarms"].text(0, at - 0.25, name.replace("_", " "), fontsize=6)
    panels["alarms"].set_yticks([])
    panels["alarms"].set_ylim(len(names) - 0.4, -0.8)
