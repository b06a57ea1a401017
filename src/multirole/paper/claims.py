"""Hold the paper's qualitative claims, which `claims.yaml` lists, against a grid's runs: holds, fails or undecided.

Every claim has cases, each for it (1), against it (-1) or open (0). The rules are the same for every claim of a kind:

- *Most cells*: a matched cell counts for or against where the 95 % interval of the difference lies on one side of zero. The claim
  holds with more than half of the cells for it, fails with more than half against it or with none for it and fewer than half
  open, and is undecided otherwise.
- *Every seed*: a pattern of single runs is looked for in each seed. It holds if every seed shows it, fails if none does.
- Fewer than `OUTER` seeds decide nothing.
"""

from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml
from scipy.stats import binomtest

from multirole.diagnostics.falls import first_fall
from multirole.experiment.presets import TASKS
from multirole.paper.grid import POLICIES, WORKFLOWS
from multirole.paper.measures import amplitudes, matched
from multirole.paper.results import Key, Results
from multirole.paper.statistics import OUTER, Interval, difference
from multirole.paper.write import Table

DECLARED = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
FIRST = 5  # iterations whose median is the "first logged value" of a noisy metric
CLIMBS, FLAT = 3.0, 1.5  # times its first value
LONGER = 1.5  # times its length on the base model
ALL = "all"
GAP = "ip − sp"


class Case(NamedTuple):
    """A cell or run: which way it counts, the numbers that decide it, the seeds behind them."""

    stands: int
    where: Key
    numbers: dict[str, float]
    seeds: int = 1


Found = tuple[str, list[Case]]
"""A verdict and the cases behind it."""


def most(cases: list[Case], is_open_for: bool = False) -> str:
    """Decide over cells. With `is_open_for` ("matches or exceeds") an open cell counts for the claim."""
    if not cases or min(case.seeds for case in cases) < OUTER:
        return "undecided"
    n, against = len(cases), sum(case.stands < 0 for case in cases)
    agrees = n - against if is_open_for else sum(case.stands > 0 for case in cases)
    if agrees > n / 2:
        return "holds"
    return "fails" if against > n / 2 or (agrees == 0 and 2 * (n - against) < n) else "undecided"


def every(cases: list[Case]) -> str:
    """Decide over runs, or over one cell per workflow."""
    stands = {case.stands for case in cases}
    if len(cases) < OUTER:
        return "undecided"
    return "holds" if stands == {1} else "fails" if stands == {-1} else "undecided"


def of_cell(interval: Interval, workflow: str, policy: str, task: str) -> Case:
    """Count a cell by the side of zero that its interval lies on."""
    numbers = {"difference": interval.mean, "low": interval.low, "high": interval.high}
    return Case(
        int(interval.low > 0) - int(interval.high < 0), Key(workflow, policy, task, ALL), numbers, interval.seeds
    )


def of_run(is_seen: bool, key: Key, **numbers: float) -> Case:
    """Count a run by whether it shows a pattern."""
    return Case(1 if is_seen else -1, key, numbers)


def falls(results: Results, key: Key) -> bool:
    """Whether a run ends in a terminal fall."""
    fall = first_fall(results.correct(key).mean())
    return fall is not None and fall.is_terminal


def metric_of(results: Results, key: Key, role: str, metric: str) -> pd.Series:
    """iteration -> value of one role of a run."""
    rows = results.of_run("roles", key)
    return rows[rows["role"] == role].set_index("iteration")[metric]


def climb(series: pd.Series) -> float:
    """The largest 3-iteration mean over the first value; sizes, since an estimate of chi2 can be slightly negative."""
    sizes = series.abs()
    return float(sizes.rolling(3).mean().max() / max(sizes.iloc[:FIRST].median(), 1e-6))


def keys_of(results: Results, cell: tuple[str, str, str]) -> list[Key]:
    """List the finished runs of a cell."""
    return [Key(*cell, seed) for seed in results.seeds(*cell)]


# ---- the rules of claims.yaml


def peak_minus(results: Results, other: str, is_open_for: bool = False) -> Found:
    """Compare every trained cell's peak with its base, or with the single agent's peak."""
    cases = []
    for cell in product(WORKFLOWS, POLICIES, TASKS):
        before = (*cell, "base") if other == "base" else ("single", "sp", cell[2], "best")
        after, before = results.outcomes(*cell, "best"), results.outcomes(*before)
        if after is not None and before is not None:
            cases.append(of_cell(difference(after, before), *cell))
    return most(cases, is_open_for), cases


def ip_minus_sp(results: Results, of: str, task: str | None = None) -> Found:
    """Compare the policies of each matched cell; on one task, in every workflow."""
    cases = []
    for workflow, on in matched(results):
        if task in (None, on):
            after, before = (_outcomes(results, of, (workflow, policy, on)) for policy in POLICIES)
            cases.append(of_cell(difference(after, before), workflow, GAP, on))
    if task is None:
        return most(cases), cases
    if len(cases) < len(WORKFLOWS) or min(case.seeds for case in cases) < OUTER:
        return "undecided", cases
    least = min(case.stands for case in cases)
    return "holds" if least > 0 else "fails" if least < 0 else "undecided", cases


def _outcomes(results: Results, of: str, cell: tuple[str, str, str]) -> np.ndarray:
    if of == "first checkpoint":
        return np.stack([results.correct(key).iloc[:, 1] for key in keys_of(results, cell)])
    peak = results.outcomes(*cell, "best")
    return peak if of == "peak" else peak - results.outcomes(*cell, "terminal")


def ip_falls_more_often(results: Results) -> Found:
    """Count the matched runs where one policy alone falls."""
    cases = []
    for (workflow, task), seeds in matched(results).items():
        for seed in seeds:
            ip, sp = (falls(results, Key(workflow, policy, task, seed)) for policy in POLICIES)
            cases.append(Case(ip - sp, Key(workflow, GAP, task, seed), {"ip falls": ip, "sp falls": sp}))
    only_ip, only_sp = (sum(case.stands == stands for case in cases) for stands in (1, -1))
    p = binomtest(only_ip, only_ip + only_sp).pvalue if only_ip + only_sp else 1.0
    if len(cases) < OUTER * len(WORKFLOWS) or p > 0.05:
        return "undecided", cases
    return "holds" if only_ip > only_sp else "fails", cases


def sp_fails_too(results: Results) -> Found:
    """Look for a fall under SP."""
    cells = [(workflow, "sp", task) for workflow, task in matched(results)]
    fallen = {key: falls(results, key) for cell in cells for key in keys_of(results, cell)}
    cases = [of_run(is_fallen, key, falls=is_fallen) for key, is_fallen in fallen.items()]
    return "undecided" if len(cases) < OUTER else "holds" if any(fallen.values()) else "fails", cases


def larger_under_ip(results: Results, measure: str) -> Found:
    """Compare the largest value of each run with that of its match under the other policy."""
    cases = []
    for (workflow, task), rows in amplitudes(results).groupby(["workflow", "task"], sort=False):
        wide = rows.pivot(index="seed", columns="policy", values=measure)
        larger = wide["ip"] > wide["sp"]
        numbers = {f"{policy}, seed {seed}": wide.loc[seed, policy] for seed, policy in product(wide.index, POLICIES)}
        cases.append(Case(int(larger.all()) - int(not larger.any()), Key(workflow, GAP, task, ALL), numbers, len(wide)))
    if not cases or min(case.seeds for case in cases) < OUTER:
        return "undecided", cases
    n_for, n_against = (sum(case.stands == stands for case in cases) for stands in (1, -1))
    return "holds" if 2 * n_for > len(cases) else "fails" if 2 * n_against > len(cases) else "undecided", cases


def ranking_changes(results: Results) -> Found:
    """Compare the orders of the workflows between tasks."""
    seeds = [s for s in results.grid.seeds if all(s in results.seeds(*c) for c in product(WORKFLOWS, POLICIES, TASKS))]
    orders: dict[str, list[tuple[str, ...]]] = {task: [] for task in TASKS}
    cases = []
    for seed in seeds:
        gains = {}
        for task, workflow in product(TASKS, WORKFLOWS):
            curve = results.correct(Key(workflow, "ip", task, seed)).mean()
            gains[task, workflow] = curve.iloc[1:].max() - curve.iloc[0]
        for task, held in orders.items():
            held.append(tuple(sorted(WORKFLOWS, key=lambda w, task=task, gains=gains: -gains[task, w])))
        differs = len({held[-1] for held in orders.values()}) > 1
        cases.append(
            of_run(differs, Key(ALL, "ip", ALL, seed), **{f"{w}, {task}": gain for (task, w), gain in gains.items()})
        )
    found = [set(held) for held in orders.values()]
    if len(seeds) < OUTER:
        return "undecided", cases
    return "holds" if not set.intersection(*found) else "fails" if len(set.union(*found)) == 1 else "undecided", cases


def climbs_and_falls(results: Results, cell: list[str], role: str, metric: str, flat: str | None = None) -> Found:
    """Look for a role's metric that climbs, another role's that does not, and a fall."""
    cases = []
    for key in keys_of(results, cell):
        climbs = {name: climb(metric_of(results, key, name, metric)) for name in (role, flat) if name}
        is_seen = climbs[role] >= CLIMBS and (flat is None or climbs[flat] < climbs[role] / FLAT)
        cases.append(of_run(is_seen and falls(results, key), key, **climbs, falls=falls(results, key)))
    return every(cases), cases


def only_ip_falls(results: Results, workflow: str, task: str) -> Found:
    """Look for a fall under IP and none under SP."""
    cases = []
    for seed in matched(results).get((workflow, task), []):
        ip, sp = (falls(results, Key(workflow, policy, task, seed)) for policy in POLICIES)
        cases.append(of_run(ip and not sp, Key(workflow, GAP, task, seed), ip=ip, sp=sp))
    return every(cases), cases


def grows(results: Results, cell: list[str], role: str, other: str) -> Found:
    """Look for a role whose texts grow longer while another role's do not."""
    cases = []
    for key in keys_of(results, cell):
        (start, end), (before, after) = (_ends(results, key, name, "length_mean") for name in (role, other))
        lengths = {f"{role}, start": start, f"{role}, end": end, f"{other}, start": before, f"{other}, end": after}
        cases.append(of_run(end >= LONGER * start and after < LONGER * before, key, **lengths))
    return every(cases), cases


def writes_code(results: Results, cell: list[str], role: str) -> Found:
    """Look for a role that begins to write Python fences."""
    cases = []
    for key in keys_of(results, cell):
        start, end = _ends(results, key, role, "code_fence_rate")
        cases.append(of_run(end - start >= 0.25, key, start=start, end=end))
    return every(cases), cases


def _ends(results: Results, key: Key, role: str, metric: str) -> tuple[float, float]:
    """Means over the first and the last iterations."""
    series = metric_of(results, key, role, metric)
    return float(series.iloc[:FIRST].mean()), float(series.iloc[-FIRST:].mean())


RULES = {
    rule.__name__: rule
    for rule in (
        peak_minus, ip_minus_sp, ip_falls_more_often, sp_fails_too, larger_under_ip, ranking_changes, climbs_and_falls,
        only_ip_falls, grows, writes_code,
    )
}  # fmt: skip


def claims(results: Results) -> Table:
    """Make the table of every claim's verdict; its values are the numbers of every case."""
    shown, values = [], []
    for about in DECLARED["claims"]:
        verdict, cases = RULES[about["rule"]](results, **about.get("options", {}))
        counts = {
            name: sum(case.stands == stands for case in cases)
            for name, stands in (("for", 1), ("open", 0), ("against", -1))
        }
        row = {"the paper's claim": about["claim"], "sec": about["section"], "tested by": about["test"]}
        shown.append(row | counts | {"here": f"**{verdict}**", "see": about["see"]})
        values += [
            {
                "claim": about["name"],
                "verdict": verdict,
                "stands": case.stands,
                **case.where._asdict(),
                "number": name,
                "value": float(value),
            }
            for case in cases
            for name, value in case.numbers.items()
        ]
    caption = DECLARED["caption"].format(
        scale=results.grid.scale, seeds=len(results.grid.seeds), missing=len(results.missing())
    )
    return Table("claims", "The paper's claims against these runs", caption, pd.DataFrame(shown), pd.DataFrame(values))
