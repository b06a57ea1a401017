"""Reward each turn for being right, in addition to the episode's reward, for roles that can degrade without changing the outcome."""

from collections.abc import Sequence

from multirole.callbacks import Trainer
from multirole.credit.advantages import compared_grades, spread
from multirole.credit.estimator import CreditEstimator
from multirole.update.rows import Row


class ProcessReward(CreditEstimator):
    """A + `weight` times the advantage of being right (1 or 0) within the turn's (problem, role, round) group (`process_reward`).

    A is what `credit` estimates. The second advantage is 0 for turns without a grade, for groups of one, and for episodes without a reward, on
    which nothing is trained. Needs grades and no replays, costs the grading of every turn, and allows older weights.
    """

    needs_grades = True

    def __init__(self, weight: float) -> None:
        if not (isinstance(weight, (int, float)) and weight >= 0):
            raise ValueError(f"`process_reward` must be a weight of 0 or more, got {weight!r}.")
        self.weight = weight

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        known = [i for i, row in enumerate(rows) if row.turn.is_right is not None and row.episode.reward is not None]
        process = spread(compared_grades(rows, known, trainer.args.num_generations), known, len(rows))
        return [row.advantage + self.weight * advantage for row, advantage in zip(rows, process, strict=True)]
