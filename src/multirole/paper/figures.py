"""The paper's Figures 1 to 6, one call each, from a results folder and nothing else; `figures(results)` is all of them.

On an unfinished grid the missing runs are left out, and each caption counts them. `measures` makes the numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from multirole.experiment.presets import SCALES, TASKS
from multirole.paper import topology
from multirole.paper.cliffs import LEAST_RATIO, Column, log_axis
from multirole.paper.cliffs import draw as draw_cliffs
from multirole.paper.dynamics_table import FIRST_ITERATIONS
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.measures import (
    SMOOTHED,
    accuracy,
    amplitudes,
    base,
    falls,
    matched,
    smoothed,
    training,
    validation,
)  # fmt: skip
from multirole.paper.numbers import POLICY_NAMES, TASK_NAMES, WORKFLOW_NAMES, intervals, listed, not_published
from multirole.paper.results import Results, key_of
from multirole.paper.tables import PEAK
from multirole.paper.write import STYLE

POLICY_COLOURS = {"ip": "#7a1f5c", "sp": topology.SHARED_COLOUR}
TASK_FILLS = {"math": "#30343f", "code": "#e3c15a"}
MARKERS = {"eval_opt": "o", "voting": "s", "orch_workers": "^"}
CODES = {"eval_opt": "E", "voting": "V", "orch_workers": "O"}  # the paper's
REFERENCE = "0.35"  # colour of base and single agent
MATRIX = tuple(product(WORKFLOWS, POLICIES))
WITH_SINGLE = (*MATRIX, ("single", "sp"))
ASIDE = {"ip": -0.19, "sp": 0.19}  # x, from the middle of a cell


@dataclass(frozen=True)
class Plate:
    """A figure with its file name and its caption."""

    name: str
    figure: Figure
    caption: str


def figures(results: Results) -> list[Plate]:
    """All of them, in order; Figure 4 once per task, and Figure 6 a second time with this grid's own falls."""
    return [
        figure_1(results), figure_2(results), figure_3(results), *(figure_4(results, task) for task in TASKS),
        figure_5(results), figure_6(results), figure_6_falls(results),
    ]  # fmt: skip


@plt.rc_context(STYLE)
def figure_1(results: Results) -> Plate:
    """Workflow topology and policy routing."""
    figure = Figure(figsize=(10.2, 6.0), layout="constrained")
    cells = [[results.grid.cell(w, p, "math", results.grid.seeds[0]) for w in WORKFLOWS] for p in POLICIES]
    names = {"ip": "Isolated-Policy (IP)", "sp": "Shared-Policy (SP)"}
    topology.draw(figure, cells, [names[p] for p in POLICIES], [WORKFLOW_NAMES[w] for w in WORKFLOWS])
    rounds = [results.grid.cell("eval_opt", "sp", task, results.grid.seeds[0]).rounds for task in TASKS]
    caption = (
        "Figure 1. Workflow topology and policy routing. A box is one slot of a role, a dark arrow a text that "
        "enters another role's prompt; besides these, every role reads the problem. The colour of a box, and the "
        "dotted line, is the adapter π that speaks there: under IP every role has its own, which its slots share, "
        "and under SP one serves all. The outcome reward of the answer is given to every turn of the episode and "
        "trains the adapters by GRPO (red). Eval-Opt stops at the evaluator's approval or after "
        f"{listed([f'{n} verdicts ({TASK_NAMES[t]})' for n, t in zip(rounds, TASKS, strict=True)])}. Drawn from the "
        "workflows and policies themselves; it holds no result, so it has no n, seeds or interval."
    )
    return _plate("figure_1", figure, caption)


@plt.rc_context(STYLE)
def figure_2(results: Results) -> Plate:
    """Gain of every cell's peak over the base workflow."""
    figure = Figure(figsize=(9.2, 3.7), layout="constrained")
    panels = figure.subplots(1, len(TASKS), sharey=True)
    for task, axes in zip(TASKS, panels, strict=True):
        single = accuracy(results, "single", "sp", task, "best")
        for x, workflow in enumerate(WORKFLOWS):
            for policy in POLICIES:
                gain = accuracy(results, workflow, policy, task, "best", since="base")
                if gain is None:
                    continue
                at, colour = x + ASIDE[policy], POLICY_COLOURS[policy]
                mean, low, high = (100 * part for part in gain.interval[:3])
                axes.bar(at, mean, 0.34, color=colour, alpha=0.85, zorder=2)
                axes.errorbar(at, mean, [[mean - low], [high - mean]], color="0.15", capsize=3, lw=1.1, zorder=4)
                seeds = [100 * value for value in gain.by_seed.values()]
                axes.scatter([at + 0.09] * len(seeds), seeds, 14, color="white", ec=colour, lw=0.9, zorder=3)
            untrained = base(results, workflow, task)
            if single and untrained is not None:
                level = 100 * (single.interval.mean - untrained)
                axes.plot([x - 0.42, x + 0.42], [level, level], color=REFERENCE, ls=":", lw=1.6, zorder=5)
        axes.axhline(0, color=REFERENCE, lw=0.8)
        axes.set_xticks(range(len(WORKFLOWS)), [WORKFLOW_NAMES[w] for w in WORKFLOWS])
        axes.set_xlim(-0.6, len(WORKFLOWS) - 0.4)
        axes.set_title(TASK_NAMES[task])
        axes.tick_params(axis="x", length=0)
    panels[0].set_ylabel("peak minus base\n(percentage points)")
    handles = [*_policy_handles(), Line2D([], [], color=REFERENCE, ls=":", lw=1.6, label="SA-RL's peak minus base")]
    figure.legend(handles=handles, loc="outside upper center", ncols=3)
    caption = (
        "Figure 2. Peak validation accuracy of every cell minus that of its base, the untrained workflow (step 0 of "
        "the same runs), paired by seed and problem. Bars are means, light points single seeds, and the dotted line "
        f"is where the single agent's peak lies above the same base. {PEAK} {_about(results, WITH_SINGLE)} {_bars(results)} The "
        f"paper draws these deltas for three scales. {not_published('Figure 2')}"
    )
    return _plate("figure_2", figure, caption)


@plt.rc_context(STYLE)
def figure_3(results: Results | Sequence[Results]) -> Plate:
    """Accuracy under IP against accuracy under SP, at the peak and at the end; of one scale or of several."""
    scales = [results] if isinstance(results, Results) else list(results)
    sizes = {r.grid.scale: 55 + 45 * i for i, r in enumerate(sorted(scales, key=lambda r: SCALES.index(r.grid.scale)))}
    figure = Figure(figsize=(9.6, 5.2), layout="constrained")
    titles = {"best": "peak", "terminal": "end of training"}
    for (at, title), axes in zip(titles.items(), figure.subplots(1, 2), strict=True):
        points = [
            (workflow, task, r, *(accuracy(r, workflow, policy, task, at, seeds=seeds) for policy in ("sp", "ip")))
            for r in scales for (workflow, task), seeds in matched(r).items()
        ]  # fmt: skip
        for workflow, task, r, sp, ip in points:
            look = {"marker": MARKERS[workflow], "color": TASK_FILLS[task], "edgecolor": "0.15"}
            x, y = sp.interval, ip.interval
            error = [[x.mean - x.low], [x.high - x.mean]], [[y.mean - y.low], [y.high - y.mean]]
            axes.errorbar(x.mean, y.mean, error[1], error[0], color="0.5", lw=1, capsize=2, zorder=2)
            axes.scatter(x.mean, y.mean, sizes[r.grid.scale], **look, lw=0.9, zorder=4)
            axes.scatter(
                sp.by_seed.values(), ip.by_seed.values(), sizes[r.grid.scale] / 4, **look, lw=0.5, alpha=0.4, zorder=3
            )
        _square(axes)
        axes.set(xlabel=f"SP validation accuracy, {title}", ylabel=f"IP validation accuracy, {title}")
    figure.legend(handles=_cell_handles(sizes), loc="outside upper center", ncols=5 + len(sizes) * (len(sizes) > 1))
    caption = (
        "Figure 3. Validation accuracy under IP against SP on matched cells: at the peak (left), as in the paper, "
        "and at the end of training (right), where a lower floor would show. Large "
        f"markers are means over seeds, small light ones single seeds. {PEAK} {' '.join(_about(r) for r in scales)} "
        f"{_bars(scales[0])} They are of each policy alone, not of the difference. Marker size is the scale. "
        f"{not_published('Figure 3')}"
    )
    return _plate("figure_3", figure, caption)


@plt.rc_context(STYLE)
def figure_4(results: Results, task: str = "math") -> Plate:
    """Training success rate and validation accuracy over the run, a column per workflow."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    grid = figure.subplots(2, len(WORKFLOWS), sharex=True, sharey="row")
    single = accuracy(results, "single", "sp", task, "best")
    for workflow, (above, below) in zip(WORKFLOWS, grid.T, strict=True):
        for policy in POLICIES:
            colour = POLICY_COLOURS[policy]
            raw, points = training(results, workflow, policy, task), validation(results, workflow, policy, task)
            if points.empty:
                continue
            above.plot(raw, color=colour, lw=0.6, alpha=0.3)
            _curve(above, smoothed(raw), colour)
            _curve(below, points, colour, marker="o", ms=3.5)
        untrained = base(results, workflow, task)
        if untrained is not None:
            below.axhline(untrained, color=REFERENCE, ls="--", lw=1)
        if single:
            below.axhline(single.interval.mean, color=REFERENCE, ls=":", lw=1.6)
        above.set_title(WORKFLOW_NAMES[workflow])
        below.set_xlabel("iteration")
        below.xaxis.set_major_locator(MaxNLocator(integer=True, steps=(1, 2, 5, 10)))
    for axes, name in zip(grid[:, 0], ("training success rate", "validation accuracy"), strict=True):
        axes.set_ylabel(name)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    handles = [
        *_policy_handles(lw=1.7),
        Line2D([], [], color=REFERENCE, ls="--", lw=1, label="base"),
        Line2D([], [], color=REFERENCE, ls=":", lw=1.6, label="SA-RL's peak"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    caption = (
        f"Figure 4. Training dynamics on {TASK_NAMES[task]}. Above: share of training episodes whose answer is "
        f"right, per iteration (thin, one line per seed) and as a centred mean over {SMOOTHED} iterations. Below: "
        "validation accuracy per checkpoint. Lines are means over seeds and bands their range, from the lowest seed "
        f"to the highest, not intervals; a single seed has none. {_about(results, WITH_SINGLE, (task,))} The paper draws "
        f"1.7B on Math, one seed. {not_published('Figure 4')}"
    )
    return _plate(f"figure_4_{task}", figure, caption)


AMPLITUDES = {
    "chi2": ("largest χ² during the update", "log"),
    "chi2_after": ("largest χ² after the update", "log"),
    "grad_norm": ("largest gradient norm\n(one optimizer step)", "log"),
    "entropy": ("entropy collapse depth\n(nats per token)", "linear"),
}


@plt.rc_context(STYLE)
def figure_5(results: Results) -> Plate:
    """Instability amplitudes of matched cells."""
    table, cells = amplitudes(results), [(w, t) for t, w in product(TASKS, WORKFLOWS)]
    figure = Figure(figsize=(9.6, 5.6), layout="constrained")
    for (name, (label, scale)), axes in zip(AMPLITUDES.items(), figure.subplots(2, 2).flat, strict=True):
        for (workflow, task, _), pair in table.groupby(["workflow", "task", "seed"]):
            at = [cells.index((workflow, task)) + ASIDE[policy] for policy in POLICIES]
            by_policy = pair.set_index("policy").loc[list(POLICIES)]
            axes.plot(at, by_policy[name], color="0.7", lw=0.9, zorder=1)
            axes.scatter(at, by_policy[name], 26, color=list(POLICY_COLOURS.values()), zorder=3)
            if f"{name}_role" in by_policy:
                largest = by_policy.loc["sp", f"{name}_role"]
                axes.scatter(at[1], largest, 26, fc="none", ec=POLICY_COLOURS["sp"], zorder=2)
        if scale == "log" and (table[name] > 0).all():
            log_axis(axes)
        elif scale == "log":
            axes.set_yscale("symlog", linthresh=1e-3)
        axes.set(ylabel=label, xlim=(-0.6, len(cells) - 0.4))
        axes.set_xticks(range(len(cells)), [CODES[w] for w, _ in cells])
        axes.axvline(len(WORKFLOWS) - 0.5, color="0.85", lw=0.8)
        for group, task in enumerate(TASKS):
            middle = (group + 0.5) / len(TASKS)
            axes.text(middle, -0.13, TASK_NAMES[task], transform=axes.transAxes, ha="center", va="top")
        axes.tick_params(axis="x", length=0)
    role = Line2D([], [], ls="", marker="o", mfc="none", mec=POLICY_COLOURS["sp"], label="SP, role with the largest χ²")
    figure.legend(handles=[*_policy_handles(ls="", marker="o"), role], loc="outside upper center", ncols=3)
    caption = (
        "Figure 5. Instability amplitude of matched cells, E = Eval-Opt, V = Voting, O = Orch-Workers. A dot is one "
        "run's extreme over its iterations, a line joins the two policies of a seed; extremes of single runs have "
        "no interval. χ² is of the role with the largest one under IP, and of all tokens of the shared adapter "
        "under SP, much as the released code logs them, which pools SP and favours larger values under IP. Open "
        "circles read SP as IP is read, by its role with the largest χ². χ² during the update, the paper's, also "
        "grows with the optimizer steps per iteration, and is flat for a role that takes one; χ² after the update, "
        "measured on every 16th row, is not. The gradient norm is an adapter's, before clipping. Entropy collapse "
        f"depth is the token mean over all roles at iteration 1 minus the least one. {_about(results)} "
        f"{not_published('Figure 5')}"
    )
    return _plate("figure_5", figure, caption)


@plt.rc_context(STYLE)
def figure_6(results: Results) -> Plate:
    """The paper's matched cliff cells."""
    cells = (
        ("(a) Voting-IP, Math", "voting", "ip", "math"),
        ("(b) Orch-Workers-SP, Math", "orch_workers", "sp", "math"),
    )
    columns = [Column(title, *cell, tuple(results.seeds(*cell))) for title, *cell in cells]
    figure = Figure(figsize=(10, 7.4), layout="constrained")
    axes = draw_cliffs(figure, results, columns, POLICY_COLOURS)[-1][-1]
    axes.set_title("(c) Orch-Workers, Math: IP and SP", fontsize=9.5, weight="bold")
    asked = [("voting", "ip"), ("orch_workers", "ip"), ("orch_workers", "sp")]
    caption = (
        "Figure 6. Training dynamics of the paper's cliff cells, at this scale: (a) Voting-IP and (b) "
        "Orch-Workers-SP on Math, (c) the validation of Orch-Workers under IP and SP, which is also under (a) for "
        f"Voting. The paper has (a) and (c) at 1.7B and (b) at 4B, and no roles in (b). {CLIFFS} Curves have no "
        f"interval. {_about(results, asked, ('math',))} {not_published('Figure 6')}"
    )
    return _plate("figure_6", figure, caption)


@plt.rc_context(STYLE)
def figure_6_falls(results: Results) -> Plate:
    """Figure 6 of the two runs of this grid, one per policy, that fall farthest from peak to end."""
    worst = falls(results).groupby("policy", sort=True).first()
    columns, said = [], []
    for policy, run in worst.iterrows():
        title = (
            f"{WORKFLOW_NAMES[run['workflow']]}-{POLICY_NAMES[policy]}, {TASK_NAMES[run['task']]}, seed {run['seed']}"
        )
        columns.append(Column(title, run["workflow"], policy, run["task"], (run["seed"],), has_alarms=True))
        said.append(f"{title}: {run['peak']:.1%} at the peak, {run['final']:.1%} at the end")
    figure = Figure(figsize=(10, 8.4), layout="constrained")
    if columns:
        draw_cliffs(figure, results, columns, POLICY_COLOURS)
    caption = (
        "Figure 6, falls. The same reading of the two runs of this grid, one per policy, whose validation falls "
        "farthest from its peak to the end. They are chosen because they fall, and say nothing of how often runs "
        f"do. {'; '.join(said)}. {CLIFFS} Dots and thin vertical lines are alarms, in the colour of their role; the "
        f"dashed line is the validation peak. The other policy's validation is of the same seed. {_about(results)} "
        "The paper has no such figure."
    )
    return _plate("figure_6_falls", figure, caption)


CLIFFS = (
    "χ² is drawn as it is, linear below 0.01 and logarithmic above, since its first value is next to nothing; "
    f"perplexity and gradient norm are over their first value, the median of the first {FIRST_ITERATIONS} iterations "
    f"(the paper: the first logged value, for all), and cut below {LEAST_RATIO:g}: a gradient is zero where all rewards "
    "of a group are equal. A role with one optimizer step per iteration is measured before that step moves it, so "
    "that its χ² during the update stays at zero by construction; χ² after the update shows it, in a small sample and "
    "so with noise. The shared adapter pools its roles. Thin lines are single seeds; thick ones are the median over "
    f"seeds and then over {SMOOTHED} iterations, and in the lowest panel the mean over seeds."
)


def _about(results: Results, asked: Sequence[tuple[str, str]] = MATRIX, tasks: Sequence[str] = TASKS) -> str:
    """n, scale and seeds, and how many of the runs of these workflows and policies are not there."""
    cell, seeds = results.grid.cells()[0], results.grid.seeds
    n = "all" if cell.n_validation is None else f"n = {cell.n_validation}"
    wanted = [key for key in map(key_of, results.grid.cells()) if key[:2] in asked and key.task in tasks]
    missing = sum(key not in results.runs for key in wanted)
    return (
        f"Scale {cell.scale}; {n} validation problems per task, one episode each; "
        f"{f'seeds {listed(seeds)}' if len(seeds) > 1 else f'seed {seeds[0]} alone'}. "
        + (f"{missing} of {len(wanted)} runs are not finished, or altered since, and left out." if missing
           else f"All {len(wanted)} runs are finished.")
    )  # fmt: skip


def _bars(results: Results) -> str:
    """What the error bars are."""
    return intervals(results).replace("Brackets", "Error bars", 1)


def _plate(name: str, figure: Figure, caption: str) -> Plate:
    """Lay out now, while the style is in force: matplotlib makes ticks only when it draws."""
    figure.draw_without_rendering()
    return Plate(name, figure, caption)


def _curve(axes: Axes, by_seed: pd.DataFrame, colour: str, **look: object) -> None:
    """The mean over seeds, and their range as a band."""
    axes.plot(by_seed.mean(axis=1), color=colour, lw=1.7, zorder=3, **look)
    if by_seed.shape[1] > 1:
        axes.fill_between(by_seed.index, by_seed.min(axis=1), by_seed.max(axis=1), color=colour, alpha=0.15, lw=0)


def _square(axes: Axes) -> None:
    """Equal limits and the diagonal."""
    low = min(axes.get_xlim()[0], axes.get_ylim()[0])
    high = max(axes.get_xlim()[1], axes.get_ylim()[1])
    axes.plot([low, high], [low, high], color=REFERENCE, lw=0.8, ls="--", zorder=1)
    axes.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title("above the diagonal: IP higher", fontsize=8.5, color=REFERENCE)


def _policy_handles(ls: str = "-", marker: str = "", lw: float = 6) -> list[Line2D]:
    return [
        Line2D([], [], color=POLICY_COLOURS[p], ls=ls, marker=marker, lw=lw, label=POLICY_NAMES[p]) for p in POLICIES
    ]


def _cell_handles(sizes: dict[str, float]) -> list[Line2D]:
    """Workflows by shape, tasks by fill, scales by size where there are several."""
    look = {"ls": "", "mec": "0.15"}
    shapes = [Line2D([], [], marker=MARKERS[w], mfc="white", label=WORKFLOW_NAMES[w], **look) for w in WORKFLOWS]
    fills = [Line2D([], [], marker="D", mfc=TASK_FILLS[t], label=TASK_NAMES[t], **look) for t in TASKS]
    scales = [
        Line2D([], [], marker="o", mfc="white", ms=size**0.5, label=scale, **look) for scale, size in sizes.items()
    ]
    return [*shapes, *fills, *(scales if len(scales) > 1 else [])]
