"""Open a finished run, so that its checkpoints can be measured."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from multirole.types import Problem
from multirole_study.experiment.base_models import check_base_of_run, model_of_run
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import CellTrainer, load_adapters, make_trainer
from multirole_study.experiment.launch import ONE_PROCESS, Launch
from multirole_study.experiment.run_folder import (
    adapters_folder,
    claim,
    read_config,
    recorded_kernels,
    recorded_start,
    saved_steps,
)


class MeasuredRun:
    """A run and the steps at which it is measured.

    Args:
        folder: the run's folder, which receives the measurement.
        cell: the run's cell.
        adapters: step -> its adapters, from `adapters_of`.
        launch: how the run's trainer is started.
    """

    def __init__(
        self, folder: Path, cell: Cell, adapters: dict[int, Path | None], launch: Launch = ONE_PROCESS
    ) -> None:  # fmt: skip
        self.folder, self.cell, self.adapters, self.launch = folder, cell, adapters, launch

    @classmethod
    def read(cls, folder: Path, steps: Sequence[int] | None, model: str | None = None) -> "MeasuredRun":
        """Return the run of a folder and some steps, by default all that it has saved; errors are those of `cell_of` and `adapters_of`.

        `model` is the folder of the base if the run had a user-supplied one.
        """
        return cls(folder, cell_of(folder, model), adapters_of(folder, steps))

    @contextmanager
    def open(self, problems: list[Problem] | None = None) -> Iterator[CellTrainer]:
        """Context manager: the run's trainer. Until it ends no other process may write to the run's folder (ValueError).

        The trainer has only these problems, which are not tried first; by default it has those of the cell.
        """
        with claim(self.folder), TemporaryDirectory() as scratch:
            started, both = recorded_start(self.folder), None if problems is None else (problems, problems)
            trainer = make_trainer(self.cell, scratch, self.launch, problems=both, started=started)
            trainer.use_kernels(recorded_kernels(self.folder))
            self.untrained = Path(scratch, "untrained")
            trainer.peft_model.save_pretrained(self.untrained)
            try:
                yield trainer
            finally:
                trainer.engine.close()

    def load(self, trainer: CellTrainer, step: int) -> None:
        """Give the trainer the adapters that the run had at a step."""
        load_adapters(trainer.peft_model, self.adapters[step] or self.untrained)
        trainer.state.global_step = step  # tells `play` to publish the new weights

    def columns(self, step: int) -> dict[str, object]:
        """Return the columns that identify the run and the step in a table of measurements."""
        cell = self.cell
        return {
            "run": self.folder.name, "workflow": cell.workflow, "policy": cell.policy_name, "task": cell.task,
            "seed": cell.seed, "step": step,
        }  # fmt: skip


def cell_of(folder: Path, model: str | None = None) -> Cell:
    """Return the cell of a run's folder; `model` is the folder of the base if the run had a user-supplied one.

    Raises ValueError if the folder holds no run or a run of user-supplied code, or if the base is not the run's.
    """
    settings = read_config(folder)
    if any(name.endswith("_sha256") for name in settings) or settings.get("data"):
        raise ValueError(
            f"{folder} was trained with a workflow, a task or rows of your own, and its record does not say where they are. Of such runs "
            "`multirole role_value -p ...` measures what each role is worth."
        )
    settings["model"] = model_of_run(folder, model)
    cell = Cell.from_record(settings)
    check_base_of_run(folder, cell)
    return cell


def adapters_of(folder: Path, steps: Sequence[int] | None) -> dict[int, Path | None]:
    """Return step -> the saved adapters of a run, in order, by default for all saved steps; None for step 0, whose adapters are untrained.

    Raises ValueError for steps whose adapters the run has not kept.
    """
    saved = saved_steps(folder)
    chosen = saved if steps is None else list(steps)
    if not chosen:
        raise ValueError(
            f"{folder} has saved no adapters yet, which a run does at each evaluation but the first. Measure a run that has, or write "
            "--at 0 for the untrained adapters."
        )
    if set(chosen) - {0, *saved}:
        raise ValueError(f"`--at` must name 0 or saved steps of {folder}, which are {saved}, got {chosen}.")
    return {step: adapters_folder(folder, step) if step else None for step in sorted(chosen)}
