"""Play episodes for a trainer: publish the adapters that play, share the episodes between processes, and rest the engine."""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

from peft import PeftModel

from multirole.engines.protocol import EngineError, RequestRefused, Sampling
from multirole.rollout.errors import RolloutStopped, WorkflowError
from multirole.rollout.play_ahead import RolloutsAhead
from multirole.rollout.replay import Replay
from multirole.rollout.rollout import Attempt, Rollout, Speaker, check_failures
from multirole.types import Answer, Episode, Turn
from multirole.update.processes import gather_results, own_share

PLAY_ERRORS = (WorkflowError, EngineError, RequestRefused)
"""Errors that end a rollout and leave the weights as they were. Their messages are complete."""


class Player:
    """Plays episodes of a workflow under the current adapters of a model.

    Args:
        rollout: plays the episodes of this process, on its engine.
        sampling: of training and of evaluation.
        free_memory: called after the engine has gone to sleep.

    Attributes:
        ahead: plays the next iterations during the update, with `max_staleness`.
    """

    def __init__(self, rollout: Rollout, sampling: Sampling, free_memory: Callable[[], None]) -> None:
        self.rollout, self.engine, self.sampling, self.free_memory = rollout, rollout.engine, sampling, free_memory
        self.policy = rollout.policy
        self.ahead: RolloutsAhead | None = None
        self._published: Hashable = None

    @property
    def has_published(self) -> bool:
        """Return whether the engine holds adapters and memory, so that it must rest before an update."""
        return self._published is not None

    def forget_published(self) -> None:
        """Publish the adapters before the next episode, whatever the engine holds."""
        self._published = None

    def play(
        self, model: PeftModel, version: int, weights: Hashable, attempts: Sequence[Attempt], iteration: int,
        policy: Mapping[str, Speaker] | None = None, replays: Sequence[Replay] | None = None,
    ) -> list[Episode]:  # fmt: skip
        """Play one episode per attempt under the adapters of `model`. Each process plays a share and gets all of them.

        Args:
            version: of the adapters, which every turn records.
            weights: differs whenever the adapters' values do; they are published if the engine has others.
            policy: replaces the trained map in this call; None runs a role on the base model.
            replays: one per attempt, for episodes that were played before.

        Raises WorkflowError where more than the rollout's `max_failed_episodes` fail, over all processes. An error of one process's share is raised in all of them.
        """
        if self._published != weights:
            self.engine.publish(model, version)
            self._published = weights
        self.rollout.policy, self.rollout.version = policy or self.policy, version

        def play_share() -> list[tuple[list[Turn], Answer | None, str | None]]:
            episodes = self.rollout.run(own_share(attempts), iteration, self.sampling, replays and own_share(replays))
            return [(episode.turns, episode.answer, episode.failure) for episode in episodes]

        played = itertools.chain.from_iterable(gather_results(play_share, *PLAY_ERRORS, RolloutStopped))
        episodes = [
            Episode(*attempt, turns, answer, failure=failure)
            for attempt, (turns, answer, failure) in zip(attempts, played, strict=True)
        ]
        check_failures(episodes, self.rollout.max_failed_episodes)
        return episodes

    def rest(self) -> None:
        """Free the engine's memory for the trainer until the next episode, unless the engine plays during the update."""
        if self.ahead is None:
            self.engine.sleep()
            self.free_memory()
        self.forget_published()

    def stop(self) -> None:
        """Drop the episodes that are played ahead, and publish before the next episode: the engine may hold an interrupted rollout's weights."""
        if self.ahead is not None:
            self.ahead.stop()
        self.forget_published()
