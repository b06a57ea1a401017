"""Select the runs of an arm from packed results, and read a measure of each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from multirole_study.compare.corrections import ALL_CELLS
from multirole_study.compare.measures import Measure

if TYPE_CHECKING:
    from multirole_study.experiment.cell import Cell
    from multirole_study.paper.results import Results, Run

Place = tuple[str, str]
"""A workflow and a task."""
Runs = Mapping[Place, Mapping[int, "Run"]]
"""The runs of an arm: (workflow, task) -> seed -> packed run, in the order in which seeds are read."""


def find_runs(results: "Results", cells: Iterable["Cell"]) -> dict[int, "Run"]:
    """Return seed -> packed run of cells that differ in their seed; those that are not packed are left out."""
    return {cell.seed: run for cell in cells if (run := results.find(cell))}


def values_of(runs: Mapping[int, "Run"], measure: Measure, **options: object) -> pd.Series:
    """Return seed -> a measure of runs of one cell."""
    return pd.Series({seed: measure.of(run, **options) for seed, run in runs.items()}, dtype=float)


def numbers_of(
    measure: Measure, arm: Runs, minus: Runs | None = None, *, minus_measure: Measure | None = None,
    roles: Mapping[str, str] | None = None, **options: object,
) -> pd.DataFrame:  # fmt: skip
    """Return a row per run of an arm: workflow, task, seed and `value`, and `minus`, the value of the other arm's run of the same seed.

    Runs without a partner in `minus` are left out. `minus_measure` is what is read of the partner, by default the same measure; with a
    measure of pairs the partner has no value of its own. `roles` gives the option `role` by workflow.
    """
    roles, rows = roles or {}, []
    for (workflow, task), runs in arm.items():
        others = runs if minus is None else minus.get((workflow, task), {})
        chosen = options | ({"role": roles[workflow]} if workflow in roles else {})
        for seed, run in runs.items():
            if seed not in others:
                continue
            row = {"workflow": workflow, "task": task, "seed": seed}
            if measure.is_paired:
                row["value"] = measure.of(run, other=others[seed], **chosen)
            else:
                row["value"] = measure.of(run, **chosen)
                if minus is not None:
                    row["minus"] = (minus_measure or measure).of(others[seed], **chosen)
            rows.append(row)
    read = ["value", *(["minus"] if minus is not None and not measure.is_paired else [])]
    return pd.DataFrame(rows, columns=["workflow", "task", "seed", *read]).astype(dict.fromkeys(read, float))


def of_whole_seeds(parts: Sequence[pd.DataFrame], seeds: Sequence[int], counts_missing: bool = False) -> pd.DataFrame:
    """Return the numbers of the seeds that every part has, in the order of `seeds`; `parts` are as `numbers_of` returns them.

    A run whose number is missing (NaN) counts as one that is there if `counts_missing`.
    """
    numbers = pd.concat([part if counts_missing else part.dropna() for part in parts])
    counts = numbers.groupby("seed").size()
    whole = numbers[numbers["seed"].isin(counts.index[counts == len(parts)])]
    return whole.sort_values("seed", key=lambda column: column.map(list(seeds).index), kind="stable")


def mean_by_seed(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return a row per seed, in their order, with the mean of its numbers."""
    read = [name for name in ("value", "minus") if name in numbers]
    means = numbers.groupby("seed", sort=False)[read].mean().reset_index()
    return means.assign(workflow=ALL_CELLS, task=", ".join(dict.fromkeys(numbers["task"])))
