"""Advantages of rows: which rewards are compared (`advantage_group`) and how they are normalised (`advantage_norm`).

The default, one value per episode, is TRL's own (`_generate_and_score_completions`: n episodes of a problem, eps 1e-4).
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch

from multirole.core.rows import Row
from multirole.core.types import Episode
from multirole.experiment.cell import Cell


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], eps: float = 1e-6, norm: str = "group"
) -> list[float]:
    """Each reward against its group, in double precision.

    "group" and "agent": (reward - mean) / (std + eps), std being the sample standard deviation (ddof=1). "none": reward - mean.
    "leave_one_out": reward - mean of the other members. A group of one has nothing to be compared with and gets 0, but with "group"
    it keeps its reward, as the released code does (verl `compute_grpo_outcome_advantage`).
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        reward_G = torch.tensor([rewards[i] for i in indices], dtype=torch.float64)  # (G,)
        n, deviation = len(indices), reward_G - reward_G.mean()  # (G,)
        if n == 1:
            advantage_G = reward_G if norm == "group" else deviation
        elif norm == "none":
            advantage_G = deviation
        elif norm == "leave_one_out":
            advantage_G = deviation * n / (n - 1)  # r - (sum - r) / (n - 1)
        else:
            advantage_G = deviation / (reward_G.std() + eps)
        for i, advantage in zip(indices, advantage_G.tolist(), strict=True):
            advantages[i] = advantage
    return advantages


def group_of(row: Row, cell: Cell) -> tuple:
    """The rows whose rewards a row's is compared with; under "agent" they are those of its role instead."""
    key, turn = row.episode.group(cell.n_episodes), row.turn
    own = {"episode": (), "role": (turn.role,), "slot": (turn.role, turn.slot), "role_round": (turn.role, turn.round)}
    return (*key, *own[cell.advantage_group])


def with_advantages(rows: Sequence[Row], episodes: Sequence[Episode], cell: Cell) -> list[Row]:
    """The rows with their advantages, in their order."""
    advantages = row_advantages(rows, episodes, cell)
    if cell.process_reward:
        own = process_advantages(rows, cell)
        advantages = [a + cell.process_reward * b for a, b in zip(advantages, own, strict=True)]
    return [replace(row, advantage=advantage) for row, advantage in zip(rows, advantages, strict=True)]


def row_advantages(rows: Sequence[Row], episodes: Sequence[Episode], cell: Cell) -> list[float]:
    """One advantage per row, in their order. Under "episode" every turn carries its episode's."""
    rewards, norm = [row.episode.reward.value for row in rows], cell.advantage_norm
    if norm == "agent":
        return group_advantages(rewards, [row.turn.role for row in rows], norm=norm)
    if cell.advantage_group != "episode":
        return group_advantages(rewards, [group_of(row, cell) for row in rows], norm=norm)
    if norm == "group":
        return [row.episode.advantage for row in rows]
    values = group_advantages(
        [e.reward.value for e in episodes], [e.group(cell.n_episodes) for e in episodes], norm=norm
    )
    of_episode = {id(episode): value for episode, value in zip(episodes, values, strict=True)}
    return [of_episode[id(row.episode)] for row in rows]


def process_advantages(rows: Sequence[Row], cell: Cell) -> list[float]:
    """Whether each row's own turn was right, against its (problem, role, round) group.

    0 for turns that nobody can judge (`judging`) and for groups of one.
    """
    known = [i for i, row in enumerate(rows) if row.turn.is_right is not None]
    groups = [(*rows[i].episode.group(cell.n_episodes), rows[i].turn.role, rows[i].turn.round) for i in known]
    values = group_advantages([float(rows[i].turn.is_right) for i in known], groups)
    sizes, advantages = Counter(groups), [0.0] * len(rows)
    for i, group, value in zip(known, groups, values, strict=True):
        advantages[i] = value if sizes[group] > 1 else 0.0
    return advantages
