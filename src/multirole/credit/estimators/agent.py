"""Credit by agent (Dr. MAS)."""

from collections.abc import Sequence

from multirole.callbacks import Trainer
from multirole.credit.advantages import compared_outcomes
from multirole.credit.estimator import CreditEstimator
from multirole.update.rows import Row


class AgentCredit(CreditEstimator):
    """A = (R - mu_k) / (sigma_k + 1e-6) over the problem's rows of agent k (Dr. MAS, arXiv:2602.08847).

    An agent is a role. A role with several turns in an episode enters the statistics once per turn, and a role that took a single
    turn keeps its reward, as in the authors' code. Needs no grades and no replays, costs nothing, and allows older weights.
    """

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        keys = [(*row.episode.group(trainer.args.num_generations), row.turn.role) for row in rows]
        return compared_outcomes(rows, keys, keeps_lone=True)
