"""Read packed runs and evaluations: the tables of one run, or those of a grid with the cells' coordinates as columns."""

import json
from collections import Counter
from collections.abc import Iterable
from functools import cache, cached_property
from pathlib import Path

import pandas as pd

from multirole_study.experiment.cell import Cell
from multirole_study.experiment.evaluation import Evaluation, named_steps
from multirole_study.experiment.settings import did_you_mean
from multirole_study.falls import first_fall
from multirole_study.paper import pack
from multirole_study.paper.grid import Grid

REPORTED_STEPS = ("peak", "end")
"""The checkpoints that most tables report (`Run.steps`)."""


class Run:
    """One packed run; `folder` is `<results_dir>/<scale>`."""

    def __init__(self, cell: Cell, folder: Path) -> None:
        self.cell, self.folder = cell, folder

    def table(self, name: str, *columns: str) -> pd.DataFrame:
        """Return one of the run's tables; without rows if the run has none, such as cosines under IP."""
        path = self.folder / f"{name}.parquet"
        if not path.exists():
            return pd.DataFrame()
        tables, empty = _by_run(path, path.stat().st_mtime_ns, columns)
        return tables.get(self.cell.id, empty)

    def series(self, metric: str, role: str | None = None) -> pd.Series:
        """Return iteration -> a metric, of one role or of the run. Raises ValueError for a role or a metric that the run does not have."""
        if role and role not in self.cell.policy:
            raise ValueError(
                f"The run {self.cell.id} has no role {role!r}, so that it has no {metric!r} of it. Its roles are {list(self.cell.policy)}."
            )
        rows = self.table("roles" if role else "metrics")
        if not rows.empty and metric not in rows:
            known = (
                did_you_mean(metric, rows.columns)
                or f" Its metrics are {sorted(set(rows) - {'run', 'iteration', 'role'})}."
            )
            raise ValueError(
                f"The run {self.cell.id} has no metric {metric!r}{f' of {role!r}' if role else ''}.{known}"
            )
        return (rows[rows["role"] == role] if role else rows).set_index("iteration")[metric]

    @cached_property
    def correct(self) -> pd.DataFrame:
        """Return validation outcomes as problems (sorted by name) x evaluated steps, 1.0 if right."""
        table = self.table("eval", "step", "problem", "correct")
        return table.pivot(index="problem", columns="step", values="correct").astype(float).sort_index()

    @cached_property
    def steps(self) -> dict[str, int]:
        """Return the steps of the untrained model and the early, best and terminal checkpoint; tables call the last two peak and end."""
        named = named_steps(self.accuracy)
        return {"base": 0} | named | {"peak": named["best"], "end": named["terminal"]}

    @cached_property
    def accuracy(self) -> pd.Series:
        """Return evaluated step -> validation accuracy."""
        return self.correct.mean()

    @property
    def falls(self) -> bool:
        """Return whether validation accuracy falls, even if it recovers."""
        return first_fall(self.accuracy) is not None

    @property
    def ends_fallen(self) -> bool:
        """Return whether its fall is terminal."""
        fall = first_fall(self.accuracy)
        return fall is not None and fall.is_terminal

    def at(self, name: str) -> float:
        """Return validation accuracy at one of `steps`.

        The peak is chosen on the same problems, as in the paper, so it is optimistic.
        """
        return self.accuracy[self.steps[name]]


def accuracies(runs: Iterable[Run], at: str) -> pd.Series:
    """Return seed -> validation accuracy of runs of one cell at a named checkpoint."""
    return pd.Series({run.cell.seed: run.at(at) for run in runs}, dtype=float)


@cache
def _by_run(path: Path, _modified: int, columns: tuple[str, ...]) -> tuple[dict[str, pd.DataFrame], pd.DataFrame]:
    """Read a packed table and split it by run, and return it without rows as well; cached until the file changes."""
    table = pack.read(path.parent, path.stem, columns=["run", *columns] if columns else None)
    return dict(iter(table.groupby("run", observed=True))), table.iloc[:0]


class Results:
    """The packed part of a grid. `folder` is `<results_dir>/<scale>`, which holds `grid.json` and the packed tables.

    `find` also looks for a run in `others`, further folders of the same kind.
    """

    def __init__(self, folder: str | Path, others: Iterable[str | Path] = ()) -> None:
        self.folder = Path(folder)
        self.others = [Results(other) for other in others]
        self.grid = Grid.read(folder)
        self._made: dict[str, Run] = {}

    @cached_property
    def packed(self) -> pd.DataFrame:
        """Return `runs.parquet`, indexed by the names of runs and evaluations."""
        return pack.index(self.folder).set_index("run")

    @cached_property
    def runs(self) -> list[Cell]:
        """Return the cells of the grid that are packed."""
        return [cell for cell in self.grid.cells() if cell.id in self.packed.index]

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """Return the evaluations of the grid that are packed."""
        return [evaluation for evaluation in self.grid.evaluations() if evaluation.id in self.packed.index]

    def bases(self, task: str) -> Counter[str]:
        """Return base -> packed runs and evaluations of the grid on a task: its name, the start of its weights' SHA-256, and its dtype if recorded."""
        jobs = [*self.runs, *self.evaluations]
        names = [job.id for job in jobs if (job if isinstance(job, Cell) else job.cell).task == task]
        models = [json.loads(text)["model"] for text in self.packed.loc[names, "provenance"]]
        parts = (
            [model["name"], *(digest[:12] for digest in model["sha256"].values()), model.get("dtype")]
            for model in models
        )
        return Counter(", ".join(filter(None, part)) for part in parts)

    def missing(self) -> list[str]:
        """List the runs and evaluations of the grid that are not packed."""
        jobs = [*self.grid.cells(), *self.grid.evaluations()]
        return [job.id for job in jobs if job.id not in self.packed.index]

    def find(self, cell: Cell) -> Run | None:
        """Return a cell's run, in the grid or not; None if it is not packed."""
        if cell.id in self.packed.index:
            return self._made.setdefault(cell.id, Run(cell, self.folder))
        return next((run for other in self.others if (run := other.find(cell))), None)

    @cache  # noqa: B019  (a few instances, in use until the process ends)
    def runs_of(self, workflow: str, policy: str, task: str, **changed: object) -> dict[int, Run]:
        """Return seed -> packed run of a cell of the grid, or of a regime, which changes the grid's parameters."""
        if workflow == "single":  # it always takes one step per iteration
            changed.pop("updates", None)
        runs = {seed: self.find(self.grid.cell(workflow, policy, task, seed, **changed)) for seed in self.grid.seeds}
        return {seed: run for seed, run in runs.items() if run}

    def accuracy(self, workflow: str, policy: str, task: str, at: str) -> pd.Series:
        """Return seed -> validation accuracy of a cell at a named checkpoint."""
        return accuracies(self.runs_of(workflow, policy, task).values(), at)

    def base(self, workflow: str, task: str) -> pd.Series:
        """Return seed -> accuracy of the untrained workflow: step 0 of its runs, which is the same for both policies."""
        return accuracies((self.runs_of(workflow, "ip", task) | self.runs_of(workflow, "sp", task)).values(), "base")

    def evaluated(self, adapters: str, name: str = "eval", **values: object) -> pd.DataFrame:
        """Return "eval" or "turns" of all evaluations of a kind ("own", "base", ...), with their cells' coordinates.

        `values` selects the rows whose columns have these values.
        """
        table = self._evaluated(adapters, name)
        for column, value in values.items() if len(table) else ():
            table = table[table[column] == value]
        return table

    def evaluated_accuracy(self, adapters: str, workflow: str, task: str) -> pd.Series:
        """Return seed -> accuracy of a workflow in the evaluations of a kind, such as "transfer"."""
        outcomes = self.evaluated(adapters, workflow=workflow, task=task)
        return outcomes.groupby("seed")["correct"].mean() if len(outcomes) else pd.Series(dtype=float)

    @cache  # noqa: B019
    def _evaluated(self, adapters: str, name: str) -> pd.DataFrame:
        cells = {evaluation.id: evaluation.cell for evaluation in self.evaluations if evaluation.adapters == adapters}
        rows = [(cell.workflow, cell.policy_name, cell.task, cell.seed) for cell in cells.values()]
        keys = pd.DataFrame(rows, list(cells), ["workflow", "policy", "task", "seed"])
        table = pack.read(self.folder, pack.EVALUATION_TABLES[name], list(cells)).astype({"run": str}).set_index("run")
        return keys.join(table, how="inner").reset_index(drop=True)

    def own_evaluation(self, workflow: str, policy: str, task: str, at: str, name: str = "eval") -> pd.DataFrame:
        """Return the rows of a cell's own evaluations at a named checkpoint of its runs."""
        outcomes = self.evaluated("own", name, workflow=workflow, policy=policy, task=task)
        steps = {seed: run.steps[at] for seed, run in self.runs_of(workflow, policy, task).items()}
        return outcomes[outcomes["step"] == outcomes["seed"].map(steps)] if len(outcomes) else outcomes
