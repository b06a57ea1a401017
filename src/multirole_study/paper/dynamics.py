"""Compute training dynamics: curves by iteration, and how far each role's chi2, perplexity and gradient norm rise (Table 2, Figures 3-6)."""

from itertools import product

import numpy as np
import pandas as pd

from multirole_study.compare.intervals import t_interval
from multirole_study.compare.measures import FIRST_ITERATIONS, entropy, has_iterations, largest
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.results import Results, Run

SMOOTHED = 5  # iterations
CHI2_ROUNDING = 1e-6
"""A smaller chi2 is rounding of the engine: a role with one step per iteration is measured before that step changes it."""
MIN_CHI2 = 1e-4
"""Figures draw a smaller chi2 at this value: such estimates are noise around zero."""
AMPLITUDES = {
    "chi2 peak / first": "ratio",
    "perplexity peak / first": "ratio",
    "grad-norm peak / first": "ratio",
    "chi2 peak at iteration": "count",
    "chi2 peak": "ratio",
    "chi2 after the update, peak": "ratio",
    "optimizer steps per iteration": "count",
}
"""Number -> unit: the paper's four, then ours."""
SHARES = {"rows": "row_share", "tokens": "token_mass", "gradient": "grad_share"}
"""Share of a role -> its column in `gradient_shares`."""


def amplitudes(series: pd.DataFrame) -> dict[str, float]:
    """Return one role's amplitudes in one run, NaN if undefined; `series` is indexed by iteration."""
    chi2, rising = series["chi2"], series[["perplexity", "grad_norm"]]
    first, rises = chi2.abs().iloc[:FIRST_ITERATIONS].median(), rising.max() / rising.iloc[0].replace(0, np.nan)
    groups = (
        chi2.max() / first if first >= CHI2_ROUNDING else np.nan,
        *rises,
        chi2.idxmax() if chi2.max() >= CHI2_ROUNDING else np.nan,
        chi2.max(),
        series["chi2_after"].max(),
        series["optimizer_steps"].median(),
    )
    return dict(zip(AMPLITUDES, groups, strict=True))


def matched(results: Results) -> dict[tuple[str, str], list[int]]:
    """Return (workflow, task) -> the seeds with a run under both policies, if there are any."""
    pairs = {}
    for task, workflow in product(results.grid.tasks, WORKFLOWS):
        ip, sp = (results.runs_of(workflow, policy, task) for policy in POLICIES)
        if seeds := [seed for seed in ip if seed in sp]:
            pairs[workflow, task] = seeds
    return pairs


def extremes(run: Run) -> dict[str, float]:
    """Return a run's extremes over its iterations.

    `chi2` and `chi2_after` are those of the role with the largest value under IP, and of all tokens of the shared adapter under SP,
    similar to the released code's logs; `chi2_role` and `chi2_after_role` are those of the role with the largest value under
    both. `grad_norm` is that of single optimizer steps of an adapter, `entropy` (per token, over all roles) the initial value
    minus the smallest. All are NaN for a run without iterations.
    """
    if not has_iterations(run):
        return dict.fromkeys(("chi2", "chi2_after", "chi2_role", "chi2_after_role", "grad_norm", "entropy"), np.nan)
    roles, ledger = run.table("roles"), run.table("ledger")
    row = {name: largest(run, name) for name in ("chi2", "chi2_after")}
    row |= {f"{name}_role": roles[name].max() for name in ("chi2", "chi2_after")}
    return row | {"grad_norm": ledger["grad_norm"].max(), "entropy": entropy(run)}


def gradient_shares(run: Run) -> pd.DataFrame:
    """Return role -> its share of a shared adapter's rows, tokens and gradient (`SHARES`): medians over the iterations of a run."""
    roles = run.table("roles")
    row_share = roles["rows"] / roles.groupby("iteration")["rows"].transform("sum")
    return roles.assign(row_share=row_share).groupby("role", sort=False)[list(SHARES.values())].median()


def gradient_cosines(run: Run) -> pd.Series:
    """Return "role and role" -> the cosine of their parts of a shared adapter's gradient: the median over the iterations of a run."""
    table = run.table("cosines")
    pairs = [" and ".join(sorted(pair)) for pair in zip(table["role"], table["other"], strict=True)]
    return table.groupby(pairs)["cosine"].median()


def smoothed(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the centred mean over `SMOOTHED` iterations, over fewer at the ends."""
    return curves.rolling(SMOOTHED, center=True, min_periods=1).mean()


def pointwise(curves: pd.DataFrame) -> pd.DataFrame:
    """Return iteration -> mean over seeds with its t interval ("mean", "low", "high") of curves (iterations x seeds)."""
    intervals = [t_interval(values)[1:3] for values in curves.to_numpy()]
    limits = pd.DataFrame(intervals, curves.index, ["low", "high"], float)
    return limits.assign(mean=curves.mean(axis=1))


def typical(curves: pd.DataFrame, quantile: float = 0.5) -> pd.Series:
    """Return a quantile over seeds, by default the median, and then its median over `SMOOTHED` iterations, which hides single large values."""
    return curves.quantile(quantile, axis=1).rolling(SMOOTHED, center=True, min_periods=1).median()


def over_first(series: pd.Series) -> pd.Series:
    """Divide a positive series by its first value: the median of the first iterations, because a single one is noisy."""
    return series / series.iloc[:FIRST_ITERATIONS].median()
