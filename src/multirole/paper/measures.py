"""The numbers that Figures 2 to 6 draw, from a grid's results; nothing is drawn here."""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from multirole.paper.dynamics import FIRST_ITERATIONS, POOLED, role_series
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.results import Key, Results, outcomes
from multirole.paper.statistics import Interval, difference, over_seeds

SMOOTHED = 5  # iterations


class Measured(NamedTuple):
    """A cell's number with its interval, and each seed's own."""

    interval: Interval
    by_seed: dict[int, float]


def accuracy(
    results: Results, workflow: str, policy: str, task: str, at: str, since: str | None = None,
    seeds: Sequence[int] | None = None,
) -> Measured | None:  # fmt: skip
    """Validation accuracy at a named checkpoint, or its gain since another; None without a run."""
    runs = {
        seed: run for seed, run in results.runs_of(workflow, policy, task).items() if seeds is None or seed in seeds
    }
    if not runs:
        return None
    after, before = (name and outcomes(runs.values(), name) for name in (at, since))
    interval = over_seeds(after) if before is None else difference(after, before)
    by_seed = (after if before is None else after - before).mean(axis=1).tolist()
    return Measured(interval, dict(zip(runs, by_seed, strict=True)))


def base(results: Results, workflow: str, task: str) -> float | None:
    """Accuracy of the untrained workflow: step 0 of its runs, which the policies of a seed share."""
    runs = results.runs_of(workflow, "ip", task) | results.runs_of(workflow, "sp", task)
    return float(np.mean([run.accuracy[0] for run in runs.values()])) if runs else None


def matched(results: Results) -> dict[tuple[str, str], list[int]]:
    """(workflow, task) -> the seeds with a run under both policies, where there are any."""
    found = {
        (w, t): [seed for seed in results.runs_of(w, "ip", t) if seed in results.runs_of(w, "sp", t)]
        for t, w in product(results.grid.tasks, WORKFLOWS)
    }
    return {cell: seeds for cell, seeds in found.items() if seeds}


def training(results: Results, workflow: str, policy: str, task: str) -> pd.DataFrame:
    """iteration x seed: training accuracy."""
    runs = results.runs_of(workflow, policy, task)
    curves = {seed: run.table("metrics").set_index("iteration")["accuracy"] for seed, run in runs.items()}
    return pd.DataFrame(curves)


def validation(results: Results, workflow: str, policy: str, task: str) -> pd.DataFrame:
    """Evaluated step x seed: validation accuracy."""
    return pd.DataFrame({seed: run.accuracy for seed, run in results.runs_of(workflow, policy, task).items()})


def smoothed(curves: pd.DataFrame) -> pd.DataFrame:
    """Centred mean over `SMOOTHED` iterations, over fewer at the ends."""
    return curves.rolling(SMOOTHED, center=True, min_periods=1).mean()


def typical(curves: pd.DataFrame) -> pd.Series:
    """Median over seeds, then over `SMOOTHED` iterations: a single large value does not show in it."""
    return curves.median(axis=1).rolling(SMOOTHED, center=True, min_periods=1).median()


def over_first(series: pd.Series) -> pd.Series:
    """A positive series over its first value, the median of the first iterations: a single one is noisy."""
    return series / series.iloc[:FIRST_ITERATIONS].median()


def amplitudes(results: Results) -> pd.DataFrame:
    """One row per run of a matched cell and seed: its extremes over the iterations.

    `chi2` and `chi2_after` are of the role with the largest one under IP, and of all tokens of the shared adapter under
    SP, much as the released code logs them; `chi2_role` and `chi2_after_role` of the role with the largest under both.
    `grad_norm` is of single optimizer steps of an adapter, `entropy` (per token, of all roles) the initial value minus the least.
    """
    rows = []
    for ((workflow, task), seeds), policy in product(matched(results).items(), POLICIES):
        for seed in seeds:
            key = Key(workflow, policy, task, seed)
            series, run = role_series(results, key), results.run(key)
            roles = run.table("roles")
            row: dict[str, object] = key._asdict()
            for name in ("chi2", "chi2_after"):
                row[f"{name}_role"] = max(part[name].max() for role, part in series.items() if role != POOLED)
                row[name] = series[POOLED][name].max() if POOLED in series else row[f"{name}_role"]
            row["grad_norm"] = run.table("ledger")["grad_norm"].max()
            by = (
                roles.assign(entropy=roles["entropy"] * roles["tokens"])
                .groupby("iteration")[["entropy", "tokens"]]
                .sum()
            )
            entropy = by["entropy"] / by["tokens"]
            row["entropy"] = entropy.iloc[0] - entropy.min()
            rows.append(row)
    names = ("chi2_role", "chi2", "chi2_after_role", "chi2_after", "grad_norm", "entropy")
    return pd.DataFrame(rows, columns=[*Key._fields, *names])
