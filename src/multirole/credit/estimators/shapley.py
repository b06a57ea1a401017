"""Credit by the Shapley value of each role, from forks."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from peft import PeftModel

from multirole.callbacks import Trainer
from multirole.credit.advantages import compared, outcome
from multirole.credit.estimator import CreditEstimator
from multirole.inputs.adapters import check_base_alone
from multirole.rollout.forks import play_forks, trained_roles
from multirole.rollout.replay import Fork
from multirole.types import Episode
from multirole.update.rows import Row


class ShapleyCredit(CreditEstimator):
    """A = (phi - mean) / (std + 1e-6) over the n episodes of the problem; phi is the role's Shapley value (Shapley 1953) in the episode.

    The players are the trained roles; the base model plays the roles outside a coalition (`shapley_values`). Where one of the replays has no
    reward, the episode's rows get 0. The base's replies have their own seeds: with the roles' seeds, a new adapter, which equals the base, would be
    worth exactly 0 in every episode and would never be trained.

    Needs replays and no grades, and excludes older weights and adapters that take over a part of the base (PiSSA and its kind). An episode of
    r roles is replayed 2^r - 1 times.
    """

    replays_episodes = True
    why_one_reward = "divides one reward of the episode between its roles"

    def __init__(self) -> None:
        self.values: dict[int, dict[str, float]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: PeftModel, **_: Any) -> None:
        """Raise ValueError before training if the base alone is not the untrained model."""
        check_base_alone(model, "Use another `credit`, or another `init_lora_weights`.")

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        roles = trained_roles(trainer)
        coalitions = [frozenset(c) for size in range(len(roles)) for c in itertools.combinations(roles, size)]
        scored = [episode for episode in episodes if episode.reward is not None]
        forks = [
            Fork(episode, tuple(role for role in roles if role not in coalition), "base", 1)
            for episode in scored
            for coalition in coalitions
        ]
        played = play_forks(trainer, forks, trainer.state.global_step)
        self.values = {}
        for i, episode in enumerate(scored):
            replays = played[i * len(coalitions) : (i + 1) * len(coalitions)]
            if any(replay.reward is None for replay in replays):
                continue  # it failed, or its reward function left it out: there is no value
            rewards = [outcome(replay) for replay in replays]
            worth = dict(zip(coalitions, rewards, strict=True)) | {frozenset(roles): outcome(episode)}
            self.values[id(episode)] = shapley_values(worth, roles)

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> list[float]:
        n = trainer.args.num_generations
        advantage_of: dict[tuple[int, str], float] = {}
        episodes = {id(row.episode): row.episode for row in rows if id(row.episode) in self.values}
        groups = [episode.group(n) for episode in episodes.values()]
        for role in trained_roles(trainer):
            values = compared([self.values[key][role] for key in episodes], groups)
            advantage_of |= {(key, role): value for key, value in zip(episodes, values, strict=True)}
        self.values = {}
        return [advantage_of.get((id(row.episode), row.turn.role), 0.0) for row in rows]


def shapley_values(worth: Mapping[frozenset[str], float], players: Sequence[str]) -> dict[str, float]:
    """Return the Shapley value of each player (Shapley 1953): its marginal worth, averaged over the orders of joining.

    phi_i = sum over S without i of |S|! (n - |S| - 1)! / n! (v(S + i) - v(S)), with `worth` v of every subset of the n players.
    """
    n, values = len(players), dict.fromkeys(players, 0.0)
    for player in players:
        others = [other for other in players if other != player]
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for members in map(frozenset, itertools.combinations(others, size)):
                values[player] += weight * (worth[members | {player}] - worth[members])
    return values
