"""The paper's matrix at one scale: which cells are trained, and what is evaluated afterwards (paper sec 3).

A results folder `<results_dir>/<scale>/` says in `grid.json` which runs its tables are made of, so that runs with other
options can lie beside them. The Snakefile runs a grid; every cell of it can be run alone by papermill as well.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from multirole.experiment.cell import Cell
from multirole.experiment.evaluate import Evaluation
from multirole.experiment.presets import SCALES, TASKS
from multirole.experiment.storage import write_text

WORKFLOWS = ("eval_opt", "voting", "orch_workers")  # in the paper's order
POLICIES = ("ip", "sp")


@dataclass(frozen=True)
class Grid:
    """Every cell of the matrix at one scale; bad values raise ValueError.

    Args:
        seeds: each cell is trained once with each.
        parameters: fields of `Cell` that every cell shares and that differ from the preset.
        base_rollouts: episodes per problem of the untrained workflows, which are evaluated with the first seed only.
    """

    scale: str
    seeds: tuple[int, ...] = (0,)
    parameters: dict[str, object] = field(default_factory=dict)
    base_rollouts: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "seeds", tuple(self.seeds))
        if self.scale not in SCALES:
            raise ValueError(f"scale={self.scale!r} is not known. Write one of {list(SCALES)}.")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={self.seeds} repeat one, or hold none. Write seeds=[0, 1, 2], say.")
        if own := {"workflow", "policy", "task", "scale", "seed"} & set(self.parameters):
            raise ValueError(f"parameters set {sorted(own)}, which the grid goes through itself. Leave them out.")
        self.cells()  # refuses what no cell can be

    def cell(self, workflow: str, policy: str, task: str, seed: int) -> Cell:
        """One cell of the matrix."""
        return Cell(workflow, policy, task, self.scale, seed, **self.parameters)

    def cells(self) -> list[Cell]:
        """The trained cells: every workflow under both policies, and the single-agent control, for each task and seed."""
        pairs = [*((w, p) for w in WORKFLOWS for p in POLICIES), ("single", "sp")]
        return [self.cell(w, p, task, seed) for seed in self.seeds for task in TASKS for w, p in pairs]

    def base(self, workflow: str, task: str) -> Evaluation:
        """The untrained workflow."""
        return Evaluation(self.cell(workflow, "sp", task, self.seeds[0]), "base", n_rollouts=self.base_rollouts)

    def own(self, cell: Cell) -> Evaluation:
        """A trained cell's early, best and terminal checkpoint."""
        return Evaluation(cell)

    def transfer(self, workflow: str, task: str, seed: int, adapters: str = "transfer") -> Evaluation:
        """The single-agent adapter at its best checkpoint in a workflow (Table 3)."""
        return Evaluation(self.cell(workflow, "sp", task, seed), adapters)

    def evaluations(self) -> list[Evaluation]:
        """Everything that is evaluated besides the validation of the runs themselves."""
        moved = [
            self.transfer(w, task, seed, adapters)
            for seed in self.seeds
            for task in TASKS
            for w in WORKFLOWS
            for adapters in ("transfer", "transfer_all")
        ]
        return [
            *(self.base(w, task) for task in TASKS for w in (*WORKFLOWS, "single")),
            *(self.own(cell) for cell in self.cells()),
            *moved,
        ]

    def parameters_of(self, what: Cell | Evaluation) -> dict[str, object]:
        """The notebook parameters of a cell (train_cell.ipynb) or of an evaluation (eval_cell.ipynb)."""
        cell = what if isinstance(what, Cell) else what.cell
        coordinates = {
            "workflow": cell.workflow_name,
            "policy": cell.policy_name,
            "task": cell.task,
            "scale": cell.scale,
        }
        own = (
            {}
            if what is cell
            else {"adapters": what.adapters, "checkpoints": what.checkpoints, "n_rollouts": what.n_rollouts}
        )
        return coordinates | {"seed": cell.seed} | self.parameters | own

    def write(self, results_dir: str | Path) -> None:
        """`<results_dir>/<scale>/grid.json`."""
        folder = Path(results_dir) / self.scale
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "grid.json", json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, folder: str | Path) -> "Grid":
        """The grid of a results folder `<results_dir>/<scale>`; ValueError where none is recorded."""
        path = Path(folder) / "grid.json"
        if not path.is_file():
            raise ValueError(
                f"{path} does not exist, so nothing says which runs the tables are of. Pass a folder such as results/tiny-s, "
                "or run a grid first: make grid."
            )
        return cls(**json.loads(path.read_text()))
