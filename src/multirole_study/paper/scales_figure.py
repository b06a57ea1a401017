"""Draw validation accuracy of several bases over optimizer steps: workflows, and the single agent with as many steps."""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multirole_study.labels import (
    BASE_NAMES,
    POLICY_COLOURS,
    POLICY_STYLES,
    SINGLE_COLOUR,
    SINGLE_STYLE,
    TASKS_OF_BASES,
    cell_name,
)
from multirole_study.paper.grid import POLICIES, Study
from multirole_study.paper.output import Plate, how_many, say_below, styled
from multirole_study.paper.questions import DECLARED, parameters_of, runs_of
from multirole_study.paper.results import Results, Run

SINGLE = {"color": SINGLE_COLOUR, "ls": SINGLE_STYLE}


def over_optimizer_steps(run: Run) -> pd.Series:
    """Return number of optimizer steps (of all adapters together) -> validation accuracy after them."""
    steps = run.series("optimizer_steps").cumsum()
    return run.accuracy.rename(lambda iteration: float(steps.get(iteration, 0.0)))


def curves(results: Results, workflow: str, task: str) -> Iterator[tuple[str, dict[str, str], dict[int, Run]]]:
    """Yield name, look and runs of a workflow's policies and of the single agent that is its control."""
    for policy in POLICIES:
        look = {"color": POLICY_COLOURS[policy], "ls": POLICY_STYLES[policy]}
        yield cell_name(workflow, policy), look, runs_of(results, workflow, policy, task, {})
    control = parameters_of(results, Study.read(results.folder), "control")
    yield f"{cell_name('single', 'sp')}, more problems", SINGLE, runs_of(results, "single", "sp", task, control)


@styled
def scales_figure(scales: list[Results], task: str = DECLARED["task"], workflow: str = "voting") -> Plate:
    """Draw one panel per base: the mean over seeds as a thick line, each seed as a thin one."""
    figure = Figure(figsize=(3.3 * len(scales), 3.1), layout="constrained")
    counts = []
    panels = figure.subplots(1, len(scales), squeeze=False, sharey=True)[0]
    for results, axes in zip(scales, panels, strict=True):
        drawn = [_draw(axes, *curve) for curve in curves(results, workflow, task)]
        base = results.grid.base
        counts.append(f"{base}: {', '.join(f'{name} {n}' for name, n in drawn if n)}")
        seeds = f"n = {how_many([n for _, n in drawn if n])} seeds" if any(n for _, n in drawn) else "not run"
        names = BASE_NAMES.get(base, base), TASKS_OF_BASES.get((results.grid.scale, task), task)
        axes.set(xlabel="optimizer steps of all adapters", title=f"{', '.join(names)}\n{seeds}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    figure.axes[0].set_ylabel("validation accuracy")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    seed = plt.Line2D([], [], color="0.35", lw=0.9, alpha=0.5)
    figure.legend([*handles, seed], [*labels, "one seed"], loc="outside upper center", ncols=4)
    say_below(figure, "thick: mean over seeds")
    caption = (
        f"Validation accuracy on {task} over optimizer steps. Thick: mean over seeds; thin: each seed. The single agent takes the "
        f"steps of a workflow on several times its problems. Seeds: {'; '.join(counts)}."
    )
    return Plate("scales", figure, caption)


def _draw(axes: Axes, name: str, look: dict[str, str], runs: dict[int, Run]) -> tuple[str, int]:
    """Draw the runs of one line over the steps of the first run; return the line's name and number of runs."""
    by_seed = {seed: over_optimizer_steps(run) for seed, run in runs.items()}
    for series in by_seed.values():
        axes.plot(series.index, series.to_numpy(), lw=0.9, alpha=0.4, **look)
    steps = next(iter(by_seed.values())).index if by_seed else []
    means = pd.DataFrame({seed: series.to_numpy() for seed, series in by_seed.items()}).mean(axis=1)
    axes.plot(steps, means, lw=2.4, label=name, **look)
    return name, len(by_seed)
