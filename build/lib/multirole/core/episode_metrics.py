"""What can be read off episodes and rows without the model: rewards, accuracy, and one role's numbers."""

import math

import torch

from multirole.core.rows import Row, loss_mass
from multirole.core.types import OVERFLOW, Episode


def mean_reward(episodes: list[Episode]) -> float:
    """Mean outcome reward of scored episodes; NaN where there is none."""
    values = [episode.reward.value for episode in episodes if episode.reward is not None]
    return sum(values) / len(values) if values else math.nan


def accuracy(episodes: list[Episode]) -> float | None:
    """Fraction of correct ones among scored episodes; None where the reward function does not say which are."""
    right = [episode.reward.is_correct for episode in episodes if episode.reward is not None]
    return None if None in right or not right else sum(map(bool, right)) / len(right)


def overflow_rate(episodes: list[Episode]) -> float:
    """Fraction of episodes that a prompt of more than `max_prompt_tokens` ended; they are scored on an empty answer."""
    return sum(e.answer is not None and e.answer.reason == OVERFLOW for e in episodes) / len(episodes)


def n_failed(episodes: list[Episode]) -> int:
    """Number of episodes whose workflow raised."""
    return sum(episode.failure is not None for episode in episodes)


def evaluation_advantages(rewards: list[float | None], num_generations: int) -> list[float]:
    """Each reward minus the mean of its problem's `num_generations` and over their standard deviation; 0 where that is 0 or unknown."""
    advantages = []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations]
        known = torch.tensor([reward for reward in group if reward is not None], dtype=torch.float64)  # (G,)
        spread = known.std().item() if len(known) > 1 else 0.0
        mean = known.mean().item() if spread else 0.0
        advantages += [0.0 if reward is None or not spread else (reward - mean) / spread for reward in group]
    return advantages


def surrogate_loss(episodes: list[Episode], advantages: list[float], loss_type: str) -> float:
    """The policy-gradient objective of episodes that were sampled under the present weights: minus the mean advantage of their turns.

    A mean over rows or over completion tokens, as `loss_type` has it. KL is not part of it.
    """
    rows = [
        (Row(e, turn, ""), advantage) for e, advantage in zip(episodes, advantages, strict=True) for turn in e.turns
    ]
    masses = [loss_mass([row], loss_type) for row, _ in rows]
    total = sum(m * advantage for m, (_, advantage) in zip(masses, rows, strict=True))
    return (0.0 - total) / max(1, sum(masses))


def text_metrics(rows: list[Row]) -> dict[str, float]:
    """What can be read off one role's rows without the model."""
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)  # (N,)
    return {
        "rows": len(rows),
        "tokens": sum(len(row.turn.completion_ids) for row in rows),
        "reward": mean_reward([row.episode for row in rows]),
        "advantage_mean": advantages.mean().item(),
        "advantage_abs": advantages.abs().mean().item(),
        "length_mean": sum(len(row.turn.completion_ids) for row in rows) / len(rows),
        "truncated_rate": sum(row.turn.finish_reason == "length" for row in rows) / len(rows),
        "unparsed_rate": sum(row.turn.outcome == "unparsed" for row in rows) / len(rows),
    }


def over_micro_batches(name: str, values: list[tuple[int, float]]) -> float:
    """One number of a metric's values by micro-batch, given as (completion tokens, value): the mean by tokens, or the extreme it names."""
    known = [(tokens, value) for tokens, value in values if tokens and not math.isnan(value)]
    if not known:
        return math.nan
    if name.endswith(("_min", "_max")):
        return (min if name.endswith("_min") else max)(value for _, value in known)
    return sum(tokens * value for tokens, value in known) / sum(tokens for tokens, _ in known)
