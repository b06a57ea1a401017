"""Measure how training changes the roles of a run: their skill (`multirole.roles.skill`) and the paper's phenomena."""

from collections.abc import Iterable

import pandas as pd

from multirole_study.compare.measures import gain_of, start_and_change
from multirole_study.paper.claims import DECLARED
from multirole_study.paper.results import Run

PHENOMENA: dict[str, dict[str, str]] = DECLARED["phenomena"]["lines"]
"""Phenomenon -> how it is measured."""


def changes_by_seed(line: dict[str, str], runs: dict[str, Iterable[Run]]) -> pd.DataFrame:
    """Return seed -> "start, ip", "change, ip" and the same for "sp": a phenomenon's number in the seeds of both policies."""
    frames, read = [], {name: line[name] for name in ("role", "metric", "gain") if name in line}
    for policy, policy_runs in runs.items():
        by_seed = {run.cell.seed: start_and_change(run, **read) for run in policy_runs}
        frames.append(pd.DataFrame.from_dict(by_seed, "index", float, [f"start, {policy}", f"change, {policy}"]))
    return pd.concat(frames, axis=1).dropna()


def units_of_change(line: dict[str, str]) -> tuple[str, str]:
    """Return the unit of a phenomenon's number and that of its change."""
    if "gain" in line:
        return "gain", "difference"
    return "tokens" if line["metric"] == "length_mean" else "rate", "change"


def ends_of_gains(runs: dict[str, dict[int, Run]], measure: str) -> pd.DataFrame:
    """Return seed -> "start" and "end" of a role's gain, means over both policies, which start from the same model.

    Only the seeds that have a gain under both policies are kept. The end is the mean of the last two evaluations. Empty if nothing is measured.
    """
    by_run = {(policy, seed): gain_of(run, measure) for policy, of in runs.items() for seed, run in of.items()}
    gains = pd.DataFrame({key: gain for key, gain in by_run.items() if len(gain)})
    if gains.empty:
        return pd.DataFrame(columns=["start", "end"])
    ends = pd.DataFrame({"start": gains.iloc[0], "end": gains.iloc[-2:].mean()}).dropna()
    is_paired = ends.groupby(level=1)["end"].transform("size") == len(runs)
    return ends[is_paired].groupby(level=1).mean()
