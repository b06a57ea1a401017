"""The ledger of optimizer steps against what a cell's options predict of it, computed here independently of the trainer."""

from collections.abc import Iterator
from math import ceil, cos, pi

import numpy as np
import pandas as pd

from multirole.core.policy import adapter_names
from multirole.experiment.cell import Cell
from multirole.paper.results import Results
from multirole.paper.study import Study
from multirole.paper.twins import Run, run_of
from multirole.paper.write import number

USUAL = "as the grid"
TOLERANCE = 1e-12
"""Relative; the learning rate passes through HF's optimizer as a Python float."""


def schedule(cell: Cell, tick: int) -> float:
    """The fraction of the peak learning rate at a tick of the schedule's clock."""
    if tick < cell.warmup_iterations:
        return tick / cell.warmup_iterations
    progress = (tick - cell.warmup_iterations) / max(1, cell.iterations - cell.warmup_iterations)
    return 1.0 if cell.lr_schedule == "constant" else 0.5 * (1.0 + cos(pi * min(progress, 1.0)))


def n_steps(cell: Cell, rows: int, tokens: int) -> int:
    """The optimizer steps of an adapter that owns so many rows and completion tokens of an iteration."""
    if cell.updates == "tokens":
        return min(rows, ceil(tokens / cell.step_tokens))
    return 1 if cell.updates == "one" else ceil(rows / (cell.n_problems * cell.n_episodes))


def predicted(cell: Cell, roles: pd.DataFrame, rollbacks: list[int]) -> pd.DataFrame:
    """Steps, rows, tokens and learning rate of each adapter and iteration, from what its roles sampled.

    `roles` is the run's table of that name, counted where turns are played and not where they are trained; `rollbacks` are the
    iterations that ended with one.
    """
    adapters, rows = adapter_names(cell.policy), []
    owned = roles.assign(call=roles["role"].map(cell.policy).map(adapters.index)).groupby(["iteration", "call"])
    for (iteration, call), sums in owned[["rows", "tokens"]].sum().iterrows():
        kept = cell.rollback_rate ** sum(one < iteration for one in rollbacks)
        tick = iteration - 1 if cell.lr_clock == "iteration" else (iteration - 1) * len(adapters) + call
        lr = cell.learning_rate * kept * schedule(cell, tick)
        rows.append((iteration, adapters[call], n_steps(cell, *sums), *sums, lr))
    return pd.DataFrame(rows, columns=["iteration", "adapter", "steps", "rows", "tokens", "lr"])


def recorded(steps: pd.DataFrame) -> pd.DataFrame:
    """The same columns from a run's ledger; NaN where the steps of an update call differ in learning rate."""
    found = steps.groupby(["iteration", "adapter"], sort=False).agg(
        steps=("rows", "size"), rows=("rows", "sum"), tokens=("tokens", "sum"), lr=("lr", "first"), n=("lr", "nunique")
    )
    found["lr"] = found["lr"].where(found.pop("n") == 1)
    return found.reset_index()


def rollbacks(run: Run) -> list[int]:
    """The iterations after which a run went back: those with an alarm once something was evaluated and saved."""
    alarms = run.table("alarms")
    if run.cell.on_alarm != "rollback" or alarms.empty:
        return []
    first = min(step for step in run.correct.columns if step and step % run.cell.save_every == 0)
    return sorted({int(one) for one in alarms["iteration"] if one > first})


def compared(run: Run, steps: pd.DataFrame) -> pd.DataFrame:
    """Predicted columns, and recorded ones that end in " recorded", a row per adapter and iteration; `steps` is the ledger."""
    ours = predicted(run.cell, run.table("roles"), rollbacks(run))
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


def ledger_values(results: Results, study: Study) -> pd.DataFrame:
    """In how many update calls the ledger differs from the prediction, by workflow, policy and variant."""
    groups: dict[tuple[str, ...], list[tuple[pd.DataFrame, pd.DataFrame]]] = {}
    for name, run in _runs(results, study):
        steps = run.table("ledger")
        coordinates = run.cell.workflow, run.cell.policy_name, name
        groups.setdefault(coordinates, []).append((compared(run, steps), steps))
    rows = []
    for coordinates, found in groups.items():
        both, steps = (pd.concat(parts) for parts in zip(*found, strict=True))
        differ = sum((both[column] != both[f"{column} recorded"]).sum() for column in ("steps", "rows", "tokens"))
        off, taken = rate_error(both), both["steps recorded"]
        clipped = steps["grad_norm_clipped"].median() if "grad_norm_clipped" in steps else np.nan
        where = dict(zip(("workflow", "policy", "variant"), coordinates, strict=True))
        rows += [
            number("runs", len(found), "count", **where),
            number("calls", len(both), "count", **where),
            number("steps per call", taken.median(), "count", **where) | {"low": taken.min(), "high": taken.max()},
            number("counts that differ", differ, "count", **where),
            number("duplicated rows", steps.get("duplicated_rows", pd.Series(0)).sum(), "count", **where),
            number("learning rate off by", off if off > TOLERANCE else 0, "ratio", **where),
            number("gradient norm", steps["grad_norm"].median(), "ratio", **where),
            number("clipped", clipped, "ratio" if pd.notna(clipped) else "missing", **where),
        ]
    return pd.DataFrame(rows)
