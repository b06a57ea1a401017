"""What training does to the roles: the paper's role phenomena as changes over a run, by policy, in the grid's regime."""

import numpy as np
import pandas as pd

from multirole.paper.claims import DECLARED, metric_of
from multirole.paper.results import Results, Run
from multirole.paper.skills import gain_of
from multirole.paper.statistics import t_interval
from multirole.paper.write import number

LINES, WINDOW = DECLARED["phenomena"]["lines"], DECLARED["phenomena"]["window"]


def start_and_change(run: Run, about: dict[str, str]) -> tuple[float, float]:
    """A line's number at the start of a run, and how far it is from there at the end; NaN where it was not measured."""
    if "gain" in about:
        gain = gain_of(run, about["gain"])
        return (gain.iloc[0], gain.iloc[-2:].mean() - gain.iloc[0]) if len(gain) else (np.nan, np.nan)
    series = metric_of(run, about["role"], about["metric"])
    start, end = series.iloc[:WINDOW].mean(), series.iloc[-WINDOW:].mean()
    return start, end / start - 1 if about["metric"] == "length_mean" else end - start


def phenomena(results: Results) -> pd.DataFrame:
    """Every line's start, its change under each policy, and the difference of these changes, paired by seed.

    All columns are of the seeds that have a number under both policies, or under one where the other has none.
    """
    rows = []
    for task in results.grid.tasks:
        for name, about in LINES.items():
            found = {}
            for policy in ("ip", "sp"):
                runs = results.runs_of(about["workflow"], policy, task)
                numbers = {seed: start_and_change(run, about) for seed, run in runs.items()}
                found[policy] = {seed: of for seed, of in numbers.items() if not np.isnan(of).any()}
            if not any(found.values()):
                continue
            both = [seed for seed in found["sp"] if seed in found["ip"]]
            if both:
                found = {policy: {seed: of[seed] for seed in both} for policy, of in found.items()}
            measure = about.get("metric", "gain over the trivial role")
            where = {"task": task, "workflow": about["workflow"], "phenomenon": name, "measured by": measure}
            unit = {"length_mean": "tokens"}.get(measure, "gain" if "gain" in about else "rate")
            starts = [start for of in found.values() for start, _ in of.values()]
            rows.append(number("start", float(np.mean(starts)), unit, **where))
            rows.append(number("seeds", max(map(len, found.values())), "count", **where))
            changes = {
                f"change, {policy.upper()}": [change for _, change in of.values()] for policy, of in found.items()
            }
            changes["SP − IP"] = [found["sp"][seed][1] - found["ip"][seed][1] for seed in both]
            unit = "difference" if "gain" in about else "change"
            rows += [number(label, t_interval(of), unit, **where) for label, of in changes.items() if of]
    return pd.DataFrame(rows)
