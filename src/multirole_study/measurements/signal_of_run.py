"""Measure signal and noise of a run's gradients at its checkpoints (`multirole signal RUN`, `gradient_signal`)."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from scipy.stats import t

from multirole_study.experiment.announce import say
from multirole_study.experiment.run_folder import SIGNAL_FILE
from multirole_study.experiment.storage import add_steps
from multirole_study.measurements.gradient_signal import (
    AdapterGradients,
    Estimate,
    cosines,
    measure_gradients,
    noise_scale,
    role_statistics,
)
from multirole_study.measurements.runs import MeasuredRun

CONFIDENCE = 0.95


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


def measure_run(folder: Path, steps: Sequence[int] | None, n_batches: int, model: str | None = None) -> Path:
    """Measure a run at some steps and write `gradient_signal.parquet` into its folder, which keeps its rows of other steps.

    The arguments and errors are those of `MeasuredRun.read`.
    """
    run, path = MeasuredRun.read(folder, steps, model), folder / SIGNAL_FILE
    with run.open() as trainer:
        for step in run.adapters:
            run.load(trainer, step)
            rows = [
                run.columns(step) | {"batches": n_batches, "adapter": adapter, "other": ""} | row
                for adapter, gradients in measure_gradients(trainer, n_batches).items()
                for row in rows_of(gradients)
            ]
            say(f"{folder.name} at iteration {step}: {n_batches} batches measured")
            add_steps(path, rows)  # at once, so that an interruption loses no finished step
    return path
