"""Pass the answers of episodes to TRL's reward functions as completions, and set their results on the episodes."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from multirole.credit.role_rewards import weighted
from multirole.types import Episode, Reward
from multirole.update.processes import gather_objects


def with_equal_columns(rows: list[dict]) -> list[dict]:
    """Return rows that all have the same columns, None where a row lacks one: TRL reads the column names of the first row."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [dict.fromkeys(names) | row for row in rows]


def answers_as_completions(prompts: list, episodes: list[Episode]) -> list:
    """Return the episodes' answers as TRL passes completions: texts, or a list of one message where the prompt is a conversation."""
    answers = [episode.answer.text if episode.answer else "" for episode in episodes]
    return [
        answer if isinstance(prompt, str) else [{"role": "assistant", "content": answer}]
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def leave_out_failed(rewards: Tensor, episodes: list[Episode]) -> None:
    """Set the rewards (N, F) of episodes whose workflow raised to NaN, in place. `rewards` are of all processes, `episodes` of this."""
    failed = itertools.chain.from_iterable(gather_objects([episode.failure is not None for episode in episodes]))
    rewards[torch.tensor(list(failed), device=rewards.device)] = math.nan


def set_rewards(
    episodes: list[Episode], rewards: Tensor, weights: Tensor, of_turns: Sequence[Tensor] | None = None
) -> None:
    """Set `reward` of episodes from their rewards (N, F) by function and the functions' weights (F,).

    An episode for which every function returned None (NaN) gets None. A [`Reward`] that a function has set keeps its reason. `of_turns` are
    the rewards (T, F) of each episode's turns, if a function rewards single turns.
    """
    values = (rewards * weights.to(rewards.device)).nansum(1).tolist()
    for episode, value, is_left_out in zip(episodes, values, rewards.isnan().all(1).tolist(), strict=True):
        if is_left_out:
            episode.reward = None
        elif episode.reward is None:
            episode.reward = Reward(value)
        elif not math.isclose(episode.reward.value, value, rel_tol=1e-6):  # TRL's rewards are float32
            episode.reward = replace(episode.reward, value=value)
        if episode.reward is not None and episode.answer is not None and episode.answer.reason is not None:
            episode.reward = replace(episode.reward, reason=episode.answer.reason)
    for episode, of_episode in zip(episodes, of_turns or [], strict=of_turns is not None):
        if episode.reward is not None:
            episode.reward = replace(episode.reward, turns=tuple(weighted(of_episode, weights).tolist()))
