"""Measure signal and noise of a run's gradients at its checkpoints (`multirole signal RUN`, `multirole_study.measurements.gradient_signal`)."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from scipy.stats import t

from multirole_study.experiment.base_models import check_base_of_run, model_of_run
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.cell_trainer import load_adapters, make_trainer
from multirole_study.experiment.progress import say
from multirole_study.experiment.run_folder import (
    SIGNAL_FILE,
    adapters_folder,
    claim,
    read_config,
    recorded_start,
    saved_steps,
)
from multirole_study.experiment.storage import add_steps
from multirole_study.measurements.gradient_signal import (
    AdapterGradients,
    Estimate,
    cosines,
    measure_gradients,
    noise_scale,
    role_statistics,
)

CONFIDENCE = 0.95


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


def with_interval(estimate: Estimate, batches: int) -> dict[str, float]:
    """Return an estimate and its 95 % interval (Student's t with `batches` - 1 degrees of freedom)."""
    half = estimate.error * float(t.ppf(0.5 + CONFIDENCE / 2, batches - 1))
    return {"value": estimate.value, "low": estimate.value - half, "high": estimate.value + half}


def rows_of(gradients: AdapterGradients) -> Iterator[dict[str, object]]:
    """Yield one row per role, or pair of roles, and statistic of one adapter.

    In addition to the statistics of `role_statistics` and `cosines` there are noise_scale (in batches), and row_share and token_share:
    the role's shares of its adapter's rows and tokens.
    """
    products, batches = gradients.products(), len(gradients.values)
    for role, statistics in role_statistics(products).items():
        for name, estimate in statistics.items():
            yield {"role": role, "statistic": name, **with_interval(estimate, batches)}
        share = with_interval(statistics["signal_share"], batches)
        scale = {
            "value": noise_scale(share["value"]),
            "low": noise_scale(share["high"]),
            "high": noise_scale(share["low"]),
        }
        yield {"role": role, "statistic": "noise_scale", **scale}
        for name, counts in (("row_share", gradients.rows), ("token_share", gradients.tokens)):
            role_count = sum(count for part, count in counts.items() if part[0] == role)
            yield {
                "role": role,
                "statistic": name,
                "value": role_count / counts.total(),
                "low": math.nan,
                "high": math.nan,
            }
    for (role, other), estimate in cosines(products).items():
        yield {"role": role, "other": other, "statistic": "cosine", **with_interval(estimate, batches)}


def measure_cell(
    cell: Cell, run: str, adapters: Mapping[int, Path | None], n_batches: int, started: str | None = None
) -> Iterator[list[dict[str, object]]]:
    """Yield the rows of a run of a cell at some iterations; `adapters` maps each to saved adapters, or to None for untrained ones."""
    with TemporaryDirectory() as scratch:
        trainer = make_trainer(cell, scratch, started=started)
        try:
            for step, saved in adapters.items():
                if saved is not None:
                    load_adapters(trainer.peft_model, saved)
                run_columns = {"run": run, "workflow": cell.workflow, "policy": cell.policy_name, "task": cell.task,
                               "seed": cell.seed, "step": step, "batches": n_batches}  # fmt: skip
                yield [
                    run_columns | {"adapter": adapter, "other": ""} | row
                    for adapter, gradients in measure_gradients(trainer, n_batches).items()
                    for row in rows_of(gradients)
                ]
                say(f"{run} at iteration {step}: {n_batches} batches measured")
        finally:
            trainer.engine.close()


def measure_run(folder: Path, steps: Sequence[int] | None, n_batches: int, model: str | None = None) -> Path:
    """Measure a run at evaluated steps, by default at all of them, and write `gradient_signal.parquet` into its folder.

    The file keeps its rows of other steps. `model` is as in `cell_of`. Raises ValueError for steps whose adapters the run has not kept, and for a folder
    that holds no run or that another process is writing to.
    """
    cell, adapters, path = cell_of(folder, model), adapters_of(folder, steps), folder / SIGNAL_FILE
    with claim(folder):  # two measurements would erase each other's rows
        for rows in measure_cell(cell, folder.name, adapters, n_batches, recorded_start(folder)):
            add_steps(path, rows)  # at once, so that an interruption loses no finished step
    return path


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
