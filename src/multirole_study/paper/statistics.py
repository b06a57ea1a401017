"""Compute intervals and tests over seeds (the paper has one seed and no intervals). `claims.yaml` has the rules, such as the margin.

The unit is a seed. Its number is the mean over validation problems, which are the same for all seeds of a cell, so that evaluation
noise is part of the spread between seeds. Statements over several cells have the cell as their unit, and its number is its mean
over seeds: with equally many seeds in every cell, that is the mixed model with cells as random effects and cells - 1 degrees
of freedom. All intervals are Student's t.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml
from numpy.typing import ArrayLike
from scipy.stats import nct, t

RULES = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))["rules"]
ALPHA, MARGIN = RULES["alpha"], RULES["margin"]


SMALLEST_SD = 1e-9
"""Numbers that spread less are equal up to rounding. Accuracies on few problems can be, in few seeds."""


class Interval(NamedTuple):
    """A mean over units with its t interval; `p` tests the mean against 0, `p_match` tests |mean| >= `MARGIN` (TOST).

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


def t_interval(values: pd.Series | np.ndarray | list[float]) -> Interval:
    """Return the mean of one number per unit, with its interval."""
    values = np.asarray(values, float)
    n, mean = len(values), float(values.mean()) if len(values) else math.nan
    if n < 2:
        return Interval(mean, *[math.nan] * 5, n)
    sd = float(values.std(ddof=1))
    if sd < SMALLEST_SD:
        return Interval(mean, *[math.nan] * 4, 0.0, n)
    error = sd / math.sqrt(n)
    half = t.ppf(1 - ALPHA / 2, n - 1) * error
    p = 2 * t.sf(abs(mean) / error, n - 1)
    return Interval(mean, mean - half, mean + half, float(p), float(t.sf((MARGIN - abs(mean)) / error, n - 1)), sd, n)


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
    half = 0.0
    if squares[1] > squares[2]:  # otherwise problems' means differ no more than by chance
        half = t.ppf(1 - ALPHA / 2, total**2 / (squares**2 / df).sum()) * math.sqrt(total / values.size)
    # fmin and fmax, because seeds that are all equal have no bounds
    low, high = np.fmin(interval.low, interval.mean - half), np.fmax(interval.high, interval.mean + half)
    return interval._replace(low=float(low), high=float(high))


def difference(after: pd.Series, before: pd.Series) -> Interval:
    """Return the mean of `after` minus `before`, paired by seed, over the seeds that have both; NaN if there are none."""
    return t_interval((after - before).dropna())


def untested(interval: Interval) -> Interval:
    """Return the interval without its tests, which are then excluded from corrections."""
    return interval._replace(p=math.nan, p_match=math.nan)


ALL_CELLS = "all cells"
"""Workflow of the lines that pool cells, or the beginning of their run's name."""


def holm(p_values: ArrayLike) -> np.ndarray:
    """Return p-values after Holm's step-down correction, in the same order.

    As statsmodels' `multipletests(..., method="holm")`, which also collects garbage at every call: half a second with torch loaded.
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    result = np.empty_like(p)
    result[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return result


def corrected(table: pd.DataFrame) -> pd.DataFrame:
    """Add `p_holm` and `p_match_holm` to rows of numbers: Holm's correction over the differences and changes of the table.

    Lines that pool cells are a separate family. Only differences of accuracies can be equivalent: `MARGIN` is in points.
    """
    table = table.assign(p_holm=np.nan, p_match_holm=np.nan)
    nothing = pd.Series("", table.index)
    is_pooled = (table.get("workflow", nothing) == ALL_CELLS) | table.get("run", nothing).str.startswith(ALL_CELLS)
    units = {"p": ("difference", "change"), "p_match": ("difference",)}
    for name, tested in units.items() if "p" in table else ():
        for members in (is_pooled, ~is_pooled):
            family = members & table["unit"].isin(tested) & table[name].notna()
            if family.any():
                table.loc[family, f"{name}_holm"] = holm(table.loc[family, name])
    return table


def seeds_needed(sd: float, effect: float) -> int | None:
    """Return the pairs of seeds that a paired t test needs to find an effect with probability `power`; None if more than 1,000."""
    for n in range(2, 1001):
        limit, shift = t.ppf(1 - ALPHA / 2, n - 1), effect / max(sd, 1e-12) * math.sqrt(n)
        other_tail = np.nan_to_num(nct.cdf(-limit, n - 1, shift))  # scipy returns NaN if it is close to 0
        if shift > 30 or nct.sf(limit, n - 1, shift) + other_tail >= RULES["power"]:
            return n
    return None


def split_half_peak(correct: pd.DataFrame) -> np.ndarray:
    """Return the outcomes (P,) of a run at a peak that was chosen on other problems.

    `correct` is problems x steps. The best trained step is chosen on every second problem and evaluated on the others, and vice
    versa, so that each problem counts once and none chooses the checkpoint at which it is scored.
    """
    trained = correct.loc[:, correct.columns > 0]
    outcomes = np.empty(len(correct))
    for half in (0, 1):
        chosen = trained.iloc[1 - half :: 2].mean().idxmax()
        outcomes[half::2] = trained[chosen].iloc[half::2]
    return outcomes
