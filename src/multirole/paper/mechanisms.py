"""The paper's two mechanisms (sec 5), measured instead of inferred: how coherent same-role gradients are, who owns a shared
adapter, how many optimizer steps an iteration takes, and how all that moves before validation falls.
"""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from multirole.diagnostics.falls import first_fall
from multirole.diagnostics.names import POLICY_COLOURS, ROLE_COLOURS, WORKFLOW_MARKERS, cell_name
from multirole.paper.results import Key, Results

FIRST = 10  # iterations: "early"
BEFORE = 10  # iterations: "just before the fall"
SHARES = {"row_mass": "rows", "token_mass": "tokens", "grad_share": "gradient"}
SOLVERS = ("generator", "worker")


def role_runs(results: Results) -> Iterator[tuple[dict[str, object], pd.DataFrame, int | None]]:
    """Yield each role of each run: its coordinates, its rows by iteration, the last evaluated step before validation first falls."""
    for (*key, role), rows in results.table("roles").groupby([*Key._fields, "role"], sort=False):
        fall = first_fall(results.correct(Key(*key)).mean())
        yield (
            dict(zip([*Key._fields, "role"], (*key, role), strict=True)),
            rows.set_index("iteration"),
            fall and fall.before,
        )


def parts(series: pd.Series, fall: int | None, name: str = "") -> dict[str, float]:
    """Average a series early, over the run, and just before its fall (NaN if it does not fall)."""
    last = np.nan if fall is None else series.loc[fall - BEFORE + 1 : fall].mean()
    return {f"{name}early": series.loc[:FIRST].mean(), f"{name}all": series.mean(), f"{name}before_fall": last}


def coherence(results: Results) -> pd.DataFrame:
    """One row per run and role with several slots: coherence and amplification.

    `coherence` is the mean cosine between the gradients of the role's slots, `amplification` slots times that: what the paper
    calls N copies of one gradient would have coherence 1 and amplification N.
    """
    rows = []
    for where, role, fall in role_runs(results):
        if (by := role[role["coherence"].notna()]).size:
            slots = round(float((by["amplification"] / by["coherence"]).median()))
            means = {name: by[name].mean() for name in ("amplification", "cosine_previous")}
            rows.append(
                where | {"slots": slots, "highest": by["coherence"].max()} | parts(by["coherence"], fall) | means
            )
    return pd.DataFrame(rows)


def ownership(results: Results) -> pd.DataFrame:
    """One row per shared-policy run and role: its share of the adapter's rows, tokens and gradient."""
    rows = []
    for where, role, fall in role_runs(results):
        if where["policy"] == "sp" and where["workflow"] != "single":
            shares = [parts(role[column], fall, f"{name}_") for column, name in SHARES.items()]
            rows.append(where | {name: value for share in shares for name, value in share.items()})
    return pd.DataFrame(rows).rename(columns=lambda name: name.removesuffix("_all"))


def steps_and_falls(results: Results) -> pd.DataFrame:
    """One row per run: the optimizer steps per iteration of its busiest adapter, and how far validation ends below its peak.

    `end` is a fraction of problems, the last checkpoint minus the best one; `lowest` the lowest checkpoint after the best minus that.
    """
    of = list(Key._fields)
    steps = results.table("ledger").groupby([*of, "adapter", "iteration"]).size()
    busiest = steps.groupby([*of, "adapter"]).mean().groupby(of).max()
    rows = []
    for key in results.runs:
        trained = results.correct(key).mean().iloc[1:]
        end, lowest = trained.iloc[-1] - trained.max(), trained.loc[trained.idxmax() :].min() - trained.max()
        rows.append(key._asdict() | {"steps_per_iteration": busiest[tuple(key)], "end": end, "lowest": lowest})
    return pd.DataFrame(rows)


def before_the_fall(results: Results, metrics: list[str], span: int = 30) -> pd.DataFrame:
    """Metrics of every falling run's roles, aligned at the last evaluation before the fall (`at` 0), `span` iterations each way."""
    rows = [
        role.assign(**where, at=role.index - fall)[lambda table: table["at"].abs() <= span]
        for where, role, fall in role_runs(results)
        if fall is not None
    ]
    columns = [*Key._fields, "role", "at", *metrics]
    return pd.concat(rows, ignore_index=True)[columns] if rows else pd.DataFrame(columns=columns)


def plot_coherence(results: Results) -> Figure:
    """Coherence of same-role slots as the mean of three iterations, a panel per cell, a line per seed; falls are dotted."""
    runs = [
        (role["coherence"].rolling(3).mean().reset_index().assign(**where), fall)
        for where, role, fall in role_runs(results)
    ]
    table = _named(pd.concat([run for run, _ in runs]).dropna(subset="coherence").reset_index(drop=True))
    grid = _lines(table, "coherence", x="iteration", hue="role", palette=ROLE_COLOURS, units="seed", estimator=None)
    for run, fall in runs:
        if fall is not None and (panel := _named(run)["cell"].iloc[0]) in grid.axes_dict:
            grid.axes_dict[panel].axvline(fall, color="0.5", lw=0.8, ls=":")
    grid.refline(y=1, color="k", ls="-").refline(y=0, color="0.7", ls="-").set(ylabel="cosine between slots")
    return _shown(grid)


def plot_ownership(results: Results) -> Figure:
    """Who owns the shared adapter: each role's share of its rows, tokens and gradient, over seeds, a panel per cell."""
    table = _named(ownership(results)).melt(["cell", "role"], list(SHARES.values()), "of", "share of the adapter")
    look = {"palette": ROLE_COLOURS, "height": 2.2, "aspect": 1.3, "errorbar": ("pi", 100)}
    grid = sns.catplot(table, kind="bar", x="of", y="share of the adapter", hue="role", col="cell", col_wrap=3, **look)
    return _shown(grid.set_titles("{col_name}").set(xlabel=None))


def plot_steps_and_falls(results: Results) -> Figure:
    """Each run: optimizer steps per iteration of its busiest adapter against how far validation ends below its peak."""
    names = {"end": "last checkpoint minus peak", "lowest": "lowest later checkpoint minus peak"}
    table = steps_and_falls(results).rename(columns=names)
    table = table.melt(
        ["workflow", "policy", "steps_per_iteration"], list(names.values()), "at", "fraction of problems"
    )
    look = {"markers": WORKFLOW_MARKERS, "palette": POLICY_COLOURS, "height": 3.2, "alpha": 0.75}
    grid = sns.relplot(
        table, x="steps_per_iteration", y="fraction of problems", col="at", hue="policy", style="workflow", **look
    )
    return _shown(grid.set_titles("{col_name}"))


def plot_before_the_fall(results: Results) -> Figure:
    """What moves before validation falls: medians over the falling runs' solver and other roles, with the middle half."""
    metrics = ["chi2_after", "grad_norm", "coherence", "entropy"]
    table = before_the_fall(results, metrics)
    table = table.assign(at=5 * (table["at"].astype(float) / 5).round(), role=table["role"].isin(SOLVERS))
    table["role"] = table["role"].map({True: "solver", False: "judging or planning"})
    table = table.melt(["at", "role"], metrics, "cell", "value")
    grid = _lines(
        table, "value", x="at", hue="role", estimator="median", errorbar=("pi", 50), facet_kws={"sharey": False}
    )
    grid.axes_dict["chi2_after"].set_yscale("symlog", linthresh=1e-3)
    return _shown(grid.refline(x=0).set(xlabel="iterations from the fall"))


def _named(table: pd.DataFrame) -> pd.DataFrame:
    cells = zip(table["workflow"], table["policy"], table["task"], strict=True)
    return table.assign(cell=[cell_name(*cell) for cell in cells])


def _lines(table: pd.DataFrame, y: str, **look: object) -> sns.FacetGrid:
    """A panel per "cell", four in a row."""
    return sns.relplot(table, y=y, kind="line", col="cell", col_wrap=4, height=2.2, lw=1, **look).set_titles(
        "{col_name}"
    )


def _shown(grid: sns.FacetGrid) -> Figure:
    plt.close(grid.figure)  # a notebook shows what a cell returns
    return grid.figure
