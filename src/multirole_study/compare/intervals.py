"""Compute intervals and tests over seeds (the paper has one seed and no intervals). `claims.yaml` has the rules, such as the margin.

The unit is a seed. Its number is the mean over validation problems, which are the same for all seeds of a cell, so that evaluation
noise is part of the spread between seeds. Statements over several cells have the cell as their unit, and its number is its mean
over seeds: with equally many seeds in every cell, that is the mixed model with cells as random effects and cells - 1 degrees
of freedom. Intervals of means are Student's t; those of counts are exact, or Newcombe's for a difference.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import binom, binomtest, fisher_exact, nct, pearsonr, permutation_test, rankdata, t
from statsmodels.stats.proportion import confint_proportions_2indep

from multirole_study.compare.rules import ALPHA, MARGIN, RULES

SMALLEST_SD = 1e-9
"""Numbers that spread less are equal up to rounding. Accuracies on few problems can be, in few seeds."""
PERMUTATIONS = 9999
"""The largest number of permutations in a rank correlation's test; if more are possible, so many are drawn at random."""


class Interval(NamedTuple):
    """A mean over units with its 95 % interval; `p` tests the mean against 0 on both sides, `p_match` tests |mean| >= margin (TOST).

    For a single unit everything except the mean is NaN. Units that are all equal have an `sd` of 0, but no bounds and no p either: they do not
    say how far other units would differ.
    """

    mean: float
    low: float
    high: float
    p: float
    p_match: float
    sd: float
    seeds: int


NO_UNITS = Interval(math.nan, math.nan, math.nan, math.nan, math.nan, math.nan, 0)
"""The interval of nothing."""


# ---- means


def t_interval(values: pd.Series | np.ndarray | list[float], margin: float = MARGIN) -> Interval:
    """Return the mean of one number per unit, with its interval. `margin` is that of equivalence, in the unit of the values."""
    values = np.asarray(values, float)
    n, mean = len(values), float(values.mean()) if len(values) else math.nan
    if n < 2:
        return NO_UNITS._replace(mean=mean, seeds=n)
    sd = float(values.std(ddof=1))
    if sd < SMALLEST_SD:
        return NO_UNITS._replace(mean=mean, sd=0.0, seeds=n)
    error = sd / math.sqrt(n)
    half = t.ppf(1 - ALPHA / 2, n - 1) * error
    p = 2 * t.sf(abs(mean) / error, n - 1)
    return Interval(mean, mean - half, mean + half, float(p), float(t.sf((margin - abs(mean)) / error, n - 1)), sd, n)


def crossed_interval(values: np.ndarray) -> Interval:
    """Return the mean of `values` (seeds, problems), with an interval for other seeds and other problems, without tests.

    Seeds and problems are crossed random effects: the variance of the mean is that of the seeds' means plus that of the problems'
    means minus the shared part, from mean squares (Cornfield and Tukey 1956), with Satterthwaite's degrees of freedom. The interval
    is never narrower than that over seeds, which an estimate of such a sum could be.
    """
    seeds, problems = values.shape
    interval = untested(t_interval(values.mean(axis=1)))
    if seeds < 2:
        return interval
    by_seed, by_problem = values.mean(axis=1, keepdims=True), values.mean(axis=0, keepdims=True)
    effects = (by_seed - interval.mean, by_problem - interval.mean, values - by_seed - by_problem + interval.mean)
    sizes = np.array([problems, seeds, 1])
    df = np.array([seeds - 1, problems - 1, (seeds - 1) * (problems - 1)])
    squares = sizes * [(effect**2).sum() for effect in effects] / df
    total = squares @ (1, 1, -1)
    half = math.nan
    if squares[1] > squares[2]:  # otherwise problems' means differ no more than by chance
        half = t.ppf(1 - ALPHA / 2, total**2 / (squares**2 / df).sum()) * math.sqrt(total / values.size)
    # fmin and fmax ignore NaN: seeds that are all equal have no bounds, and problems may have none
    low, high = np.fmin(interval.low, interval.mean - half), np.fmax(interval.high, interval.mean + half)
    return interval._replace(low=float(low), high=float(high))


def difference(after: pd.Series, before: pd.Series) -> Interval:
    """Return the mean of `after` minus `before`, paired by seed, over the seeds that have both; NaN if there are none."""
    return t_interval((after - before).dropna())


def untested(interval: Interval) -> Interval:
    """Return the interval without its tests, which are then excluded from corrections."""
    return interval._replace(p=math.nan, p_match=math.nan)


def resampled(values: np.ndarray, statistic: Callable[[np.ndarray], float]) -> Interval:
    """Return a statistic of `values` (seeds, ...) with its 95 % percentile interval over seeds drawn with replacement. Every call draws the same seeds."""
    rng = np.random.default_rng(0)
    draws = rng.integers(len(values), size=(RULES["resamples"], len(values)))
    low, high = np.nanquantile([statistic(values[draw]) for draw in draws], [ALPHA / 2, 1 - ALPHA / 2])
    return NO_UNITS._replace(mean=statistic(values), low=float(low), high=float(high), seeds=len(values))


def seeds_needed(sd: float, effect: float) -> int | None:
    """Return the pairs of seeds that a paired t test needs to find an effect with probability `power`; None if more than 1,000."""
    for n in range(2, 1001):
        limit, shift = t.ppf(1 - ALPHA / 2, n - 1), effect / max(sd, 1e-12) * math.sqrt(n)
        other_tail = np.nan_to_num(nct.cdf(-limit, n - 1, shift))  # scipy returns NaN if it is close to 0
        if shift > 30 or nct.sf(limit, n - 1, shift) + other_tail >= RULES["power"]:
            return n
    return None


# ---- counts of runs


def exact_share(count: int, n: int) -> Interval:
    """Return count / n with its exact (Clopper and Pearson's) interval, without tests; NaN for no runs."""
    if not n:
        return NO_UNITS
    low, high = binomtest(count, n).proportion_ci(1 - ALPHA)
    return NO_UNITS._replace(mean=count / n, low=float(low), high=float(high), seeds=n)


def difference_of_shares(a: int, n: int, b: int, m: int) -> Interval:
    """Return a / n - b / m with Newcombe's interval, and the p of Fisher's exact test: twice that of the smaller side; NaN for no runs of either."""
    if not (n and m):
        return NO_UNITS
    low, high = confint_proportions_2indep(a, n, b, m, method="newcomb", alpha=ALPHA)
    p = min(1.0, 2 * min(one_sided_fisher(a, b, n, m)))
    return NO_UNITS._replace(mean=a / n - b / m, low=float(low), high=float(high), p=p, seeds=n)


def mcnemar_p(differences: pd.Series | np.ndarray | list[int]) -> float:
    """Return the two-sided p of McNemar's exact test, from the differences of paired outcomes: 1 where only the first of a pair shows the pattern, -1, or 0."""
    signs = np.sign(np.asarray(differences, float))
    apart = int(abs(signs).sum())
    return float(binomtest(int((signs > 0).sum()), apart).pvalue) if apart else 1.0


def one_sided_fisher(a: int, b: int, n: int, m: int) -> tuple[float, float]:
    """Return the p of a / n above b / m, and of a / n below b / m."""
    outcomes = [[a, n - a], [b, m - b]]
    return float(fisher_exact(outcomes, "greater")[1]), float(fisher_exact(outcomes, "less")[1])


def chance_to_decide(share: float, other: float, n: int, level: float) -> float:
    """Return the probability that Fisher's one-sided test of n runs each decides that `other` is larger, from all of its outcomes."""
    likely = [[float(binom.pmf(count, n, rate)) for count in range(n + 1)] for rate in (share, other)]
    pairs = [(b, a) for b in range(n + 1) for a in range(n + 1)]
    return sum(likely[0][b] * likely[1][a] for b, a in pairs if one_sided_fisher(a, b, n, n)[0] < level)


# ---- ranks


def rank_correlation(x: list[float], y: list[float]) -> tuple[float, float]:
    """Return Spearman's correlation and its two-sided p by permutation, exact if there are at most `PERMUTATIONS` permutations."""
    ranks = rankdata(y)

    def statistic(permuted: np.ndarray, axis: int) -> np.ndarray:
        return pearsonr(permuted, np.broadcast_to(ranks, permuted.shape), axis=axis).statistic

    test = permutation_test(
        (rankdata(x),), statistic, permutation_type="pairings", n_resamples=PERMUTATIONS, rng=np.random.default_rng(0)
    )
    return float(test.statistic), float(test.pvalue)
