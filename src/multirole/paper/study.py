"""Runs that differ from a grid's in one thing: updates, schedules and rows, judging roles, single-agent controls, or nothing (A/A).

A *variant* is a name, the question it belongs to, the fields of `Cell` that it changes, and the cells of the grid it is tried on.
Its runs are packed beside the grid's, and `study.json` says which they are.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from multirole.experiment.cell import Cell
from multirole.experiment.evaluation import Evaluation
from multirole.paper.grid import CHECKED, Grid, write_json

DETAILED_SEEDS = 1
"""Of a grid's runs, those of so many seeds are packed with every column."""


@dataclass(frozen=True, config=CHECKED)
class Variant:
    """One change of a grid's cells, which are written "workflow policy task"."""

    question: Literal["updates", "setup", "controls", "factorial", "judges", "aa"]
    parameters: dict[str, object]
    cells: list[str]
    seeds: list[int] | None = None
    """Its own, where they are not the study's."""


@dataclass(frozen=True, config=CHECKED)
class Study:
    """The variants of a grid. Raises ValueError for values that cannot work.

    Args:
        rollouts: answers per problem of the single agents' best checkpoint, for votes and best of k.
    """

    grid: Grid
    seeds: list[int]
    variants: dict[str, Variant]
    rollouts: int = Field(1, ge=1)

    def __post_init__(self) -> None:
        if extra := set(self.seeds) - set(self.grid.seeds):
            raise ValueError(
                f"`seeds` must be seeds of the grid, {self.grid.seeds}, got {sorted(extra)}: a variant is compared with the "
                "grid's run of the same seed."
            )
        self.cells()  # raises what Cell refuses

    def cell(self, name: str, where: str, seed: int) -> Cell:
        """Make the variant of the grid's cell "workflow policy task"."""
        return self.grid.cell(*where.split(), seed, **self.variants[name].parameters)

    def runs(self, question: str | None = None) -> Iterator[tuple[str, str, Cell]]:
        """Yield (variant, "workflow policy task", cell) of every run, seeds inmost."""
        for name, variant in self.variants.items():
            for where in variant.cells if question in (None, variant.question) else ():
                for seed in variant.seeds or self.seeds:
                    yield name, where, self.cell(name, where, seed)

    def cells(self) -> list[Cell]:
        """List the runs that the study trains besides the grid's."""
        usual = {cell.id for cell in self.grid.cells()}
        return list({cell.id: cell for _, _, cell in self.runs() if cell.id not in usual}.values())

    def draws(self) -> list[Evaluation]:
        """List the evaluations of the grid's single agents with several answers per problem."""
        tasks = dict.fromkeys(where.split()[2] for _, where, _ in self.runs("controls"))
        singles = [self.grid.cell("single", "sp", task, seed) for task in tasks for seed in self.seeds]
        return [Evaluation(cell, "own", "best", self.rollouts) for cell in singles]

    def parameters_of(self, what: Cell | Evaluation) -> dict[str, object]:
        """Return the notebook parameters of a run or of an evaluation."""
        own = next((self.variants[name].parameters for name, _, cell in self.runs() if cell == what), {})
        return self.grid.parameters_of(what) | own

    def write(self, results_dir: str | Path) -> None:
        """Write `<results_dir>/<scale>/study.json`."""
        about = asdict(self)
        del about["grid"]
        write_json(Path(results_dir) / self.grid.scale / "study.json", about)

    @classmethod
    def read(cls, grid: Grid, folder: str | Path) -> "Study | None":
        """Read the study of a results folder `<results_dir>/<scale>`; None if none is recorded."""
        path = Path(folder) / "study.json"
        return cls(grid, **json.loads(path.read_text())) if path.is_file() else None


def detailed(folder: str | Path) -> set[str] | None:
    """The names of the runs and evaluations of a results folder that are packed with every column; None, all, without a grid.

    These are the grid's runs of the first `DETAILED_SEEDS` seeds, and the several answers per problem that votes are made of.
    """
    if not (Path(folder) / "grid.json").exists():
        return None
    grid = Grid.read(folder)
    study = Study.read(grid, folder)
    draws = {draw.id for draw in (study.draws() if study else [])}
    return draws | {cell.id for cell in grid.cells() if cell.seed in grid.seeds[:DETAILED_SEEDS]}
