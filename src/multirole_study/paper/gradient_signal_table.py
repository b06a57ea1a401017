"""Table and figure of signal and noise of gradients by role, by the rules of `gradient_signal.yaml`.

The measurement is `multirole signal`; `<results_dir>/<scale>/gradient_signal.parquet` holds its rows of all runs.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import yaml
from matplotlib.axes import Axes

from multirole_study.compare.verdicts import side
from multirole_study.labels import BASE_NAMES, MAP_COLOUR, POLICY_COLOURS, POLICY_NAMES, WORKFLOW_NAMES, task_name
from multirole_study.paper.output import MISSING, STYLE, Plate, Table, bounded, how_many, say_below

DECLARED = yaml.safe_load(Path(__file__).with_name("gradient_signal.yaml").read_text(encoding="utf-8"))
CELL_KEYS = ["workflow", "policy", "task", "seed", "step"]
LINE_KEYS = [*CELL_KEYS, "role"]
TABLE_COLUMNS = {  # column of the table -> (statistic, unit)
    "share of rows": ("row_share", "rate"),
    "share of tokens": ("token_share", "rate"),
    "share of a batch's gradient": ("batch_share", "rate"),
    "share of the mean gradient": ("mean_share", "rate"),
    "signal in a batch's gradient": ("signal_share", "rate"),
    "noise scale (batches)": ("noise_scale", "tokens"),
    "coherence of slots": ("coherence", "ratio"),
    "of that beyond the mean gradient": ("shared_coherence", "ratio"),
}
CAPTION = (
    "Not in the paper, which infers both mechanisms. Gradients of {batches} independent batches of episodes, each as large as an iteration, at fixed weights, at {scale} on {task}. "
    "A batch's gradient is the mean gradient plus noise; signal is the squared norm of the mean gradient, from inner products between different "
    "batches, as a part of a batch's squared norm, in percent. It is unbiased and may be negative. The noise scale is noise over signal: as many "
    "batches averaged have as much signal as noise. Shares of the mean gradient are of one adapter and sum to 100 %. Coherence is the mean inner product of two slots of a role over the "
    "squared norm of one. Brackets are 95 % jackknife intervals over batches, of one seed: {seeds}. "
    "Not measured: {missing}. Rules: gradient_signal.yaml, version {version}."
)


def verdict(low: float, high: float, above: float) -> str:
    """Decide a question by an interval: "yes" above the bound, "no" below it, else "undecided"."""
    if math.isnan(low) or math.isnan(high):
        return MISSING
    return side(low, high, above)


def reliability(rows: pd.DataFrame, role: str) -> float:
    """Return signal / (signal + noise / batches) of a role's mean gradient, for the rows of one adapter and checkpoint."""
    values = rows[rows["role"] == role].set_index("statistic")["value"]
    signal, noise = values["signal"], values["noise"] / rows["batches"].iloc[0]
    return signal / (signal + noise) if signal + noise > 0 else 0.0


def unread(question: str, rows: pd.DataFrame, role: str, other: str) -> str:
    """Return why a question about an adapter at a checkpoint (`rows`) is not answered; "" if it is."""
    if question == "dominates" and not has_signal(rows):
        return "not read (no signal)"
    if question == "agree" and min(reliability(rows, one) for one in (role, other)) < DECLARED["reliable"]:
        return "not read (unreliable)"
    return ""


def has_signal(rows: pd.DataFrame) -> bool:
    """Return whether any role of an adapter has a detected signal at a checkpoint; else the mean gradient may be zero, and has no shares."""
    signals = rows[rows["statistic"] == "signal_share"]
    return bool((signals["low"] > DECLARED["detected"]).any())


def answers(rows: pd.DataFrame) -> Iterator[dict[str, object]]:
    """Yield the verdict on every declared question, by adapter, checkpoint and role or pair of roles."""
    keys = [*CELL_KEYS, "adapter"]
    detected = {"detected": {"statistic": "signal_share", "above": DECLARED["detected"]}}
    for key, group in rows.groupby(keys, sort=False):
        for name, question in (detected | DECLARED["questions"]).items():
            chosen = group[(group["statistic"] == question["statistic"]) & group["value"].notna()]
            if name in ("dominates", "agree") and group["role"].nunique() < 2:
                continue  # an adapter of one role
            for row in chosen.itertuples():
                decision = unread(name, group, row.role, row.other) or verdict(row.low, row.high, question["above"])
                row_keys = dict(zip(keys, key, strict=True)) | {"role": row.role, "other": row.other, "question": name}
                unit = "similarity" if name == "agree" else "rate"
                yield row_keys | {
                    "value": row.value,
                    "low": row.low,
                    "high": row.high,
                    "unit": unit,
                    "verdict": decision,
                }


def unmeasured(rows: pd.DataFrame, declared: dict) -> list[tuple[str, int]]:
    """List the declared (cell, checkpoint) that have not been measured."""
    measured = {(f"{row.workflow} {row.policy}", row.step) for row in rows.itertuples() if row.task == declared["task"]}
    return [pair for pair in product(declared["cells"], declared["checkpoints"]) if pair not in measured]


def declared_at(scale: str) -> dict:
    """Return the declaration of a scale; no cells and checkpoints if it has none."""
    return DECLARED["scales"].get(scale, {"task": "", "cells": [], "checkpoints": []})


def tasks_of(rows: pd.DataFrame) -> str:
    """Name the tasks of measured rows."""
    return " and ".join(map(task_name, rows["task"].unique()))


def without_single_task(table: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return a table of measured rows without its column `task`, unless they have several."""
    return table if rows["task"].nunique() > 1 else table.drop(columns="task")


def first_columns(row: Mapping[str, Any]) -> dict[str, object]:
    """Return the workflow, policy, task and iteration of measured rows as a table shows them."""
    return {
        "workflow": WORKFLOW_NAMES.get(row["workflow"], row["workflow"]),
        "policy": POLICY_NAMES.get(row["policy"], row["policy"]),
        "task": task_name(row["task"]),
        "iteration": row["step"],
    }


def missing(rows: pd.DataFrame, scale: str) -> str:
    """List the declared cells of a scale that have not been measured, by checkpoint; nothing is declared of another scale."""
    declared, parts = declared_at(scale), []
    for step in declared["checkpoints"]:
        cells = [cell for cell, other in unmeasured(rows, declared) if other == step]
        if cells:
            parts.append(f"iteration {step}, {'all cells' if cells == declared['cells'] else ', '.join(cells)}")
    return "; ".join(parts) or "nothing"


def ordered(rows: pd.DataFrame, scale: str) -> pd.DataFrame:
    """Return the rows in the order of the declared cells, then of others, and of the checkpoints. Shares of an adapter of one role become NaN, because they are always 1."""
    place_of = {cell: i for i, cell in enumerate(declared_at(scale)["cells"])}
    place = [place_of.get(f"{row.workflow} {row.policy}", len(place_of)) for row in rows.itertuples()]
    rows = rows.assign(place=place).sort_values(["place", "step"], kind="stable").drop(columns="place")
    n_roles = rows.groupby(["run", "step", "adapter"])["role"].transform("nunique")
    is_trivial = (n_roles < 2) & rows["statistic"].isin(["batch_share", "mean_share"])
    return rows.assign(**{name: rows[name].mask(is_trivial) for name in ("value", "low", "high")})


def signal_table(rows: pd.DataFrame, decided: pd.DataFrame, scale: str) -> Table:
    """Build the table of every role's signal and noise: `rows` as `ordered`, `decided` the verdicts of `answers` on them."""
    shown = []
    for key, group in rows[rows["other"] == ""].groupby(LINE_KEYS, sort=False):
        line = first_columns(group.iloc[0]) | {"role": key[-1]}
        by_statistic = group.set_index("statistic")
        for column, (statistic, unit) in TABLE_COLUMNS.items():
            row = by_statistic.loc[statistic]
            line[column] = bounded(row["value"], unit, row["low"], row["high"])
        line_verdicts = decided[(decided[LINE_KEYS] == list(key)).all(axis=1) & (decided["other"] == "")]
        line["verdicts"] = ", ".join(f"{row.question} {row.verdict}" for row in line_verdicts.itertuples())
        shown.append(line)
    for row in decided[decided["other"] != ""].itertuples():
        line = first_columns(row._asdict()) | {"role": f"{row.role} and {row.other}"}
        interval = "no interval" if math.isnan(row.low) else f"[{row.low:.2f}, {row.high:.2f}]"
        estimate = f"{row.value:.2f} {interval}".replace("-", "−")
        shown.append(line | {"verdicts": f"cosine {estimate}: agree {row.verdict}"})
    seeds = ", ".join(map(str, sorted(rows["seed"].unique())))
    caption = CAPTION.format(
        batches=how_many(rows["batches"]),
        scale=scale,
        task=tasks_of(rows),
        seeds=seeds,
        missing=missing(rows, scale),
        version=DECLARED["version"],
    )
    return Table(
        "gradient_signal",
        "Signal and noise of the gradient by role",
        caption,
        without_single_task(pd.DataFrame(shown), rows).fillna(MISSING),
        without_single_task(pd.concat([decided, _batch_shares(rows)]), rows),
    )


def _batch_shares(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the shares of a batch's gradient as values of the table, which no question asks for."""
    shares = rows[(rows["statistic"] == "batch_share") & rows["value"].notna()]
    columns = [*LINE_KEYS, "adapter", "other", "value", "low", "high"]
    return shares[columns].assign(question="batch_share", unit="rate", verdict=MISSING)


AXIS_LABELS = {  # statistic -> label of the axis
    "signal_share": "signal in a batch's gradient (%)",
    "batch_share": "share of a batch's gradient (%)",
    "mean_share": "share of the mean gradient (%)",
    "coherence": "coherence of slots (%)",
}


def colour_of(policy: str) -> str:
    """Return the colour of a policy; policy maps share one."""
    return POLICY_COLOURS.get(policy, MAP_COLOUR)


OF_SHARED_ADAPTERS = ("batch_share", "mean_share")
"""Statistics that only the roles of a shared adapter have."""


def signal_figure(rows: pd.DataFrame, scale: str) -> Plate:
    """Draw signal, both shares and coherence, a line for each role and checkpoint of a workflow and a colour per policy; `rows` are `ordered`."""
    keys, has_several = ["workflow", "task", "role", "step"], rows["task"].nunique() > 1
    order = {workflow: i for i, workflow in enumerate(rows["workflow"].unique())}
    lines = rows.loc[rows["other"] == "", keys].drop_duplicates()
    lines = lines.sort_values(keys, key=lambda column: column.map(order) if column.name == "workflow" else column)
    policies = sorted(rows["policy"].unique(), key=[*POLICY_COLOURS, *rows["policy"]].index)
    with plt.rc_context(STYLE):
        size = 10, 1.2 + 0.25 * len(lines)
        figure, axes = plt.subplots(1, len(AXIS_LABELS), figsize=size, sharey=True, layout="constrained")
        for ax, (statistic, title) in zip(axes, AXIS_LABELS.items(), strict=True):
            ax.axvline(0, color="0.8", linewidth=0.8)
            for height, line in enumerate(lines.itertuples(index=False)):
                here = rows[(rows[keys] == list(line)).all(axis=1) & (rows["other"] == "")]
                estimates = {(row["statistic"], row["policy"]): row for row in here.to_dict("records")}
                _draw_line(ax, height, estimates, statistic, policies)
            ax.set_xlabel(title)
        for height in range(1, len(lines)):
            if lines["workflow"].iloc[height] != lines["workflow"].iloc[height - 1]:
                for ax in axes:
                    ax.axhline(height - 0.5, color="0.6", lw=0.8)
        names = [
            f"{WORKFLOW_NAMES.get(line.workflow, line.workflow)}{f', {task_name(line.task)}' if has_several else ''}: {line.role}, iteration {line.step}"
            for line in lines.itertuples()
        ]
        axes[0].set_yticks(range(len(lines)), names)
        axes[0].set_ylim(len(lines) - 0.5, -0.5)
        marks = [
            plt.Line2D(
                [], [], color=colour_of(policy), marker="o", ms=4, lw=1.5, label=POLICY_NAMES.get(policy, policy)
            )
            for policy in policies
        ]
        marks.append(plt.Line2D([], [], color="black", marker="|", ms=9, ls="", label="the role's share of rows (SP)"))
        figure.legend(handles=marks, loc="outside upper center", ncols=len(marks))
        task, batches = tasks_of(rows), how_many(rows["batches"])
        about = f"{BASE_NAMES.get(scale, scale)}, {task}; one seed; lines are 95 % jackknife intervals over {batches} batches"
        say_below(figure, f"{about}; shares of the mean gradient only where they have an interval")
    caption = (
        f"Signal and noise of the gradient by role, at {scale} on {tasks_of(rows)}. Dots are estimates, lines 95 % jackknife intervals over {how_many(rows['batches'])} batches of one seed; a "
        f"bar is the role's share of rows. Only roles of a shared adapter have shares, and only roles with several slots have a coherence. Not measured: {missing(rows, scale)}."
    )
    return Plate("gradient_signal", figure, caption)


def _draw_line(
    ax: Axes, height: float, estimates: dict[tuple[str, str], dict[str, float]], statistic: str, policies: list[str]
) -> None:
    """Draw a statistic of one role and checkpoint under each policy, in percent; `estimates` maps (statistic, policy) to a row."""
    is_shared = statistic in OF_SHARED_ADAPTERS
    drawn = {
        policy: row
        for policy in policies
        if (row := estimates.get((statistic, policy))) is not None and not math.isnan(row["low"])
    }
    for policy, row in drawn.items():
        at = height if is_shared else height + 0.32 * (policies.index(policy) + 0.5 - len(policies) / 2)
        ax.hlines(at, 100 * row["low"], 100 * row["high"], color=colour_of(policy), linewidth=1.5)
        ax.plot(100 * row["value"], at, "o", color=colour_of(policy), markersize=3.6)
    if is_shared and ("row_share", "sp") in estimates:
        ax.plot(100 * estimates["row_share", "sp"]["value"], height, "|", color="black", markersize=9)
    if statistic == "coherence" and not drawn:
        look = {"ha": "center", "va": "center", "fontsize": 6.5, "color": "0.55", "transform": ax.get_yaxis_transform()}
        ax.text(0.5, height, "one slot", **look)
