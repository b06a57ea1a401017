"""Intervals and tests over seeds; the paper had one seed and none. The rules, such as the margin, stand in `claims.yaml`.

The unit is a seed, whose number is its mean over validation problems, the same for all seeds of a cell, so that the noise of an
evaluation is part of the spread between seeds. Statements over several cells have the
cell as their unit, whose number is its mean over seeds: with as many seeds in every cell, that is the mixed model with cells as random
effects, with cells - 1 degrees of freedom. All intervals are Student's t.
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import yaml
from scipy.stats import nct, t
from statsmodels.stats.multitest import multipletests

RULES = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))["rules"]
ALPHA, MARGIN = RULES["alpha"], RULES["margin"]


class Interval(NamedTuple):
    """A mean over units with its t interval; `p` is of the mean against 0, `p_match` of |mean| >= `MARGIN` (TOST).

    All but the mean are NaN for a single unit.
    """

    mean: float
    low: float
    high: float
    p: float
    p_match: float
    sd: float
    seeds: int


def t_interval(values: pd.Series | np.ndarray | list[float]) -> Interval:
    """The mean of one number per unit and its interval."""
    values = np.asarray(values, float)
    n, mean = len(values), float(values.mean()) if len(values) else math.nan
    if n < 2:
        return Interval(mean, *[math.nan] * 5, n)
    sd = float(values.std(ddof=1))
    error = max(sd / math.sqrt(n), 1e-12)
    half = t.ppf(1 - ALPHA / 2, n - 1) * error
    p = 2 * t.sf(abs(mean) / error, n - 1)
    return Interval(mean, mean - half, mean + half, float(p), float(t.sf((MARGIN - abs(mean)) / error, n - 1)), sd, n)


def crossed_interval(values: np.ndarray) -> Interval:
    """The mean of `values` (seeds, problems) with its interval over other seeds and other problems, without tests.

    Seeds and problems are crossed random effects: the variance of the mean is that of seeds' means plus that of problems' means less
    what both share, from mean squares (Cornfield and Tukey 1956), with Satterthwaite's degrees of freedom. Never narrower than over seeds
    alone, as estimates of such sums can be.
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
    if squares[1] > squares[2]:  # or problems' means differ no more than chance makes them
        half = t.ppf(1 - ALPHA / 2, total**2 / (squares**2 / df).sum()) * math.sqrt(total / values.size)
    return interval._replace(low=min(interval.low, interval.mean - half), high=max(interval.high, interval.mean + half))


def difference(after: pd.Series, before: pd.Series) -> Interval:
    """The mean of `after` minus `before`, paired by seed, of the seeds that have both; NaN where none has."""
    return t_interval((after - before).dropna())


def untested(interval: Interval) -> Interval:
    """The interval without its tests, which then count in no correction."""
    return interval._replace(p=math.nan, p_match=math.nan)


ALL = "all cells"
"""What the lines that pool cells have for their workflow, or their run's name begins with."""


def corrected(table: pd.DataFrame) -> pd.DataFrame:
    """Add `p_holm` and `p_match_holm` to rows of numbers: Holm's correction over the differences and changes of the table.

    Lines that pool cells are a family of their own. Only differences of accuracies can be equivalent: `MARGIN` is in points.
    """
    table = table.assign(p_holm=np.nan, p_match_holm=np.nan)
    nothing = pd.Series("", table.index)
    is_pooled = (table.get("workflow", nothing) == ALL) | table.get("run", nothing).str.startswith(ALL)
    units = {"p": ("difference", "change"), "p_match": ("difference",)}
    for name, tested in units.items() if "p" in table else ():
        for members in (is_pooled, ~is_pooled):
            family = members & table["unit"].isin(tested) & table[name].notna()
            if family.any():
                table.loc[family, f"{name}_holm"] = multipletests(table.loc[family, name], ALPHA, "holm")[1]
    return table


def seeds_needed(sd: float, effect: float) -> int | None:
    """Pairs of seeds with which a paired t test finds an effect with probability `power`; None if 1,000 are too few."""
    for n in range(2, 1001):
        limit, shift = t.ppf(1 - ALPHA / 2, n - 1), effect / max(sd, 1e-12) * math.sqrt(n)
        other_tail = np.nan_to_num(nct.cdf(-limit, n - 1, shift))  # scipy has NaN where it is next to nothing
        if shift > 30 or nct.sf(limit, n - 1, shift) + other_tail >= RULES["power"]:
            return n
    return None


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
