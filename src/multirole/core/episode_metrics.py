"""What can be read off episodes and rows without the model: rewards, accuracy, and one role's numbers."""

import math

import torch

from multirole.core.rows import Row
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
