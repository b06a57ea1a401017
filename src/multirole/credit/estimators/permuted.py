"""Credit of a random episode: a placebo."""

import random
from collections.abc import Hashable, Sequence
from typing import Any

from multirole.callbacks import Trainer
from multirole.credit.estimator import CreditEstimator
from multirole.types import Episode
from multirole.update.rows import Row


class PermutedCredit(CreditEstimator):
    """A of a uniformly drawn episode of the group with a reward, itself included: a placebo for experiments, of no paper.

    The iteration seeds the draw of every group. The advantages have the size and the mean of `outcome`'s, but no correlation with the episode that they
    train. All turns of an episode get the same one. Needs no grades and no replays, costs nothing, and allows older weights.
    """

    why_one_reward = "gives all turns of an episode the advantage of another one"

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        groups: dict[Hashable, list[Episode]] = {}
        for episode in {id(row.episode): row.episode for row in rows if row.episode.reward is not None}.values():
            groups.setdefault(episode.group(trainer.args.num_generations), []).append(episode)
        advantage_of: dict[int, Any] = {}
        for group, episodes in groups.items():
            drawn = random.Random(repr((trainer.state.global_step, group))).sample(episodes, len(episodes))
            advantage_of |= {id(e): other.advantage for e, other in zip(episodes, drawn, strict=True)}
        return [advantage_of.get(id(row.episode), 0.0) for row in rows]
