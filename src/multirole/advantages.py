"""Advantages of `advantage_group="role"` and "slot": groups of rows, as in the released code.

The default, one value per episode, is TRL's own (`_generate_and_score_completions`: n episodes of a problem, eps 1e-4).
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch


def group_advantages(rewards: Sequence[float], groups: Sequence[Hashable], eps: float = 1e-6) -> list[float]:
    """(reward - mean) / (std + eps) within each group; std is the sample standard deviation (ddof=1).

    A group of one keeps its reward as its advantage, as the released code does (verl `compute_grpo_outcome_advantage`).
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        reward_G = torch.tensor([rewards[i] for i in indices], dtype=torch.float64)  # (G,)
        if len(indices) == 1:
            advantage_G = reward_G
        else:
            advantage_G = (reward_G - reward_G.mean()) / (reward_G.std() + eps)
        for i, advantage in zip(indices, advantage_G.tolist(), strict=True):
            advantages[i] = advantage
    return advantages
