"""Credit with the factor 1/T of a mean over turns (ReMA, as Dr. MAMR states it)."""

from collections.abc import Sequence

from multirole.callbacks import Trainer
from multirole.credit.estimator import CreditEstimator
from multirole.update.rows import Row


class MeanOverTurnsCredit(CreditEstimator):
    """1/G sum_i 1/T_i sum_t A_i l_it, the objective with the 1/T_i that, as Dr. MAMR (arXiv:2511.02303) finds, rewards short episodes.

    The loss is a mean over all N rows, sum_it A_i l_it / N, which has no 1/T_i: the default is Dr. MAMR's objective already. This
    puts the factor back: each advantage times N / (G T_i), with T_i turns of the G episodes. Dr. MAMR's other terms, the causal influence
    of a step and the reward for restarts, are not implemented. Needs no grades and no replays, costs nothing, and allows older weights.
    """

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        turns: dict[int, int] = {}
        for row in rows:
            turns[id(row.episode)] = turns.get(id(row.episode), 0) + 1
        mean_turns = len(rows) / len(turns) if turns else 0.0
        return [row.advantage * mean_turns / turns[id(row.episode)] for row in rows]
