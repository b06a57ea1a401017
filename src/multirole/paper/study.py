"""Runs that differ from a grid's in one thing: updates, schedules and rows, remedies, single-agent controls.

A *variant* is a name, the question it belongs to, the fields of `Cell` that it changes, and the cells of the grid it is tried on.
Its runs lie beside the grid's, in `<results_dir>/<scale>/<cell id>/`, and `study.json` says which they are.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from multirole.experiment.cell import Cell
from multirole.experiment.evaluate import Evaluation
from multirole.experiment.storage import write_text
from multirole.paper.grid import Grid

QUESTIONS = ("updates", "setup", "remedies", "controls")
"""Of the number of optimizer steps; of the schedule and the order of rows; of what helps; of the single agent."""


@dataclass(frozen=True)
class Variant:
    """One change of a grid's cells. `cells` are "workflow policy task"."""

    question: str
    parameters: dict[str, object]
    cells: list[str]


@dataclass(frozen=True)
class Study:
    """A grid's variants; bad values raise ValueError."""

    grid: Grid
    seeds: list[int]
    variants: dict[str, Variant]
    rollouts: int = 1

    def __post_init__(self) -> None:
        if unknown := {v.question for v in self.variants.values()} - set(QUESTIONS):
            raise ValueError(f"{sorted(unknown)} are no questions of a study. Write question: one of {QUESTIONS}.")
        if extra := set(self.seeds) - set(self.grid.seeds):
            raise ValueError(
                f"seeds {sorted(extra)} are not in the grid, so that their runs have no twins. Write seeds of {self.grid.seeds}."
            )
        self.cells()  # refuses what no cell can be

    @classmethod
    def of(cls, grid: Grid, given: dict[str, object]) -> "Study":
        """From the text of `study.yaml`."""
        variants = {name: Variant(**variant) for name, variant in given["variants"].items()}
        return cls(grid, list(given["seeds"]), variants, given.get("rollouts", 1))

    def cell(self, name: str, where: str, seed: int) -> Cell:
        """A variant of the grid's cell "workflow policy task"."""
        workflow, policy, task = where.split()
        parameters = {"policy": policy} | self.grid.parameters | self._own(name, policy)
        return Cell(workflow=workflow, task=task, scale=self.grid.scale, seed=seed, **parameters)

    def _own(self, name: str, policy: str) -> dict[str, object]:
        """A variant's parameters; where one adapter has all roles, both clocks of the schedule are one, and one run is enough."""
        own = self.variants[name].parameters
        return {field: value for field, value in own.items() if (policy, field) != ("sp", "lr_clock")}

    def runs(self, question: str | None = None) -> Iterator[tuple[str, str, Cell]]:
        """(variant, "workflow policy task", cell) of every run, seeds inmost."""
        for name, variant in self.variants.items():
            for where in variant.cells if question in (None, variant.question) else ():
                for seed in self.seeds:
                    yield name, where, self.cell(name, where, seed)

    def cells(self) -> list[Cell]:
        """Every run that the study trains besides the grid's."""
        usual = {cell.id for cell in self.grid.cells()}
        return list({cell.id: cell for _, _, cell in self.runs() if cell.id not in usual}.values())

    def draws(self) -> list[Evaluation]:
        """Several answers per problem of the grid's single agents at their best checkpoint, for votes and best of k."""
        asked = dict.fromkeys(where.split()[2] for _, where, _ in self.runs("controls"))
        return [
            Evaluation(self.grid.cell("single", "sp", task, seed), "own", "best", self.rollouts)
            for task in asked
            for seed in self.seeds
        ]

    def parameters_of(self, what: Cell | Evaluation) -> dict[str, object]:
        """The notebook parameters of a run or of an evaluation."""
        own = next((self._own(name, where.split()[1]) for name, where, cell in self.runs() if cell == what), {})
        return self.grid.parameters_of(what) | own

    def write(self, results_dir: str | Path) -> None:
        """`<results_dir>/<scale>/study.json`."""
        variants = {name: asdict(variant) for name, variant in self.variants.items()}
        about = {"seeds": self.seeds, "variants": variants, "rollouts": self.rollouts}
        folder = Path(results_dir) / self.grid.scale
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "study.json", json.dumps(about, indent=2) + "\n")

    @classmethod
    def read(cls, grid: Grid, folder: str | Path) -> "Study | None":
        """The study of a results folder `<results_dir>/<scale>`; None where none is recorded."""
        path = Path(folder) / "study.json"
        return cls.of(grid, json.loads(path.read_text())) if path.is_file() else None
