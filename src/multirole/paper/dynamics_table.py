"""Table 2: how far chi2, perplexity and gradient norm of each role rise above where they began."""

from itertools import product

import numpy as np
import pandas as pd

from multirole.experiment.presets import TASKS
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.numbers import (
    MISSING,
    TASK_NAMES,
    WORKFLOW_NAMES,
    listed,
    not_published,
    policy_label,
    significant,
    spread,
    unfinished,
)  # fmt: skip
from multirole.paper.results import Key, Results
from multirole.paper.write import Table

FIRST_ITERATIONS = 5
ROUNDING = 1e-6
"""chi2 below this is the engine's rounding: roles that take one step per iteration are measured before it moves them."""
NAMED = (("math", "voting"), ("math", "orch_workers"))  # the paper's cliff cells
POOLED = "all roles (shared)"
COLUMNS = {
    "chi2_ratio": "χ² peak / first",
    "perplexity_ratio": "perplexity peak / first",
    "grad_norm_ratio": "grad-norm peak / first",
    "chi2_iteration": "χ² peak at iteration",
    "chi2_peak": "χ² peak",
    "chi2_after_peak": "χ² after the update, peak",
    "steps": "optimizer steps per iteration",
}
"""The paper's four, then ours."""
COUNTS = ("chi2_iteration", "steps")


def role_series(results: Results, key: Key) -> dict[str, pd.DataFrame]:
    """A run's rows of Table 2: iteration x (chi2, perplexity, grad_norm, chi2_after, optimizer_steps).

    A shared adapter has one of all its roles first, then each role's own part in it.
    """
    roles, ledger = (_of_run(results.table(name), key) for name in ("roles", "ledger"))
    by_role = {role: rows.set_index("iteration") for role, rows in roles.groupby("role")}
    of_roles = {role: by_role[role] for role in results.grid.cell(*key).policy if role in by_role}
    if key.policy == "ip" or len(of_roles) == 1:
        return of_roles
    steps = ledger.groupby("iteration")["grad_norm"]
    pooled = pd.DataFrame(
        {
            "chi2": _weighted(roles, "chi2", "tokens"),
            "perplexity": _weighted(roles, "perplexity", "rows"),
            "chi2_after": _weighted(roles, "chi2_after", "tokens"),
            "grad_norm": steps.mean(),
            "optimizer_steps": steps.size(),
        }
    )
    return {POOLED: pooled} | {f"{role}'s part": rows for role, rows in of_roles.items()}


def _of_run(table: pd.DataFrame, key: Key) -> pd.DataFrame:
    return table[(table[list(Key._fields)] == list(key)).all(axis=1)]


def _weighted(roles: pd.DataFrame, name: str, weight: str) -> pd.Series:
    """Mean over roles per iteration."""
    products = (roles[name] * roles[weight]).groupby(roles["iteration"]).sum(min_count=1)
    return products / roles.groupby("iteration")[weight].sum()


def amplitudes(series: pd.DataFrame) -> dict[str, float]:
    """One role's numbers in one run, NaN where undefined; `series` has iterations as its index."""
    chi2 = series["chi2"]
    first = chi2.abs().iloc[:FIRST_ITERATIONS].median()
    return {
        "steps": series["optimizer_steps"].median(),
        "chi2_peak": chi2.max(),
        "chi2_ratio": chi2.max() / first if first >= ROUNDING else np.nan,
        "chi2_iteration": chi2.idxmax() if chi2.max() >= ROUNDING else np.nan,
        "perplexity_ratio": _over_first(series["perplexity"]),
        "grad_norm_ratio": _over_first(series["grad_norm"]),
        "chi2_after_peak": series["chi2_after"].max(),
    }


def _over_first(values: pd.Series) -> float:
    """NaN where the first value is 0, as the gradient of an iteration without any advantage is."""
    return values.max() / values.iloc[0] if values.iloc[0] else np.nan


def table_2(results: Results) -> Table:
    """Peak over first value of chi2, perplexity and gradient norm, per role."""
    cells = [*NAMED, *(pair for pair in product(TASKS, WORKFLOWS) if pair not in NAMED)]
    runs = [*((t, w, p) for t, w in cells for p in POLICIES), *((t, "single", "sp") for t in TASKS)]
    lines, values = [], []
    for task, workflow, policy in runs:
        keys = [Key(workflow, policy, task, seed) for seed in results.seeds(workflow, policy, task)]
        of_role: dict[str, list[dict]] = {}
        for key in keys:
            for role, series in role_series(results, key).items():
                of_role.setdefault(role, []).append(amplitudes(series))
        line = {
            "task": TASK_NAMES[task],
            "workflow": WORKFLOW_NAMES[workflow],
            "policy": policy_label(workflow, policy),
        }
        if not keys:
            lines.append(line | {"role": MISSING} | dict.fromkeys(COLUMNS.values(), MISSING))
        for role, found in of_role.items():
            by_seed = pd.DataFrame(found)
            lines.append(line | {"role": role} | {shown: _text(by_seed[name], name) for name, shown in COLUMNS.items()})
            values += [
                {"task": task, "workflow": workflow, "policy": policy, "role": role, "number": name}
                | {"median": by_seed[name].median(), "low": by_seed[name].min(), "high": by_seed[name].max()}
                | {"seeds": len(by_seed), "undefined": int(by_seed[name].isna().sum())}
                for name in COLUMNS
            ]  # fmt: skip
    return Table("table_2", TITLE, _caption(results), pd.DataFrame(lines), pd.DataFrame(values))


TITLE = "Table 2: training dynamics per role, peak over first value"


def _text(by_seed: pd.Series, name: str) -> str:
    known, n = by_seed.dropna().tolist(), len(by_seed)
    lost = n - len(known)
    if not known:
        return "undefined"
    return spread(known, np.median, "{:g}".format if name in COUNTS else significant) + (
        f" ({lost} of {n} undefined)" if lost else ""
    )


def _caption(results: Results) -> str:
    seeds, cell = results.grid.seeds, results.grid.cells()[0]
    over = (
        "Seed {} alone" if len(seeds) == 1 else "Median over seeds {}; brackets: their range, left out where they agree"
    )
    return (
        f"Scale {cell.scale}, {cell.iterations} iterations. {over.format(listed(seeds))}. A maximum over a run has no "
        "interval over problems. One row per role under IP. Under SP one row of the shared adapter, as in the paper "
        "(χ² pooled over its roles by tokens, perplexity by rows, grad-norm over the adapter's optimizer steps), and "
        "below it each role's own part, which the paper does not have. The cells that the paper names come first, the "
        "single agent last. χ² compares the trainer with the rollout engine during the update. Its first value is the "
        f"median of |χ²| over the first {FIRST_ITERATIONS} iterations: at the very first the learning rate is 0, and "
        "χ² is rounding. The paper divides by its first logged value, which holds a constant offset (its engine's "
        "log-probabilities are not at the sampling temperature), so its ratios are smaller by construction. χ² peak "
        f"is the peak itself. Ratio and iteration are undefined where χ² stays below {significant(ROUNDING)}: a role "
        "with one optimizer step per iteration is measured before that step moves it. χ² after the update is measured "
        "under the moved weights, on every 16th row, and shows those roles too. Perplexity and grad-norm are divided "
        "by their value at iteration 1, and undefined where that is 0; grad-norm is that of a single optimizer step before clipping, averaged over "
        "an iteration. χ² grows with the number of steps per iteration even at equal step size: compare rows with "
        f"equal steps. {not_published('Table 2')} {unfinished(results)}"
    )
