"""The paper's two mechanisms (sec 5), measured instead of inferred: how coherent same-role gradients are, who owns a shared
adapter, how many optimizer steps an iteration takes, and how all that moves before validation falls.

Everything here reads `roles.parquet`, `ledger.parquet` and the validation of a grid's runs.
"""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from multirole.diagnostics.names import POLICY_COLOURS, ROLE_COLOURS
from multirole.paper.results import Key, Results
from multirole.paper.statistics import first_fall
from multirole.paper.write import STYLE

FIRST = 10  # iterations: "early"
BEFORE = 10  # iterations: "just before the fall"
MASSES = (("row_mass", "rows"), ("token_mass", "tokens"), ("grad_share", "gradient"))
MARKERS = {"single": "D", "eval_opt": "o", "voting": "s", "orch_workers": "^"}


def _runs(results: Results) -> Iterator[tuple[Key, pd.DataFrame, int | None]]:
    """Each run, its roles by iteration, and the last evaluated step before validation first falls (None: it does not)."""
    roles = results.table("roles")
    for key, mine in roles.groupby(list(Key._fields), sort=False):
        fall = first_fall(results.correct(Key(*key)).mean())
        yield Key(*key), mine, fall and fall[0]


def coherence(results: Results) -> pd.DataFrame:
    """One row per run and role with several slots: coherence and amplification early, over the run and just before its fall.

    `coherence` is the mean cosine between the gradients of the role's slots, `amplification` slots times that: what the paper
    calls N copies of one gradient would have coherence 1 and amplification N. NaN before a fall that never came.
    """
    rows = []
    for key, mine, fall in _runs(results):
        for role, part in mine[mine["coherence"].notna()].groupby("role", sort=False):
            by = part.set_index("iteration")
            last = by.loc[fall - BEFORE + 1 : fall] if fall else by.iloc[:0]
            rows.append(
                {
                    **key._asdict(),
                    "role": role,
                    "slots": round(float((by["amplification"] / by["coherence"]).median())),
                    "early": by.loc[:FIRST, "coherence"].mean(),
                    "all": by["coherence"].mean(),
                    "highest": by["coherence"].max(),
                    "before_fall": last["coherence"].mean(),
                    "amplification": by["amplification"].mean(),
                    "cosine_previous": by["cosine_previous"].mean(),
                }
            )
    return pd.DataFrame(rows)


def ownership(results: Results) -> pd.DataFrame:
    """One row per shared-policy run and role: its share of the adapter's rows, tokens and gradient, early and before a fall."""
    rows = []
    for key, mine, fall in _runs(results):
        if key.policy != "sp" or key.workflow == "single":
            continue
        for role, part in mine.groupby("role", sort=False):
            by = part.set_index("iteration")
            row = {**key._asdict(), "role": role}
            for column, name in MASSES:
                row |= {name: by[column].mean(), f"{name}_early": by.loc[:FIRST, column].mean()}
                row[f"{name}_before_fall"] = by.loc[fall - BEFORE + 1 : fall, column].mean() if fall else np.nan
            rows.append(row)
    return pd.DataFrame(rows)


def steps_and_falls(results: Results) -> pd.DataFrame:
    """One row per run: the most optimizer steps per iteration of any of its adapters, and how far validation ends below its peak.

    `fall` is a fraction of problems, final minus peak over the trained checkpoints; `lowest` the lowest trained checkpoint after
    the peak minus the peak.
    """
    steps = results.table("ledger").groupby([*Key._fields, "adapter", "iteration"]).size()
    most = steps.groupby([*Key._fields, "adapter"]).mean().groupby(list(Key._fields)).max()
    rows = []
    for key in results.runs:
        accuracy = results.correct(key).mean()
        trained = accuracy[accuracy.index > 0]
        after = trained.loc[trained.idxmax() :]
        rows.append(
            {
                **key._asdict(),
                "steps_per_iteration": most[tuple(key)],
                "fall": trained.iloc[-1] - trained.max(),
                "lowest": after.min() - trained.max(),
            }
        )
    return pd.DataFrame(rows)


def plot_coherence(results: Results) -> Figure:
    """Coherence of same-role slots by iteration, one panel per cell with such a role, a line per seed; falls are marked."""
    table = coherence(results)
    cells = list(dict.fromkeys(zip(table["workflow"], table["policy"], table["task"], table["role"], strict=True)))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            2, -(-len(cells) // 2), figsize=(10.5, 4.6), layout="constrained", sharex=True, sharey=True, squeeze=False
        )
        for axes, (workflow, policy, task, role) in zip(grid.flat, cells, strict=False):
            for key, mine, fall in _runs(results):
                if key[:3] == (workflow, policy, task):
                    by = mine[mine["role"] == role].set_index("iteration")["coherence"]
                    axes.plot(by.index, by.rolling(3).mean(), color=ROLE_COLOURS[role], lw=1, alpha=0.8)
                    if fall:
                        axes.axvline(fall, color="0.5", lw=0.8, ls=":")
            axes.axhline(1, color="k", lw=0.6)
            axes.axhline(0, color="0.7", lw=0.6)
            axes.set_title(f"{workflow.replace('_', '-')} {policy.upper()} {task}: {role}", fontsize=8.5)
        for axes in grid[-1]:
            axes.set_xlabel("iteration")
        grid[0, 0].set_ylabel("cosine between slots")
        grid[1, 0].set_ylabel("cosine between slots")
        grid[0, 0].set_ylim(-0.3, 1.05)
    plt.close(figure)  # a notebook shows what a cell returns
    return figure


def plot_ownership(results: Results) -> Figure:
    """Who owns the shared adapter: each role's share of its rows, tokens and gradient, one bar per measure, a panel per cell."""
    table = ownership(results)
    mean = table.groupby(["workflow", "task", "role"])[[name for _, name in MASSES]].mean()
    cells = list(dict.fromkeys(zip(table["workflow"], table["task"], strict=True)))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, len(cells), figsize=(10.5, 2.8), layout="constrained", sharey=True, squeeze=False
        )
        for axes, cell in zip(grid[0], cells, strict=True):
            bottom = np.zeros(len(MASSES))
            for role, shares in mean.loc[cell].iterrows():
                axes.bar(
                    [name for _, name in MASSES], shares, bottom=bottom, color=ROLE_COLOURS[role], width=0.7, label=role
                )
                bottom = bottom + shares.to_numpy()
            axes.set_title(f"{cell[0].replace('_', '-')} SP {cell[1]}", fontsize=8.5)
            axes.tick_params(axis="x", labelsize=8)
        grid[0, 0].set_ylabel("share of the adapter")
        handles = {label: h for axes in grid[0] for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=len(handles))
    plt.close(figure)  # a notebook shows what a cell returns
    return figure


def plot_steps_and_falls(results: Results) -> Figure:
    """Each run: optimizer steps per iteration of its busiest adapter against how far validation fell after its peak."""
    table = steps_and_falls(results)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, 2, figsize=(10.5, 3.6), layout="constrained", sharey=True)
        for axes, (column, title) in zip(
            grid, (("fall", "final minus peak"), ("lowest", "lowest later checkpoint minus peak")), strict=True
        ):
            for (workflow, policy), part in table.groupby(["workflow", "policy"], sort=False):
                colour = "0.3" if workflow == "single" else POLICY_COLOURS[policy]
                label = "single agent" if workflow == "single" else f"{workflow.replace('_', '-')} {policy.upper()}"
                axes.scatter(part["steps_per_iteration"], 100 * part[column], marker=MARKERS[workflow], color=colour, alpha=0.75,
                             s=34, lw=0, label=label)  # fmt: skip
            axes.set(title=title, xlabel="optimizer steps per iteration, busiest adapter")
            axes.axhline(0, color="0.7", lw=0.6)
        grid[0].set_ylabel("percentage points")
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
        sns.despine(figure)
    plt.close(figure)  # a notebook shows what a cell returns
    return figure


def before_the_fall(results: Results, metrics: tuple[str, ...], span: int = 30) -> pd.DataFrame:
    """Metrics of every falling run's roles, aligned at the last evaluation before the fall (`at` 0), `span` iterations each way."""
    rows = []
    for key, mine, fall in _runs(results):
        if fall:
            near = mine[(mine["iteration"] - fall).abs() <= span].assign(at=mine["iteration"] - fall)
            rows.append(near[[*Key._fields, "role", "at", *metrics]])
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=[*Key._fields, "role", "at", *metrics])


def plot_before_the_fall(results: Results) -> Figure:
    """What moves before validation falls: medians over the falling runs' solver and judging roles, with the middle half."""
    metrics = (("chi2_after", "chi2 after the update"), ("grad_norm", "gradient norm"), ("coherence", "coherence of slots"),
               ("entropy", "entropy (nats per token)"))  # fmt: skip
    table = before_the_fall(results, tuple(name for name, _ in metrics))
    table["kind"] = np.where(table["role"].isin(["generator", "worker"]), "solver", "judging or planning")
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(metrics), figsize=(10.5, 2.9), layout="constrained")
        for axes, (metric, title) in zip(grid, metrics, strict=True):
            for kind, part in table.groupby("kind", sort=False):
                bins = (
                    part.assign(at=5 * np.round(part["at"] / 5))
                    .groupby("at")[metric]
                    .quantile([0.25, 0.5, 0.75])
                    .unstack()
                )
                (line,) = axes.plot(bins.index, bins[0.5], marker=".", lw=1.3, label=kind)
                axes.fill_between(bins.index, bins[0.25], bins[0.75], color=line.get_color(), alpha=0.18, lw=0)
            axes.axvline(0, color="0.5", lw=0.8, ls=":")
            axes.set(title=title, xlabel="iterations from the fall")
        grid[0].set_yscale("symlog", linthresh=1e-3)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    plt.close(figure)  # a notebook shows what a cell returns
    return figure


def findings(results: Results) -> str:
    """What the tables say in sentences, every number computed here: coherence, ownership, steps and falls."""
    slots, owned, steps = coherence(results), ownership(results), steps_and_falls(results)
    fallen = slots["before_fall"].dropna()
    last = f", {fallen.mean():.2f} in the {BEFORE} iterations before the {len(fallen)} falls" if len(fallen) else ""
    lines = [
        (
            f"Same-role slots pull in one direction by a cosine of {slots['all'].mean():.2f} on average over {len(slots)} roles of as many "
            f"runs ({slots['early'].mean():.2f} in the first {FIRST} iterations{last}); the largest of any iteration is "
            f"{slots['highest'].max():.2f}. N copies of one gradient would have 1. So the mean amplification is "
            f"{slots['amplification'].mean():.2f}, where full coherence would give {slots['slots'].max()}."
        ),
        (
            f"Successive updates of an adapter agree by a cosine of {slots['cosine_previous'].mean():.2f}, which AdamW's momentum alone makes "
            "large."
        ),
    ]
    if len(owned):
        most = owned.loc[owned.groupby(list(Key._fields))["tokens"].idxmax()]
        lines.append(
            f"On a shared adapter the role with most tokens owns {most['tokens'].mean():.0%} of them, {most['rows'].mean():.0%} of the rows "
            f"and {most['gradient'].mean():.0%} of the gradient ({len(most)} runs): its tokens overstate what it pulls."
        )
    rank = spearmanr(steps["steps_per_iteration"], steps["fall"])
    lines.append(
        f"Over {len(steps)} runs, optimizer steps per iteration of the busiest adapter and the change from peak to end have a rank "
        f"correlation of {rank.statistic:.2f} (p={rank.pvalue:.1g}, runs taken as independent). Steps, workflow and policy change "
        "together in this matrix, so that this is an association; the `updates` option takes them apart."
    )
    return "\n\n".join(lines)
