"""Send the episodes of `log_completions` to trackio as traces: the messages of every role's turns, and facts of the episode.

TRL's table has one text per episode. A trace (https://github.com/gradio-app/trackio, `trackio.Trace`) has a message per turn.
"""

import math
from typing import Any

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.extras import needed_by
from multirole.options import MultiRoleGRPOConfig
from multirole.types import Episode, Turn


def finite(value: float) -> float | None:
    """Return a number for JSON: None for NaN and infinities."""
    return value if math.isfinite(value) else None


def message_of(episode: Episode, turn: Turn) -> dict[str, Any]:
    """Return a turn as a message, whose `role` is the workflow's role."""
    return {
        "role": turn.role, "content": turn.text, "slot": turn.slot, "round": turn.round, "tokens": len(turn.completion_ids),
        "finish_reason": turn.finish_reason, "outcome": turn.outcome, "reward": finite(episode.reward_of(turn)),
        "advantage": finite(episode.advantage_of(turn)),
    }  # fmt: skip


def messages_of(episode: Episode) -> list[dict[str, Any]]:
    """Return the messages of an episode: its problem, its turns in their order and, as the assistant's message, the answer that was scored."""
    answer = [] if episode.answer is None else [{"role": "assistant", "content": episode.answer.text}]
    return [*episode.problem.messages, *(message_of(episode, turn) for turn in episode.turns), *answer]


def metadata_of(episode: Episode, iteration: int) -> dict[str, Any]:
    """Return the facts of an episode after `iteration` iterations; trackio's dashboard lists `status` ("right", "wrong" or "failed")."""
    facts = {
        "iteration": iteration, "problem": episode.problem.id, "attempt": episode.index, "turns": len(episode.turns),
        "tokens": sum(len(turn.completion_ids) for turn in episode.turns), "advantage": finite(episode.advantage),
    }  # fmt: skip
    if (reward := episode.reward) is not None:
        facts |= {"reward": finite(reward.value), "reason": reward.reason}
        if reward.is_correct is not None:
            facts["status"] = "right" if reward.is_correct else "wrong"
    if episode.failure is not None:
        facts |= {"status": "failed", "failure": episode.failure}
    return facts


class EpisodeTraces(MultiRoleCallback):
    """Logs the episodes that TRL's table shows: those of the last iteration before a log, or of an evaluation.

    Args:
        is_unique: log one episode per problem (`log_unique_prompts`).
    """

    def __init__(self, is_unique: bool) -> None:
        with needed_by('`report_to="trackio"`'):
            import trackio
        self.trackio, self.is_unique = trackio, is_unique
        self.name, self.episodes = "", list[Episode]()  # of the next log

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        self.name, self.episodes = "train/episodes", episodes

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float], prefix: str
    ) -> None:  # fmt: skip
        self.name, self.episodes = f"{prefix}/episodes", episodes

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the episodes of `predict`, which TRL's table does not show."""
        self.episodes = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the traces, after transformers' callback has logged the metrics."""
        episodes, self.episodes = self.episodes, []
        if not episodes or not state.is_world_process_zero:
            return
        if self.is_unique:
            episodes = list({episode.problem.id: episode for episode in reversed(episodes)}.values())[::-1]
        traces = [
            self.trackio.Trace(messages=messages_of(e), metadata=metadata_of(e, state.global_step)) for e in episodes
        ]
        self.trackio.log({self.name: traces})


def trace_callbacks(args: MultiRoleGRPOConfig) -> list[MultiRoleCallback]:
    """Return the callback that `log_completions` asks for where trackio is among `report_to`."""
    return [EpisodeTraces(args.log_unique_prompts)] if args.log_completions and "trackio" in args.report_to else []
