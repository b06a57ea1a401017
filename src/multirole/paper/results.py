"""Reads a grid's finished runs and evaluations: one tidy table of each kind, with the cell's coordinates as columns."""

import json
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.experiment.cell import Cell
from multirole.experiment.evaluate import Evaluation, named_steps
from multirole.experiment.record import folder_of, is_done
from multirole.paper.grid import Grid


class Key(NamedTuple):
    """The coordinates of a run within a grid; `single` runs have policy "sp"."""

    workflow: str
    policy: str
    task: str
    seed: int


def key_of(cell: Cell) -> Key:
    """A cell's coordinates."""
    return Key(cell.workflow_name, cell.policy_name, cell.task, cell.seed)


class Results:
    """The finished part of a grid. `folder` is `<results_dir>/<scale>`, which holds `grid.json`.

    A run whose files do not match its DONE counts as unfinished: no number is made of altered data.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.grid = Grid.read(folder)

    @cached_property
    def runs(self) -> dict[Key, Path]:
        """Folder of every finished run."""
        folders = {key_of(cell): folder_of(cell, self.folder.parent) for cell in self.grid.cells()}
        return {key: folder for key, folder in folders.items() if is_done(folder)}

    @cached_property
    def evaluations(self) -> dict[tuple[str, Key], Path]:
        """Folder of every finished evaluation, by what it evaluates and of whom."""
        found = {(e.adapters, key_of(e.cell)): e.folder(self.folder.parent) for e in self.grid.evaluations()}
        return {key: folder for key, folder in found.items() if is_done(folder)}

    def missing(self) -> list[str]:
        """Runs and evaluations that the grid asks for and that are not finished."""
        cells = [cell.id for cell in self.grid.cells() if key_of(cell) not in self.runs]
        asked: list[Evaluation] = self.grid.evaluations()
        return cells + [
            f"{e.adapters}/{e.cell.id}" for e in asked if (e.adapters, key_of(e.cell)) not in self.evaluations
        ]

    @cache  # noqa: B019  (a handful of instances, each used to the end)
    def table(self, name: str) -> pd.DataFrame:
        """A table of `record.TABLES` of all finished runs below each other, with the columns of `Key` first."""
        return _stack({key: folder / f"{name}.parquet" for key, folder in self.runs.items()})

    @cache  # noqa: B019
    def evaluated(self, adapters: str, name: str = "eval") -> pd.DataFrame:
        """ "eval" or "turns" of all finished evaluations of a kind ("own", "base", "transfer", "transfer_all")."""
        return _stack(
            {k: folder / f"{name}.parquet" for (kind, k), folder in self.evaluations.items() if kind == adapters}
        )

    def provenance(self, key: Key) -> dict:
        """Where a run's numbers come from."""
        return json.loads((self.runs[key] / "provenance.json").read_text())

    @cache  # noqa: B019
    def steps(self, key: Key) -> dict[str, int]:
        """A run's early, best and terminal checkpoint, and its untrained start."""
        return {"base": 0} | named_steps(self.runs[key])

    def seeds(self, workflow: str, policy: str, task: str) -> list[int]:
        """The seeds whose run is finished."""
        return [key.seed for key in self.runs if key[:3] == (workflow, policy, task)]

    @cache  # noqa: B019
    def correct(self, key: Key) -> pd.DataFrame:
        """One run's validation: problems (in the order of their names) x evaluated steps, 1.0 where right."""
        table = self.table("eval")
        return outcomes(table[(table[list(Key._fields)] == list(key)).all(axis=1)])

    def outcomes(self, workflow: str, policy: str, task: str, at: str) -> np.ndarray | None:
        """(S, P): each seed's validation outcomes at "base", "early", "best" or "terminal"; None without a finished run.

        "best" is chosen per seed on these same problems, as in the paper: it is optimistic.
        """
        keys = [Key(workflow, policy, task, seed) for seed in self.seeds(workflow, policy, task)]
        return np.stack([self.correct(key)[self.steps(key)[at]] for key in keys]) if keys else None

    def evaluation_outcomes(self, adapters: str, workflow: str, task: str) -> np.ndarray | None:
        """(S, P): outcomes of a "base", "transfer" or "transfer_all" evaluation, mean over rollouts; None without one."""
        table = self.evaluated(adapters)
        if table.empty:
            return None
        mine = table[(table["workflow"] == workflow) & (table["task"] == task)]
        by_problem = mine.groupby(["seed", "problem"])["correct"].mean().unstack("problem")
        return by_problem.to_numpy(float) if len(by_problem) else None


def outcomes(table: pd.DataFrame) -> pd.DataFrame:
    """Problems x evaluated steps, 1.0 where right, of one run's `eval.parquet`."""
    return table.pivot(index="problem", columns="step", values="correct").astype(float).sort_index()


def _stack(paths: dict[Key, Path]) -> pd.DataFrame:
    """Tables of equal columns below each other; files that were never written, such as alarms that never rang, are empty."""
    frames = []
    for key, path in paths.items():
        if path.exists():
            frame = pd.read_parquet(path)
            for place, (name, value) in enumerate(key._asdict().items()):
                frame.insert(place, name, value)
            frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(Key._fields))
