"""Settings of an evaluation after training: of checkpoints, the base model, or Table 3's transfer.

`run.run_evaluation` runs it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from multirole.types import structure_of
from multirole_study.experiment.cell import EVALUATION_NAMES, OF_OTHER_MAPS, Cell
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.old_names import with_current_names
from multirole_study.experiment.run_folder import folder_of, is_done, saved_steps
from multirole_study.experiment.settings import Parameter, Settings, option, parameters, user_errors

if TYPE_CHECKING:
    import pandas as pd

NAMED = ("early", "best", "terminal")
CHECKPOINTS = {"own": ",".join(NAMED), "base": "0", "transfer": "best", "transfer_all": "best"}
"""The default checkpoints of each kind of adapters."""


class Evaluation(Settings):
    """One evaluation. Raises ValueError for invalid values.

    Args:
        cell: the workflow, task, scale and sampling; its id names the folder.
        adapters: "own" takes the checkpoints of the cell's run; "base" none at all; "transfer" gives the single-agent run's
            adapter (same task, scale, seed and options) to the solver role and none to the others (paper Table 3);
            "transfer_all" gives it to every role.
        checkpoints: "all" saved ones, or a comma-separated list of steps (0 is the untrained model) and of
            "early" (the checkpoint nearest to halfway between the first and best), "best" (highest validation accuracy after step 0, or mean reward
            if the task defines no accuracy; the earlier of equals) and "terminal" (the last one). None takes `CHECKPOINTS`; the base model has no other than 0.
    """

    adapters: Literal["own", "base", "transfer", "transfer_all"] = option(
        "the run's adapters, none, or the single agent's on the solver role or on all roles", "own"
    )
    checkpoints: str = option("early,best,terminal of a run (best of a transfer), or all, or steps such as 0,30", None)
    num_generations_eval: int = option("episodes per problem", 1, ge=1, le=10**4)
    cell: Any

    def __init__(
        self, cell: Cell, adapters: str = "own", checkpoints: str | int | None = None, num_generations_eval: int = 1
    ) -> None:
        if isinstance(checkpoints, int):  # as a notebook and a command line read 30
            checkpoints = str(checkpoints)
        if adapters == "base" or checkpoints is None:
            checkpoints = CHECKPOINTS.get(str(adapters), "all")
        if adapters != "own":  # the cell does not depend on the adapters, so that equal evaluations share a folder
            of_map = list(OF_OTHER_MAPS)
            if cell.warmup_steps > cell.max_steps * (cell.lr_clock_ticks or 1):  # the ticks of one adapter's schedule
                of_map.append("warmup_steps")
            cell = cell.replace(policy="sp", **dict.fromkeys(of_map))
        Settings.__init__(
            self, cell=cell, adapters=adapters, checkpoints=checkpoints, num_generations_eval=num_generations_eval
        )
        names = checkpoints.split(",")
        if checkpoints != "all" and not all(name in NAMED or name.isdecimal() for name in names):
            raise ValueError(
                f"`checkpoints` must be 'all', or steps and names such as '0,{','.join(NAMED)}', got {checkpoints!r}."
            )
        if adapters.startswith("transfer") and cell.workflow_name == "single":
            raise ValueError(
                f"`adapters={adapters!r}` plays another workflow with the single agent's adapter, and `workflow` is 'single'. Name another "
                "workflow, or write adapters='own'."
            )

    @classmethod
    @user_errors()
    def from_parameters(cls, values: dict[str, Any]) -> "tuple[Evaluation, Launch]":
        """Build an evaluation and its launch options from a notebook's `globals()`; see `Cell.from_parameters`."""
        values = with_current_names(values)
        options = {name: values[name] for name in EVALUATION_NAMES if values.get(name) is not None}
        rest = {name: value for name, value in values.items() if name not in EVALUATION_NAMES}
        cell, launch = Cell.from_parameters(rest, others=EVALUATION_NAMES)
        if launch.n_processes > 1:
            raise ValueError(
                f"`n_processes` must be 1 for an evaluation, which runs on one GPU, got {launch.n_processes}."
            )
        return cls(cell, **options), launch.replace(sharding="none")

    @property
    def source(self) -> Cell | None:
        """The trained cell whose adapters are evaluated; None for the base model."""
        if self.adapters == "base":
            return None
        return self.cell if self.adapters == "own" else self.cell.sibling("single", "sp")

    @property
    def name(self) -> str:
        """The kind of adapters, followed by checkpoints and num_generations_eval where they differ from the defaults."""
        checkpoints = "" if self.checkpoints == CHECKPOINTS[self.adapters] else f"-{self.checkpoints.replace(',', '_')}"
        return self.adapters + checkpoints + (f"-n{self.num_generations_eval}" if self.num_generations_eval > 1 else "")

    @property
    def id(self) -> str:
        """The unique name among a scale's evaluations, used for its folder and in the packed tables."""
        return f"{self.name}/{self.cell.id}"

    def folder(self, results_dir: str | Path) -> Path:
        """Return the results folder."""
        return Path(results_dir) / self.cell.scale / "evaluations" / self.id

    def policy(self) -> dict[str, str | None]:
        """Return the source's adapter by role; None means the base model, which every role uses at step 0."""
        policy: dict[str, str | None] = dict(self.cell.policy)
        if self.adapters == "transfer":  # the single-agent run calls its adapter as "sp" does
            policy |= {role: None for role in policy if role != solver_of(self.cell)}
        return policy


def evaluation_parameters() -> list[Parameter]:
    """Return the parameters of the evaluation notebook, in order."""
    left_out = ("cell", "n_processes", "sharding", "report_to", "gradient_checkpointing")
    return [parameter for parameter in parameters(Evaluation, Cell, Launch) if parameter.name not in left_out]


def solver_of(cell: Cell) -> str:
    """Return the role that answers the problem; if the workflow declares none, the role with the most slots."""
    workflow = cell.make_workflow()
    return structure_of(workflow).solver or max(workflow.roles, key=lambda role: workflow.roles[role])


def named_steps(score: "pd.Series") -> dict[str, int]:
    """Return the steps named early, best and terminal, given the validation accuracy, or mean reward, indexed by step."""
    steps = [step for step in score.index if step > 0] or [0]  # a run that diverged before its first evaluation
    best = max(steps, key=lambda step: (score[step], -step))
    middle = (steps[0] + best) / 2
    return {"early": min(steps, key=lambda step: abs(step - middle)), "best": best, "terminal": steps[-1]}


def steps_by_name(run: Path) -> dict[str, int]:
    """Return the steps of a finished run that are named early, best and terminal."""
    import pandas as pd

    outcomes = pd.read_parquet(run / "eval.parquet", columns=["step", "reward", "correct"])
    score = "correct" if outcomes["correct"].notna().any() else "reward"
    return named_steps(outcomes.groupby("step")[score].mean())


def steps_of(evaluation: Evaluation, results_dir: str | Path) -> list[int]:
    """Return the steps to evaluate in ascending order. Raises ValueError if their adapters are missing."""
    if evaluation.source is None:
        return [0]
    run = folder_of(evaluation.source, results_dir)
    saved = saved_steps(run)
    if not is_done(run):
        words = "the same" if evaluation.adapters == "own" else "-p workflow single -p policy sp and the other"
        raise ValueError(
            f"`adapters={evaluation.adapters!r}` needs the adapters of the run {run}, which is not finished. Train it first, with "
            f"`multirole train` or notebooks/train_cell.ipynb and {words} parameters."
        )
    if evaluation.checkpoints == "all":
        return saved
    named = steps_by_name(run)
    steps = sorted({named[n] if n in named else int(n) for n in evaluation.checkpoints.split(",")})
    if missing := [step for step in steps if step not in saved and step != 0]:
        raise ValueError(f"`checkpoints` must be 0 or among {saved}, the saved steps of {run}, got {missing}.")
    return steps
