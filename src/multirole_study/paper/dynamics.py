"""Compute training dynamics: curves by iteration, and how far each role's chi2, perplexity and gradient norm rise (Table 2, Figures 3-6)."""

from collections import defaultdict
from collections.abc import Iterator
from itertools import product

import numpy as np
import pandas as pd

from multirole_study.compare.intervals import t_interval
from multirole_study.compare.measures import FIRST_ITERATIONS, largest, role_series, weighted
from multirole_study.paper.grid import POLICIES, WORKFLOWS
from multirole_study.paper.output import Row, number, spread
from multirole_study.paper.results import Results

SMOOTHED = 5  # iterations
CHI2_ROUNDING = 1e-6
"""A smaller chi2 is rounding of the engine: a role with one step per iteration is measured before that step changes it."""
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


def dynamics(results: Results) -> Iterator[Row]:
    """Yield the median and range over seeds of every role's amplitudes; the paper's cliff cells come first."""
    cliffs, lines = [("math", "voting"), ("math", "orch_workers")], product(results.grid.tasks, (*WORKFLOWS, "single"))
    ordered = sorted(dict.fromkeys([*cliffs, *lines]), key=lambda line: line[1] == "single")
    for (task, workflow), policy in product(ordered, POLICIES):
        rows_by_name: dict[str, list[dict]] = defaultdict(list)
        for run in results.runs_of(workflow, policy, task).values():
            for role, series in role_series(run).items():
                rows_by_name[role].append(amplitudes(series))
        for (role, runs), (name, unit) in product(rows_by_name.items(), AMPLITUDES.items()):
            keys = {"task": task, "workflow": workflow, "policy": policy, "role": role}
            yield keys | {"number": name, "unit": unit} | spread((run[name] for run in runs), "median")


def matched(results: Results) -> dict[tuple[str, str], list[int]]:
    """Return (workflow, task) -> the seeds with a run under both policies, if there are any."""
    pairs = {}
    for task, workflow in product(results.grid.tasks, WORKFLOWS):
        ip, sp = (results.runs_of(workflow, policy, task) for policy in POLICIES)
        if seeds := [seed for seed in ip if seed in sp]:
            pairs[workflow, task] = seeds
    return pairs


def extremes(results: Results) -> pd.DataFrame:
    """Return one row per run of a matched cell and seed: its extremes over the iterations.

    `chi2` and `chi2_after` are those of the role with the largest value under IP, and of all tokens of the shared adapter under SP,
    similar to the released code's logs; `chi2_role` and `chi2_after_role` are those of the role with the largest value under
    both. `grad_norm` is that of single optimizer steps of an adapter, `entropy` (per token, over all roles) the initial value
    minus the smallest.
    """
    rows = []
    for ((workflow, task), seeds), policy in product(matched(results).items(), POLICIES):
        for seed in seeds:
            run = results.runs_of(workflow, policy, task)[seed]
            roles, ledger = run.table("roles"), run.table("ledger")
            entropy = weighted(roles, "entropy", "tokens")
            row = {"workflow": workflow, "policy": policy, "task": task, "seed": seed}
            row |= {name: largest(run, name) for name in ("chi2", "chi2_after")}
            row |= {f"{name}_role": roles[name].max() for name in ("chi2", "chi2_after")}
            rows.append(row | {"grad_norm": ledger["grad_norm"].max(), "entropy": entropy.iloc[0] - entropy.min()})
    return pd.DataFrame(rows)


def role_gradients(results: Results) -> Iterator[Row]:
    """Yield each role's share of a shared adapter's gradient, and the cosine of two roles' gradients: medians over a run's iterations."""
    for task, workflow in product(results.grid.tasks, WORKFLOWS):
        shares, cosines = {}, {}
        if not (runs := results.runs_of(workflow, "sp", task)):
            continue
        for seed, run in runs.items():
            roles, table = run.table("roles"), run.table("cosines")
            row_share = roles["rows"] / roles.groupby("iteration")["rows"].transform("sum")
            by_role = roles.assign(row_share=row_share).groupby("role", sort=False)
            shares[seed] = by_role[list(SHARES.values())].median()
            pairs = [" and ".join(sorted(pair)) for pair in zip(table["role"], table["other"], strict=True)]
            cosines[seed] = table.groupby(pairs)["cosine"].median()
        keys = {"task": task, "workflow": workflow}
        for role, role_shares in pd.concat(shares).groupby(level=1, sort=False):
            for name, share in SHARES.items():
                yield number(f"share of {name}", t_interval(role_shares[share]), "rate", **keys, role=role)
        for pair, role_shares in pd.concat(cosines).groupby(level=1):
            yield number("cosine", t_interval(role_shares.dropna()), "similarity", **keys, role=pair)


def smoothed(curves: pd.DataFrame) -> pd.DataFrame:
    """Return the centred mean over `SMOOTHED` iterations, over fewer at the ends."""
    return curves.rolling(SMOOTHED, center=True, min_periods=1).mean()


def typical(curves: pd.DataFrame) -> pd.Series:
    """Return the median over seeds and then over `SMOOTHED` iterations, which hides single large values."""
    return curves.median(axis=1).rolling(SMOOTHED, center=True, min_periods=1).median()


def over_first(series: pd.Series) -> pd.Series:
    """Divide a positive series by its first value: the median of the first iterations, because a single one is noisy."""
    return series / series.iloc[:FIRST_ITERATIONS].median()
