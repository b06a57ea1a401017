"""Reward each turn for being right, in addition to the episode's reward, for roles that can degrade without changing the outcome."""

from collections.abc import Callable

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.credit.estimators import compared, judge_episodes
from multirole.types import Episode
from multirole.update.rows import Row


class ProcessReward(MultiRoleCallback):
    """Callback that adds a second advantage: that of being right, within the turn's (problem, role, round) group.

    Args:
        weight: factor of the second advantage.
        judge: sets `is_right` of the turns of scored episodes; turns that it leaves at None get no second advantage, and neither do those
            of an episode without a reward.
    """

    def __init__(self, weight: float, judge: Callable[[list[Episode]], None]) -> None:
        self.weight, self.judge = weight, judge

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        judge_episodes(self.judge, episodes)

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        for row, advantage in zip(rows, process_advantages(rows, trainer.args.num_generations), strict=True):
            row.advantage = row.advantage + self.weight * advantage
        return rows


def process_advantages(rows: list[Row], n_episodes: int) -> list[float]:
    """Return the group-relative advantage of being right (1 or 0), within the row's (problem, role, round) group.

    It is 0 for turns that are not judged, for groups of one, and for episodes without a reward, on which nothing is trained.
    """
    known = [i for i, row in enumerate(rows) if row.turn.is_right is not None and row.episode.reward is not None]
    groups = [(*rows[i].episode.group(n_episodes), rows[i].turn.role, rows[i].turn.round) for i in known]
    values = compared([float(bool(rows[i].turn.is_right)) for i in known], groups)
    by_row = dict(zip(known, values, strict=True))
    return [by_row.get(i, 0.0) for i in range(len(rows))]
