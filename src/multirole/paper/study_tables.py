"""The same cells with one optimizer step per adapter and iteration (`updates="one"`): the number of steps, held fixed.

In the paper's setup a shared adapter takes the steps of all its roles, an isolated one those of its own, the single agent one:
policy, workflow and number of steps change together. Runs with `updates="one"` that lie beside a grid's, all else equal, take
them apart.
"""

from collections.abc import Iterator
from dataclasses import replace

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from multirole.evaluate import named_steps
from multirole.paper.numbers import percent, points
from multirole.paper.results import Key, Results, key_of
from multirole.paper.statistics import bootstrap, difference, method
from multirole.paper.write import STYLE, Table
from multirole.record import folder_of, is_done

COLOURS = {"per_batch": "#b2182b", "one": "#2166ac"}
LABELS = {"per_batch": "a step per batch of rows, as the grid", "one": "one step per iteration"}


def twins(results: Results) -> Iterator[tuple[Key, pd.DataFrame, pd.DataFrame, dict[str, int]]]:
    """Each grid run that has a twin with `updates="one"`: outcomes (problems x steps) of both, and the twin's named steps."""
    for cell in results.grid.cells():
        folder, key = folder_of(replace(cell, updates="one"), results.folder.parent), key_of(cell)
        if key in results.runs and is_done(folder):
            table = pd.read_parquet(folder / "eval.parquet")
            outcomes = table.pivot(index="problem", columns="step", values="correct").astype(float).sort_index()
            yield key, results.correct(key), outcomes, named_steps(folder)


def matched_updates(results: Results) -> Table:
    """Peak and end of every cell with twins, under both numbers of steps, and the differences with their intervals."""
    cells: dict[tuple[str, str, str], list[tuple[np.ndarray, ...]]] = {}
    for key, usual, one, steps in twins(results):
        own = results.steps(key)
        arrays = (usual[own["best"]], usual[own["terminal"]], one[steps["best"]], one[steps["terminal"]])
        cells.setdefault(key[:3], []).append(tuple(array.to_numpy() for array in arrays))
    shown, values = [], []
    for (workflow, policy, task), runs in cells.items():
        peak, end, peak_one, end_one = (np.stack(arrays) for arrays in zip(*runs, strict=True))  # (S, P)
        numbers = {
            "peak": bootstrap(peak),
            "end": bootstrap(end),
            "peak, one step": bootstrap(peak_one),
            "end, one step": bootstrap(end_one),
            "gain at the peak": difference(peak_one, peak),
            "gain at the end": difference(end_one, end),
        }
        single = results.outcomes("single", "sp", task, "best")
        if single is not None:
            numbers["one step − SA-RL, peaks"] = difference(peak_one, single)
        name = {"cell": f"{workflow}, {policy.upper()}, {task}", "seeds": len(runs)}
        shown.append(
            name | {k: (percent if k.startswith(("peak", "end")) else points)(number) for k, number in numbers.items()}
        )
        values += [
            {"workflow": workflow, "policy": policy, "task": task, "measure": k, **number._asdict()}
            for k, number in numbers.items()
        ]
    caption = (
        "The same seeds, problems, rollouts per iteration, learning rate and schedule; only the number of optimizer steps differs: one per "
        "adapter and iteration instead of one per batch of rows. Validation accuracy in percent, gains in percentage points, one step minus "
        f"the grid's, paired by seed and problem; {method(max((len(runs) for runs in cells.values()), default=1))}. Peaks are chosen on the "
        "problems they are read on. Not in the paper."
    )
    title = "One optimizer step per iteration against one per batch of rows"
    return Table("matched_updates", title, caption, pd.DataFrame(shown), pd.DataFrame(values))


def plot_matched_updates(results: Results) -> Figure:
    """Validation accuracy of the cells with twins, seeds thin and their mean thick."""
    cells: dict[tuple[str, str, str], list[tuple[pd.Series, pd.Series]]] = {}
    for key, usual, one, _ in twins(results):
        cells.setdefault(key[:3], []).append((usual.mean(), one.mean()))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, max(1, len(cells)), figsize=(10.5, 3.2), layout="constrained", sharey=True, squeeze=False
        )
        for axes, ((workflow, policy, task), runs) in zip(grid[0], cells.items(), strict=True):
            for curves, updates in zip(zip(*runs, strict=True), LABELS, strict=True):
                for curve in curves:
                    axes.plot(curve.index, 100 * curve, color=COLOURS[updates], lw=0.8, alpha=0.4)
                mean = pd.concat(curves, axis=1).mean(axis=1)
                axes.plot(mean.index, 100 * mean, color=COLOURS[updates], lw=2, marker=".", label=LABELS[updates])
            single = results.outcomes("single", "sp", task, "best")
            if single is not None:
                axes.axhline(100 * single.mean(), color="0.4", ls=":", lw=1, label="single agent's peak")
            axes.set(title=f"{workflow.replace('_', '-')} {policy.upper()} {task}", xlabel="iteration")
        grid[0, 0].set_ylabel("validation accuracy (%)")
        figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    plt.close(figure)  # a notebook shows what a cell returns
    return figure
