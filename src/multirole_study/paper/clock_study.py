"""Define the runs of `studies/clock.yaml`: lines of arms that differ in policy, learning-rate clock and rate.

Unlike the variants of `grid.Study` these runs have no twin in the grid. Lines are trained in order, so that an early stop leaves complete lines.
"""

from itertools import product
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.old_names import merged
from multirole_study.experiment.settings import CHECKED
from multirole_study.paper.grid import ArmsStudy, cell_of

MIDDLE = "middle"
"""The rate of a line whose number is decided by the calibration."""


@dataclass(frozen=True, config=CHECKED)
class Line:
    """Runs that are trained together: every arm of every workflow and task, seed by seed."""

    rate: float | Literal["middle"]
    workflows: list[str]
    tasks: list[str]
    arms: list[str]
    seeds: list[int]
    purpose: Literal["verdicts", "calibration"] = "verdicts"


@dataclass(frozen=True, config=CHECKED)
class ClockStudy(ArmsStudy):
    """The arms and lines of the study, and nothing of the grid's cells. Raises ValueError for values that cannot work.

    Args:
        grid: gives the scale and the parameters that all runs share.
        arms: name -> policy and clock.
        parameters: fields of `Cell` that all runs of the study share besides the grid's.
        middle: the learning rate of lines whose rate is "middle"; None until the calibration has been read.
    """

    RECORD: ClassVar[str] = "clock.json"
    command: ClassVar[str] = "clock"
    arms: dict[str, dict[str, str]]
    lines: list[Line]
    parameters: dict[str, object] = Field(default_factory=dict)
    middle: float | None = None

    def __post_init__(self) -> None:
        if unknown := {arm for line in self.lines for arm in line.arms} - set(self.arms):
            raise ValueError(f"Lines name the arms {sorted(unknown)}, which `arms` does not have: {sorted(self.arms)}.")
        by_purpose = {purpose: self.seeds(purpose) for purpose in ("verdicts", "calibration")}
        if both := set(by_purpose["verdicts"]) & set(by_purpose["calibration"]):
            raise ValueError(
                f"Seeds {sorted(both)} calibrate the rate and score as well. Use others for one of the two."
            )
        self.cells()  # raises ValueError for invalid cells

    def rate(self, line: Line) -> float | None:
        """Return a line's learning rate; None while it is not known."""
        return self.middle if line.rate == MIDDLE else line.rate

    def seeds(self, purpose: str) -> list[int]:
        """List the seeds of the lines of a purpose, in their order."""
        return list(dict.fromkeys(seed for line in self.lines if line.purpose == purpose for seed in line.seeds))

    def settings(self, arm: str, rate: float) -> dict[str, object]:
        """Return the fields of `Cell` by which an arm's runs differ from the preset."""
        return merged(self.grid.parameters, self.parameters, self.arms[arm], {"learning_rate": rate})

    def cell(self, arm: str, workflow: str, task: str, rate: float, seed: int) -> Cell:
        """Create the cell of one run."""
        return cell_of(workflow=workflow, task=task, scale=self.grid.scale, seed=seed, **self.settings(arm, rate))

    def cells_by_line(self) -> list[dict[str, Cell]]:
        """Return id -> cell of each line's runs, in the order in which they are trained."""
        lines = []
        for line in self.lines:
            rate = self.rate(line)
            runs = product(line.seeds, line.workflows, line.tasks, line.arms) if rate is not None else ()
            cells = [self.cell(arm, workflow, task, rate, seed) for seed, workflow, task, arm in runs]
            lines.append({cell.id: cell for cell in cells})
        return lines

    def parameters_of(self, cell: Cell) -> dict[str, object]:
        """Return the notebook parameters of a run."""
        at = cell.workflow, cell.task, cell.learning_rate, cell.seed
        arm = next(name for name in self.arms if self.cell(name, *at) == cell)
        coordinates = {"workflow": cell.workflow, "task": cell.task, "scale": cell.scale, "seed": cell.seed}
        return coordinates | self.settings(arm, cell.learning_rate)
