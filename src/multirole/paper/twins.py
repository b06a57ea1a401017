"""The runs of a study beside those of the grid: a variant and its twin have the same seed and problems."""

from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.diagnostics.alarms import Alarms
from multirole.diagnostics.falls import first_fall
from multirole.experiment.cell import Cell
from multirole.experiment.evaluation import named_steps
from multirole.paper import pack
from multirole.paper.results import Results, correct
from multirole.paper.study import Study

SHOWN = {"best": "peak", "terminal": "end"}
MECHANISMS = ("gradient_amplification", "sp_role_capture_tokens", "sp_role_capture_frequency")
"""The alarms of the paper's two mechanisms (sec 5)."""


class Run:
    """One packed run."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder

    @cached_property
    def correct(self) -> pd.DataFrame:
        """Validation: problems x evaluated steps, 1.0 where right."""
        return correct(self.folder, self.cell.id)

    @cached_property
    def steps(self) -> dict[str, int]:
        """The early, best and terminal checkpoint."""
        return named_steps(self.correct.mean())

    def table(self, name: str) -> pd.DataFrame:
        """Read one of the run's tables; without rows where it has none, such as alarms that never rang."""
        return pack.read(self.folder, name, [self.cell.id])

    @property
    def falls(self) -> bool:
        """Whether validation falls (`diagnostics.falls`)."""
        return first_fall(self.correct.mean()) is not None

    @property
    def is_announced(self) -> bool:
        """Whether the present thresholds announce one of the paper's two mechanisms in it."""
        alarms = Alarms(self.cell.policy, self.cell.make_workflow().roles)
        alarms.replay(self.table("roles").to_dict("records"))
        return any(row["alarm"] in MECHANISMS for row in alarms.log)


@cache
def run_of(cell: Cell, results_dir: Path) -> Run | None:
    """Find a cell's run below a results folder; None if it is not packed."""
    folder = results_dir / cell.scale
    return Run(cell, folder) if cell.id in _names(folder) else None


@cache
def _names(folder: Path) -> frozenset[str]:
    return frozenset(pack.index(folder)["run"])


def at(runs: list[Run], name: str) -> np.ndarray:
    """(S, P): the runs' outcomes at "best" or "terminal"."""
    return np.stack([run.correct[run.steps[name]] for run in runs])


class Twins(NamedTuple):
    """A cell of the grid and a variant of it: the runs of the seeds that have both."""

    workflow: str
    policy: str
    task: str
    variant: str
    usual: list[Run]
    changed: list[Run]


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
