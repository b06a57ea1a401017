"""Draw three learning-rate schedules under the accuracies that they lead to (`studies/clock.yaml`)."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multirole_study.compare.measures import FLOOR
from multirole_study.experiment.cell import Cell
from multirole_study.labels import (
    BASE_NAMES,
    POLICY_COLOURS,
    POLICY_STYLES,
    cell_name,
    colours_of,
    file_name,
    task_name,
)
from multirole_study.paper.clock_study import ClockStudy
from multirole_study.paper.clock_tables import Place, arm_name, places, read_runs, reason_unread
from multirole_study.paper.output import Plate, how_many, labelled, say_below, styled
from multirole_study.paper.results import Results, Run

TITLES = {
    "ip, one clock": "one clock: a tick per iteration",
    "ip, ended": "a tick per update call, ended",
    "ip, wrapping": "a tick per update call, wrapping",
}
COUNTS = {1: "one clock", 2: "two clocks", 3: "three clocks"}
SP = "sp"


def learning_rates(cell: Cell) -> pd.DataFrame:
    """Return the learning rate of every iteration (from 1) and adapter of a cell with a cosine, from its settings alone."""
    adapters = list(dict.fromkeys(cell.policy.values()))
    warmup, horizon = cell.warmup_steps, cell.max_steps
    iterations, calls = np.arange(horizon)[:, None], np.arange(len(adapters))[None]
    ticks = iterations + 0 * calls if cell.lr_clock == "iteration" else iterations * len(adapters) + calls
    if cell.lr_clock == "update_call":
        ticks = np.minimum(ticks, horizon)
    cosine = 0.5 * (1 + np.cos(math.pi * (ticks - warmup) / (horizon - warmup)))
    share = np.where(ticks < warmup, ticks / max(1, warmup), cosine)
    return pd.DataFrame(share * cell.learning_rate, index=range(1, horizon + 1), columns=adapters)


def mean_of(series: list[pd.Series]) -> pd.Series:
    """Return the mean over seeds."""
    return pd.concat(series, axis=1).mean(axis=1) if series else pd.Series(dtype=float)


def draw_accuracy(axes: Axes, runs: dict[int, Run], policy: str) -> None:
    """Draw validation accuracy: each seed as a thin line, the mean as a thick one."""
    look = {"color": POLICY_COLOURS[policy], "ls": POLICY_STYLES[policy]}
    for run in runs.values():
        axes.plot(run.accuracy.index, run.accuracy.to_numpy(), lw=0.7, alpha=0.35, **look)
    mean = mean_of([run.accuracy for run in runs.values()])
    axes.plot(mean.index, mean.to_numpy(), lw=2.4, label=policy.upper(), **look)


@styled
def clock_figure(results: Results, study: ClockStudy, place: Place) -> Plate:
    """Draw a column per schedule that IP has there: accuracy beside SP's, chi2 after the update by role, and the rate of each adapter."""
    titles = {arm: TITLES[arm] for arm in place.arms if arm in TITLES}
    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    rows = figure.subplots(3, len(titles), squeeze=False, sharex=True, sharey="row", height_ratios=[2.2, 1.2, 1])
    shared = read_runs(results, study, place, SP)
    counts = {"SP": len(shared)}
    for column, (arm, title) in enumerate(titles.items()):
        accuracy, chi2, rate = rows[:, column]
        runs = read_runs(results, study, place, arm)
        counts[arm_name(arm)] = len(runs)
        cell = study.cell(arm, place.workflow, place.task, place.rate, study.seeds("verdicts")[0])
        colours = colours_of(list(cell.policy))
        accuracy.set_title(title if runs else f"{title}\n({reason_unread(results, study, place, arm)})", fontsize=8)
        for name, by_seed in (("ip", runs), (SP, shared)):
            if by_seed:
                draw_accuracy(accuracy, by_seed, name)
        for role in cell.policy:
            mean = mean_of([run.series("chi2_after", role).abs().rolling(3).mean() for run in runs.values()])
            if len(mean):
                chi2.plot(mean.index, mean.clip(lower=FLOOR).to_numpy(), lw=1.2, color=colours[role], label=role)
        for role, series in learning_rates(cell).items():
            rate.plot(series.index, series.to_numpy() * 1e3, lw=1.2, color=colours.get(str(role)), label=str(role))
        rate.set_xlabel("iteration")
    rows[0, 0].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    rows[1, 0].set_yscale("log")
    for axes, label in zip(rows[:, 0], ("validation accuracy", "χ² after the update", "rate, 10⁻³"), strict=True):
        axes.set_ylabel(label)
    handles = labelled(figure)
    handles["one seed"] = plt.Line2D([], [], color="0.35", lw=0.7, alpha=0.6)
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=len(handles))
    base = BASE_NAMES.get(results.grid.base, results.grid.base)
    cell_text = f"{cell_name(place.workflow, 'ip', place.task)} beside SP, {base}, largest rate {place.rate:g}"
    say_below(figure, f"{cell_text}; n = {how_many(list(counts.values()))} seeds")
    runs_text = "; ".join(f"{name}: {count}" for name, count in counts.items())
    caption = (
        f"{cell_name(place.workflow, 'ip')} with {COUNTS[len(titles)]} and {cell_name(place.workflow, 'sp')}, {task_name(place.task)}, rate {place.rate:g}, {results.grid.scale}. Top: validation "
        "accuracy; thick is the mean over seeds, thin is each seed, SP is the same in all columns. Middle: χ² after the update by role, means over seeds and 3 "
        f"iterations, of absolute values because estimates can be negative. Bottom: the learning rate of each adapter. Runs: {runs_text}."
    )
    return Plate(file_name(f"clock_{place.workflow}_{place.task}_{place.name}"), figure, caption)


def figures(results: Results, study: ClockStudy) -> list[Plate]:
    """Return a figure for every workflow, task and rate at which a look has read runs of both policies."""
    return [
        clock_figure(results, study, place)
        for place in places(study)
        if any(read_runs(results, study, place, arm) for arm in TITLES) and read_runs(results, study, place, SP)
    ]
