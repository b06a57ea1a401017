"""Measure bias and variance of credit estimators at a run's checkpoints (`multirole credit RUN`, `credit_accuracy`)."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet as pq

from multirole_study.experiment.announce import say
from multirole_study.experiment.run_folder import CREDIT_FILE
from multirole_study.experiment.storage import write_table
from multirole_study.measurements.credit_accuracy import SIZES, Measurement, Sizes, measure_credit
from multirole_study.measurements.runs import MeasuredRun

CHUNK = 8
"""Number of problems measured at a time. The table is written after each chunk, so that a killed measurement continues from there."""


def measure_run(
    folder: Path, steps: Sequence[int] | None, n_problems: int, sizes: Sizes = SIZES, model: str | None = None
) -> Path:
    """Measure a run at some steps and write `credit_accuracy.parquet` into its folder.

    A row has the moments of one estimator in one context. A context is a turn of an episode; one episode of each of the first
    `n_problems` training problems is measured. Problems already in the file are not measured again. The steps take turns, so that
    all have the same problems if the measurement is killed.

    The other arguments and errors are those of `MeasuredRun.read`; also raises ValueError for fewer than two problems.
    """
    run, path = MeasuredRun.read(folder, steps, model), folder / CREDIT_FILE
    if n_problems < 2:
        raise ValueError(f"`--problems` must be at least 2, for an interval, got {n_problems}.")
    with run.open() as trainer:
        rows = pq.read_table(path).to_pylist() if path.exists() else []
        measured_before = {(row["step"], row["problem"]) for row in rows}
        problems = trainer.problems[:n_problems]
        for i in range(0, len(problems), CHUNK):
            for step in run.adapters:
                chunk = [problem for problem in problems[i : i + CHUNK] if (step, problem.id) not in measured_before]
                if not chunk:
                    continue
                run.load(trainer, step)
                measurement = measure_credit(trainer, chunk, sizes)
                rows += [run.columns(step) | row for row in rows_of(measurement)]
                write_table(path, rows)
                say(f"{folder.name} at iteration {step}: {i + len(chunk)} of {len(problems)} problems measured")
    return path


def rows_of(measurement: Measurement) -> Iterator[dict[str, object]]:
    """Yield one row per context and estimator."""
    for context in measurement.contexts:
        role, slot, round_ = context.place
        turn_columns = {"problem": context.problem, "role": role, "slot": slot, "round": round_}
        for name, moments in context.moments.items():
            tokens = measurement.tokens_per_row[name]
            yield turn_columns | {"estimator": name} | moments._asdict() | {"tokens_per_row": tokens}
