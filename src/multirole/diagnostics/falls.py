"""When validation accuracy falls: the one definition that the paper's tables, the alarms' benchmark and the inspector share."""

from typing import NamedTuple

import pandas as pd

FALL = 0.05
"""Fraction of the validation problems."""


class Fall(NamedTuple):
    """A run's first fall: the evaluated steps before and at it, and whether the run ends without recovering."""

    before: int
    at: int
    is_terminal: bool


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
