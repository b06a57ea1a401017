"""Table 7, the hyper-parameters, and what a grid cost (the paper's A.8)."""

import json
from collections.abc import Iterator
from itertools import product

import pandas as pd

from multirole.experiment.cell import Cell
from multirole.experiment.presets import MODELS
from multirole.paper.grid import LINES
from multirole.paper.results import Results, Run
from multirole.paper.write import MISSING, Row, number

SIZES = {"math": (12704, 1412), "code": (15252, 1000)}
"""Problems of the paper's tasks: training and validation."""


def hyper_parameters(results: Results, settings: list[list[str]]) -> pd.DataFrame:
    """The hyper-parameters of the paper, of this project's preset of them, and of this grid."""
    grid = results.grid
    repos = ", ".join(f"{model.repo} at {model.revision[:8]}" for model in MODELS.values())
    here = MODELS[grid.scale].repo if grid.scale in MODELS else f"{grid.scale}, embedded"
    rows = [
        ("Base models", "Qwen3 0.6B, 1.7B, 4B", repos, here),
        ("Seeds per cell", "1 (A.1)", "1", f"{len(grid.seeds)}: {', '.join(map(str, grid.seeds))}"),
    ]
    for setting, paper, text, *where in settings:
        workflow, task = where or ("voting", "math")
        preset = _filled(text, Cell(workflow, "sp", task, "1.7b"), task)
        is_asked = task in grid.tasks
        own = _filled(text, grid.cell(workflow, "sp", task, grid.seeds[0]), task) if is_asked else MISSING
        rows.append((setting, paper, preset, own))
    own = ", ".join(f"{name}={value}" for name, value in grid.parameters.items()) or "none"
    rows.append(("Options that the grid sets beside its scale's preset", "–", "–", own))
    return pd.DataFrame(rows, columns=["setting", "paper", "preset", "grid"])


def _filled(text: str, cell: Cell, task: str) -> str:
    train, validation = SIZES[task]
    counts = {"train": cell.n_train or train, "validation": cell.n_validation or validation}
    text = text.format(cell=cell, rows=cell.n_problems * cell.n_episodes, **counts)
    return text.replace("e-0", "e-").replace("None", "none")


COST = {
    "wall_seconds": ("wall-clock (h)", "hours"),
    "rollout_seconds": ("rollout (h)", "hours"),
    "grading_seconds": ("grading, in rollout (h)", "hours"),
    "cpu_seconds": ("CPU time allotted (h)", "hours"),
    "seconds_per_iteration": ("seconds per iteration", "ratio"),
    "completion_tokens": ("tokens sampled (M)", "million"),
    "prompt_tokens": ("tokens read (M)", "million"),
    "optimizer_steps": ("optimizer steps", "count"),
}


def compute(results: Results) -> Iterator[Row]:
    """What every cell cost over its seeds, their sum, and the tokens of the evaluations."""
    trained = []
    for task, (workflow, policy) in product(results.grid.tasks, LINES):
        if runs := results.runs_of(workflow, policy, task).values():
            trained.append(pd.concat([_spent(results, run) for run in runs]))
            yield from _cost(trained[-1], len(runs), task=task, workflow=workflow, policy=policy)
    everything = pd.concat(trained) if trained else pd.DataFrame()
    yield from _cost(everything, len(results.runs), task="training, sum", workflow="", policy="")
    for kind in dict.fromkeys(kind for kind, _ in results.evaluations):
        n = sum(one == kind for one, _ in results.evaluations)
        yield from _cost(results.evaluated(kind), n, task=f"evaluations, {kind}", workflow="", policy="")


def _spent(results: Results, run: Run) -> pd.DataFrame:
    """The metrics of a run, with what they say of its time."""
    metrics, about = run.table("metrics"), json.loads(results.packed.loc[run.cell.id, "provenance"])
    wall = metrics["rollout_seconds"] + metrics["update_seconds"]
    cores = about["processes"] * about["torch_threads"]
    return metrics.assign(iterations=1, wall_seconds=wall, cpu_seconds=wall * cores)


def _cost(table: pd.DataFrame, n_runs: int, **where: str) -> Iterator[Row]:
    sums = table[[name for name in (*COST, "iterations") if name in table]].sum()
    if "iterations" in sums:
        sums["seconds_per_iteration"] = sums["wall_seconds"] / sums["iterations"]
    yield number("runs", n_runs, "count", **where)
    yield from (number(label, sums[name], unit, **where) for name, (label, unit) in COST.items() if name in sums)
