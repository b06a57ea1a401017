"""The runs of a study beside those of the grid: a variant and its twin have the same seed and problems."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.diagnostics.alarms import Alarms
from multirole.experiment.cell import Cell
from multirole.experiment.evaluate import named_steps
from multirole.experiment.record import folder_of, is_done
from multirole.paper.results import Results, outcomes
from multirole.paper.statistics import first_fall
from multirole.paper.study import Study

SHOWN = {"best": "peak", "terminal": "end"}
NAMED = ("gradient_amplification", "sp_role_capture_tokens", "sp_role_capture_frequency")
"""The alarms of the paper's two mechanisms (sec 5)."""


class Run(NamedTuple):
    """One finished run: validation outcomes (problems x steps), and at which step its checkpoints are."""

    cell: Cell
    folder: Path
    correct: pd.DataFrame
    steps: dict[str, int]

    def table(self, name: str) -> pd.DataFrame:
        """A table of `record.TABLES`; empty where it was never written, such as alarms that never rang."""
        path = self.folder / f"{name}.parquet"
        return pd.read_parquet(path) if path.exists() else pd.DataFrame()

    @property
    def falls(self) -> bool:
        """Whether an evaluation lies 5 points below the best one before it."""
        return first_fall(self.correct.mean()) is not None

    @property
    def is_announced(self) -> bool:
        """Whether the present thresholds announce one of the paper's two mechanisms in it."""
        alarms = Alarms(self.cell.policy, self.cell.make_workflow().roles)
        alarms.replay(self.table("roles").to_dict("records"))
        return any(row["alarm"] in NAMED for row in alarms.log)


def run_of(cell: Cell, root: Path) -> Run | None:
    """A cell's run below a results folder; None where it is not finished."""
    folder = folder_of(cell, root)
    read = _read(folder)
    return read and Run(cell, folder, *read)


@cache
def _read(folder: Path) -> tuple[pd.DataFrame, dict[str, int]] | None:
    if not is_done(folder):
        return None
    return outcomes(pd.read_parquet(folder / "eval.parquet")), named_steps(folder)


def named(cell: Cell) -> str:
    """A cell's workflow and policy as the tables name them; a map stays as it is."""
    policy = cell.policy_name
    return f"{cell.workflow_name}, {policy if '=' in policy else policy.upper()}"


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

    @property
    def label(self) -> str:
        """The cell as the tables name it."""
        return f"{named(self.usual[0].cell)}, {self.task}"


def twins(results: Results, study: Study, *questions: str) -> Iterator[Twins]:
    """Every variant of the questions on every cell that has a finished run of both, in the study's order."""
    found: dict[tuple[str, ...], list[tuple[Run, Run]]] = {}
    root = results.folder.parent
    for question in questions:
        for name, where, cell in study.runs(question):
            usual, changed = run_of(study.grid.cell(*where.split(), cell.seed), root), run_of(cell, root)
            if usual and changed:
                found.setdefault((*where.split(), name), []).append((usual, changed))
    for coordinates, pairs in found.items():
        yield Twins(*coordinates, *(list(runs) for runs in zip(*pairs, strict=True)))
