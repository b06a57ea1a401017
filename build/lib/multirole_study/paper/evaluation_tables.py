"""What an evaluation's outcomes say: accuracy, and how well the judging roles judge (notebooks/eval_cell.ipynb)."""

from pathlib import Path

import numpy as np
import pandas as pd

from multirole.diagnostics.role_skill import role_skills
from multirole_study.inspector import run_reader
from multirole_study.paper.statistics import t_interval
from multirole_study.workflow_record import recorded_structure


def accuracy(folder: str | Path) -> pd.DataFrame:
    """One row per evaluated step, all fractions.

    `accuracy` with its 95 % t interval over problems; `std` over rollouts (population; the released code's) and
    `pass@n` over them where there are several; over the solver's turns of an episode, `one slot` (the mean of them),
    `any slot` (the oracle: at least one is right) and `slots` (how many there are on average).
    """
    table, rows = pd.read_parquet(Path(folder) / "eval.parquet"), []
    for step, part in table.groupby("step"):
        by_rollout = part.pivot(index="rollout", columns="problem", values="correct").astype(float)  # (n, P)
        n, problems = by_rollout.shape
        mean, low, high = t_interval(by_rollout.mean().to_numpy())[:3]
        row = {"step": step, "problems": problems, "rollouts": n, "accuracy": mean, "low": low, "high": high}
        if n > 1:
            row |= {"std": by_rollout.mean(axis=1).std(ddof=0), f"pass@{n}": by_rollout.max().mean()}
        slots = part["slots_correct"][part["slots_correct"].map(len) > 0]
        row |= {"one slot": slots.map(np.mean).mean(), "any slot": slots.map(any).sum() / len(part)}
        rows.append(row | {"slots": slots.map(len).mean()})
    return pd.DataFrame(rows).set_index("step")


def judging(folder: str | Path) -> pd.DataFrame:
    """Step x judging role: what the role adds over its trivial twin (`diagnostics.role_skill`); empty for a single agent."""
    turns, config = pd.read_parquet(Path(folder) / "turns.parquet"), run_reader.read_config(Path(folder))
    structure = recorded_structure(config["cell"], run_reader.read_provenance(Path(folder)))
    rows = [{"step": step} | row for step, part in turns.groupby("step") for row in role_skills(part, structure)]
    table = pd.DataFrame(rows).set_index("step")
    return table[~table["measure"].isin(["workflow", "solves", "other"])]
