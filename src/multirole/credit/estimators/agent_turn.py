"""Credit by agent and turn (AT-GRPO without its tree)."""

from collections.abc import Sequence

from multirole.callbacks import Trainer
from multirole.credit.advantages import compared_outcomes
from multirole.credit.estimator import CreditEstimator
from multirole.update.rows import Row


class AgentTurnCredit(CreditEstimator):
    """A = (R - mean) / (std + 1e-6) over the problem's turns of one role, slot and round (AT-GRPO, arXiv:2510.11062, on parallel episodes).

    After the first stage the turns of a group have different prompts, which the paper's tree sampling avoids (`branches`). The paper
    adds a local reward of each agent, which an outcome reward does not have. A group of one gets 0. Needs no grades and no replays, costs
    nothing, and allows older weights.
    """

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        n = trainer.args.num_generations
        keys = [(*row.episode.group(n), row.turn.role, row.turn.slot, row.turn.round) for row in rows]
        return compared_outcomes(rows, keys)
