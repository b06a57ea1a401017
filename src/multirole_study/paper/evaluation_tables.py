"""Summarise an evaluation: accuracy, and how well the judging roles judge (notebooks/eval_cell.ipynb)."""

from pathlib import Path

import numpy as np
import pandas as pd

from multirole.roles.skill import role_skills
from multirole_study.compare.intervals import t_interval
from multirole_study.experiment.run_folder import read_config, read_provenance
from multirole_study.workflow_record import recorded_structure


def accuracy(folder: str | Path) -> pd.DataFrame:
    """Return one row per evaluated step; all values are fractions.

    `accuracy` has a 95 % t interval over problems. With several rollouts there are `std` over them (population, as in the released
    code) and `pass@n`. Over the solver's turns of an episode there are `one slot` (their mean), `any slot` (the oracle: at least
    one is right) and `slots` (their average number).
    """
    table, rows = pd.read_parquet(Path(folder) / "eval.parquet"), []
    for step, part in table.groupby("step"):
        by_rollout = part.pivot(index="rollout", columns="problem", values="correct").astype(float)  # (n, P)
        n, problems = by_rollout.shape
        mean, low, high = t_interval(by_rollout.mean().dropna())[:3]  # of problems with a grade
        row = {"step": step, "problems": problems, "rollouts": n, "accuracy": mean, "low": low, "high": high}
        if n > 1:
            row |= {"std": by_rollout.mean(axis=1).std(ddof=0), f"pass@{n}": by_rollout.max().mean()}
        slots = part["slots_correct"][part["slots_correct"].map(len) > 0]
        row |= {"one slot": slots.map(np.mean).mean(), "any slot": slots.map(any).sum() / len(part)}
        rows.append(row | {"slots": slots.map(len).mean()})
    return pd.DataFrame(rows).set_index("step")


def judging(folder: str | Path) -> pd.DataFrame:
    """Return step x judging role: the role's gain over its trivial twin (`multirole.roles.skill`); empty for a single agent."""
    turns, config = pd.read_parquet(Path(folder) / "turns.parquet"), read_config(Path(folder), may_be_evaluation=True)
    structure = recorded_structure(config["cell"], read_provenance(Path(folder), may_be_missing=True))
    rows = [{"step": step} | row for step, part in turns.groupby("step") for row in role_skills(part, structure)]
    table = pd.DataFrame(rows).set_index("step")
    return table[~table["measure"].isin(["workflow", "solves", "other"])]
