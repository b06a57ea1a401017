"""Rewards of single roles and turns: spread what reward functions return over the turns, and compare it within each role.

A reward function returns, for each episode, a number, a dict from roles to numbers, or a list with a number for each turn. A number is the
reward of every turn, and the number of a role that of all its turns. Where no function returns a dict or a list, TRL's advantage of the episode
is that of all its turns, and nothing here is computed. With equal numbers for all turns, both give the same advantages, bit for bit.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from multirole.credit.advantages import groups_of_equal_rewards
from multirole.credit.estimator import CreditEstimator
from multirole.types import Episode
from multirole.update.processes import gather_objects

OfTurns = list[list[float] | None]
"""For each episode, the rewards of its turns by one function, NaN without one; None where the function returned one number for the episode."""


class TurnRewards:
    """Collects what the reward functions returned for single turns, while TRL calls them."""

    def __init__(self) -> None:
        self._of_function: dict[int, OfTurns] = {}

    def recorder(self, index: int) -> Callable[[OfTurns], None]:
        """Return what the function with this index reports to (`inputs.reward_functions.checked_reward`)."""

        def record(of_turns: OfTurns) -> None:
            self._of_function[index] = of_turns

        return record

    def take(self, episodes: Sequence[Episode], rewards: Tensor) -> list[Tensor] | None:
        """Collective: return the rewards (T, F) of each episode's turns, NaN without one; None if no function of any process rewards turns.

        `episodes` are those that this process has scored, and `rewards` (N, F) theirs, which all turns get from a function that returned one number.
        """
        collected, self._of_function = self._of_function, {}
        is_any = any(values is not None for of_turns in collected.values() for values in of_turns)
        if not any(gather_objects(is_any)):
            return None
        of_episodes = []
        for i, (episode, row) in enumerate(zip(episodes, rewards.cpu(), strict=True)):
            values = row.expand(len(episode.turns), -1).clone()  # (T, F)
            for function, of_turns in collected.items():
                if (of_episode := of_turns[i]) is not None and episode.failure is None:
                    values[:, function] = torch.tensor(of_episode, dtype=values.dtype)
            of_episodes.append(values)
        return of_episodes


def weighted(rewards: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums (...) of the functions' rewards (..., F), as TRL adds them; NaN where no function has one."""
    flat = rewards.reshape(-1, rewards.size(-1))
    sums = (flat * weights.to(flat)).nansum(1).masked_fill(flat.isnan().all(1), torch.nan)
    return sums.view(rewards.shape[:-1])


def role_advantages(
    of_turns: Sequence[Tensor], roles: Sequence[Sequence[str]], weights: Tensor, num_generations: int, scale_rewards: str, aggregation: str
) -> tuple[list[list[float]], float]:  # fmt: skip
    """Return the advantages of each episode's turns, compared within their role, and the share of (episode, role) pairs in groups of equal rewards.

    TRL's advantage (`_generate_and_score_completions`), once for each role: an episode's reward is the mean over the role's turns, and the mean M of
    a group is over its episodes with such a turn. A turn's advantage is (r - M) / (std + 1e-4), where the variance is the mean over these
    episodes of their turns' mean squared distance to M, times n / (n - 1). So an episode counts once, however many turns the role took in it; and
    within a role and a group, the episodes' mean advantages sum to zero. A turn without a reward, and a role with a turn in one episode only, get 0.

    Args:
        of_turns: rewards (T, F) of each episode's turns by function, NaN without one; the episodes are in groups of `num_generations`.
        roles: the roles of each episode's turns.
        weights: (F,), of the functions.
        scale_rewards: TRL's: "group", "batch" or "none".
        aggregation: TRL's `multi_objective_aggregation`.
    """
    advantages = [[0.0] * len(turns) for turns in roles]
    n_equal = n_pairs = 0
    for role in dict.fromkeys(itertools.chain.from_iterable(roles)):
        places = [[i for i, name in enumerate(turns) if name == role] for turns in roles]
        n_slots = max(map(len, places))
        rewards = torch.full((len(roles), n_slots, len(weights)), torch.nan, device=weights.device)  # (N, S, F)
        for e, indices in enumerate(places):
            rewards[e, : len(indices)] = of_turns[e][indices]
        compared = _compared(rewards, weights, num_generations, scale_rewards, aggregation)  # (N, S)
        is_equal = groups_of_equal_rewards(rewards.flatten(0, 1), weights, num_generations * n_slots, aggregation)
        compared = compared.masked_fill(is_equal.view_as(compared), 0.0)
        has_turn = torch.tensor([bool(indices) for indices in places], device=weights.device)
        n_equal += int((is_equal.view_as(compared)[:, 0] & has_turn).sum())
        n_pairs += int(has_turn.sum())
        for e, indices in enumerate(places):
            for i, advantage in zip(indices, compared[e].tolist(), strict=False):
                advantages[e][i] = advantage
    return advantages, n_equal / max(1, n_pairs)


def _compared(rewards: Tensor, weights: Tensor, n: int, scale_rewards: str, aggregation: str) -> Tensor:
    """Return the advantages (N, S) of one role's turns from their rewards (N, S, F), NaN where an episode has fewer; groups of `n` episodes."""
    if aggregation == "sum_then_normalize":
        values = weighted(rewards, weights)[..., None]  # (N, S, 1)
        deviation, std = _deviation(values, n)
        if scale_rewards == "batch":
            std = _deviation(values, len(values))[1]
        if scale_rewards != "none":
            deviation = deviation / (std + 1e-4)
        return deviation[..., 0].nan_to_num(nan=0.0)
    deviation, std = _deviation(rewards, n)
    sums = weighted(deviation / (std + 1e-4), weights)[..., None]  # (N, S, 1)
    deviation, std = _deviation(sums, len(sums))
    return (deviation / (std + 1e-4))[..., 0].nan_to_num(nan=0.0)


def _deviation(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the distances (N, S, K) of values from the mean of their group of `n` episodes, and its standard deviation (N, 1, K), by TRL's `nanstd`."""

    def grouped(of_episodes: Tensor) -> Tensor:
        return of_episodes.view(-1, n, of_episodes.size(-1))  # (P, n, K)

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(n, dim=0)[:, None]  # (N, 1, K)

    of_episodes = _mean_over_turns(values)  # (N, K)
    count = (~grouped(of_episodes).isnan()).sum(1)  # (P, K)
    deviation = values - spread(grouped(of_episodes).nanmean(1))
    deviation = deviation.masked_fill(spread(count < 2), 0.0)  # an episode alone has nothing to be compared with
    variance = grouped(_mean_over_turns(deviation**2)).nanmean(1)
    correction = torch.where(count > 1, count / (count - 1), torch.nan)
    return deviation, spread(torch.sqrt(variance * correction))


def _mean_over_turns(values: Tensor) -> Tensor:
    """Return the mean (N, K) over turns of values (N, S, K), NaN without one. It is exact where an episode's values are equal."""
    first = values.gather(1, (~values.isnan()).int().argmax(1, keepdim=True))  # (N, 1, K)
    return (first + (values - first).nanmean(1, keepdim=True))[:, 0]


def check_one_reward(estimators: Iterable[object]) -> None:
    """Raise ValueError for an estimator that is defined for one reward of the episode only."""
    for estimator in estimators:
        if isinstance(estimator, CreditEstimator) and estimator.why_one_reward:
            raise ValueError(
                f"A reward function rewards single roles or turns, but {type(estimator).__name__} {estimator.why_one_reward}. Return one number for "
                "each episode, or use another `credit`, such as 'outcome' or 'agent'."
            )
