"""The paper's credit: the outcome of the episode."""

from collections.abc import Sequence

from multirole.callbacks import Trainer
from multirole.credit.estimator import CreditEstimator
from multirole.update.rows import Row


class OutcomeCredit(CreditEstimator):
    """A = (R - mean) / (std + 1e-4) over the n episodes of a problem, TRL's advantage, for every turn of the episode.

    The paper's credit (section 4). The loss is a mean over turns, so it has no factor 1/T: this is also Dr. MAMR's first change (arXiv:2511.02303;
    `mean_over_turns` undoes it). Needs no grades and no replays, costs nothing, and allows older weights.
    """

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        return [row.advantage for row in rows]
