"""Plot the curves of a run for the notebooks."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator

from multirole_study.inspector import run_reader
from multirole_study.inspector.run_reader import load, validation
from multirole_study.labels import colours_of

LINE_STYLES = ("-", "--", ":", "-.")


def plot_learning(folder: str | Path) -> Figure:
    """Plot training reward and accuracy per iteration, and validation accuracy with its interval."""
    metrics, points = load(folder, "metrics"), validation(folder)
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    if len(metrics):
        axes.plot(metrics["iteration"], metrics["reward"], "--", color="C1", lw=1.8, label="training reward")
        axes.plot(metrics["iteration"], metrics["accuracy"], color="C0", lw=1, label="training accuracy")
    if len(points):
        error = (points["accuracy"] - points["low"], points["high"] - points["accuracy"])
        label = f"validation accuracy ({points['n'].iloc[0]} problems, 95 % Wilson)"
        axes.errorbar(points["step"], points["accuracy"], yerr=error, fmt="o-", color="C3", capsize=3, label=label)
        axes.axhline(points["accuracy"].iloc[0], color="C3", lw=0.8, ls=":", label="untrained workflow")
    lowest = metrics["reward"].min() if len(metrics) else 0.0
    axes.set(xlabel="iteration", ylabel="fraction", ylim=(min(0.0, lowest), 1.0))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_roles(folder: str | Path, group: str = "main") -> Figure:
    """Plot the per-role curves of a group of panels: "main" (the paper's monitoring advice, A.6.2) or "gradients"."""
    panels = [(panel, series) for panel, series in run_reader.curves(folder, group) if panel.table == "roles"]
    roles = list(dict.fromkeys(role for _, series in panels for role in series))
    n_rows = max(1, -(-len(panels) // 4))
    figure = plt.figure(figsize=(12, 2.6 * n_rows), layout="constrained")
    lines = {}
    for i, (panel, series) in enumerate(panels, start=1):
        axes, is_divergence = figure.add_subplot(n_rows, 4, i), panel.scale == "divergence"
        for role, values in series.items():
            style = LINE_STYLES[roles.index(role) % len(LINE_STYLES)]
            values = values.clip(lower=0) if is_divergence else values
            (lines[role],) = axes.plot(values.index, values, style, lw=1.3, color=colours_of(roles)[role])
        if is_divergence:
            axes.set_yscale("symlog", linthresh=1e-4)
            axes.set_ylim(0, max(axes.get_ylim()[1], 1e-2))
        elif panel.scale == "log":
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 1)))
        elif axes.get_ylim()[0] > 0:
            axes.set_ylim(bottom=0)
        axes.set_title(f"{panel.name} ({panel.unit})" if panel.unit else panel.name, fontsize=8.5, wrap=True)
        axes.set_xlabel("iteration", fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=6, frameon=False, fontsize=9)
    return figure
