"""The figures of the paper and of a study, from a results folder; runs that are not finished are left out.

`figures.yaml` holds the captions, and Figure 1 is a drawing, `docs/figures/workflows.svg`.
"""

from collections.abc import Collection, Iterable
from itertools import product
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
import yaml
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from multirole.diagnostics.names import (
    POLICY_COLOURS,
    POLICY_NAMES,
    POLICY_STYLES,
    ROLE_COLOURS,
    SETUP_COLOURS,
    SETUP_STYLES,
    TASK_COLOURS,
    TASK_NAMES,
    WORKFLOW_MARKERS,
    WORKFLOW_NAMES,
    cell_name,
)
from multirole.paper import dynamics, factorial, skills
from multirole.paper.claims import REGIMES
from multirole.paper.grid import LINES, POLICIES, WORKFLOWS
from multirole.paper.results import Results, Run
from multirole.paper.statistics import ALL, t_interval
from multirole.paper.study import Study
from multirole.paper.study_tables import Twins, twins
from multirole.paper.tables import made_from, sentences
from multirole.paper.write import STYLE, Plate, Table

CAPTIONS = yaml.safe_load(Path(__file__).with_name("figures.yaml").read_text(encoding="utf-8"))
REFERENCE = {"color": "0.35", "lw": 1.2}
"""Lines of the base and of the single agent."""
ASIDE = {"ip": -0.19, "sp": 0.19}  # x, from the middle of a cell
AMPLITUDES = {
    "chi2": "largest χ² during the update",
    "chi2_after": "largest χ² after the update",
    "grad_norm": "largest gradient norm",
    "entropy": "entropy collapse depth (nats)",
}


LEAST = 1e-4
"""Smaller chi2 is drawn here: such estimates are noise around zero."""
FELL, STAYED = "#c1272d", "#0173b2"
CLIFFS = {
    "chi2": "χ² during\nthe update",
    "chi2_after": "χ² after\nthe update",
    "perplexity": "perplexity\n/ first",
    "grad_norm": "gradient norm\n/ first",
    "validation": "validation\naccuracy",
}
"""What Figure 6 draws, from the top."""


@plt.rc_context(STYLE)
def figures(results: Results) -> list[Plate]:
    """Draw them all; Figure 4, the judging roles and the regimes once per task."""
    by_regime = {task: accuracy_by_regime(results, task) for task in results.grid.tasks}
    return [
        figure_2(results), figure_3(results), *(figure_4(results, task) for task in results.grid.tasks), figure_5(results),
        figure_6(results),
        *(figure_of_roles(results, task) for task in results.grid.tasks),
        *(figure_of_regimes(results, task, runs) for task, runs in by_regime.items() if runs["regime"].nunique() > 1),
    ]  # fmt: skip


def figure_2(results: Results) -> Plate:
    """The gain of every cell's peak over the base workflow."""
    figure = Figure(figsize=(6.4, 2.9), layout="constrained")
    tasks = results.grid.tasks
    panels = figure.subplots(1, len(tasks), sharey=True, squeeze=False)[0]
    for task, axes in zip(tasks, panels, strict=True):
        single = results.accuracy("single", "sp", task, "best")
        for x, workflow in enumerate(WORKFLOWS):
            for policy in POLICIES:
                cell = workflow, policy, task
                gain = results.accuracy(*cell, "best") - results.accuracy(*cell, "base")
                if gain.empty:
                    continue
                at, colour, (mean, low, high) = x + ASIDE[policy], POLICY_COLOURS[policy], t_interval(gain)[:3]
                axes.bar(at, mean, 0.34, color=colour, alpha=0.85, zorder=2)
                axes.errorbar(at, mean, [[mean - low], [high - mean]], color="0.15", capsize=3, lw=1.1, zorder=4)
                axes.scatter([at + 0.09] * len(gain), gain, 12, color="white", ec=colour, zorder=3)
            untrained = results.base(workflow, task)
            if len(single) and len(untrained):
                axes.hlines(single.mean() - untrained.mean(), x - 0.42, x + 0.42, ls=":", zorder=5, **REFERENCE)
        axes.axhline(0, color="0.35", lw=0.8)
        axes.set_xticks(range(len(WORKFLOWS)), [WORKFLOW_NAMES[w] for w in WORKFLOWS])
        axes.set_title(TASK_NAMES[task])
        _in_percent(axes.yaxis, symbol="")
    panels[0].set_ylabel("peak minus base (points)")
    _legend(figure, [*_policies(lw=6, ls="-"), Line2D([], [], ls=":", **REFERENCE, label="SA-RL's peak minus base")])
    return plate(results, "figure_2", figure)


def figure_3(results: Results) -> Plate:
    """Accuracy under IP against accuracy under SP, at the peak and at the end."""
    figure = Figure(figsize=(6.4, 3.7), layout="constrained")
    for (at, title), axes in zip((("best", "peak"), ("terminal", "end")), figure.subplots(1, 2), strict=True):
        for (workflow, task), seeds in dynamics.matched(results).items():
            sp, ip = (results.accuracy(workflow, policy, task, at)[seeds] for policy in ("sp", "ip"))
            look = {"marker": WORKFLOW_MARKERS[workflow], "color": TASK_COLOURS[task], "edgecolor": "0.15"}
            (x, left, right), (y, below, above) = t_interval(sp)[:3], t_interval(ip)[:3]
            errors = [[y - below], [above - y]], [[x - left], [right - x]]
            axes.errorbar(x, y, *errors, color="0.5", lw=1, zorder=2)
            axes.scatter(x, y, 45, **look, zorder=4)
            axes.scatter(sp, ip, 12, **look, lw=0.5, alpha=0.4, zorder=3)
        lows, highs = zip(axes.get_xlim(), axes.get_ylim(), strict=True)
        low, high = max(0, min(lows)), min(1.02, max(highs))
        axes.plot([low, high], [low, high], color="0.35", lw=0.8, ls="--", zorder=1)
        axes.set(xlim=(low, high), ylim=(low, high), aspect="equal", xlabel=f"SP, {title}", ylabel=f"IP, {title}")
        axes.set_title("above the diagonal: IP higher")
        _in_percent(axes.xaxis, axes.yaxis)
    marks = [(WORKFLOW_MARKERS[workflow], "white", WORKFLOW_NAMES[workflow]) for workflow in WORKFLOWS]
    marks += [("D", TASK_COLOURS[task], TASK_NAMES[task]) for task in results.grid.tasks]
    _legend(figure, [Line2D([], [], ls="", marker=m, mfc=c, mec="0.15", label=name) for m, c, name in marks])
    return plate(results, "figure_3", figure)


def figure_4(results: Results, task: str) -> Plate:
    """Training success rate and validation accuracy over the run, a column per workflow."""
    figure = Figure(figsize=(6.6, 3.6), layout="constrained")
    grid = figure.subplots(2, len(WORKFLOWS), sharex=True, sharey="row")
    for workflow, (above, below) in zip(WORKFLOWS, grid.T, strict=True):
        for policy, colour in POLICY_COLOURS.items():
            if not (runs := results.runs_of(workflow, policy, task)):
                continue
            raw = pd.DataFrame({seed: run.series("accuracy") for seed, run in runs.items()})
            above.plot(raw, color=colour, lw=0.5, alpha=0.3)
            for axes, curves in ((above, dynamics.smoothed(raw)), (below, validation(runs))):
                look = {"color": colour, "ls": POLICY_STYLES[policy], "lw": 1.5, "zorder": 3}
                axes.plot(curves.mean(axis=1), marker="." if axes is below else "", **look)
                band = curves.min(axis=1), curves.max(axis=1)
                axes.fill_between(curves.index, *band, color=colour, alpha=0.15, lw=0)
        _level(below, results.base(workflow, task), "--")
        _level(below, results.accuracy("single", "sp", task, "best"))
        above.set_title(WORKFLOW_NAMES[workflow])
        below.set_xlabel("iteration")
    for axes, name in zip(grid[:, 0], ("training success", "validation accuracy"), strict=True):
        axes.set_ylabel(name)
        _in_percent(axes.yaxis)
    lines = [Line2D([], [], ls=ls, label=label, **REFERENCE) for ls, label in (("--", "base"), (":", "SA-RL's peak"))]
    _legend(figure, [*_policies(lw=1.7), *lines])
    return plate(results, "figure_4", figure, f"figure_4_{task}", task=TASK_NAMES[task])


def figure_5(results: Results) -> Plate:
    """Instability amplitudes of matched cells."""
    table, cells = dynamics.extremes(results), list(product(results.grid.tasks, WORKFLOWS))
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    for (name, label), axes in zip(AMPLITUDES.items(), figure.subplots(2, 2).flat, strict=True):
        for (workflow, task, _), pair in table.groupby(["workflow", "task", "seed"]):
            at = [cells.index((task, workflow)) + ASIDE[policy] for policy in POLICIES]
            by_policy = pair.set_index("policy").loc[list(POLICIES)]
            shown = by_policy[name].clip(lower=LEAST)
            axes.plot(at, shown, color="0.7", lw=0.9, zorder=1)
            axes.scatter(at, shown, 16, color=[POLICY_COLOURS[policy] for policy in POLICIES], zorder=3)
            if f"{name}_role" in by_policy:
                of_role = max(by_policy.loc["sp", f"{name}_role"], LEAST)
                axes.scatter(at[1], of_role, 16, fc="none", ec=POLICY_COLOURS["sp"], zorder=2)
        if name != "entropy":
            axes.set_yscale("log")
        axes.set_title(label)
        axes.set_xticks(range(len(cells)), [f"{WORKFLOW_NAMES[w][0]}\n{TASK_NAMES[t]}" for t, w in cells])
    role = Line2D([], [], ls="", marker="o", mfc="none", mec=POLICY_COLOURS["sp"], label="SP, role with the largest χ²")
    _legend(figure, [*_policies(ls="", marker="o"), role])
    return plate(results, "figure_5", figure)


def figure_6(results: Results) -> Plate:
    """The paper's cliff cells."""
    cells = {"(a) ": ("voting", "ip", "math"), "(b) ": ("orch_workers", "sp", "math")}
    runs = {at + cell_name(*cell): results.runs_of(*cell) for at, cell in cells.items()}
    return _cliffs(results, "figure_6", runs)


def _cliffs(results: Results, name: str, columns: dict[str, dict[int, Run]]) -> Plate:
    """A column per cell with the runs of its seeds, a row per diagnostic, a colour per role."""
    figure = Figure(figsize=(6.6, 6.2), layout="constrained")
    grid = figure.subplots(len(CLIFFS), len(columns) or 1, sharex=True, squeeze=False)
    for axes, label in zip(grid[:, 0], CLIFFS.values(), strict=True):
        axes.set_ylabel(label)
    for (title, runs), axes in zip(columns.items(), grid.T, strict=False):
        panels = dict(zip(CLIFFS, axes, strict=True))
        series = [dynamics.role_series(run) for run in runs.values()]
        handles = [_draw_role(panels, role, [run[role] for run in series]) for role in (series[0] if series else ())]
        for metric in panels.keys() - {"validation"}:
            panels[metric].set_yscale("log")
        for policy, colour in POLICY_COLOURS.items() if runs else ():
            cell = next(iter(runs.values())).cell
            points = validation(results.runs_of(cell.workflow, policy, cell.task))
            points = points[[seed for seed in points if seed in runs]]
            if points.size:
                look = {"color": colour, "ls": POLICY_STYLES[policy]}
                panels["validation"].plot(points, lw=0.5, alpha=0.4, **look)
                panels["validation"].plot(points.mean(axis=1), lw=1.6, marker=".", label=POLICY_NAMES[policy], **look)
        _in_percent(panels["validation"].yaxis)
        panels["validation"].set_xlabel("iteration")
        panels["validation"].legend(ncols=2, loc="lower left")
        axes[0].legend(handles=handles, title=title, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=7)
    figure.align_ylabels()
    return plate(results, name, figure)


def _draw_role(panels: dict[str, Axes], name: str, runs: list[pd.DataFrame]) -> Line2D:
    """One role's diagnostics, a thin line per seed and a thick one for what is typical; returns its legend entry."""
    is_shared = name == dynamics.POOLED
    label = "shared adapter" if is_shared else runs[0]["role"].iloc[0]
    colour, lw = (POLICY_COLOURS["sp"], 2.2) if is_shared else (ROLE_COLOURS[label], 1.4)
    for metric in panels.keys() - {"validation"}:
        is_chi2 = metric.startswith("chi2")
        curves = pd.concat([run[metric] if is_chi2 else dynamics.over_first(run[metric]) for run in runs], axis=1)
        curves = curves.clip(lower=LEAST if is_chi2 else 0.03)
        panels[metric].plot(curves, color=colour, lw=0.6, alpha=0.4)
        panels[metric].plot(dynamics.typical(curves), color=colour, lw=lw)
    return Line2D([], [], color=colour, lw=lw, label=label)


def figure_of_roles(results: Results, task: str) -> Plate:
    """Accuracy of every workflow, and the length and the gain of its judging role, over training and by policy."""
    figure = Figure(figsize=(6.8, 5.2), layout="constrained")
    grid = figure.subplots(3, len(WORKFLOWS), sharex=True, sharey="row")
    for workflow, column in zip(WORKFLOWS, grid.T, strict=True):
        role, measure = skills.JUDGES[workflow], skills.MEASURES[workflow][0]
        for policy, colour in POLICY_COLOURS.items():
            runs = results.runs_of(workflow, policy, task)
            lengths = pd.DataFrame({seed: run.series("length_mean", role) for seed, run in runs.items()})
            gains = pd.DataFrame({seed: skills.gain_of(run, measure) for seed, run in runs.items()})
            drawn = validation(runs), dynamics.smoothed(lengths), gains
            for axes, curves, bounds in zip(column, drawn, ((0, 1), (0, None), (-1, 1)), strict=True):
                if curves.empty:
                    continue
                axes.plot(curves.mean(axis=1), color=colour, ls=POLICY_STYLES[policy], lw=1.6, zorder=3)
                if curves.shape[1] > 1:
                    low, high = np.clip([t_interval(at)[1:3] for at in curves.to_numpy()], *bounds).T
                    axes.fill_between(curves.index, low, high, color=colour, alpha=0.18, lw=0)
        _level(column[0], results.accuracy("single", "sp", task, "best"))
        column[2].axhline(0, color="0.6", lw=0.8)
        column[0].set_title(f"{WORKFLOW_NAMES[workflow]}: its {role}", fontsize=8)
        column[2].set_xlabel("iteration")
    for axes, label in zip(grid[:, 0], ("validation accuracy", "tokens of its reply", "what it adds"), strict=True):
        axes.set_ylabel(label)
    _in_percent(grid[0, 0].yaxis, grid[2, 0].yaxis)
    _legend(figure, [*_policies(lw=1.7), Line2D([], [], ls=":", label="SA-RL's peak", **REFERENCE)])
    return plate(results, "roles", figure, f"roles_{task}", task=TASK_NAMES[task])


def figure_of_regimes(results: Results, task: str, runs: pd.DataFrame) -> Plate:
    """Validation accuracy over training (`accuracy_by_regime`), a row per regime and a column per workflow."""
    named = {POLICY_NAMES[policy]: policy for policy in POLICIES}
    facets = sns.relplot(
        runs, kind="line", x="iteration", y="accuracy", row="regime", col="workflow", hue="policy",
        style="policy", palette={name: POLICY_COLOURS[policy] for name, policy in named.items()},
        dashes={name: "" if POLICY_STYLES[policy] == "-" else (3, 1.5) for name, policy in named.items()},
        errorbar=("pi", 100), height=1.4, aspect=1.1, facet_kws={"margin_titles": True},
    )  # fmt: skip
    facets.set_titles(col_template="{col_name}", row_template="{row_name}")
    sns.move_legend(facets, "upper center", ncols=2, title="")
    facets.set(ylim=(0, 1))
    _in_percent(*(axes.yaxis for axes in facets.axes.flat))
    facets.tight_layout(rect=(0, 0, 1, 0.95))  # the legend is above
    plt.close(facets.figure)  # a notebook shows plates
    return plate(results, "regimes", facets.figure, f"regimes_{task}", task=TASK_NAMES[task])


def accuracy_by_regime(results: Results, task: str) -> pd.DataFrame:
    """Validation accuracy of every evaluated step of every run, in the regimes that have runs of a workflow."""
    rows = [
        (name, WORKFLOW_NAMES[workflow], POLICY_NAMES[policy], seed, step, accuracy)
        for name, changed in REGIMES.items()
        for workflow, policy in (LINES[-1], *LINES[:-1])
        for seed, run in results.runs_of(workflow, policy, task, **changed).items()
        for step, accuracy in run.accuracy.items()
    ]
    found = pd.DataFrame(rows, columns=["regime", "workflow", "policy", "seed", "iteration", "accuracy"])
    # the single agent takes one step anyway, so that its runs are of two regimes
    has_workflow = found.groupby("regime")["workflow"].transform("nunique") > 1
    found = found[has_workflow]
    for name, mine in found.groupby("regime"):
        seeds = mine[mine["workflow"] != WORKFLOW_NAMES["single"]].groupby(["workflow", "policy"])["seed"].nunique()
        found["regime"] = found["regime"].replace(name, f"{name}\nn = {_from_to(seeds)}")
    return found


def figure_of_twins(results: Results, name: str, found: list[Twins], labels: tuple[str, str]) -> Plate:
    """Validation accuracy of the twins and of a variant, a panel per cell; seeds thin and their mean thick."""
    rows = -(-len(found) // 4) or 1
    figure = Figure(figsize=(6.8, 1.9 * rows + 0.3), layout="constrained")
    grid = figure.subplots(rows, 4, sharey=True, sharex=True, squeeze=False)
    for axes, twin in zip(grid.flat, found, strict=False):
        for runs, colour, ls in zip((twin.usual, twin.changed), SETUP_COLOURS, SETUP_STYLES, strict=True):
            curves = pd.concat([run.accuracy for run in runs], axis=1)
            axes.plot(curves, color=colour, lw=0.7, alpha=0.4)
            axes.plot(curves.mean(axis=1), color=colour, lw=1.8, ls=ls, marker=".")
        _level(axes, results.accuracy("single", "sp", twin.task, "best"))
        axes.set_title(cell_name(*twin[:3]), fontsize=7.5)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    _in_percent(*(axes.yaxis for axes in grid[:, 0]))
    figure.supxlabel("iteration", fontsize=8)
    looks = zip(SETUP_COLOURS, SETUP_STYLES, labels, strict=True)
    setups = [Line2D([], [], color=c, lw=1.8, ls=ls, label=label) for c, ls, label in looks]
    _legend(figure, [*setups, Line2D([], [], ls=":", label="single agent's peak", **REFERENCE)])
    return plate(results, name, figure, seeds=_from_to([len(twin.changed) for twin in found] or [0]))


def figure_of_matched_updates(results: Results, study: Study) -> list[Plate]:
    """One optimizer step per iteration beside the grid's."""
    labels = "one step per batch of rows, as in the grid", "one step per iteration"
    return [figure_of_twins(results, "matched_updates", list(twins(results, study, "updates")), labels)]


def figure_of_long_runs(results: Results, study: Study) -> list[Plate]:
    """A setup that trains for more iterations beside the grid's, where there are runs of one."""
    found = [
        one for one in twins(results, study, "setup") if one.changed[0].cell.iterations > one.usual[0].cell.iterations
    ]
    if not found:
        return []
    usual, changed = (runs[0].cell.iterations for runs in (found[0].usual, found[0].changed))
    labels = f"{usual} iterations, as in the grid", f"{changed} iterations"
    return [figure_of_twins(results, "long", found, labels)]


def figure_of_factorial(results: Results, study: Study, table: Table) -> Plate:
    """A map of where the single agent's training is stable, and how well each quantity tells."""
    found = factorial.arms(results, study)
    lines, rates = sorted({(arm.steps, arm.rows) for arm in found}), sorted({arm.rate for arm in found})
    quantities = factorial.RULES["predictors"]
    figure = Figure(figsize=(6.8, 5.0), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    axes, ends = above.subplots(), np.full((len(lines), len(rates)), np.nan)
    for arm, runs in found.items():
        at = lines.index((arm.steps, arm.rows)), rates.index(arm.rate)
        ends[at] = np.mean([run.accuracy.iloc[-1] for run in runs])
        falls, fallen = sum(run.falls for run in runs), sum(run.ends_fallen for run in runs)
        text = f"{100 * ends[at]:.0f} %\n{falls} of {len(runs)} fall" + (f", {fallen} for good" if falls else "")
        look = {"color": "white" if ends[at] < 0.55 else "black", "fontsize": 7}
        axes.text(*at[::-1], text, ha="center", va="center", **look)
    image = axes.imshow(ends, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axes.set_yticks(range(len(lines)), [f"{steps} step{'s' * (steps > 1)} of {rows} rows" for steps, rows in lines])
    axes.set(xlabel="learning rate, times the grid's")
    axes.spines[:].set_visible(False)
    above.colorbar(image, label="accuracy at the end", format=PercentFormatter(1.0, decimals=0))
    by = table.values.set_index(["quantity", "number"])["value"]
    for (name, formula), axes in zip(quantities.items(), below.subplots(1, len(quantities), sharey=True), strict=True):
        for arm, runs in found.items():
            x = pd.eval(formula, local_dict=arm._asdict())
            for run in runs:
                look = {"mfc": FELL if run.falls else "white", "mec": FELL if run.falls else STAYED}
                axes.plot(x * 1.06 ** (run.cell.seed - 1), run.accuracy.iloc[-1], "o", ms=4, mew=0.9, alpha=0.8, **look)
        if np.isfinite(by[name, "threshold"]):
            axes.axvline(by[name, "threshold"], color="0.35", lw=0.9, ls="--")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(10, [1, 3], numticks=6))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(x=0.12)
        axes.set_title(f"{name}\n{by[name, 'arms misjudged']:.0f} of {by[name, 'arms']:.0f} arms misjudged", fontsize=7)
        _in_percent(axes.yaxis)
    below.supylabel("accuracy at the end", fontsize=8)
    mark = {"ls": "", "mew": 0.9}
    below.legend(handles=[
        Line2D([], [], marker="o", mfc=FELL, mec=FELL, label="falls", **mark),
        Line2D([], [], marker="o", mfc="white", mec=STAYED, label="does not", **mark),
        Line2D([], [], color="0.35", lw=0.9, ls="--", label="threshold"),
    ], loc="outside lower center", ncols=3)  # fmt: skip
    return plate(results, "factorial", figure, made_from=made_from(results, study, "factorial"))


def figure_of_controls(results: Results, table: Table) -> Plate:
    """Peaks of workflows and of single agents with more episodes, more optimizer steps or both, by the tokens sampled for them."""
    tasks = list(dict.fromkeys(table.values["task"]))
    cells = {cell_name(w, p): (WORKFLOW_MARKERS[w], POLICY_COLOURS[p]) for w, p in product(WORKFLOWS, POLICIES)}
    figure = Figure(figsize=(2.8 + 3.6 * len(tasks), 4.0), layout="constrained")
    for task, axes in zip(tasks, np.atleast_1d(figure.subplots(1, len(tasks), sharey=True)), strict=True):
        found = table.values[table.values["task"] == task].set_index(["run", "number"])
        for run in (run for run in found.index.unique("run") if not run.startswith(ALL)):
            tokens, steps, peak = (found.loc[(run, name)] for name in ("tokens sampled (M)", "optimizer steps", "peak"))
            x, error = tokens["value"] / 1e6, [[peak["value"] - peak["low"]], [peak["high"] - peak["value"]]]
            name, _, variant = run.partition(", ")
            marker, colour = cells.get(name, (WORKFLOW_MARKERS["single"], "0.2"))
            inside = "white" if name in cells and variant else colour
            axes.errorbar(x, peak["value"], error, marker=marker, color=colour, mfc=inside, ms=5, lw=1.0, capsize=2)
            if name not in cells:
                variant = variant.replace(", ", "\n")
                look = {"xytext": (-8, -3), "textcoords": "offset points", "va": "top", "fontsize": 6}
                axes.annotate(f"{variant}\n({steps['value']:.0f} steps)", (x, peak["low"]), **look)
        _in_percent(axes.yaxis)
        axes.set_ylim(axes.get_ylim()[0] - 0.03)  # room for the lowest name
        axes.set_xlim(0, 1.1 * axes.get_xlim()[1])
        axes.set(xlabel="completion tokens sampled in training, millions", title=TASK_NAMES[task])
    figure.supylabel("validation accuracy at the peak", fontsize=8)
    shapes = [
        Line2D([], [], ls="", marker=WORKFLOW_MARKERS[w], color="0.2", label=WORKFLOW_NAMES[w])
        for w in ("single", *WORKFLOWS)
    ]
    handles, runs = [*shapes, *_policies(ls="-", lw=3)], (run.partition(", ") for run in table.values["run"])
    if variants := dict.fromkeys(variant for name, _, variant in runs if name in cells and variant):
        handles.append(Line2D([], [], ls="", marker="o", color="0.2", mfc="white", label=" or ".join(variants)))
    _legend(figure, handles, ncols=4)
    return plate(results, "controls", figure)


@plt.rc_context(STYLE)
def figures_of_study(results: Results, study: Study, tables: Iterable[Table]) -> list[Plate]:
    """Draw those of the study's tables that have a figure."""
    drawn = {
        "matched_updates": lambda _: figure_of_matched_updates(results, study),
        "setup": lambda _: figure_of_long_runs(results, study),
        "factorial_predictors": lambda table: [figure_of_factorial(results, study, table)],
        "controls": lambda table: [figure_of_controls(results, table)],
    }
    return [plate for table in tables if table.name in drawn for plate in drawn[table.name](table)]


def plate(results: Results, caption: str, figure: Figure, name: str | None = None, **facts: object) -> Plate:
    """Add a figure's caption; the layout is made now, while the style is in force."""
    figure.draw_without_rendering()
    facts = sentences(results) | {"smoothed": dynamics.SMOOTHED, "least": LEAST} | facts
    cliffs = CAPTIONS["cliffs"].format(**facts)
    return Plate(name or caption, figure, CAPTIONS[caption].format(cliffs=cliffs, **facts))


def validation(runs: dict[int, Run]) -> pd.DataFrame:
    """Evaluated step x seed: validation accuracy."""
    return pd.DataFrame({seed: run.accuracy for seed, run in runs.items()})


def _from_to(counts: Collection[int]) -> str:
    """The least and the most of them, or the one that all are."""
    few, many = min(counts), max(counts)
    return f"{few} to {many}" if many > few else f"{few}"


def _in_percent(*of: Axis, symbol: str = "%") -> None:
    for axis in of:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=symbol))


def _level(axes: Axes, found: pd.Series, ls: str = ":") -> None:
    """A line at the mean of accuracies, where there are any."""
    if len(found):
        axes.axhline(found.mean(), ls=ls, **REFERENCE)


def _policies(**look: object) -> list[Line2D]:
    looks = {policy: {"color": POLICY_COLOURS[policy], "ls": POLICY_STYLES[policy]} | look for policy in POLICIES}
    return [Line2D([], [], label=POLICY_NAMES[policy], **own) for policy, own in looks.items()]


def _legend(figure: Figure, handles: list, ncols: int | None = None) -> None:
    figure.legend(handles=handles, loc="outside upper center", ncols=ncols or len(handles), columnspacing=1.2)
