"""Do alarms tell runs that fall from runs that do not? Thresholds from seed 0, judged on the other seeds, beside two baselines.

    python benchmarks/alarms.py results/tiny-r [--out results/bench/alarms.json]

The unit is an evaluation interval of a multi-agent run that has not fallen yet (`multirole.diagnostics.falls`). *Ahead* asks for
the next interval: is the score, the highest of the interval's iterations and of the roles, above the threshold before the last
evaluation that is still good? *Seen* asks for the same interval: does the score show the fall that the evaluation at its end
finds? *Skill lost* takes every interval: does the score show that a judging role adds at most `LOST` over its trivial twin
(`multirole.diagnostics.skills`) at the interval's end? The threshold is the one with the largest sensitivity + specificity - 1 (Youden's J) on the runs of seed 0; AUC and J are
of the runs of all other seeds, and `j, stress` of those among them that train in the stressed regime; `j, rule` is J at the threshold that the rule has. A score
is worth its code if its J there is above that of every baseline: the *clock* (iterations so far), the *optimizer steps* per
iteration, and the *rate x steps*, how far these steps can go, all known before training. *rings* counts runs of the other seeds
with a score above the threshold at any time, falling ones and others apart.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from multirole.diagnostics.alarms import BASELINE, RULES, change_of
from multirole.diagnostics.falls import first_fall
from multirole.paper import pack

TARGETS = {"fall_next": "ahead", "falls": "seen", "skill_lost": "skill lost"}
BASELINES = ("baseline: clock", "baseline: optimizer steps", "baseline: rate x steps")
LOST = 0.05
"""Of balanced accuracy, or of the accuracy where candidates disagree."""
STRESS = (0.006, "constant")
DRIFTS = ("chi2", "chi2_after", "clip_fraction", "grad_norm", "coherence", "entropy")
"""What the rules that were removed were made of; as its level, and as its ratio to the baseline where it falls or grows."""


def changes(change: str, within: tuple[float, float] = (-np.inf, np.inf)) -> Callable[[pd.Series], list[float]]:
    """A role's series -> how far it stands from where it stood, by iteration; NaN where its baseline is not within."""

    def of(series: pd.Series) -> list[float]:
        known = series.dropna().tolist()
        if not known or not within[0] <= np.median(known[:BASELINE]) <= within[1]:
            return [np.nan] * len(series)
        found = [change_of(change, known[: i + 1]) for i in range(len(known))]
        return [np.nan] * (len(series) - len(found)) + [np.nan if one is None else one for one in found]

    return of


SET = {f"{rule.alarm}: {rule.metric}, {rule.change}": rule.threshold for rule in RULES}
SCORES: dict[str, tuple[str, Callable[[pd.Series], object]]] = {
    **{
        f"{rule.alarm}: {rule.metric}, {rule.change}": (rule.metric, changes(rule.change, rule.within))
        for rule in RULES
    },
    **{f"removed: {name}": (name, lambda series: series.rolling(3, min_periods=1).mean()) for name in DRIFTS},
    "removed: box loss, rise": ("boxed_rate", lambda series: -series.rolling(3, min_periods=1).median()),
    "removed: length, rise": ("length_mean", changes("rise")),
    "removed: entropy, share lost": ("entropy", changes("share lost")),
}


def scored(folder: Path, name: str) -> pd.DataFrame:
    """iteration x score of one run, the largest over its roles; the baselines are the first columns."""
    roles = pack.read(folder, "roles", [name])
    calls = pack.read(folder, "ledger", [name]).groupby(["iteration", "adapter"])["lr"]
    steps, moved = (of.groupby("iteration").max() for of in (calls.size(), calls.sum()))
    clock = pd.Series(steps.index, index=steps.index)
    table = dict(zip(BASELINES, (clock, steps, moved), strict=True))
    for label, (metric, score) in SCORES.items():
        by_role = {
            role: pd.Series(score(rows.set_index("iteration")[metric]), index=rows["iteration"].to_numpy())
            for role, rows in roles.groupby("role")
        }
        table[label] = pd.DataFrame(by_role).max(axis=1)
    return pd.DataFrame(table)


def intervals(folder: Path) -> pd.DataFrame:
    """Run, seed, `fall_next`, `falls` and the highest scores of every interval of a multi-agent run that has not fallen."""
    index, rows = pack.index(folder), []
    for run in index[(index["kind"] == "run") & (index["workflow"] != "single")].itertuples():
        settings = json.loads(run.settings)
        accuracy = pack.read(folder, "eval", [run.run], ["run", "step", "correct"]).groupby("step")["correct"].mean()
        fall, scores = first_fall(accuracy), scored(folder, run.run)
        skills = pack.read(folder, "skills", [run.run])
        skills = skills[skills["measure"].isin(["judges", "selects", "merges"])].set_index("step")
        gain = skills["skill"] - skills["trivial"]
        for start, end in zip(accuracy.index, accuracy.index[1:], strict=False):
            is_over = bool(fall and start > fall.before)
            flags = {"falls": bool(fall and fall.at == end), "fall_next": bool(fall and fall.before == end)}
            flags = {name: None if is_over else flag for name, flag in flags.items()}
            flags["skill_lost"] = None if np.isnan(gain.get(end, np.nan)) else bool(gain[end] <= LOST)
            is_stress = (settings["learning_rate"], settings["lr_schedule"]) == STRESS
            about = {
                "run": run.run,
                "seed": settings["seed"],
                "is_stress": is_stress,
                "is_last": end == accuracy.index[-1],
            } | flags
            rows.append(about | scores.loc[start + 1 : end].max().to_dict())
    return pd.DataFrame(rows)


def auc(positive: np.ndarray, score: np.ndarray) -> float:
    """The chance that an interval with a fall has the higher score, ties counted half."""
    ranks, n = rankdata(score), positive.sum()
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * (~positive).sum()))


def youden(positive: np.ndarray, rings: np.ndarray) -> float:
    """Sensitivity + specificity - 1."""
    return float(rings[positive].mean() - rings[~positive].mean())


def judged(table: pd.DataFrame, score: str, target: str) -> dict[str, object]:
    """One line: the threshold of seed 0, and what it is worth on the other seeds."""
    known = table[~((table["is_last"]) & (target == "fall_next"))].dropna(subset=[score, target])
    known = known.astype({target: bool})
    first, others = known[known["seed"] == 0], known[known["seed"] != 0]
    limits = np.unique(first[score])
    limit = max(limits, key=lambda one: youden(first[target].to_numpy(), (first[score] >= one).to_numpy()))
    rings = (others[score] >= limit).to_numpy()
    runs = others.assign(rings=rings).groupby("run").agg(falls=(target, "any"), rings=("rings", "any"))
    positive, stress = others[target].to_numpy(), others["is_stress"].to_numpy()
    return {
        "score": score, "target": TARGETS[target], "threshold": float(limit),
        "auc": auc(positive, others[score].to_numpy()), "j": youden(positive, rings),
        "j, stress": youden(positive[stress], rings[stress]),
        "j, rule": youden(positive, (others[score] >= SET.get(score, np.nan)).to_numpy()) if score in SET else None,
        "sensitivity": float(rings[positive].mean()), "specificity": float(1 - rings[~positive].mean()),
        "rings, falling runs": f"{int(runs['rings'][runs['falls']].sum())} of {int(runs['falls'].sum())}",
        "rings, other runs": f"{int(runs['rings'][~runs['falls']].sum())} of {int((~runs['falls']).sum())}",
    }  # fmt: skip


def main(argv: list[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="<results_dir>/<scale>, whose runs are packed")
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    arguments = parser.parse_args(argv)
    known = intervals(arguments.folder)
    lines = [judged(known, name, target) for target in TARGETS for name in (*BASELINES, *SCORES)]
    print(pd.DataFrame(lines).round(3).to_markdown(index=False))
    if arguments.out:
        arguments.out.write_text(json.dumps({"intervals": len(known), "scores": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
