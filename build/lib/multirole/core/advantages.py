"""Advantages of rows. By default every turn carries its episode's, which TRL computes (`_generate_and_score_completions`).

The authors' released code compares rows instead of episodes: `MultiRoleGRPOConfig.advantage_group`.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch

from multirole.core.config import MultiRoleGRPOConfig
from multirole.core.rows import Row


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
        if len(indices) > 1:
            reward_G = advantages[indices]  # (G,)
            advantages[indices] = (reward_G - reward_G.mean()) / (reward_G.std() + eps if scale else 1.0)
    return advantages.tolist()


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
