"""Tests of `claims.yaml` that compare all cells of a regime (`comparison`), each with its numbers as text.

A comparison takes the runs as one table, `Runs`, and returns a verdict with the numbers behind it; `claims.yaml` says when it holds.
"""

import math
from collections.abc import Callable
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import f
from statsmodels.stats.proportion import confint_proportions_2indep

from multirole_study.labels import WORKFLOW_NAMES, task_name
from multirole_study.paper.output import MISSING, formatted
from multirole_study.paper.statistics import ALPHA, RULES, holm, t_interval

FACTORS = ["workflow", "task", "arm"]


class Judged(NamedTuple):
    """A verdict and the numbers behind it as text."""

    verdict: str
    text: str


NOTHING = Judged(MISSING, MISSING)


def complete(numbers: pd.DataFrame) -> pd.DataFrame:
    """Return a table (seeds, cells) with one number per run, for the seeds that have every cell. Its columns are (workflow, task, arm); the arm is the policy."""
    return numbers.pivot_table("value", "seed", FACTORS).dropna()


def side(low: float, high: float) -> str:
    """Return the verdict on a difference that is claimed to be positive."""
    return "holds" if low > 0 else "fails" if high < 0 else "undecided"


def resampled(values: np.ndarray, statistic: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of a statistic of `values` (seeds, ...) over seeds drawn with replacement. Every call draws the same seeds."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(values), size=(RULES["resamples"], len(values)))
    low, high = np.nanquantile([statistic(values[draw]) for draw in draws], [ALPHA / 2, 1 - ALPHA / 2])
    return float(low), float(high)


# ---- variance


def spread(numbers: pd.DataFrame, claim: dict) -> Judged:
    """Decide whether cells differ, by an F test of equal means among cells with the same `within`, with seeds as blocks."""
    table = complete(numbers)
    if len(table) < RULES["least_seeds"]:
        return NOTHING
    explained = error = df = 0.0
    for _, group in table.T.groupby(claim["within"] or (lambda _: 0)):
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
    return Judged("holds" if p < ALPHA else "undecided", text)


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


def variance(numbers: pd.DataFrame, claim: dict) -> Judged:
    """Decide whether workflow and task explain more of the variance than policy."""
    table = complete(numbers)
    if len(table) < RULES["least_seeds"] or not table.to_numpy().any():
        return NOTHING
    values, factors = table.to_numpy(), levels_of(table.columns)
    cell_share, policy = shares_of_variance(values, factors)
    low, high = resampled(values, lambda drawn: float(np.subtract(*shares_of_variance(drawn, factors))))
    names = "workflow and task" if table.columns.get_level_values("task").nunique() > 1 else "workflow (one task)"
    text = f"{names} {cell_share:.2f}, policy {policy:.2f}, difference {cell_share - policy:.2f} [{low:.2f}, {high:.2f}], {len(table)} seeds"
    return Judged(side(low, high), text.replace("-", "−"))


def standardised(values: np.ndarray) -> np.ndarray:
    """Return the size of the mean of each column of `values` (seeds, columns) in standard deviations over seeds."""
    return abs(values.mean(axis=0)) / np.maximum(values.std(axis=0, ddof=1), 1e-12)


def effect_sizes(numbers: pd.DataFrame, claim: dict) -> Judged:
    """Decide whether the standardised IP − SP of entropy is smaller than those of chi2 and of the gradient norm."""
    table = numbers.pivot_table("value", "seed", ["metric", "workflow", "task"]).dropna()
    if len(table) < RULES["least_seeds"]:
        return NOTHING
    by_metric = table.T.groupby(level="metric").mean().T  # (seeds, 3)
    order = ["chi2", "grad_norm", "entropy"]

    def least_lead(values: np.ndarray) -> float:
        chi2, norm, entropy = standardised(values)
        return min(chi2, norm) - entropy

    values = by_metric[order].to_numpy()
    low, high = resampled(values, least_lead)
    text = "χ² {:.2f}, gradient norm {:.2f}, entropy {:.2f}".format(*standardised(values))
    text += f"; lead {least_lead(values):.2f} [{low:.2f}, {high:.2f}], {len(table)} seeds"
    return Judged(side(low, high), text.replace("-", "−"))


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


def signed(differences: dict[tuple[str, str], pd.Series]) -> list[Signed]:
    """Test the mean of every (name, task) -> one difference per seed, corrected together."""
    intervals = {key: t_interval(values.dropna()) for key, values in differences.items()}
    ps = holm([interval.p for interval in intervals.values()])
    return [Signed(*key, interval.mean, float(p)) for (key, interval), p in zip(intervals.items(), ps, strict=True)]


def signs_by_name(differences: dict[tuple[str, str], pd.Series]) -> dict[str, list[Signed]]:
    """Return the tested differences of each name, one per task; empty where a task is missing or seeds are few."""
    if not differences or any(values.count() < RULES["least_seeds"] for values in differences.values()):
        return {}
    tests = signed(differences)
    names = {name: [test for test in tests if test.name == name] for name in dict.fromkeys(test.name for test in tests)}
    return names if all(len(group) > 1 for group in names.values()) else {}


def opposite_signs(differences: dict[tuple[str, str], pd.Series]) -> Judged:
    """Decide whether a name's difference is decided above zero on one task and below zero on the other."""
    tests = signs_by_name(differences)
    if not tests:
        return NOTHING
    signs = [{test.sign for test in group} for group in tests.values()]
    decision = "holds" if {1, -1} in signs else "fails" if all(s in ({1}, {-1}) for s in signs) else "undecided"
    return Judged(decision, "; ".join(f"{name}: {', '.join(map(str, group))}" for name, group in tests.items()))


def by_cell(numbers: pd.DataFrame) -> dict[tuple[str, str], pd.Series]:
    """Return (workflow, task) -> seed -> number."""
    return {key: group.set_index("seed")["value"] for key, group in numbers.groupby(["workflow", "task"], sort=False)}


def ranking(numbers: pd.DataFrame, claim: dict) -> Judged:
    """Decide whether two workflows rank one way on one task and the other way on the other."""
    cells = by_cell(numbers)
    tasks = list(dict.fromkeys(task for _, task in cells))
    pairs = combinations(dict.fromkeys(workflow for workflow, _ in cells), 2)
    return opposite_signs({
        (f"{WORKFLOW_NAMES.get(a, a)} − {WORKFLOW_NAMES.get(b, b)}", task): cells[a, task] - cells[b, task]
        for (a, b), task in product(pairs, tasks)
        if (a, task) in cells and (b, task) in cells
    })  # fmt: skip


def gain_and_slip(numbers: pd.DataFrame, claim: dict) -> Judged:
    """Decide whether a workflow lies above the single agent on one task and below it on the other."""
    return opposite_signs({(WORKFLOW_NAMES.get(w, w), task): values for (w, task), values in by_cell(numbers).items()})


# ---- alarms


def monitor(numbers: pd.DataFrame, claim: dict) -> Judged:
    """Decide whether an alarm precedes falls more often than it goes off in runs that do not end fallen. `value` is the alarm, `fallen` the fall."""
    fallen = numbers["fallen"].astype(bool)
    ahead, false = numbers.loc[fallen, "value"], numbers.loc[~fallen, "value"]
    if numbers.empty:
        return NOTHING
    text = f"ahead of {ahead.sum():.0f} of {len(ahead)} falls, and in {false.sum():.0f} of {len(false)} runs that do not end fallen"
    if ahead.empty or false.empty:
        return Judged("not measured", text)
    low, high = confint_proportions_2indep(
        ahead.sum(), len(ahead), false.sum(), len(false), method="newcomb", alpha=ALPHA
    )
    lead = formatted(ahead.mean() - false.mean(), "difference")
    return Judged(side(low, high), f"{text}: {lead} [{formatted(low, 'difference')}, {formatted(high, 'difference')}]")


COMPARISONS: dict[str, Callable[[pd.DataFrame, dict], Judged]] = {
    "spread": spread,
    "variance": variance,
    "effect_sizes": effect_sizes,
    "ranking": ranking,
    "gain_and_slip": gain_and_slip,
    "monitor": monitor,
}
