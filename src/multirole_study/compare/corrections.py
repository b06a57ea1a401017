"""Correct p-values for the number of tests: Holm's step-down over a family, or over the differences of a table."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

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


def holm_over_declared(p_values: list[float]) -> list[float]:
    """Return p-values after Holm's correction over all declared lines; NaN, the p of a line without all its runs, counts as 1."""
    return list(holm(np.nan_to_num(p_values, nan=1.0)))


CORRECTIONS: dict[str, Callable[[list[float]], list[float]]] = {"holm": holm_over_declared, "none": list}
"""Name of a correction -> a function of the p-values of a family."""


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
