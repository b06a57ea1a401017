"""Define the interval of a validation accuracy and its falls, for tables, benchmarks, the inspector and a run's progress lines."""

from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

Z = NormalDist().inv_cdf(0.975)

FALL = 0.05
"""Drop of accuracy that counts as a fall, as a fraction of the validation problems."""


class Fall(NamedTuple):
    """A run's first fall: the evaluated steps before and at it, and whether the run ends without recovering."""

    before: int
    at: int
    is_terminal: bool


def wilson(right: Any, n: Any) -> tuple[Any, Any]:
    """Return the 95 % Wilson interval of a fraction `right` / `n`, for numbers or arrays."""
    p, weight = right / n, 1 + Z * Z / n
    centre, half = p + Z * Z / (2 * n), Z * np.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return np.maximum((centre - half) / weight, 0), np.minimum((centre + half) / weight, 1)  # rounding passes them


def first_fall(accuracy: pd.Series) -> Fall | None:
    """Find the first fall in accuracies indexed by evaluated step (0 is the untrained model); None if there is none.

    A run falls at the first evaluation that lies `FALL` or more below the best one before it. The fall is terminal if the
    last evaluation, too, lies that far below the best.
    """
    fallen = accuracy <= accuracy.cummax() - FALL + 1e-9  # 0.95 - 0.05 is a little less than 0.9
    if not fallen.any():
        return None
    at = int(fallen.to_numpy().argmax())
    return Fall(int(accuracy.index[at - 1]), int(accuracy.index[at]), bool(fallen.iloc[-1]))
