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
from scipy.stats import t
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


def difference(after: pd.Series, before: pd.Series) -> Interval:
    """The mean of `after` minus `before`, paired by seed, of the seeds that have both; NaN where none has."""
    return t_interval((after - before).dropna())


def untested(found: Interval) -> Interval:
    """The interval without its tests, which then count in no correction."""
    return found._replace(p=math.nan, p_match=math.nan)


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
