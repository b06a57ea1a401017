"""Compute group-relative advantages. Every turn has the advantage of its episode, as TRL computes it.

TRL's method is `_generate_and_score_completions`. A callback may change the advantages of rows (`MultiRoleCallback.on_rows`);
`group_advantages` computes them for groups of any size.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

REWARD_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Largest relative difference of two rewards that count as equal: TRL stores rewards in float32."""


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], eps: float = 1e-6, scale: bool = True
) -> list[float]:
    """Return each reward minus its group's mean, divided, if `scale`, by (the group's sample standard deviation + eps).

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
            advantages[indices] = (reward_G - reward_G.mean()) / (reward_G.std() + eps if scale else 1.0)
    return advantages.tolist()


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
