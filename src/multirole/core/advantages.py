"""Advantages of rows. By default every turn carries its episode's, which TRL computes (`_generate_and_score_completions`).

The authors' released code compares rows instead of episodes: `MultiRoleGRPOConfig.advantage_group`.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.rows import Row

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Relative to their size, the difference of rewards that are equal: TRL keeps them in float32."""


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], eps: float = 1e-6, scale: bool = True
) -> list[float]:
    """Each reward minus its group's mean and, with `scale`, over (the group's sample standard deviation + eps).

    In double precision. A group of one keeps its reward, as in the released code (verl `compute_grpo_outcome_advantage`).
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
    """Whether no column of (G, F) has two numbers that differ by more than rounding; NaN differs from none."""
    high, low = values.nan_to_num(nan=-math.inf).amax(0), values.nan_to_num(nan=math.inf).amin(0)  # (F,)
    return bool((high - low <= ROUNDING * torch.maximum(high.abs(), low.abs())).logical_or(high < low).all())


def groups_of_equal_rewards(rewards: Tensor, weights: Tensor, num_generations: int, aggregation: str) -> Tensor:
    """Which episodes (N,) are of groups whose rewards (N, F), by function, teach nothing, so that their advantage is 0.

    With "sum_then_normalize" the weighted sums have to be equal, with "normalize_then_sum" each function's rewards. An episode that
    no function scores is left out of its group (TRL 1.16's `_generate_and_score_completions`, which leaves rounding noise of up
    to 1e-3 in such groups: it divides by their standard deviation of 0 plus 1e-4).
    """
    values = rewards.double().cpu()
    if aggregation == "sum_then_normalize":
        is_left_out = values.isnan().all(1, keepdim=True)
        values = (values * weights.double().cpu()).nansum(1, keepdim=True).masked_fill(is_left_out, math.nan)  # (N, 1)
    groups = values.view(-1, num_generations, values.size(1))
    return torch.tensor([is_equal(group) for group in groups]).repeat_interleave(num_generations).to(rewards.device)


def set_advantages(rows: Sequence[Row], args: MultiRoleGRPOConfig) -> None:
    """Set `advantage` of every row of an iteration; 0 where an episode was left out of scoring."""
    if args.advantage_group == "episode":
        for row in rows:
            row.advantage = row.episode.advantage
        return
    scored = [(row, row.episode.reward.value) for row in rows if row.episode.reward is not None]
    n, by_slot = args.num_generations, args.advantage_group == "slot"
    keys = [(*row.episode.group(n), row.turn.role, row.turn.slot * by_slot) for row, _ in scored]
    advantages = group_advantages([reward for _, reward in scored], keys, scale=args.scale_rewards != "none")
    for (row, _), advantage in zip(scored, advantages, strict=True):
        row.advantage = advantage
