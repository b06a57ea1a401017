"""Estimate a number from the numbers of runs: each kind is registered by its name, and returns an interval, its text, or its own verdict.

The numbers are a table with a row per run: workflow, task, arm, seed and `value`, and `minus`, the value of the run that it is compared
with. `claims.yaml` says when a comparison of all cells of a regime holds.
"""

import math
from collections.abc import Callable
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import f

from multirole_study.compare.corrections import holm
from multirole_study.compare.intervals import (
    NO_UNITS,
    Interval,
    difference_of_shares,
    exact_share,
    mcnemar_p,
    resampled,
    t_interval,
)
from multirole_study.compare.rules import ALPHA, MARGIN, RULES
from multirole_study.compare.verdicts import NO, NOT_MEASURED, UNDECIDED, YES
from multirole_study.labels import MISSING, WORKFLOW_NAMES, formatted, task_name

FACTORS = ["workflow", "task", "arm"]
CELL = ["workflow", "task"]
MIN_CELLS = 3
"""The fewest cells whose mean is estimated where cells are the unit."""


class Estimate(NamedTuple):
    """An interval, and how it is written where its kind has words of its own. `verdict` is set where the kind decides itself."""

    interval: Interval
    text: str = ""
    verdict: str = ""
    unit: str = "seeds"


NOTHING = Estimate(NO_UNITS, MISSING, MISSING)
"""The estimate from too few runs."""


def differences(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return the numbers with `value` minus `minus` as value, without missing ones."""
    if "minus" in numbers:
        numbers = numbers.assign(value=numbers["value"] - numbers["minus"]).drop(columns="minus")
    return numbers.dropna(subset="value")


# ---- one number


def mean(numbers: pd.DataFrame, margin: float = MARGIN) -> Estimate:
    """Estimate the mean difference over seeds; over several cells, a seed's number is its mean over cells if it has all of them."""
    numbers = differences(numbers)
    if len(numbers[CELL].drop_duplicates()) > 1:
        return Estimate(t_interval(numbers.pivot_table("value", "seed", CELL).dropna().mean(axis=1), margin))
    return Estimate(t_interval(numbers["value"], margin))


def mean_over_cells(numbers: pd.DataFrame) -> Estimate:
    """Estimate the mean difference over cells: the unit is a seed where `least_seeds` have every cell, and otherwise the cell."""
    units, kind = units_of(differences(numbers))
    if kind == "cells" and len(units) < MIN_CELLS or not units.any():
        return NOTHING
    return Estimate(t_interval(units), unit=kind)


def units_of(numbers: pd.DataFrame) -> tuple[pd.Series, str]:
    """Return one number per seed that has every cell, or per cell if such seeds are few; and which of the two it is, "seeds" or "cells"."""
    table = numbers.pivot_table("value", "seed", CELL)
    by_seed = table.dropna().mean(axis=1)
    return (by_seed, "seeds") if len(by_seed) >= RULES["least_seeds"] else (table.mean(), "cells")


def share(numbers: pd.DataFrame) -> Estimate:
    """Estimate the share of runs that show a pattern; runs that have no such number are left out."""
    known = numbers["value"].dropna()
    return Estimate(exact_share(int(known.sum()), len(known)), unit="runs")


def shares(numbers: pd.DataFrame) -> Estimate:
    """Compare how many runs of two arms show a pattern, by Fisher's exact test; runs that have no such number are left out."""
    (a, n), (b, m) = ((int(numbers[name].sum()), int(numbers[name].count())) for name in ("value", "minus"))
    interval = difference_of_shares(a, n, b, m)
    return Estimate(interval, f"{a} of {n} against {b} of {m}, {span(interval)}", unit="runs")


def paired_shares(numbers: pd.DataFrame) -> Estimate:
    """Compare how many of the paired runs of two arms show a pattern, by McNemar's exact test; the interval is Student's, over the pairs."""
    values = differences(numbers)["value"]
    return Estimate(t_interval(values)._replace(p=mcnemar_p(values)), unit="pairs")


def span(interval: Interval) -> str:
    """Format a difference in points with its interval."""
    value, low, high = (formatted(limit, "difference") for limit in interval[:3])
    return f"{value} [{low}, {high}]"


# ---- all cells of a regime


def complete(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return a table (seeds, cells) with one number per run, for the seeds that have every cell. Its columns are (workflow, task, arm); the arm is the policy."""
    return numbers.pivot_table("value", "seed", FACTORS).dropna()


def spread(numbers: pd.DataFrame, within: list[str]) -> Estimate:
    """Test whether cells differ, by an F test of equal means among cells with the same `within`, with seeds as blocks."""
    table = complete(differences(numbers))
    if len(table) < RULES["least_seeds"]:
        return NOTHING
    explained = error = df = 0.0
    for _, group in table.T.groupby(within or (lambda _: 0)):
        effects = group.to_numpy().T  # (seeds, cells)
        effects = effects - effects.mean(axis=1, keepdims=True)
        means = effects.mean(axis=0)
        explained += len(effects) * (means**2).sum()
        error += ((effects - means) ** 2).sum()
        df += len(means) - 1
    error_df = df * (len(table) - 1)
    if not df or not error:
        return NOTHING
    ratio = explained / df / (error / error_df)
    p = float(f.sf(ratio, df, error_df))
    text = f"F({df:.0f}, {error_df:.0f}) = {ratio:.1f}, p = {p:.2g}, {len(table)} seeds"
    return Estimate(NO_UNITS._replace(mean=float(ratio), p=p, seeds=len(table)), text)


def levels_of(cells: pd.MultiIndex) -> list[np.ndarray]:
    """Return the levels of workflow and task together, and of policy, that cells have, as integers from 0."""
    return [
        cells.droplevel([level for level in cells.names if level not in names]).factorize()[0]
        for names in (["workflow", "task"], ["arm"])
    ]


def shares_of_variance(values: np.ndarray, factors: list[np.ndarray]) -> tuple[float, float]:
    """Return the shares of two factors, such as those of `levels_of`, in the sum of squares of `values` (seeds, cells).

    Each is (SS - df * MSE) / SS of all, so that a factor without effect has 0 on average, however many levels it has.
    """
    means, squares = values.mean(axis=0), ((values - values.mean()) ** 2).sum()
    error = ((values - means) ** 2).sum() / (values.size - values.shape[1])
    shares = []
    for codes in factors:
        sizes = np.bincount(codes)
        levels = np.bincount(codes, means) / sizes
        effect = len(values) * (sizes * (levels - means.mean()) ** 2).sum()
        shares.append((effect - (len(sizes) - 1) * error) / squares if squares else 0.0)
    return shares[0], shares[1]


def variance(numbers: pd.DataFrame) -> Estimate:
    """Estimate by how much more of the variance workflow and task explain than policy."""
    table = complete(numbers)
    if len(table) < RULES["least_seeds"] or not table.to_numpy().any():
        return NOTHING
    values, factors = table.to_numpy(), levels_of(table.columns)
    cell_share, policy = shares_of_variance(values, factors)
    interval = resampled(values, lambda drawn: float(np.subtract(*shares_of_variance(drawn, factors))))
    names = "workflow and task" if table.columns.get_level_values("task").nunique() > 1 else "workflow (one task)"
    text = f"{names} {cell_share:.2f}, policy {policy:.2f}, difference {interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}], {len(table)} seeds"
    return Estimate(interval, text.replace("-", "−"))


def standardised(values: np.ndarray) -> np.ndarray:
    """Return the size of the mean of each column of `values` (seeds, columns) in standard deviations over seeds."""
    return abs(values.mean(axis=0)) / np.maximum(values.std(axis=0, ddof=1), 1e-12)


def effect_sizes(numbers: pd.DataFrame) -> Estimate:
    """Estimate by how much the standardised differences of chi2 and of the gradient norm, the lesser of the two, exceed that of entropy."""
    table = differences(numbers).pivot_table("value", "seed", ["metric", *CELL]).dropna()
    if len(table) < RULES["least_seeds"]:
        return NOTHING
    by_metric = table.T.groupby(level="metric").mean().T  # (seeds, 3)

    def least_lead(values: np.ndarray) -> float:
        chi2, norm, entropy = standardised(values)
        return min(chi2, norm) - entropy

    values = by_metric[["chi2", "grad_norm", "entropy"]].to_numpy()
    interval = resampled(values, least_lead)
    text = "χ² {:.2f}, gradient norm {:.2f}, entropy {:.2f}".format(*standardised(values))
    text += f"; lead {interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}], {len(table)} seeds"
    return Estimate(interval, text.replace("-", "−"))


# ---- signs on two tasks


class Signed(NamedTuple):
    """A difference on one task: its mean, and its p after Holm's correction over the table."""

    name: str
    task: str
    mean: float
    p: float

    @property
    def sign(self) -> int:
        """Return the sign of a decided difference, 1 or -1; 0 if it is not decided."""
        return int(math.copysign(self.p < ALPHA, self.mean))

    def __str__(self) -> str:
        star = "*" if self.sign else ""
        return f"{task_name(self.task)} {formatted(self.mean, 'difference')}{star}"


def signed(by_line: dict[tuple[str, str], pd.Series]) -> list[Signed]:
    """Test the mean of every (name, task) -> one difference per seed, corrected together."""
    intervals = {key: t_interval(values.dropna()) for key, values in by_line.items()}
    ps = holm([interval.p for interval in intervals.values()])
    return [Signed(*key, interval.mean, float(p)) for (key, interval), p in zip(intervals.items(), ps, strict=True)]


def signs_by_name(by_line: dict[tuple[str, str], pd.Series]) -> dict[str, list[Signed]]:
    """Return the tested differences of each name, one per task; empty where a task is missing or seeds are few."""
    if not by_line or any(values.count() < RULES["least_seeds"] for values in by_line.values()):
        return {}
    tests = signed(by_line)
    names = {name: [test for test in tests if test.name == name] for name in dict.fromkeys(test.name for test in tests)}
    return names if all(len(group) > 1 for group in names.values()) else {}


def opposite_signs(by_line: dict[tuple[str, str], pd.Series]) -> Estimate:
    """Decide whether a name's difference is decided above zero on one task and below zero on the other."""
    tests = signs_by_name(by_line)
    if not tests:
        return NOTHING
    signs = [{test.sign for test in group} for group in tests.values()]
    verdict = YES if {1, -1} in signs else NO if all(s in ({1}, {-1}) for s in signs) else UNDECIDED
    text = "; ".join(f"{name}: {', '.join(map(str, group))}" for name, group in tests.items())
    return Estimate(NO_UNITS, text, verdict)


def by_cell(numbers: pd.DataFrame) -> dict[tuple[str, str], pd.Series]:
    """Return (workflow, task) -> seed -> number."""
    return {key: group.set_index("seed")["value"] for key, group in numbers.groupby(CELL, sort=False)}


def ranking(numbers: pd.DataFrame) -> Estimate:
    """Decide whether two workflows rank one way on one task and the other way on the other."""
    cells = by_cell(numbers)
    tasks = list(dict.fromkeys(task for _, task in cells))
    pairs = combinations(dict.fromkeys(workflow for workflow, _ in cells), 2)
    return opposite_signs({
        (f"{WORKFLOW_NAMES.get(a, a)} − {WORKFLOW_NAMES.get(b, b)}", task): cells[a, task] - cells[b, task]
        for (a, b), task in product(pairs, tasks)
        if (a, task) in cells and (b, task) in cells
    })  # fmt: skip


def gain_and_slip(numbers: pd.DataFrame) -> Estimate:
    """Decide whether a workflow lies above the single agent on one task and below it on the other."""
    cells = by_cell(differences(numbers))
    return opposite_signs({(WORKFLOW_NAMES.get(w, w), task): values for (w, task), values in cells.items()})


# ---- alarms


def monitor(numbers: pd.DataFrame) -> Estimate:
    """Estimate how much more often an alarm precedes a fall than it goes off in runs that do not end fallen. `value` is the alarm, `fallen` the fall."""
    fallen = numbers["fallen"].astype(bool)
    ahead, false = numbers.loc[fallen, "value"], numbers.loc[~fallen, "value"]
    text = f"ahead of {ahead.sum():.0f} of {len(ahead)} falls, and in {false.sum():.0f} of {len(false)} runs that do not end fallen"
    if ahead.empty or false.empty:
        return Estimate(NO_UNITS, text, NOT_MEASURED)
    interval = difference_of_shares(int(ahead.sum()), len(ahead), int(false.sum()), len(false))
    return Estimate(interval._replace(p=math.nan), f"{text}: {span(interval)}")  # Newcombe's interval decides


ESTIMATES: dict[str, Callable[..., Estimate]] = {
    function.__name__: function
    for function in (
        mean, mean_over_cells, share, shares, paired_shares, spread, variance, effect_sizes, ranking, gain_and_slip, monitor,
    )
}  # fmt: skip
"""Name -> kind of estimate."""
