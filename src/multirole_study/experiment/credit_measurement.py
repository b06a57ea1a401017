"""Measure bias and variance of credit estimators at a run's checkpoints (`multirole credit RUN`, `multirole_study.measurements.credit_accuracy`)."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow.parquet as pq
import torch
from transformers import AutoTokenizer

from multirole.roles.turn_grading import judge
from multirole.types import Problem, structure_of
from multirole.update.threads import use_fitting_threads
from multirole_study.experiment.base_models import locate, shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import TaskReward, load_adapters, make_trainer
from multirole_study.experiment.preflight import load_problems
from multirole_study.experiment.progress import say
from multirole_study.experiment.role_gradients import adapters_of, cell_of
from multirole_study.experiment.run_folder import CREDIT_FILE, claim, recorded_start
from multirole_study.experiment.storage import write_table
from multirole_study.measurements.credit_accuracy import SIZES, Measurement, Sizes, measure_credit

CHUNK = 8
"""Number of problems measured at a time. The table is written after each chunk, so that a killed measurement continues from there."""


def measure_run(
    folder: Path, steps: Sequence[int] | None, n_problems: int, sizes: Sizes = SIZES, model: str | None = None
) -> Path:
    """Measure a run at evaluated steps, by default at all of them, and write `credit_accuracy.parquet` into its folder.

    A row has the moments of one estimator in one context. A context is a turn of an episode; one episode of each of the first
    `n_problems` training problems is measured. Problems already in the file are not measured again. The steps take turns, so that
    all have the same problems if the measurement is killed. `model` is as in `cell_of`.

    Raises ValueError for steps whose adapters the run has not kept, for fewer than two problems, and for a folder that holds no run
    or that another process is writing to.
    """
    cell, adapters = cell_of(folder, model), adapters_of(folder, steps)
    if n_problems < 2:
        raise ValueError(f"`--problems` must be at least 2, for an interval, got {n_problems}.")
    if not torch.cuda.is_available():
        use_fitting_threads(shape_of(cell).parameters)
    problems = load_problems(cell, AutoTokenizer.from_pretrained(locate(cell)), recorded_start(folder))[:2]
    measured = problems[0][:n_problems]
    with claim(folder):  # two measurements would erase each other's rows
        _measure(cell, adapters, problems, measured, folder, sizes)
    return folder / CREDIT_FILE


def _measure(
    cell: Cell, adapters: Mapping[int, Path | None], problems: tuple[list[Problem], list[Problem]], measured: list[Problem],
    folder: Path, sizes: Sizes,
) -> None:  # fmt: skip
    """Measure the problems that are not yet in the folder's file, and add their rows to it."""
    rows = pq.read_table(folder / CREDIT_FILE).to_pylist() if (folder / CREDIT_FILE).exists() else []
    measured_before = {(row["step"], row["problem"]) for row in rows}
    reward = TaskReward(cell.make_task(), measured)
    with TemporaryDirectory() as scratch:
        trainer = make_trainer(cell, scratch, problems=problems, started=recorded_start(folder))
        untrained = Path(scratch) / "untrained"
        trainer.peft_model.save_pretrained(untrained)
        verdicts = functools.partial(judge, task=reward, structure=structure_of(trainer.workflow))
        try:
            for i in range(0, len(measured), CHUNK):
                for step, saved in adapters.items():
                    chunk = [
                        problem for problem in measured[i : i + CHUNK] if (step, problem.id) not in measured_before
                    ]
                    if not chunk:
                        continue
                    load_adapters(trainer.peft_model, saved or untrained)
                    trainer.state.global_step = step  # tells `play` to publish the new weights
                    run_columns = {"run": folder.name, "workflow": cell.workflow, "policy": cell.policy_name, "task": cell.task,
                                   "seed": cell.seed, "step": step}  # fmt: skip
                    measurement = measure_credit(trainer, chunk, reward.score_answers, verdicts, sizes)
                    rows += [run_columns | row for row in rows_of(measurement)]
                    write_table(folder / CREDIT_FILE, rows)
                    say(f"{folder.name} at iteration {step}: {i + len(chunk)} of {len(measured)} problems measured")
        finally:
            trainer.engine.close()


def rows_of(measurement: Measurement) -> Iterator[dict[str, object]]:
    """Yield one row per context and estimator."""
    for context in measurement.contexts:
        role, slot, round_ = context.place
        turn_columns = {"problem": context.problem, "role": role, "slot": slot, "round": round_}
        for name, moments in context.moments.items():
            tokens = measurement.tokens_per_row[name]
            yield turn_columns | {"estimator": name} | moments._asdict() | {"tokens_per_row": tokens}
