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
        n, (mean, low, high, _, problems) = len(by_rollout), bootstrap(by_rollout.mean().to_numpy()[None])
        row = {"step": step, "problems": problems, "rollouts": n, "accuracy": mean, "low": low, "high": high}
        if n > 1:
            right = by_rollout.sum().to_numpy()
            row |= {"std": by_rollout.mean(axis=1).std(ddof=0), f"pass@{n}": pass_at_k(right, n, n).mean()}
        slots = part["slots_correct"][part["slots_correct"].map(len) > 0]
        row |= {"one slot": slots.map(np.mean).mean(), "any slot": slots.map(any).sum() / len(part)}
        rows.append(row | {"slots": slots.map(len).mean()})
    return pd.DataFrame(rows).set_index("step")


def slot_pass_at_k(folder: str | Path) -> pd.DataFrame:
    """Step x k: chance that one of k of the solver's turns in an episode is right, over the episodes with that many."""
    table = pd.read_parquet(Path(folder) / "eval.parquet").set_index("step")["slots_correct"]
    counts = table.map(len)
    found = {
        f"pass@{k}": table[counts >= k].map(lambda slots, k=k: float(pass_at_k(np.array(sum(slots)), len(slots), k)))
        for k in range(1, counts.max() + 1)
    }
    return pd.DataFrame({name: chance.groupby("step").mean() for name, chance in found.items()})


def judging(folder: str | Path) -> pd.DataFrame:
    """Step x judging role: how often its judgement of other roles' turns was right, where it could be wrong.

    An evaluator judges the draft of its round: `right on correct` and `right on wrong` drafts (an unparsed verdict is wrong on
    both), and their mean `balanced`. An aggregator selects: over episodes whose candidates disagree, `balanced` is how often the
    selected one is right, and `chance` what a random selection would have been. Empty for workflows without either.
    """
    turns, rows = pd.read_parquet(Path(folder) / "turns.parquet"), []
    for step, part in turns.groupby("step"):
        of = dict(iter(part.groupby("role")))
        if "evaluator" in of:
            keys = ["problem", "round"]
            drafts = of["generator"].set_index(keys)["turn_correct"].rename("draft")
            judged = of["evaluator"].join(drafts, on=keys)
            judged["draft"] = judged["draft"].astype(bool)
            judged["right"] = [verdict_is_right(*one) for one in zip(judged["outcome"], judged["draft"], strict=True)]
            on = {name: judged["right"][judged["draft"] == is_right].mean()
                  for name, is_right in (("right on correct", True), ("right on wrong", False))}  # fmt: skip
            rows.append(
                {"step": step, "role": "evaluator", "judged": len(judged)}
                | on
                | {"balanced": np.mean(list(on.values()))}
            )
        if "aggregator" in of:
            candidates = of["generator"].astype({"turn_correct": bool}).groupby("problem")["turn_correct"].mean()
            mixed = candidates[(candidates > 0) & (candidates < 1)]
            chosen = of["aggregator"].set_index("problem")["correct"].reindex(mixed.index)
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
