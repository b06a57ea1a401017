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
from multirole.paper.write import STYLE

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


@plt.rc_context(STYLE)
def plot_coherence(results: Results) -> Figure:
    """Coherence of same-role slots by iteration, one panel per cell with such a role, a line per seed; falls are dotted."""
    found = [
        (where, role["coherence"], fall) for where, role, fall in role_runs(results) if role["coherence"].notna().any()
    ]
    cells = list(dict.fromkeys((w["workflow"], w["policy"], w["task"], w["role"]) for w, _, _ in found))
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    grid = figure.subplots(2, -(-len(cells) // 2), sharex=True, sharey=True, squeeze=False)
    panels = dict(zip(cells, grid.flat, strict=False))
    for where, series, fall in found:
        axes = panels[where["workflow"], where["policy"], where["task"], where["role"]]
        axes.plot(series.rolling(3).mean(), color=ROLE_COLOURS[where["role"]], lw=1, alpha=0.8)
        if fall is not None:
            axes.axvline(fall, color="0.5", lw=0.8, ls=":")
    for (*cell, role), axes in panels.items():
        axes.axhline(1, color="k", lw=0.6)
        axes.axhline(0, color="0.7", lw=0.6)
        axes.set_title(f"{cell_name(*cell)}: {role}")
    grid[0, 0].set_ylim(-0.3, 1.05)
    figure.supxlabel("iteration")
    figure.supylabel("cosine between slots")
    return figure


@plt.rc_context(STYLE)
def plot_ownership(results: Results) -> Figure:
    """Who owns the shared adapter: each role's share of its rows, tokens and gradient, one bar per measure, a panel per cell."""
    cells = dict(iter(ownership(results).groupby(["workflow", "task"], sort=False)))
    figure = Figure(figsize=(10.5, 2.8), layout="constrained")
    for (workflow, task), axes in zip(
        cells, figure.subplots(1, len(cells), sharey=True, squeeze=False)[0], strict=True
    ):
        shares = cells[workflow, task].groupby("role", sort=False)[list(SHARES.values())].mean().T
        colours = [ROLE_COLOURS[role] for role in shares]
        shares.plot.bar(stacked=True, ax=axes, legend=False, rot=0, width=0.7, color=colours)
        axes.set_title(cell_name(workflow, "sp", task))
    figure.axes[0].set_ylabel("share of the adapter")
    handles = {label: h for axes in figure.axes for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    return figure


@plt.rc_context(STYLE)
def plot_steps_and_falls(results: Results) -> Figure:
    """Each run: optimizer steps per iteration of its busiest adapter against how far validation ends below its peak."""
    table, look = steps_and_falls(results), {"alpha": 0.75, "s": 34, "lw": 0}
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    titles = {"end": "last checkpoint minus peak", "lowest": "lowest later checkpoint minus peak"}
    for (column, title), axes in zip(titles.items(), figure.subplots(1, 2, sharey=True), strict=True):
        for (workflow, policy), part in table.groupby(["workflow", "policy"], sort=False):
            colour = "0.3" if workflow == "single" else POLICY_COLOURS[policy]
            axes.scatter(part["steps_per_iteration"], 100 * part[column], marker=WORKFLOW_MARKERS[workflow], color=colour,
                         label=cell_name(workflow, policy), **look)  # fmt: skip
        axes.set(title=title, xlabel="optimizer steps per iteration, busiest adapter")
        axes.axhline(0, color="0.7", lw=0.6)
    figure.axes[0].set_ylabel("percentage points")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


@plt.rc_context(STYLE)
def plot_before_the_fall(results: Results) -> Figure:
    """What moves before validation falls: medians over the falling runs' solver and other roles, with the middle half."""
    titles = {"chi2_after": "χ² after the update", "grad_norm": "gradient norm", "coherence": "coherence of slots",
              "entropy": "entropy (nats per token)"}  # fmt: skip
    table = before_the_fall(results, list(titles))
    table["role"] = np.where(table["role"].isin(SOLVERS), "solver", "judging or planning")
    table["at"] = 5 * (table["at"].astype(float) / 5).round()
    figure = Figure(figsize=(10.5, 2.9), layout="constrained")
    for (metric, title), axes in zip(titles.items(), figure.subplots(1, len(titles)), strict=True):
        sns.lineplot(
            table,
            x="at",
            y=metric,
            hue="role",
            estimator="median",
            errorbar=("pi", 50),
            marker=".",
            ax=axes,
            legend=False,
        )
        axes.axvline(0, color="0.5", lw=0.8, ls=":")
        axes.set(title=title, xlabel="iterations from the fall", ylabel=None)
    figure.axes[0].set_yscale("symlog", linthresh=1e-3)
    figure.legend(figure.axes[0].lines[:2], table["role"].unique(), loc="outside upper center", ncols=2)
    return figure
