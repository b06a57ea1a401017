"""What an evaluation's outcomes say: accuracy, pass@k over rollouts and slots, and how well the judging roles judge."""

from pathlib import Path

import numpy as np
import pandas as pd

from multirole.diagnostics.judging import verdict_is_right
from multirole.paper.statistics import bootstrap, pass_at_k


def accuracy(folder: str | Path) -> pd.DataFrame:
    """One row per evaluated step, all fractions.

    `accuracy` with its 95 % bootstrap interval over problems; `std` over rollouts (population; the released code's) and
    `pass@n` over them where there are several; over the solver's turns of an episode, `one slot` (the mean of them),
    `any slot` (the oracle: at least one is right) and `slots` (how many there are on average).
    """
    table, rows = pd.read_parquet(Path(folder) / "eval.parquet"), []
    for step, part in table.groupby("step"):
        by_rollout = part.pivot(index="rollout", columns="problem", values="correct").astype(float)  # (n, P)
        n, interval = len(by_rollout), bootstrap(by_rollout.mean().to_numpy()[None])
        row = {"step": step, "problems": interval.problems, "rollouts": n, "accuracy": interval.mean,
               "low": interval.low, "high": interval.high}  # fmt: skip
        if n > 1:
            right = by_rollout.sum().to_numpy()
            row |= {"std": by_rollout.mean(axis=1).std(ddof=0), f"pass@{n}": pass_at_k(right, n, n).mean()}
        slots = [np.asarray(values, dtype=float) for values in part["slots_correct"] if len(values)]
        row |= {
            "one slot": np.mean([values.mean() for values in slots]),
            "any slot": sum(values.any() for values in slots) / len(part),
            "slots": np.mean([len(values) for values in slots]),
        }
        rows.append(row)
    return pd.DataFrame(rows).set_index("step")


def slot_pass_at_k(folder: str | Path) -> pd.DataFrame:
    """Step x k: chance that one of k of the solver's turns in an episode is right, over the episodes with that many."""
    table = pd.read_parquet(Path(folder) / "eval.parquet")
    counts = table["slots_correct"].map(len)
    right = table["slots_correct"].map(sum).to_numpy()
    columns = {}
    for k in range(1, counts.max() + 1):
        enough = counts >= k
        chance = pd.Series(
            [float(pass_at_k(np.array([r]), n, k)[0]) for r, n in zip(right[enough], counts[enough], strict=True)]
        )
        columns[f"pass@{k}"] = chance.groupby(table.loc[enough, "step"].to_numpy()).mean()
    return pd.DataFrame(columns).rename_axis("step")


def judging(folder: str | Path) -> pd.DataFrame:
    """Step x judging role: how often its judgement of other roles' turns was right, where it could be wrong.

    An evaluator judges the draft of its round: `right on correct` and `right on wrong` drafts (an unparsed verdict is wrong on
    both), and their mean `balanced`. An aggregator selects: over episodes whose candidates disagree, `balanced` is how often the
    selected one is right, and `chance` what a random selection would have been. Empty for workflows without either.
    """
    turns, rows = pd.read_parquet(Path(folder) / "turns.parquet"), []
    for step, part in turns.groupby("step"):
        if "evaluator" in set(part["role"]):
            keys = ["problem", "round"]
            drafts = part[part["role"] == "generator"].set_index(keys)["turn_correct"]
            verdicts = part[part["role"] == "evaluator"].set_index(keys)["outcome"]
            judged = pd.DataFrame({"verdict": verdicts, "is_correct": drafts.reindex(verdicts.index).astype(bool)})
            right = pd.Series([verdict_is_right(*one) for one in judged.itertuples(index=False)], index=judged.index)
            on = {
                "right on correct": right[judged["is_correct"]].mean(),
                "right on wrong": right[~judged["is_correct"]].mean(),
            }
            rows.append(
                {"step": step, "role": "evaluator", "judged": len(judged), **on, "balanced": np.mean(list(on.values()))}
            )
        if "aggregator" in set(part["role"]):
            candidates = (
                part[part["role"] == "generator"]
                .groupby("problem")["turn_correct"]
                .agg(lambda values: values.astype(bool).mean())
            )
            mixed = candidates[(candidates > 0) & (candidates < 1)]
            chosen = part[part["role"] == "aggregator"].set_index("problem")["correct"].reindex(mixed.index)
            rows.append(
                {
                    "step": step,
                    "role": "aggregator",
                    "judged": len(mixed),
                    "balanced": chosen.mean(),
                    "chance": mixed.mean(),
                }
            )
    return pd.DataFrame(rows).set_index("step") if rows else pd.DataFrame()
