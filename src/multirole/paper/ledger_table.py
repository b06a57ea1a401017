"""The ledger of optimizer steps beside what the cell's options predict of it, run by run and step by step."""

from collections.abc import Iterator

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from multirole.core.policy import adapter_names
from multirole.core.schedule import lr_factor
from multirole.experiment.cell import Cell
from multirole.paper.results import Results
from multirole.paper.study import Study
from multirole.paper.twins import Run, run_of
from multirole.paper.write import STYLE, Table

USUAL = "as the grid"
TOLERANCE = 1e-12
"""Relative; the learning rate goes through HF's optimizer as a Python float."""


def predicted(cell: Cell, roles: pd.DataFrame, rollbacks: list[int]) -> pd.DataFrame:
    """Steps, rows, tokens and learning rate of each adapter and iteration, from how many rows and tokens its roles sampled.

    `roles` is the run's `roles.parquet`: counted where turns are played, not where they are trained. `rollbacks` are the
    iterations that ended with one.
    """
    adapters, owned, found = adapter_names(cell.policy), {}, []
    for iteration, role, rows, tokens in roles[["iteration", "role", "rows", "tokens"]].itertuples(index=False):
        if iteration > cell.train_starts[role]:
            call = owned.setdefault((iteration, adapters.index(cell.policy[role])), [0, 0])
            call[0] += rows
            call[1] += tokens
    for (iteration, call), (rows, tokens) in sorted(owned.items()):
        kept = cell.rollback_rate ** sum(one < iteration for one in rollbacks)
        lr = cell.learning_rate * kept * lr_factor(cell, iteration - 1, call, len(adapters))
        found.append((iteration, adapters[call], cell.n_steps(rows, tokens), rows, tokens, lr))
    return pd.DataFrame(found, columns=["iteration", "adapter", "steps", "rows", "tokens", "lr"])


def recorded(ledger: pd.DataFrame) -> pd.DataFrame:
    """The same columns from `ledger.parquet`; NaN where the steps of an update call differ in learning rate."""
    by_call = ledger.groupby(["iteration", "adapter"], sort=False)
    found = by_call.agg(
        steps=("rows", "size"), rows=("rows", "sum"), tokens=("tokens", "sum"), lr=("lr", "first"), n=("lr", "nunique")
    )
    found["lr"] = found["lr"].where(found.pop("n") == 1)
    return found.reset_index()


def _rollbacks(run: Run) -> list[int]:
    """The iterations after which a run went back: those with an alarm once something was evaluated and saved."""
    alarms = run.table("alarms")
    if run.cell.on_alarm != "rollback" or alarms.empty:
        return []
    first = min(step for step in run.correct.columns if step and step % run.cell.save_every == 0)
    return sorted({int(one) for one in alarms["iteration"] if one > first})


def compared(run: Run, steps: pd.DataFrame) -> pd.DataFrame:
    """Predicted and recorded, a row per adapter and iteration: columns end in "" (predicted) and " recorded".

    `steps` is the run's `ledger.parquet`.
    """
    ours = predicted(run.cell, run.table("roles"), _rollbacks(run))
    return ours.merge(recorded(steps), on=["iteration", "adapter"], how="outer", suffixes=("", " recorded"))


def rate_error(both: pd.DataFrame) -> float:
    """The largest relative error of a rate in `compared`; infinite where one side lacks a call or its steps differ in rate."""
    error = (both["lr"] - both["lr recorded"]).abs() / both["lr"].where(both["lr"] > 0, 1.0)
    return float(error.fillna(np.inf).max())


def _runs(results: Results, study: Study) -> Iterator[tuple[str, Run]]:
    """(variant, run) of every finished run of the grid and of the study."""
    asked = {cell.id: (USUAL, cell) for cell in results.grid.cells()}
    for name, _, cell in study.runs():
        asked.setdefault(cell.id, (name, cell))
    for name, cell in asked.values():
        if run := run_of(cell, results.folder.parent):
            yield name, run


def ledger(results: Results, study: Study) -> Table:
    """In how many update calls the ledger differs from the prediction, by variant, workflow and policy."""
    groups: dict[tuple[str, str, str], list[tuple[pd.DataFrame, pd.DataFrame]]] = {}
    for name, run in _runs(results, study):
        steps = run.table("ledger")
        coordinates = (name, run.cell.workflow_name, run.cell.policy_name)
        groups.setdefault(coordinates, []).append((compared(run, steps), steps))
    shown, values = [], []
    for (name, workflow, policy), found in groups.items():
        both = pd.concat([one for one, _ in found])
        steps = pd.concat([two for _, two in found])
        differ = sum((both[column] != both[f"{column} recorded"]).sum() for column in ("steps", "rows", "tokens"))
        off = rate_error(both)
        per = [both.groupby("adapter", sort=False)[f"steps{end}"].agg(["min", "max"]) for end in ("", " recorded")]
        norms = [steps[c].median() if c in steps else np.nan for c in ("grad_norm", "grad_norm_clipped")]
        duplicated = int(steps["duplicated_rows"].sum()) if "duplicated_rows" in steps else 0
        shown.append(
            {
                "workflow": workflow,
                "policy": policy if "=" in policy else policy.upper(),
                "variant": name,
                "runs": len(found),
                "calls": len(both),
            }
            | {"steps per call, predicted": _ranges(per[0]), "recorded": _ranges(per[1])}
            | {"counts that differ": int(differ), "duplicated rows": duplicated}
            | {"learning rate off by": f"{off:.0e}" if off > TOLERANCE else "0"}
            | {"gradient norm": f"{norms[0]:.3f}", "clipped": "–" if np.isnan(norms[1]) else f"{norms[1]:.3f}"}
        )
        values.append(
            {"workflow": workflow, "policy": policy, "variant": name, "runs": len(found), "calls": len(both)}
            | {"differ": differ, "lr_off": off, "grad_norm": norms[0], "grad_norm_clipped": norms[1]}
        )
    caption = (
        "An update call is one adapter in one iteration. Its steps follow from the rows and tokens that its roles sampled and from the "
        "options `updates` and `step_tokens`, its learning rate from schedule, clock and rollbacks; steps, rows, tokens and rates are "
        "held against the ledger in every call. Steps are ranges over iterations, one per adapter. Norms are medians over steps, before "
        "and after clipping; the grid's first runs did not record the latter. Not in the paper."
    )
    return Table("ledger", "The ledger against its prediction", caption, pd.DataFrame(shown), pd.DataFrame(values))


def _ranges(per_adapter: pd.DataFrame) -> str:
    """The least and most steps of each adapter."""
    spans = [(int(low), int(high)) for low, high in per_adapter.fillna(0).to_numpy()]
    return "; ".join(f"{low}" if low == high else f"{low} to {high}" for low, high in spans)


def plot_ledger(results: Results, study: Study, where: str = "voting ip math") -> Figure:
    """Recorded learning rates (dots) on predicted ones (lines) under each schedule, and the optimizer steps of the grid's cells."""
    seed = study.seeds[0]
    cells = {USUAL: study.grid.cell(*where.split(), seed)}
    for name, one, cell in study.runs("setup"):
        if one == where and cell.seed == seed and {"lr_schedule", "lr_clock"} & set(study.variants[name].parameters):
            cells[name] = cell
    runs = {name: run for name, cell in cells.items() if (run := run_of(cell, results.folder.parent))}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(runs) + 1, figsize=(2.7 * (len(runs) + 1), 2.8), layout="constrained", squeeze=False
        )
        for panel, (name, run) in zip(axes[0], runs.items(), strict=False):
            for adapter, mine in compared(run, run.table("ledger")).groupby("adapter", sort=False):
                line = panel.plot(mine["iteration"], mine["lr"], lw=1, label=adapter)[0]
                panel.plot(mine["iteration"], mine["lr recorded"], ".", ms=4, color=line.get_color())
            panel.set(title=name, xlabel="iteration")
            panel.sharey(axes[0, 0])
        axes[0, 0].set_ylabel("learning rate")
        axes[0, 0].legend()
        last, task = axes[0, -1], where.split()[2]
        for cell in results.grid.cells():
            run = run_of(cell, results.folder.parent) if (cell.task, cell.seed) == (task, seed) else None
            if run:
                steps = run.table("ledger").groupby("iteration").size().cumsum()
                last.plot(steps, lw=1, label=f"{cell.workflow_name} {cell.policy_name.upper()}")
        last.set(title="optimizer steps so far", xlabel="iteration")
        last.set_ylim(0, 1.35 * last.get_ylim()[1])
        last.legend(fontsize=7, ncols=2, loc="upper left")
    plt.close(figure)
    return figure
