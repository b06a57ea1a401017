"""Compute group-relative advantages. Every turn has the advantage of its episode, as TRL computes it.

TRL's method is `_generate_and_score_completions`. Credit estimators compute others from the same rewards, with the functions for groups of any
size that are here.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence

import torch
from torch import Tensor

from multirole.types import Episode
from multirole.update.rows import Row

REWARD_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Largest relative difference of two rewards that count as equal: TRL stores rewards in float32."""


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], eps: float = 1e-6) -> list[float]:
    """Return each reward minus its group's mean, divided by (the group's sample standard deviation + eps).

    Computed in float64. The reward of a group of one stays as it is, as in the released code (verl `compute_grpo_outcome_advantage`).
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    advantages = torch.tensor(rewards, dtype=torch.float64)  # (N,)
    for indices in members.values():
        reward_G = advantages[indices]  # (G,)
        if len(indices) > 1 and is_equal(reward_G[:, None]):
            advantages[indices] = 0.0
        elif len(indices) > 1:
            advantages[indices] = (reward_G - reward_G.mean()) / (reward_G.std() + eps)
    return advantages.tolist()


def compared(values: Sequence[float], groups: Sequence[Hashable], keeps_lone: bool = False) -> list[float]:
    """Return (value - mean) / (std + 1e-6) within its group; a value alone in its group gives 0, or itself with `keeps_lone`."""
    sizes = Counter(groups)
    return [
        advantage if sizes[group] > 1 or keeps_lone else 0.0
        for advantage, group in zip(group_advantages(values, groups), groups, strict=True)
    ]


def compared_outcomes(rows: Sequence[Row], keys: Sequence[Hashable], keeps_lone: bool = False) -> list[float]:
    """Return each row's reward compared (`compared`) with those of the rows with the same key; 0 without a reward."""
    rewards = [row.episode.reward_of(row.turn) for row in rows]
    scored = [i for i, reward in enumerate(rewards) if not math.isnan(reward)]
    values = compared([rewards[i] for i in scored], [keys[i] for i in scored], keeps_lone)
    return spread(values, scored, len(rows))


def compared_grades(rows: Sequence[Row], indices: Sequence[int], num_generations: int) -> list[float]:
    """Return the advantage of being right (1 or 0) of the rows at `indices`, within the row's (problem, role, round) group."""
    keys = [(*rows[i].episode.group(num_generations), rows[i].turn.role, rows[i].turn.round) for i in indices]
    return compared([float(bool(rows[i].turn.is_right)) for i in indices], keys)


def spread(values: Sequence[float], indices: Sequence[int], n: int) -> list[float]:
    """Return a list of `n` numbers with `values` at `indices` and 0 elsewhere."""
    result = [0.0] * n
    for i, value in zip(indices, values, strict=True):
        result[i] = value
    return result


def outcome(episode: Episode) -> float:
    """Return an episode's reward, NaN if it has none."""
    return math.nan if episode.reward is None else episode.reward.value


def mean(values: Collection[float]) -> float:
    """Return the mean of numbers."""
    return sum(values) / len(values)


def is_equal(values: Tensor) -> bool:
    """Return whether the numbers in each column of (G, F) agree up to rounding; NaN agrees with every number."""
    high, low = values.nan_to_num(nan=-math.inf).amax(0), values.nan_to_num(nan=math.inf).amin(0)  # (F,)
    return bool((high - low <= REWARD_ROUNDING * torch.maximum(high.abs(), low.abs())).logical_or(high < low).all())


def groups_of_equal_rewards(rewards: Tensor, weights: Tensor, num_generations: int, aggregation: str) -> Tensor:
    """Return a mask (N,) of the episodes whose group has equal rewards, so that their advantage must be exactly 0.

    `rewards` (N, F) has a column for each reward function. With "sum_then_normalize" the weighted sums must be equal, with
    "normalize_then_sum" the rewards of each function. An episode that no function scores is ignored. TRL 1.16
    (`_generate_and_score_completions`) leaves rounding noise of up to 1e-3 in such groups: it divides by their standard
    deviation of 0 plus 1e-4.
    """
    values = rewards.double().cpu()
    if aggregation == "sum_then_normalize":
        is_left_out = values.isnan().all(1, keepdim=True)
        values = (values * weights.double().cpu()).nansum(1, keepdim=True).masked_fill(is_left_out, math.nan)  # (N, 1)
    groups = values.view(-1, num_generations, values.size(1))
    return torch.tensor([is_equal(group) for group in groups]).repeat_interleave(num_generations).to(rewards.device)
