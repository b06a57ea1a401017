"""The runs of a study beside those of the grid: a variant and its twin have the same seed and problems."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from multirole.experiment.cell import Cell
from multirole.paper.results import Results, Run
from multirole.paper.study import Study

SHOWN = {"best": "peak", "terminal": "end"}


class Twins(NamedTuple):
    """A cell of the grid and a variant of it: the runs of the seeds that have both."""

    workflow: str
    policy: str
    task: str
    variant: str
    usual: list[Run]
    changed: list[Run]


def run_of(cell: Cell, results_dir: Path) -> Run | None:
    """Find a cell's run below a results folder; None if it is not packed."""
    run = Run(cell, results_dir / cell.scale)
    return None if run.table("eval", "step", "problem", "correct").empty else run


def at(runs: list[Run], name: str) -> np.ndarray:
    """(S, P): the runs' outcomes at "best" or "terminal"."""
    return np.stack([run.correct[run.steps[name]] for run in runs])


def twins(results: Results, study: Study, *questions: str) -> Iterator[Twins]:
    """Yield every variant of the questions on every cell that has a packed run of both, in the study's order."""
    found: dict[tuple[str, ...], list[tuple[Run, Run]]] = {}
    root = results.folder.parent
    for question in questions:
        for name, where, cell in study.runs(question):
            usual, changed = run_of(study.grid.cell(*where.split(), cell.seed), root), run_of(cell, root)
            if usual and changed:
                found.setdefault((*where.split(), name), []).append((usual, changed))
    for coordinates, pairs in found.items():
        yield Twins(*coordinates, *(list(runs) for runs in zip(*pairs, strict=True)))
