"""Credit of the joint return (MAGRPO)."""

from collections.abc import Sequence

from multirole.callbacks import Trainer
from multirole.credit.advantages import mean, outcome
from multirole.credit.estimator import CreditEstimator
from multirole.update.rows import Row


class JointReturnCredit(CreditEstimator):
    """A_t = R_t - mean(R_t) over the joint actions of a group, for every agent (MAGRPO, arXiv:2508.04652).

    The return R_t from turn t on is the outcome, the only reward of an episode. The mean is over the group's scored episodes with a trained turn,
    so this is `scale_rewards="none"` of TRL where every episode has one. Needs no grades and no replays, costs nothing, and allows older weights.
    """

    why_one_reward = "compares the joint return of all agents, which rewards of single roles are not"

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        episodes = list({id(row.episode): row.episode for row in rows if row.episode.reward is not None}.values())
        rewards = [outcome(episode) for episode in episodes]
        groups = [episode.group(trainer.args.num_generations) for episode in episodes]
        means = {group: mean([r for r, g in zip(rewards, groups, strict=True) if g == group]) for group in set(groups)}
        advantage_of = {id(e): r - means[g] for e, r, g in zip(episodes, rewards, groups, strict=True)}
        return [advantage_of.get(id(row.episode), 0.0) for row in rows]
