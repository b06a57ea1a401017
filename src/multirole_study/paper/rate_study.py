"""Define the runs of studies such as `studies/rates.yaml`: arms whose learning rate is tuned on seeds and problems that score nothing."""

from collections.abc import Iterator
from itertools import product
from typing import ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from multirole_study.compare.study import check_measure, check_minus, check_roles
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.old_names import merged
from multirole_study.experiment.settings import CHECKED, refuse_repeats
from multirole_study.paper.grid import ArmsStudy, cell_of, refuse_coordinates

Purpose = Literal["tuning", "scoring"]


@dataclass(frozen=True, config=CHECKED)
class Arm:
    """A cell of the matrix with changed fields; `rate` is set if the arm is not tuned, and `task` if it is not the study's."""

    workflow: str
    policy: str
    parameters: dict[str, object] = Field(default_factory=dict)
    rate: float | None = None
    task: str | None = None


@dataclass(frozen=True, config=CHECKED)
class Phase:
    """The seeds of tuning or scoring, and the fields of `Cell` that its runs share."""

    seeds: list[int] = Field(min_length=1)
    parameters: dict[str, object] = Field(default_factory=dict)


@dataclass(frozen=True, config=CHECKED)
class Line:
    """Arms that are tuned, or scored, together."""

    purpose: Purpose
    arms: list[str]


@dataclass(frozen=True, config=CHECKED)
class RateQuestion:
    """A comparison of arms, each with `minus`, or with its own arm in a list of them. Its lines are one family of Holm's correction.

    Args:
        measure: a name of `compare.measures.MEASURES`, such as "growth" of a role's replies; "end" is read on the problems that score.
        pooled: the question has one line, or one per task ("by task"): a seed's number is the mean over the arms, and a seed without all of them is not read.
        tested: False shows the numbers with their intervals, without p and verdict.
    """

    name: str
    question: str
    measure: str
    arms: list[str]
    minus: str | list[str]
    role: str = ""
    """The role that the measure reads, such as the one whose replies grow."""
    pooled: bool | Literal["by task"] = False
    tested: bool = True

    def __post_init__(self) -> None:
        check_measure(self.name, self.measure, self.options)
        check_minus(self.name, self.arms, self.minus)

    @property
    def options(self) -> dict[str, str]:
        """Return the options of its measure."""
        return {"role": self.role} if self.role else {}

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """List (arm, the arm that is subtracted)."""
        others = [self.minus] * len(self.arms) if isinstance(self.minus, str) else self.minus
        return list(zip(self.arms, others, strict=True))


@dataclass(frozen=True, config=CHECKED)
class RateStudy(ArmsStudy):
    """The arms, rates and lines of the study, and nothing of the grid's cells. Raises ValueError for values that cannot work.

    Args:
        arms: name -> cell.
        rates: learning rates at which an arm without its own is tuned.
        preset: the preset's learning rate, which is one of `rates`.
        task: the task of all arms that name no other.
        tuning, scoring: seeds and settings of the two phases.
        rules: the file whose first lines say how the runs are judged.
        chosen: arm -> tuned rate; an arm that is missing is not scored yet, and the lines after it wait.
    """

    RECORD: ClassVar[str] = "rates.json"
    command: ClassVar[str] = "rates"
    arms: dict[str, Arm]
    rates: list[float]
    preset: float
    task: str
    tuning: Phase
    scoring: Phase
    lines: list[Line]
    questions: list[RateQuestion]
    rules: str = "studies/rates.yaml"
    chosen: dict[str, float] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_repeats("The names of `questions`", [question.name for question in self.questions])
        named = {arm for line in self.lines for arm in line.arms} | set(self.chosen)
        named |= {arm for question in self.questions for pair in question.pairs for arm in pair}
        if unknown := named - set(self.arms):
            raise ValueError(
                f"`lines`, `questions` and `chosen` name the arms {sorted(unknown)}, which `arms` does not have: {sorted(self.arms)}."
            )
        if both := set(self.tuning.seeds) & set(self.scoring.seeds):
            raise ValueError(f"Seeds {sorted(both)} tune the rate and score as well. Use others for one of the two.")
        if self.preset not in self.rates:
            raise ValueError(f"`preset` must be one of `rates`, {self.rates}, got {self.preset}.")
        if odd := {arm: rate for arm, rate in self.chosen.items() if rate not in self.rates}:
            raise ValueError(f"`chosen` must be one of `rates`, {self.rates}, for every arm, got {odd}.")
        list(self.runs())  # raises ValueError for invalid cells
        for question in self.questions:
            pairs = (arm for pair in question.pairs for arm in pair)
            check_roles(question.name, question.options, (self.first_cell(arm, "scoring") for arm in pairs))
        for arm in (arm for arm, about in self.arms.items() if about.rate is None):
            tuning, scoring = (self.first_cell(arm, purpose).n_validation for purpose in ("tuning", "scoring"))
            if tuning is None or scoring is not None and scoring <= tuning:
                raise ValueError(
                    f"`n_validation` of the arm {arm!r} is {tuning} in tuning and {scoring} in scoring, so that no problem is left that scores and "
                    "chooses no rate. Write a larger one for scoring, or a smaller one for tuning."
                )

    def rate(self, arm: str) -> float | None:
        """Return the rate at which an arm is scored; None until it is chosen."""
        return self.arms[arm].rate if self.arms[arm].rate is not None else self.chosen.get(arm)

    def arm_of(self, workflow: str, policy: str) -> str:
        """Return the name of the first arm with this workflow and policy that is tuned."""
        return next(
            name for name, arm in self.arms.items() if (arm.workflow, arm.policy, arm.rate) == (workflow, policy, None)
        )

    def phase(self, purpose: Purpose) -> Phase:
        """Return the phase of a purpose."""
        return self.tuning if purpose == "tuning" else self.scoring

    def settings(self, arm: str, rate: float, purpose: Purpose) -> dict[str, object]:
        """Return the fields of `Cell` by which a run differs from the preset; those of an arm take precedence over those of a phase."""
        changes = merged(self.phase(purpose).parameters, self.arms[arm].parameters)
        refuse_coordinates(changes, "policy")
        return merged(self.grid.parameters, changes, {"learning_rate": rate})

    def cell(self, arm: str, rate: float, seed: int, purpose: Purpose) -> Cell:
        """Create the cell of one run."""
        about = self.arms[arm]
        settings = self.settings(arm, rate, purpose)
        coordinates = {"workflow": about.workflow, "policy": about.policy, "task": self.task_of(arm), "seed": seed}
        return cell_of(scale=self.grid.scale, **coordinates, **settings)

    def first_cell(self, arm: str, purpose: Purpose) -> Cell:
        """Create the cell of an arm's first seed at the preset's rate, whose roles and problems are those of all its runs."""
        return self.cell(arm, self.preset, self.phase(purpose).seeds[0], purpose)

    def task_of(self, arm: str) -> str:
        """Return the task of an arm."""
        return self.arms[arm].task or self.task

    def runs(self) -> Iterator[tuple[int, str, Purpose, Cell]]:
        """Yield (line, arm, purpose, cell) of every run whose rate is known, in the order of the lines."""
        for i, line in enumerate(self.lines):
            for seed, arm in product(self.phase(line.purpose).seeds, line.arms):
                for rate in self.rates if line.purpose == "tuning" else [self.rate(arm)]:
                    if rate is None:
                        continue
                    yield i, arm, line.purpose, self.cell(arm, rate, seed, line.purpose)

    def cells_by_line(self) -> list[dict[str, Cell]]:
        """Return id -> cell of each line's runs, in the order in which they are trained; none after a line of which a rate is not chosen yet."""
        lines: list[dict[str, Cell]] = [{} for _ in self.lines]
        waiting = (
            i for i, line in enumerate(self.lines) if line.purpose == "scoring" and None in map(self.rate, line.arms)
        )
        last = next(waiting, len(lines))
        for i, _, _, cell in self.runs():
            if i <= last:
                lines[i][cell.id] = cell
        return lines

    def parameters_of(self, cell: Cell) -> dict[str, object]:
        """Return the notebook parameters of a run."""
        arm, purpose = next((arm, purpose) for _, arm, purpose, other in self.runs() if other == cell)
        coordinates = {"workflow": cell.workflow, "policy": cell.policy_name, "task": cell.task}
        return coordinates | {"scale": cell.scale, "seed": cell.seed} | self.settings(arm, cell.learning_rate, purpose)
