"""How far chi2, perplexity and the gradient norm of each role rise above where they began (Table 2)."""

from itertools import product

import numpy as np
import pandas as pd

from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.results import Key, Results
from multirole.paper.write import spread

FIRST_ITERATIONS = 5
ROUNDING = 1e-6
"""A chi2 below this is rounding of the engine: a role that takes one step per iteration is measured before the step moves it."""
POOLED = "all roles (shared)"
AMPLITUDES = {
    "chi2 peak / first": "ratio",
    "perplexity peak / first": "ratio",
    "grad-norm peak / first": "ratio",
    "chi2 peak at iteration": "count",
    "chi2 peak": "ratio",
    "chi2 after the update, peak": "ratio",
    "optimizer steps per iteration": "count",
}
"""Number -> unit: the four of the paper, then ours."""


def role_series(results: Results, key: Key) -> dict[str, pd.DataFrame]:
    """Map each role of a run to its rows by iteration, with chi2, perplexity, grad_norm, chi2_after and optimizer_steps.

    A shared adapter has one entry for all of its roles first, then each role's own part in it.
    """
    roles, ledger = (results.run(key).table(name) for name in ("roles", "ledger"))
    by_role = {role: rows.set_index("iteration") for role, rows in roles.groupby("role")}
    of_roles = {role: by_role[role] for role in results.grid.cell(*key).policy if role in by_role}
    if key.policy == "ip" or len(of_roles) == 1:
        return of_roles
    steps = ledger.groupby("iteration")["grad_norm"]
    means = {"chi2": "tokens", "perplexity": "rows", "chi2_after": "tokens"}
    pooled = {name: _weighted(roles, name, weight) for name, weight in means.items()}
    pooled |= {"grad_norm": steps.mean(), "optimizer_steps": steps.size()}
    return {POOLED: pd.DataFrame(pooled)} | {f"{role}'s part": rows for role, rows in of_roles.items()}


def _weighted(roles: pd.DataFrame, name: str, weight: str) -> pd.Series:
    """The mean over roles in each iteration."""
    products = (roles[name] * roles[weight]).groupby(roles["iteration"]).sum(min_count=1)
    return products / roles.groupby("iteration")[weight].sum()


def amplitudes(series: pd.DataFrame) -> dict[str, float]:
    """One role's amplitudes in one run, NaN where undefined; `series` is indexed by iteration."""
    chi2 = series["chi2"]
    first = chi2.abs().iloc[:FIRST_ITERATIONS].median()
    over_first = {
        name: series[name].max() / series[name].iloc[0] if series[name].iloc[0] else np.nan
        for name in ("perplexity", "grad_norm")
    }
    found = (
        chi2.max() / first if first >= ROUNDING else np.nan,
        over_first["perplexity"],
        over_first["grad_norm"],
        chi2.idxmax() if chi2.max() >= ROUNDING else np.nan,
        chi2.max(),
        series["chi2_after"].max(),
        series["optimizer_steps"].median(),
    )
    return dict(zip(AMPLITUDES, found, strict=True))


def dynamics(results: Results) -> pd.DataFrame:
    """The median and the range over seeds of every role's amplitudes; the paper's cliff cells come first."""
    named = [("math", "voting"), ("math", "orch_workers")]
    tasks = results.grid.tasks
    cells = [(t, w, p) for t, w in dict.fromkeys([*named, *product(tasks, WORKFLOWS)]) for p in POLICIES]
    rows = []
    for task, workflow, policy in [*cells, *((t, "single", "sp") for t in tasks)]:
        found: dict[str, list[dict]] = {}
        for seed in results.runs_of(workflow, policy, task):
            for role, series in role_series(results, Key(workflow, policy, task, seed)).items():
                found.setdefault(role, []).append(amplitudes(series))
        for role, runs in found.items():
            about = {"task": task, "workflow": workflow, "policy": policy, "role": role}
            for name, unit in AMPLITUDES.items():
                rows.append(about | {"number": name, "unit": unit} | spread((run[name] for run in runs), "median"))
    return pd.DataFrame(rows)
