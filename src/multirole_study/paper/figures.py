"""Draw the figures of the paper and of a study from the numbers that the notebooks compute; what has no runs is left out.

Figure 1 is a drawing, `docs/figures/workflows.svg`.
"""

import math
from itertools import product

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, PercentFormatter, StrMethodFormatter

from multirole.workflows import WORKFLOWS as WORKFLOW_CLASSES
from multirole_study.compare.corrections import ALL_CELLS
from multirole_study.compare.intervals import Interval
from multirole_study.compare.measures import POOLED
from multirole_study.labels import (
    POLICY_COLOURS,
    POLICY_NAMES,
    POLICY_STYLES,
    ROLE_COLOURS,
    SETUP_COLOURS,
    SETUP_STYLES,
    SINGLE_COLOUR,
    SINGLE_STYLE,
    WORKFLOW_MARKERS,
    WORKFLOW_NAMES,
    cell_name,
    task_colour,
    task_name,
)
from multirole_study.paper.dynamics import MIN_CHI2, SHARES, over_first, typical
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.output import how_many, styled
from multirole_study.paper.results import REPORTED_STEPS
from multirole_study.paper.variants import SINGLE, Twins

BASE = {"color": "0.35", "lw": 1.2, "ls": "--"}
"""Style of the line of the untrained workflow."""
SINGLE_LINE = {"color": SINGLE_COLOUR, "lw": 1.2, "ls": SINGLE_STYLE}
"""Style of the line of the single agent."""
BAND = {"alpha": 0.15, "lw": 0}
REGIME_NAMES = {"paper": "preset's rate", "stress": "tripled rate", "stress, one step": "tripled rate,\none step"}
"""Regime of claims.yaml -> its name in the figure; another one keeps its own."""
X_OFFSET = {"ip": -0.19, "sp": 0.19}  # x, from the middle of a cell
AMPLITUDE_LABELS = {
    "chi2": "largest χ² during the update",
    "chi2_after": "largest χ² after the update",
    "grad_norm": "largest gradient norm",
    "entropy": "entropy collapse depth (nats)",
}
SHORT_NAMES = {"eval_opt": "Eval-Opt", "voting": "Voting", "orch_workers": "Orch-W."}
"""Workflow -> its name under a narrow column."""
CLIFF_PANELS = {
    "chi2": "χ² during\nthe update",
    "chi2_after": "χ² after\nthe update",
    "perplexity": "perplexity\n/ first",
    "grad_norm": "gradient norm\n/ first",
    "validation": "validation\naccuracy",
}
"""Metric -> label of the panels of Figure 6, from the top."""


@styled
def gains_over_base(gains: dict[tuple[str, str, str], pd.Series], intervals: dict[tuple[str, str, str], Interval],
                    single: dict[tuple[str, str], float]) -> Figure:  # fmt: skip
    """Draw Figure 2: the gain of every cell's peak over the base workflow.

    Args:
        gains: (task, workflow, policy) -> gain by seed; `intervals` has their means.
        single: (task, workflow) -> the gain of the single agent's peak over the same base; NaN without runs.
    """
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    tasks = list(dict.fromkeys(task for task, _, _ in gains))
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for task, axes in zip(tasks, panels, strict=True):
        for x, workflow in enumerate(WORKFLOWS):
            for policy in POLICIES:
                gain = gains[task, workflow, policy]
                if gain.empty:
                    continue
                at, colour = x + X_OFFSET[policy], POLICY_COLOURS[policy]
                mean, low, high = intervals[task, workflow, policy][:3]
                axes.bar(at, mean, 0.34, color=colour, alpha=0.85, zorder=2)
                axes.errorbar(at, mean, [[mean - low], [high - mean]], color="0.15", capsize=3, lw=1.1, zorder=4)
                axes.scatter([at + 0.09] * len(gain), gain, 12, color="white", ec=colour, zorder=3)
            if not math.isnan(level := single[task, workflow]):
                axes.hlines(level, x - 0.42, x + 0.42, zorder=5, **SINGLE_LINE)
        axes.axhline(0, color="0.35", lw=0.8)
        axes.set_xticks(range(len(WORKFLOWS)), [WORKFLOW_NAMES[w] for w in WORKFLOWS])
        axes.set_title(task_name(task))
        _in_percent(axes.yaxis, symbol="")
    panels[0].set_ylabel("peak minus base (points)")
    points = _entry("one seed", ls="", marker="o", ms=3.5, mfc="white", color="0.35")
    bars = _entry("95 % t interval of the mean", ls="", marker="|", ms=9, mew=1.1, color="0.15")
    _legend(figure, [*_policies(lw=6, ls="-"), bars, points, _entry("SA-RL's peak minus base", **SINGLE_LINE)])
    return figure


@styled
def ip_over_sp(
    accuracy: dict[tuple[str, str, str], pd.DataFrame],
    intervals: dict[tuple[str, str, str], dict[str, Interval]],
    tasks: list[str],
) -> Figure:
    """Draw Figure 3: accuracy under IP against accuracy under SP, a panel per checkpoint.

    `accuracy` maps (checkpoint, task, workflow) to a table of the seeds with a column per policy; `intervals` has the means of its columns.
    """
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for place, axes in zip(REPORTED_STEPS, panels, strict=True):
        for (at, task, workflow), by_seed in accuracy.items():
            if at != place:
                continue
            look = {"marker": WORKFLOW_MARKERS[workflow], "color": task_colour(task), "edgecolor": "0.15"}
            (x, left, right), (y, below, above) = (intervals[at, task, workflow][policy][:3] for policy in ("sp", "ip"))
            errors = [[y - below], [above - y]], [[x - left], [right - x]]
            axes.errorbar(x, y, *errors, color="0.35", lw=1.2, zorder=3)
            axes.scatter(x, y, 50, **look, zorder=4)
            axes.scatter(by_seed["sp"], by_seed["ip"], 10, **look | {"edgecolor": "none"}, alpha=0.35, zorder=2)
    lows, highs = zip(panels[0].get_xlim(), panels[0].get_ylim(), strict=True)
    low, high = max(0, min(lows)), min(1.02, max(highs))
    for place, axes in zip(REPORTED_STEPS, panels, strict=True):
        axes.plot([low, high], [low, high], color="0.35", lw=0.8, ls="--", zorder=1)
        axes.set(
            xlim=(low, high), ylim=(low, high), aspect="equal", xlabel="accuracy under SP", title=f"at the {place}"
        )
        axes.text(0.03, 0.96, "IP higher", transform=axes.transAxes, color="0.35", va="top")
        axes.text(0.97, 0.03, "SP higher", transform=axes.transAxes, color="0.35", ha="right")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        _in_percent(axes.xaxis, axes.yaxis)
    panels[0].set_ylabel("accuracy under IP")
    marks = [(WORKFLOW_MARKERS[workflow], "white", WORKFLOW_NAMES[workflow]) for workflow in WORKFLOWS]
    marks += [("D", task_colour(task), task_name(task)) for task in tasks]
    entries = [_entry(name, ls="", marker=marker, mfc=colour, mec="0.15") for marker, colour, name in marks]
    entries.append(_entry("one seed", ls="", marker="o", ms=3.2, mec="none", color="0.35", alpha=0.5))
    _legend(figure, entries)
    return figure


@styled
def training_curves(
    smooth: dict[tuple[str, str], pd.DataFrame],
    accuracy: dict[tuple[str, str], pd.DataFrame],
    levels: dict[str, dict[str, float]],
) -> Figure:
    """Draw Figure 4: training success above and validation accuracy below, a column per workflow.

    Args:
        smooth, accuracy: (workflow, policy) -> curves (iterations x seeds): smoothed training success, validation accuracy.
        levels: workflow -> "base" and "SA-RL" -> accuracy; NaN without runs.
    """
    figure = Figure(figsize=(6.6, 3.6), layout="constrained")
    grid = figure.subplots(2, len(WORKFLOWS), sharex=True, sharey="row")
    for workflow, (above, below) in zip(WORKFLOWS, grid.T, strict=True):
        for policy in POLICIES:
            for axes, curves in ((above, smooth[workflow, policy]), (below, accuracy[workflow, policy])):
                if curves.size:
                    marker = "." if axes is below else ""
                    _banded(axes, curves.mean(axis=1), policy, curves.min(axis=1), curves.max(axis=1), marker=marker)
        _level(below, levels[workflow]["base"], BASE)
        _level(below, levels[workflow]["SA-RL"], SINGLE_LINE)
        above.set_title(WORKFLOW_NAMES[workflow])
        below.set_xlabel("iteration")
    for axes, name in zip(grid[:, 0], ("training success,\nsmoothed", "validation accuracy"), strict=True):
        axes.set_ylabel(name)
        _in_percent(axes.yaxis)
    lines = _entry("base", **BASE), _entry("SA-RL's peak", **SINGLE_LINE)
    _legend(figure, [*_policies(lw=1.7), _band("lowest to highest seed"), *lines])
    return figure


@styled
def instability(amplitudes: pd.DataFrame, cells: list[tuple[str, str]]) -> Figure:
    """Draw Figure 5: the amplitudes of matched runs (`dynamics.extremes`, with the run's coordinates); `cells` are (task, workflow)."""
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    for (name, label), axes in zip(AMPLITUDE_LABELS.items(), figure.subplots(2, 2).flat, strict=True):
        by_seed = amplitudes.groupby(["workflow", "task", "seed"]) if len(amplitudes) else ()
        for (workflow, task, _), pair in by_seed:
            at = [cells.index((task, workflow)) + X_OFFSET[policy] for policy in POLICIES]
            by_policy = pair.set_index("policy").loc[list(POLICIES)]
            shown = by_policy[name].clip(lower=MIN_CHI2)
            axes.plot(at, shown, color="0.75", lw=0.7, zorder=1)
            axes.scatter(at, shown, 11, color=[POLICY_COLOURS[policy] for policy in POLICIES], zorder=3)
            if f"{name}_role" in by_policy:
                of_role = max(by_policy.loc["sp", f"{name}_role"], MIN_CHI2)
                axes.scatter(at[1], of_role, 11, fc="none", ec=POLICY_COLOURS["sp"], zorder=2)
        medians = amplitudes.groupby(["workflow", "task", "policy"])[name].median() if len(amplitudes) else pd.Series()
        for (workflow, task, policy), median in medians.items():
            x = cells.index((task, workflow)) + X_OFFSET[policy]
            axes.hlines(max(median, MIN_CHI2), x - 0.15, x + 0.15, color="0.1", lw=2, zorder=4)
        if name != "entropy":
            axes.set_yscale("log")
        axes.set_title(label)
        axes.set_xticks(range(len(cells)), [f"{SHORT_NAMES[w]}\n{task_name(t)}" for t, w in cells], fontsize=6.5)
    role = _entry("SP, role with the largest χ²", ls="", marker="o", mfc="none", mec=POLICY_COLOURS["sp"])
    _legend(figure, [*_policies(ls="", marker="o"), role, _entry("median over seeds", lw=2, color="0.1")])
    return figure


@styled
def cliffs(cells: dict[str, tuple[str, str, str]], series: dict[str, list[dict[str, pd.DataFrame]]],
           accuracy: dict[str, dict[str, pd.DataFrame]]) -> Figure:  # fmt: skip
    """Draw Figure 6: a column per cell with its runs, a row per diagnostic, a colour per role.

    Args:
        cells: label of a column -> (workflow, policy, task).
        series: label -> one `dynamics.role_series` per run.
        accuracy: label -> policy -> validation accuracy (steps x seeds), of the seeds of the column's runs.
    """
    figure = Figure(figsize=(6.6, 6.2), layout="constrained")
    grid = figure.subplots(len(CLIFF_PANELS), len(cells), sharex=True, sharey="row")
    for axes, label in zip(grid[:, 0], CLIFF_PANELS.values(), strict=True):
        axes.set_ylabel(label)
    for (at, cell), (*measured, validated) in zip(cells.items(), grid.T, strict=True):
        handles = []
        for role in series[at][0] if series[at] else ():
            is_shared = role == POOLED
            name = "shared adapter" if is_shared else series[at][0][role]["role"].iloc[0]
            look = {"color": POLICY_COLOURS["sp"] if is_shared else ROLE_COLOURS[name], "lw": 2.2 if is_shared else 1.4}
            handles.append(_entry(name, **look))
            for metric, axes in zip(CLIFF_PANELS, measured, strict=False):
                curves = pd.concat([run[role][metric] for run in series[at]], axis=1)
                is_chi2 = metric.startswith("chi2")
                curves = curves.clip(lower=MIN_CHI2) if is_chi2 else curves.apply(over_first).clip(lower=0.03)
                low, high = (typical(curves, quantile) for quantile in (0.25, 0.75))
                axes.fill_between(curves.index, low, high, color=look["color"], **BAND)
                axes.plot(typical(curves), **look)
        for policy, points in accuracy[at].items():
            if points.size:
                of_seeds = points.min(axis=1), points.max(axis=1)
                _banded(validated, points.mean(axis=1), policy, *of_seeds, marker=".", label=POLICY_NAMES[policy])
        _in_percent(validated.yaxis)
        validated.set_xlabel("iteration")
        validated.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
        if validated.get_lines():  # a grid may lack the cell
            validated.legend(ncols=2, loc="best")
        above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 2, "fontsize": 7}
        measured[0].legend(handles=handles, title=at + cell_name(*cell), **above)
    for axes in grid[:-1, 0]:
        axes.set_yscale("log")
        _few_log_ticks(axes)
    figure.align_ylabels()
    return figure


@styled
def shares_of_gradient(shares: pd.DataFrame, cells: list[tuple[str, str]]) -> Figure:
    """Draw each role's share of a shared adapter's rows, tokens and gradient, a panel per (task, workflow) of `cells`.

    `shares` has the lines of the table `role_gradients`.
    """
    shares = shares.reindex(columns=["task", "workflow", "role", "number", "value", "low", "high"])
    figure = Figure(figsize=(6.8, 1.9 * len(cells) / len(WORKFLOWS) + 0.4), layout="constrained")
    grid = figure.subplots(len(cells) // len(WORKFLOWS), len(WORKFLOWS), sharey=True, squeeze=False)
    names = [f"share of {name}" for name in SHARES]
    for axes, (task, workflow) in zip(grid.flat, cells, strict=True):
        axes.set_title(f"{WORKFLOW_NAMES[workflow]}, {task_name(task)}")
        axes.set_xticks(range(len(names)), SHARES)
        axes.axhline(0, color="0.35", lw=0.8)
        panel = shares[(shares["task"] == task) & (shares["workflow"] == workflow) & shares["number"].isin(names)]
        roles = list(dict.fromkeys(panel["role"]))
        for i, role in enumerate(roles):
            role_rows = panel[panel["role"] == role].set_index("number").loc[names]
            at, width = np.arange(len(names)) + (i - (len(roles) - 1) / 2) * 0.8 / len(roles), 0.72 / len(roles)
            errors = [role_rows["value"] - role_rows["low"], role_rows["high"] - role_rows["value"]]
            axes.bar(
                at, role_rows["value"], width, yerr=errors, color=ROLE_COLOURS[role], error_kw={"lw": 0.9, "capsize": 2}
            )
    for axes in grid[:, 0]:
        axes.set_ylabel("share of the adapter's")
        _in_percent(axes.yaxis)
    roles = [role for role in ROLE_COLOURS if role in set(shares["role"])]
    bars = _entry("95 % t interval", ls="", marker="|", ms=9, mew=1, color="0.1")
    _legend(figure, [*(_entry(role, lw=6, color=ROLE_COLOURS[role]) for role in roles), bars])
    return figure


@styled
def judging_roles(means: dict[tuple[str, str], list[pd.DataFrame]], single: float) -> Figure:
    """Draw every workflow's accuracy, and the length and gain of its judging role, over training and by policy.

    `means` maps (workflow, policy) to these three (`dynamics.pointwise`); `single` is the single agent's peak, NaN without runs.
    """
    figure = Figure(figsize=(6.8, 5.2), layout="constrained")
    grid = figure.subplots(3, len(WORKFLOWS), sharex=True, sharey="row")
    for workflow, column in zip(WORKFLOWS, grid.T, strict=True):
        for policy in POLICIES:
            panels = zip(column, means[workflow, policy], ((0, 1), (0, None), (-1, 1)), strict=True)
            for axes, of_seeds, bounds in panels:
                if len(of_seeds):
                    limits = of_seeds[["low", "high"]].clip(*bounds)
                    _banded(axes, of_seeds["mean"], policy, limits["low"], limits["high"])
        _level(column[0], single, SINGLE_LINE)
        column[2].axhline(0, color="0.6", lw=0.8)
        column[0].set_title(f"{WORKFLOW_NAMES[workflow]}: its {WORKFLOW_CLASSES[workflow].structure.judge}", fontsize=8)
        column[2].set_xlabel("iteration")
    for axes, label in zip(
        grid[:, 0], ("validation accuracy", "tokens of its reply", "what it adds (points)"), strict=True
    ):
        axes.set_ylabel(label)
    _in_percent(grid[0, 0].yaxis)
    _in_percent(grid[2, 0].yaxis, symbol="")
    lines = [*_policies(lw=1.7), _band("95 % t interval"), _entry("SA-RL's peak", **SINGLE_LINE)]
    _legend(figure, lines)
    return figure


@styled
def accuracy_by_regime(rows: list[dict[str, object]]) -> Figure | None:
    """Draw validation accuracy over training, a row per regime and a column per workflow; None if only one regime has runs.

    `rows` has one row per evaluation of a run: regime, workflow, policy, seed, iteration, accuracy.
    """
    runs = pd.DataFrame(rows, columns=["regime", "workflow", "policy", "seed", "iteration", "accuracy"])
    has_workflows = runs.groupby("regime")["workflow"].transform(lambda names: (names != "single").any())
    runs = runs[has_workflows.astype(bool)]
    regimes = sorted(runs["regime"].unique(), key=lambda name: (name not in REGIME_NAMES, *_place(name, REGIME_NAMES)))
    if len(regimes) < 2:
        return None
    figure = Figure(figsize=(6.8, 0.7 + 1.35 * len(regimes)), layout="constrained")
    grid = figure.subplots(len(regimes), 1 + len(WORKFLOWS), sharex=True, sharey=True)
    for (regime, panels), (column, workflow) in product(zip(regimes, grid, strict=True), enumerate(("single", *WORKFLOWS))):  # fmt: skip
        here = runs[(runs["regime"] == regime) & (runs["workflow"] == workflow)]
        for policy, of_policy in here.groupby("policy"):
            colour, ls = (SINGLE_COLOUR, SINGLE_STYLE) if workflow == "single" else (POLICY_COLOURS[policy], POLICY_STYLES[policy])  # fmt: skip
            sns.lineplot(of_policy, x="iteration", y="accuracy", errorbar=("pi", 100), err_kws=BAND, color=colour, ls=ls, lw=1.7, ax=panels[column])  # fmt: skip
    for regime, panels in zip(regimes, grid, strict=True):
        counts = runs[(runs["regime"] == regime) & (runs["workflow"] != "single")].groupby(["workflow", "policy"])[
            "seed"
        ]
        panels[0].set_ylabel(f"{REGIME_NAMES.get(regime, regime)}\nn = {how_many(counts.nunique())}")
        panels[0].set_ylim(0, 1)
        _in_percent(panels[0].yaxis)
    for axes, workflow in zip(grid[0], ("single", *WORKFLOWS), strict=True):
        axes.set_title(WORKFLOW_NAMES[workflow])
    for axes in grid[-1]:
        axes.set_xlabel("iteration")
    figure.supylabel("validation accuracy", fontsize=8)
    agent = _entry("single agent", color=SINGLE_COLOUR, ls=SINGLE_STYLE, lw=1.7)
    _legend(figure, [*_policies(lw=1.7), agent, _band("lowest to highest seed")])
    return figure


def _place(name: str, order: dict[str, str]) -> tuple[int, ...]:
    """Return where a name is in an order; empty if it is not there."""
    return tuple(i for i, known in enumerate(order) if known == name)


@styled
def beside_the_grid(pairs: list[Twins], labels: tuple[str, str], single: dict[str, float]) -> Figure:
    """Draw validation accuracy of a variant and its twins, a panel per cell; thin lines are seeds, thick ones their mean.

    `single` maps a task to the single agent's peak, NaN without runs.
    """
    rows = -(-len(pairs) // 4)
    figure = Figure(figsize=(6.8, 1.9 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, 4, sharey=True, sharex=True, squeeze=False)
    for axes, twin in zip(grid.flat, pairs, strict=False):
        for runs, colour, ls in zip((twin.usual, twin.changed), SETUP_COLOURS, SETUP_STYLES, strict=True):
            curves = pd.concat([run.accuracy for run in runs], axis=1)
            axes.plot(curves, color=colour, lw=0.8, alpha=0.35)
            axes.plot(curves.mean(axis=1), color=colour, lw=2.2, ls=ls)
        _level(axes, single[twin.task], SINGLE_LINE)
        axes.set_title(cell_name(*twin[:3]), fontsize=7.5)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _in_percent(*(axes.yaxis for axes in grid[:, 0]))
    for axes in grid[-1]:
        axes.set_xlabel("iteration")
    for axes in grid[:, 0]:
        axes.set_ylabel("validation accuracy")
    looks = zip(labels, SETUP_COLOURS, SETUP_STYLES, strict=True)
    setups = [_entry(f"{label} (mean)", color=colour, lw=2.2, ls=ls) for label, colour, ls in looks]
    seeds = _entry("one seed", color="0.35", lw=0.8, alpha=0.5)
    _legend(figure, [*setups, seeds, _entry("single agent's peak", **SINGLE_LINE)], ncols=2)
    return figure


@styled
def peaks_by_budget(values: pd.DataFrame) -> Figure | None:
    """Draw peaks by training budget, a row per budget; shapes are workflows and colours policies.

    `values` has the lines of the table `controls`; None if there are none.
    """
    if values.empty:
        return None
    tasks = list(dict.fromkeys(values["task"]))
    looks = {cell_name(w, p): (WORKFLOW_MARKERS[w], POLICY_COLOURS[p]) for w, p in product(WORKFLOWS, POLICIES)}
    looks[SINGLE] = WORKFLOW_MARKERS["single"], SINGLE_COLOUR
    numbers = values[~values["run"].str.startswith(ALL_CELLS)]
    numbers = numbers.join(numbers["run"].str.partition(", ")[[0, 2]].set_axis(["cell", "variant"], axis=1))
    budgets = list(
        dict.fromkeys((cell == SINGLE, variant) for cell, variant in zip(numbers["cell"], numbers["variant"]))
    )
    budgets.sort(key=lambda budget: not budget[0])
    figure = Figure(figsize=(2.9 + 3.6 * len(tasks), 0.55 * len(budgets) + 1.0), layout="constrained")
    for task, axes in zip(tasks, np.atleast_1d(figure.subplots(1, len(tasks), sharey=True)), strict=True):
        for row, (is_single, variant) in enumerate(budgets):
            rows = numbers[(numbers["task"] == task) & (numbers["variant"] == variant)]
            rows = rows[(rows["cell"] == SINGLE) == is_single]
            peaks = rows[rows["number"] == "peak"].set_index("cell")
            for i, cell in enumerate([cell for cell in looks if cell in peaks.index]):
                peak, (marker, colour) = peaks.loc[cell], looks[cell]
                error = [[peak["value"] - peak["low"]], [peak["high"] - peak["value"]]]
                at = row + (i - (len(peaks) - 1) / 2) * 0.13
                axes.errorbar(peak["value"], at, xerr=error, marker=marker, color=colour, ms=4.5, lw=1.0, capsize=1.5)
        for row in range(1, len(budgets)):
            axes.axhline(row - 0.5, color="0.85", lw=1.5 if budgets[row][0] != budgets[row - 1][0] else 0.6)
        _in_percent(axes.xaxis)
        axes.set(xlabel="validation accuracy at the peak", title=task_name(task), ylim=(len(budgets) - 0.5, -0.5))
        axes.set_yticks(range(len(budgets)), [_budget(numbers, *budget) for budget in budgets])
        axes.tick_params(axis="y", length=0)
    shapes = [
        _entry(WORKFLOW_NAMES[w], ls="", marker=WORKFLOW_MARKERS[w], color=SINGLE_COLOUR)
        for w in ("single", *WORKFLOWS)
    ]
    _legend(figure, [*shapes, *_policies(ls="-", lw=3), _entry("95 % t interval", color="0.35", marker="|", lw=1)])
    return figure


def _budget(numbers: pd.DataFrame, is_single: bool, variant: str) -> str:
    """Label a budget with its cells, with the optimizer steps and sampled tokens of a whole run, and with the number of runs of a cell."""
    rows = numbers[((numbers["cell"] == SINGLE) == is_single) & (numbers["variant"] == variant)]
    steps, tokens = (rows.loc[rows["number"] == name, "value"] for name in ("optimizer steps", "tokens sampled (M)"))
    sampled, unit = ((tokens / 1e6).round(1), "M") if tokens.max() >= 5e5 else ((tokens / 1e3).round().astype(int), "k")
    runs = how_many(rows.loc[rows["number"] == "runs", "value"].astype(int))
    spent = f"{how_many(steps.round().astype(int))} steps, {how_many(sampled)} {unit} tokens, n = {runs}"
    return f"{'single agent' if is_single else 'workflows'}, {variant or 'as in the grid'}\n{spent}"


def _banded(axes: Axes, mean: pd.Series, policy: str, low: pd.Series, high: pd.Series, **look: object) -> None:
    """Draw a policy's mean over seeds, with a band from `low` to `high`; all are indexed by iteration."""
    colour = POLICY_COLOURS[policy]
    axes.plot(mean, color=colour, ls=POLICY_STYLES[policy], lw=1.5, zorder=3, **look)
    axes.fill_between(mean.index, low, high, color=colour, **BAND)


def _in_percent(*axes: Axis, symbol: str = "%") -> None:
    for axis in axes:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=symbol))


def _few_log_ticks(axes: Axes) -> None:
    """Set ticks of a logarithmic axis that do not overlap: powers of ten, and below two decades some multiples of them."""
    low, high = axes.get_ylim()
    decades = np.log10(high / low)
    multiples = (1, 2, 5) if decades < 1.4 else (1, 3)
    locator = LogLocator(subs=multiples) if decades < 2 else LogLocator(numticks=4)
    axes.yaxis.set_major_locator(MaxNLocator(3) if decades < 0.5 else locator)
    axes.yaxis.set_minor_formatter(NullFormatter())
    if decades < 2:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))


def _level(axes: Axes, accuracy: float, look: dict[str, object]) -> None:
    """Draw a line at an accuracy, if it is known."""
    if not math.isnan(accuracy):
        axes.axhline(accuracy, **look)


def _entry(label: str, **look: object) -> Line2D:
    """Create an entry of a legend."""
    return Line2D([], [], label=label, **look)


def _band(label: str) -> Patch:
    """Create the entry of the bands in a legend."""
    return Patch(label=label, color="0.35", **BAND)


def _policies(**look: object) -> list[Line2D]:
    looks = {policy: {"color": POLICY_COLOURS[policy], "ls": POLICY_STYLES[policy]} | look for policy in POLICIES}
    return [_entry(POLICY_NAMES[policy], **style) for policy, style in looks.items()]


def _legend(figure: Figure, handles: list, ncols: int | None = None) -> None:
    figure.legend(handles=handles, loc="outside upper center", ncols=ncols or len(handles), columnspacing=1.2)
