"""Replay an episode with a turn, or all turns of a role, changed (forks), and everything that depends on them.

`replay` decides what each call of such an episode gets.
"""

from collections.abc import Sequence

from multirole.engines.protocol import Sampling
from multirole.rollout.replay import Fork, How, replays_of
from multirole.rollout.rollout import Rollout
from multirole.types import Episode, Turn


def fork(
    rollout: Rollout, episode: Episode, at: Turn | str | tuple[str, ...], how: How = "resample", n: int = 1, *, iteration: int,
    sampling: Sampling,
) -> list[Episode]:  # fmt: skip
    """Replay an episode `n` times with a turn, or all turns of a role, changed. All other turns keep their seeds.

    The engine must serve the weights that played the episode, so fork before the next update. After an evaluation the engine is at rest:
    a callback on `on_episodes_evaluated` calls `trainer.play(attempts, -1, replays=...)`, which publishes them again. Replies depend on what else is
    played at the same time only as far as the engine's do: on a CPU, not at all.

    Args:
        rollout: the rollout that played the episode, such as `trainer.rollout`.
        episode, at, how: see `Fork`.
        n: number of replays; must be 1 for a twin, whose reply is always the same.
        iteration: the iteration in which the episode was played, which is part of the seeds; -1 for an evaluation.
        sampling: how its replies were sampled, such as `trainer.sampling`.

    Returns:
        `n` new episodes with the problem and the index of the given one, not yet scored.

    Raises:
        ValueError: for a turn, role, `how` or `n` that cannot be forked.
        WorkflowError: if the workflow fails, or does not repeat the forked call.
    """
    if n < 1 or how == "twin" and n > 1:
        limit = "1, because a twin says the same each time" if how == "twin" else "1 or more"
        raise ValueError(f"`n` must be {limit}, got {n!r}.")
    first = 1 if how == "resample" else 0
    forks = [Fork(episode, at, how, draw) for draw in range(first, first + n)]
    return play_forks(rollout, forks, iteration=iteration, sampling=sampling)


def play_forks(rollout: Rollout, forks: Sequence[Fork], *, iteration: int, sampling: Sampling) -> list[Episode]:
    """Replay many forks at once, which fills the engine's batches. See `fork`; returns one episode per fork, in their order."""
    attempts, replays = replays_of(rollout.workflow, forks)
    return rollout.run(attempts, iteration, sampling, replays)
