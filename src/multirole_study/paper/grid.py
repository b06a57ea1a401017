"""Define the paper's matrix at one scale: the cells to train and the evaluations afterwards (paper sec 3).

The `grid.json` of a results folder `<results_dir>/<scale>/` lists the runs that its tables are built from, so that the folder can
also hold runs with other options. The Snakefile runs a grid; papermill runs single cells.

A study's *variant* has a name, the question it belongs to, the fields of `Cell` that it changes, and the cells of the grid that
it changes. Its runs are packed with the grid's, and `study.json` lists them.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass

from multirole_study.experiment.cell import Cell, as_text
from multirole_study.experiment.evaluation import Evaluation
from multirole_study.experiment.launch import MEMORY_SETTINGS
from multirole_study.experiment.old_names import merged
from multirole_study.experiment.presets import TASKS
from multirole_study.experiment.settings import CHECKED, refuse_repeats, user_errors
from multirole_study.experiment.storage import write_text

WORKFLOWS = ("eval_opt", "voting", "orch_workers")  # in the paper's order
POLICIES = ("ip", "sp")
WORKFLOW_POLICIES = (*product(WORKFLOWS, POLICIES), ("single", "sp"))
"""Every (workflow, policy) of a task, in the order of the tables."""
logger = logging.getLogger(__name__)


def cell_of(**fields: object) -> Cell:
    """Create a cell, or return an equal one that was created before: tables ask for each of some thousand cells many times."""
    # others depend on a file of the user's, which may change
    is_built_in = fields["workflow"] in (*WORKFLOWS, "single") and fields["task"] in TASKS
    return _built_in_cell(json.dumps(fields)) if is_built_in else Cell(**fields)  # type: ignore[arg-type]


@lru_cache(maxsize=16384)
def _built_in_cell(fields: str) -> Cell:
    return Cell(**json.loads(fields))


def as_fields(changed: dict[str, object]) -> dict[str, object]:
    """Return what a variant changes as fields of a cell, with launch options for memory as `fixed_launch`."""
    changed = merged(changed)
    fixed = {name: value for name, value in changed.items() if name in MEMORY_SETTINGS}
    rest = {name: value for name, value in changed.items() if name not in fixed}
    return rest | ({"fixed_launch": as_text(fixed)} if fixed else {})


def refuse_coordinates(parameters: Mapping[str, object], *others: str) -> None:
    """Raise ValueError if parameters set a coordinate, by which the cells of a grid differ, or one of `others`."""
    if coordinates := {"workflow", "task", "scale", "seed", *others} & set(parameters):
        raise ValueError(f"`parameters` cannot set {sorted(coordinates)}, which vary within the grid. Leave them out.")


@dataclass(frozen=True, config=CHECKED)
class Grid:
    """The cells of the matrix at one scale. Raises ValueError for values that cannot work.

    Args:
        seeds: each cell is trained once per seed.
        parameters: fields of `Cell` that every cell shares and that differ from the preset.
        base_rollouts: episodes per problem of the untrained workflows, which are evaluated with the first seed only.
        workflows, policies, tasks: names, or paths to user-supplied ones ("examples/debate.py:Debate").
    """

    scale: str
    seeds: list[int] = Field(default_factory=lambda: [0], min_length=1)
    parameters: dict[str, object] = Field(default_factory=dict)
    base_rollouts: int = Field(1, ge=1)
    workflows: list[str] = Field(default_factory=lambda: list(WORKFLOWS))
    policies: list[str] = Field(default_factory=lambda: list(POLICIES))
    tasks: list[str] = Field(default_factory=lambda: list(TASKS))

    def __post_init__(self) -> None:
        refuse_repeats("`seeds`", self.seeds)
        refuse_coordinates(self.parameters, "policy")
        self.cells()  # raises ValueError for invalid cells

    @property
    def shared(self) -> dict[str, object]:
        """Return the fields of `Cell` that every cell shares: its parameters without launch options for memory."""
        return {name: value for name, value in merged(self.parameters).items() if name not in MEMORY_SETTINGS}

    @property
    def base(self) -> str:
        """Return the name of the base model in tables: the scale, or that of the model that the grid sets."""
        return Path(str(self.parameters.get("model", self.scale))).name

    def cell(self, workflow: str, policy: str, task: str, seed: int, /, **changed: object) -> Cell:
        """Create one cell of the matrix with changed fields; None removes a parameter of the grid.

        A launch option for memory among `changed` is a treatment (`Cell.fixed_launch`). Among the grid's parameters it changes no cell.
        """
        refuse_coordinates(changed)
        parameters = {"policy": policy} | self.shared | as_fields(changed)
        settings = {name: value for name, value in parameters.items() if value is not None}
        return cell_of(workflow=workflow, task=task, scale=self.scale, seed=seed, **settings)

    def cells(self) -> list[Cell]:
        """List the trained cells: every workflow under every policy, and the single-agent control, per task and seed."""
        pairs = [*((w, p) for w in self.workflows for p in self.policies), ("single", "sp")]
        return [self.cell(w, p, task, seed) for seed in self.seeds for task in self.tasks for w, p in pairs]

    @property
    def unshown(self) -> list[str]:
        """List the workflows and policies besides the paper's, which no table or figure of a grid shows."""
        return [name for name in (*self.workflows, *self.policies) if name not in (*WORKFLOWS, *POLICIES, "single")]

    def evaluations(self) -> list[Evaluation]:
        """List the evaluations besides the validation of the runs: the untrained workflows, every run's own checkpoints,
        and the single agent's adapter at its best checkpoint in every workflow (Table 3).
        """
        first, own_checkpoints = self.seeds[0], [Evaluation(cell) for cell in self.cells()]
        untrained = product(self.tasks, (*self.workflows, "single"))
        base = [
            Evaluation(self.cell(w, "sp", t, first), "base", num_generations_eval=self.base_rollouts)
            for t, w in untrained
        ]
        moved = product(self.seeds, self.tasks, self.workflows, ("transfer", "transfer_all"))
        return [
            *base,
            *own_checkpoints,
            *(Evaluation(self.cell(w, "sp", t, seed), adapters) for seed, t, w, adapters in moved),
        ]

    def parameters_of(self, job: Cell | Evaluation) -> dict[str, object]:
        """Return the notebook parameters of a cell (train_cell.ipynb) or of an evaluation (eval_cell.ipynb)."""
        cell = job if isinstance(job, Cell) else job.cell
        names = () if job is cell else ("adapters", "checkpoints", "num_generations_eval")
        coordinates = {"workflow": cell.workflow, "policy": cell.policy_name, "task": cell.task}
        of_evaluation = {name: getattr(job, name) for name in names}
        return coordinates | {"scale": cell.scale, "seed": cell.seed} | merged(self.parameters) | of_evaluation

    def write(self, results_dir: str | Path) -> None:
        """Write `<results_dir>/<scale>/grid.json`."""
        folder = Path(results_dir) / self.scale
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "grid.json", json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: str | Path) -> "Grid":
        """Read the grid of a results folder `<results_dir>/<scale>`. Raises ValueError if none is recorded."""
        path = Path(folder) / "grid.json"
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist, so it is not known which runs the tables are made of. Pass a folder such as "
                "results/tiny-r, or run a grid first: make grid."
            )
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, config=CHECKED)
class Declaration:
    """What the Snakefile trains, evaluates and builds. This class declares a grid alone; `Study` and `ArmsStudy` declare more."""

    grid: Grid
    command: ClassVar[str] = "paper"
    """The kind of study, which chooses the notebooks that compute its tables and figures (`paper.notebooks`)."""
    RECORD: ClassVar[str] = ""
    """Name of the file in a results folder that records the fields other than `grid`; empty if there are none."""
    SEED_BY_SEED: ClassVar[bool] = False
    """Whether a seed waits for the one before it, in all arms of its line."""

    def cells_by_line(self) -> list[dict[str, Cell]]:
        """Return id -> cell of each line's runs, in the order of training. A line waits for all lines before it."""
        return [{cell.id: cell for cell in self.grid.cells()}]

    def stages(self) -> list[list[str]]:
        """Return the ids of the runs that are trained at a time, in the order of training. A stage waits for all stages before it."""
        lines = self.cells_by_line()
        return seed_by_seed(lines) if self.SEED_BY_SEED else [list(line) for line in lines]

    def cells(self) -> list[Cell]:
        """List the runs of all lines, in the order of training."""
        return [cell for line in self.cells_by_line() for cell in line.values()]

    def packed_elsewhere(self) -> set[str]:
        """Return the ids of runs that other results folders hold, and that are not trained again."""
        return set()

    def evaluations(self) -> list[Evaluation]:
        """List the evaluations besides the validation of the runs."""
        return self.grid.evaluations()

    @user_errors()
    def check_rows(self) -> None:
        """Raise UserError if an embedded table of problems has fewer for validation than a run asks for.

        Other embedded tasks are endless. Rows of the Hub and of the user's files are checked when a run starts, since they may have to be downloaded.
        """
        from multirole_study.tasks.spec_table import TableTask  # imports datasets

        cell_of_rows = {(cell.task_label, cell.n_validation): cell for cell in self.cells()}
        for cell in cell_of_rows.values():
            task = cell.make_task()
            if isinstance(task, TableTask):
                try:
                    task.problems("validation", cell.n_validation)
                except ValueError as error:
                    raise ValueError(f"{cell.id} cannot run: {error}") from error

    def parameters_of(self, job: Cell | Evaluation) -> dict[str, object]:
        """Return the notebook parameters of a run (train_cell.ipynb) or of an evaluation (eval_cell.ipynb)."""
        return self.grid.parameters_of(job)

    def write(self, results_dir: str | Path) -> None:
        """Write `grid.json` and the record of the other fields into `<results_dir>/<scale>`.

        The record of a `Study` there stays if its variants are of this grid; otherwise it is removed, and its runs and tables stay. The same
        holds for an `ArmsStudy` there, whose runs share the parameters of the grid.
        """
        folder = Path(results_dir) / self.grid.scale
        try:
            before = Grid.read(folder).shared
        except ValueError:  # none is recorded, or none that still works
            before = self.grid.shared
        self.grid.write(results_dir)
        for kind in ArmsStudy.__subclasses__() if before != self.grid.shared else ():
            if kind.RECORD != self.RECORD and (folder / kind.RECORD).is_file():
                logger.warning(
                    "%s is removed, because its runs have other parameters than this grid", folder / kind.RECORD
                )
                (folder / kind.RECORD).unlink()
        try:
            Study.read(folder)
        except ValueError as error:
            logger.warning("%s is removed, because it does not fit this grid: %s", folder / Study.RECORD, error)
            (folder / Study.RECORD).unlink()
        if self.RECORD:
            fields = {name: value for name, value in asdict(self).items() if name != "grid"}
            write_text(folder / self.RECORD, json.dumps(fields, indent=2) + "\n")

    @classmethod
    def read(cls, folder: str | Path) -> Self | None:
        """Read the study of this kind in a results folder `<results_dir>/<scale>`; None if none is recorded."""
        path = Path(folder) / cls.RECORD
        return cls(Grid.read(folder), **json.loads(path.read_text())) if path.is_file() else None


@dataclass(frozen=True, config=CHECKED)
class ArmsStudy(Declaration):
    """Base class of studies of arms alone, seed by seed: no other cell of the grid is trained, and the validation of the runs is enough."""

    SEED_BY_SEED: ClassVar[bool] = True

    def evaluations(self) -> list[Evaluation]:
        """Return none."""
        return []


def seed_by_seed(lines: list[dict[str, Cell]]) -> list[list[str]]:
    """Return the ids of each line's runs as one stage per seed. Snakemake starts the runs of a stage in any order."""
    return [
        [run for run, cell in line.items() if cell.seed == seed]
        for line in lines
        for seed in dict.fromkeys(cell.seed for cell in line.values())
    ]


@dataclass(frozen=True, config=CHECKED)
class Variant:
    """One change of a grid's cells, which are written "workflow policy task"."""

    question: Literal["updates", "setup", "controls", "factorial", "judges", "aa", "credit"]
    parameters: dict[str, object]
    cells: list[str]
    seeds: list[int] | None = None
    """The variant's seeds, if they differ from the study's."""


@dataclass(frozen=True, config=CHECKED)
class Study(Declaration):
    """A grid with variants of its cells. Raises ValueError for values that cannot work.

    Args:
        rollouts: answers per problem of the single agents' best checkpoint, for votes and best of k.
        order: lines of workflows and variants, each of which waits for the lines before it; what no line names comes last.
    """

    RECORD: ClassVar[str] = "study.json"
    seeds: list[int]
    variants: dict[str, Variant]
    rollouts: int = Field(1, ge=1)
    order: list[list[str]] = Field(default_factory=list)

    def __post_init__(self) -> None:
        if extra := set(self.seeds) - set(self.grid.seeds):
            raise ValueError(
                f"`seeds` must be seeds of the grid, {self.grid.seeds}, got {sorted(extra)}: a variant is compared with the "
                "grid's run of the same seed."
            )
        known = [*self.grid.workflows, "single", *self.variants]
        if unknown := {name for line in self.order for name in line} - set(known):
            raise ValueError(f"`order` must name workflows of the grid and variants, {known}, got {sorted(unknown)}.")
        self.cells()  # raises ValueError for invalid cells

    def cell(self, name: str, coordinates: str, seed: int) -> Cell:
        """Create the variant of the grid's cell `coordinates`, such as "voting ip math"."""
        words = coordinates.split()
        if len(words) != 3:
            raise ValueError(
                f"`cells` of the variant {name!r} must be written 'workflow policy task', such as 'voting sp math', got {coordinates!r}."
            )
        return self.grid.cell(*words, seed, **self.variants[name].parameters)

    @property
    def command(self) -> str:
        """Return "leaderboard" if all variants are credit estimators, else "paper"."""
        questions = {variant.question for variant in self.variants.values()}
        return "leaderboard" if questions == {"credit"} else "paper"

    def runs(self, question: str | None = None) -> Iterator[tuple[str, str, Cell]]:
        """Yield (variant, "workflow policy task", cell) of every run; seeds vary fastest."""
        for name, variant in self.variants.items():
            for coordinates in variant.cells if question in (None, variant.question) else ():
                for seed in variant.seeds or self.seeds:
                    yield name, coordinates, self.cell(name, coordinates, seed)

    def cells_by_line(self) -> list[dict[str, Cell]]:
        """Return id -> cell of each line of `order` and then of the rest, which is all without `order`; in each the grid's runs come first."""
        runs = [(cell.workflow, cell) for cell in self.grid.cells()] + [(name, cell) for name, _, cell in self.runs()]
        place, last = {name: i for i, line in enumerate(self.order) for name in line}, len(self.order)
        cells: dict[str, Cell] = {}
        lines: dict[str, int] = {}
        for name, cell in runs:  # two variants may have the same run, which belongs to the first line
            cells[cell.id], lines[cell.id] = cell, min(place.get(name, last), lines.get(cell.id, last))
        return [{run: cell for run, cell in cells.items() if lines[run] == i} for i in range(last + 1)]

    def draws(self) -> list[Evaluation]:
        """List the evaluations of the grid's single agents with several answers per problem."""
        tasks = dict.fromkeys(coordinates.split()[2] for _, coordinates, _ in self.runs("controls"))
        singles = [self.grid.cell("single", "sp", task, seed) for task in tasks for seed in self.seeds]
        return [Evaluation(cell, "own", "best", self.rollouts) for cell in singles]

    def evaluations(self) -> list[Evaluation]:
        """List the grid's evaluations, and `draws`; none for a leaderboard, which reads only the validation of the runs."""
        return [] if self.command == "leaderboard" else [*self.grid.evaluations(), *self.draws()]

    def parameters_of(self, job: Cell | Evaluation) -> dict[str, object]:
        """Return the notebook parameters of a run or of an evaluation."""
        changed = self._changed_by_id.get(job.id, {}) if isinstance(job, Cell) else {}
        return self.grid.parameters_of(job) | changed

    @cached_property
    def _changed_by_id(self) -> dict[str, dict[str, object]]:
        """Return id -> changed parameters of the variants' runs, of the first variant where two have the same run."""
        runs = [(cell.id, as_fields(self.variants[name].parameters)) for name, _, cell in self.runs()]
        return dict(reversed(runs))


def detailed(folder: str | Path) -> set[str] | None:
    """Return the names of the runs and evaluations packed with every column; None means all, for a folder without a grid.

    These are the grid's runs of its first seed, and the several answers per problem that votes are made of.
    """
    if not (Path(folder) / "grid.json").exists():
        return None
    grid, study = Grid.read(folder), Study.read(folder)
    draws = {draw.id for draw in (study.draws() if study else [])}
    return draws | {cell.id for cell in grid.cells() if cell.seed == grid.seeds[0]}
