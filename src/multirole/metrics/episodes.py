"""Compute metrics of episodes and rows that need no model: rewards, accuracy, and the numbers of one role."""

import logging
import math
from collections.abc import Iterable, Sequence

import torch

from multirole.credit.advantages import is_equal
from multirole.types import OVERFLOW, Episode, Turn
from multirole.update.processes import processes
from multirole.update.rows import Row, loss_mass

logger = logging.getLogger(__name__)

SILENT_ITERATIONS = 10
"""Iterations in a row without any reward after which a warning is logged, and first iterations without any turn after which a run ends."""
ZERO_REWARD = (
    "Every episode of %d iterations in a row has the reward 0, so nothing has been learned. Likely causes: the reward function does not "
    "find the answer (print what it gets in `completions`), replies are cut off at `max_completion_length` (see the roles' "
    "`truncated_rate`), or the problems are too hard for the model."
)


class ZeroRewardWarning:
    """Warns, once, when no episode of `SILENT_ITERATIONS` iterations in a row had a reward other than 0."""

    def __init__(self) -> None:
        self.n_iterations = 0  # in a row whose rewards were all 0

    def count(self, episodes: list[Episode], is_main_process: bool) -> None:
        """Count one iteration's episodes; only the main process logs the warning."""
        known = [episode.reward for episode in episodes if episode.reward is not None]
        rewards = [value for reward in known for value in reward.turns or (reward.value,) if not math.isnan(value)]
        if not rewards:
            return
        self.n_iterations = 0 if any(rewards) else self.n_iterations + 1
        if self.n_iterations == SILENT_ITERATIONS and is_main_process:
            logger.warning(ZERO_REWARD, SILENT_ITERATIONS)


def report_no_turns(episodes: list[Episode], number: int, max_prompt_tokens: int, has_trained: bool) -> None:
    """Warn of an iteration, counted from 1, in which no trained role has a turn; ValueError where none had one so far and probably never will."""
    is_played = any(episode.turns for episode in episodes)
    n_long = n_overflows(episodes)
    failures = [episode.failure for episode in episodes if episode.failure is not None]
    message = (
        f"No episode of iteration {number} has a turn{' of a role that is trained' * is_played}, so there is nothing to train."
        + f" In {n_long} of {len(episodes)} episodes the first prompt is longer than `max_prompt_tokens` ({max_prompt_tokens}): raise "
        "it, or shorten the prompts."
        * bool(n_long)
        + "".join(f" The last failure: {failure}" for failure in failures[-1:])
    )
    has_reason = bool(n_long or failures or is_played)  # perhaps of a few rows; without one, the workflow calls no role
    if not has_trained and number >= (SILENT_ITERATIONS if has_reason else 1):
        advice = " Call such a role in the workflow's `run`, or let `policy` train one that is called." * (
            not n_long and not failures
        )
        raise ValueError(message + advice)
    if processes().is_main_process:
        logger.warning("%s The run goes on without an optimizer step.", message)


def mean_reward(episodes: list[Episode]) -> float:
    """Return the mean reward of scored episodes; NaN if there is none."""
    values = [episode.reward.value for episode in episodes if episode.reward is not None]
    return sum(values) / len(values) if values else math.nan


def mean_of_turns(turns: Iterable[tuple[Episode, Turn]]) -> float:
    """Return the mean reward of turns, given with their episodes; NaN if none has one."""
    values = [value for episode, turn in turns if not math.isnan(value := episode.reward_of(turn))]
    return sum(values) / len(values) if values else math.nan


def role_rewards(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return role -> mean reward of its turns, where a reward function rewards single roles or turns; {} where none does."""
    if not any(episode.reward is not None and episode.reward.turns for episode in episodes):
        return {}
    turns = [(episode, turn) for episode in episodes for turn in episode.turns]
    return {
        role: mean_of_turns((episode, turn) for episode, turn in turns if turn.role == role)
        for role in dict.fromkeys(turn.role for _, turn in turns)
    }


def accuracy(episodes: list[Episode]) -> float | None:
    """Return the fraction of scored episodes that are correct; None if the reward function does not say which are."""
    right = [episode.reward.is_correct for episode in episodes if episode.reward is not None]
    return None if None in right or not right else sum(map(bool, right)) / len(right)


def overflow_rate(episodes: list[Episode]) -> float:
    """Return the fraction of episodes ended by a prompt longer than `max_prompt_tokens`; they are scored on an empty answer."""
    return n_overflows(episodes) / len(episodes)


def n_overflows(episodes: list[Episode]) -> int:
    """Count the episodes ended by a prompt longer than `max_prompt_tokens`."""
    return sum(e.answer is not None and e.answer.reason == OVERFLOW for e in episodes)


def n_failed(episodes: list[Episode]) -> int:
    """Count the episodes whose workflow raised."""
    return sum(episode.failure is not None for episode in episodes)


def evaluation_advantages(rewards: list[float | None], num_generations: int) -> list[float]:
    """Return (reward - mean) / standard deviation over a problem's `num_generations` episodes; 0 if they are equal or fewer than two."""
    advantages = []
    for start in range(0, len(rewards), num_generations):
        group = rewards[start : start + num_generations]
        known = torch.tensor([reward for reward in group if reward is not None], dtype=torch.float64)  # (G,)
        spread = known.std().item() if len(known) > 1 and not is_equal(known[:, None]) else 0.0
        mean = known.mean().item() if spread else 0.0
        advantages += [0.0 if reward is None or not spread else (reward - mean) / spread for reward in group]
    return advantages


def surrogate_loss(episodes: list[Episode], advantages: list[float], loss_type: str) -> float:
    """Return the policy-gradient loss of episodes sampled with the current weights: minus the mean advantage of their turns.

    The mean is over rows or over completion tokens, as `loss_type` says. KL is not part of it.
    """
    rows = [
        (Row(e, turn, ""), advantage) for e, advantage in zip(episodes, advantages, strict=True) for turn in e.turns
    ]
    masses = [loss_mass([row], loss_type) for row, _ in rows]
    total = sum(m * advantage for m, (_, advantage) in zip(masses, rows, strict=True))
    return (0.0 - total) / max(1, sum(masses))


def text_metrics(rows: list[Row]) -> dict[str, float]:
    """Compute the text metrics of one role's rows (lengths, finish reasons, outcomes, advantages)."""
    advantages = torch.tensor([row.advantage for row in rows], dtype=torch.float64)  # (N,)
    of_turns = turn_metrics([(row.episode, row.turn) for row in rows])
    of_turns.pop("turns")
    of_advantages = {"advantage_mean": advantages.mean().item(), "advantage_abs": advantages.abs().mean().item()}
    first = {name: of_turns.pop(name) for name in ("tokens", "reward")}
    return {"rows": len(rows)} | first | of_advantages | of_turns


def turn_metrics(turns: Sequence[tuple[Episode, Turn]]) -> dict[str, float]:
    """Compute the text metrics of one role's turns, given with their episodes."""
    return {
        "turns": len(turns),
        "tokens": sum(len(turn.completion_ids) for _, turn in turns),
        "reward": mean_of_turns(turns),
        "length_mean": sum(len(turn.completion_ids) for _, turn in turns) / len(turns),
        "truncated_rate": sum(turn.finish_reason == "length" for _, turn in turns) / len(turns),
        "unparsed_rate": sum(turn.outcome == "unparsed" for _, turn in turns) / len(turns),
    } | tool_metrics(turns)


def tool_metrics(turns: Sequence[tuple[Episode, Turn]]) -> dict[str, float]:
    """Count the calls of tools that were run in these turns, and those that failed; {} if none was run."""
    replies = [turn.reply for _, turn in turns if turn.reply is not None and turn.reply.results]
    if not replies:
        return {}
    return {
        "tool_calls": sum(len(reply.results) for reply in replies),
        "tool_failures": sum(reply.failures for reply in replies),
    }


def billed_tokens(turns: Sequence[tuple[Episode, Turn]]) -> dict[str, float]:
    """Sum the tokens that endpoints counted for prompts and replies; {} if none has played."""
    billed = [turn.billed for _, turn in turns if turn.billed is not None]
    if not billed:
        return {}
    return {
        f"billed_{name}_tokens": sum(counts)
        for name, counts in zip(("prompt", "completion"), zip(*billed), strict=True)
    }


def aggregate_metric(name: str, values: list[tuple[int, float]]) -> float:
    """Aggregate a metric's (weight, value) pairs: weighted mean; min or max for names that end in these. NaN without values."""
    known = [(weight, value) for weight, value in values if weight and not math.isnan(value)]
    if not known:
        return math.nan
    if name.endswith(("_min", "_max")):
        return (min if name.endswith("_min") else max)(value for _, value in known)
    return sum(weight * value for weight, value in known) / sum(weight for weight, _ in known)
