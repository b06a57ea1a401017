"""Intervals and tests over per-problem outcomes; every number of the tables carries one (the paper had one seed and none).

Outcomes are (S, P): S seeds of one cell on the same P problems. Problems are resampled together in all seeds; with at least
`OUTER` seeds, seeds are resampled as well, as the outer level. An interval over three seeds knows of few ways to draw them,
and is too narrow rather than too wide.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.special import comb
from statsmodels.stats.contingency_tables import mcnemar as exact_mcnemar

OUTER = 3
N_BOOTSTRAP = 4000


class Interval(NamedTuple):
    """A mean with its 95 % percentile bootstrap interval, and what it is over."""

    mean: float
    low: float
    high: float
    seeds: int
    problems: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


@cache
def _draws(n_seeds: int, n_problems: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each seed (B, S) and each problem (B, P) is in each draw; the same draws for every number of equal size."""
    rng = np.random.default_rng(seed)
    problems = rng.multinomial(n_problems, np.full(n_problems, 1 / n_problems), size=N_BOOTSTRAP)
    seeds = np.ones((N_BOOTSTRAP, n_seeds))
    if n_seeds >= OUTER:
        seeds = rng.multinomial(n_seeds, np.full(n_seeds, 1 / n_seeds), size=N_BOOTSTRAP)
    return seeds.astype(float), problems.astype(float)


def bootstrap(values: np.ndarray, seed: int = 0) -> Interval:
    """95 % interval of the mean of (S, P) outcomes, or of paired differences of outcomes."""
    n_seeds, n_problems = values.shape
    seeds, problems = _draws(n_seeds, n_problems, seed)
    means = ((problems @ values.T) * seeds).sum(1) / (n_seeds * n_problems)  # (B,)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(values.mean()), float(low), float(high), n_seeds, n_problems)


def difference(after: np.ndarray, before: np.ndarray) -> Interval:
    """Interval of mean(after) - mean(before), paired by problem; by seed too, unless one of them has a single row."""
    if after.shape[0] != before.shape[0] and 1 not in (after.shape[0], before.shape[0]):
        n = min(after.shape[0], before.shape[0])  # a grid that is not finished: the seeds that both have
        after, before = after[:n], before[:n]
    return bootstrap(after - before)


def method(n_seeds: int) -> str:
    """How `bootstrap` makes its interval of so many seeds, for captions."""
    level = "seeds as the outer level and problems as the inner one" if n_seeds >= OUTER else "problems only"
    return f"95 % percentile bootstrap, {N_BOOTSTRAP:,} draws, {level}"


class McNemar(NamedTuple):
    """Discordant pairs of two cells on the same problems, and the exact two-sided p-value."""

    only_first: int
    only_second: int
    p: float


def mcnemar(first: np.ndarray, second: np.ndarray) -> McNemar:
    """Exact McNemar test of (S, P) outcomes, pairs pooled over seeds.

    Pooled pairs of the same problem are not independent: with several seeds the p-value is of this set of runs, and says
    nothing of new seeds.
    """
    first, second = first.astype(bool), second.astype(bool)
    table = [[(first & second).sum(), (first & ~second).sum()], [(~first & second).sum(), (~first & ~second).sum()]]
    return McNemar(int(table[0][1]), int(table[1][0]), float(exact_mcnemar(table, exact=True).pvalue))


def split_half_peak(correct: pd.DataFrame) -> np.ndarray:
    """(P,) outcomes of a run at a peak that was chosen without them.

    `correct` is problems x steps. The best trained step is chosen on every second problem and read on the others, and the
    other way round, so that each problem counts once and none chooses the checkpoint it is scored at.
    """
    trained = correct.loc[:, correct.columns > 0]
    outcomes = np.empty(len(correct))
    for half in (0, 1):
        chosen = trained.iloc[1 - half :: 2].mean().idxmax()
        outcomes[half::2] = trained[chosen].iloc[half::2]
    return outcomes


def pass_at_k(right: np.ndarray, n: int, k: int) -> np.ndarray:
    """Unbiased chance that one of k draws from n attempts, `right` (P,) of them right, is right (Chen et al. 2021)."""
    if not 1 <= k <= n:
        raise ValueError(f"k={k} of n={n} attempts cannot be drawn. Write a k from 1 to {n}.")
    return 1 - comb(n - right, k) / comb(n, k)
