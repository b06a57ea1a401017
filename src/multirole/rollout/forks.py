"""Replay an episode with a turn, or all turns of a role, changed (forks), and everything that depends on them.

`replay` decides what each call of such an episode gets.
"""

from collections.abc import Sequence

from multirole.callbacks import Trainer
from multirole.inputs.adapters import check_base_alone
from multirole.rollout.replay import Fork, How, replays_of
from multirole.types import Episode, Turn


def fork(
    trainer: Trainer, episode: Episode, at: Turn | str | tuple[str, ...], how: How = "resample", n: int = 1, *, iteration: int
) -> list[Episode]:  # fmt: skip
    """Replay an episode `n` times with a turn, or all turns of a role, changed. All other turns keep their seeds.

    The trainer must hold the weights that played the episode, so fork before the next update. Replies depend on what else is played at the same time
    only as far as the engine's do: on a CPU, not at all. Collective: every process must call it.

    Args:
        trainer: a `MultiRoleGRPOTrainer`.
        episode, at, how: see `Fork`.
        n: number of replays; must be 1 for a twin, whose reply is always the same.
        iteration: the iteration in which the episode was played, which is part of the seeds; -1 for an evaluation.

    Returns:
        `n` new episodes with the problem and the index of the given one, scored by the trainer's reward functions.

    Raises:
        ValueError: for a turn, role, `how` or `n` that cannot be forked; see also `play_forks`.
        WorkflowError: if the workflow fails, or does not repeat the forked call.
    """
    if n < 1 or how == "twin" and n > 1:
        limit = "1, because a twin says the same each time" if how == "twin" else "1 or more"
        raise ValueError(f"`n` must be {limit}, got {n!r}.")
    first = 1 if how == "resample" else 0
    return play_forks(trainer, [Fork(episode, at, how, draw) for draw in range(first, first + n)], iteration)


def trained_roles(trainer: Trainer) -> list[str]:
    """Return the roles whose adapters are trained; the others are played by partners."""
    return [role for role, adapter in trainer.policy.items() if adapter in trainer.adapters]


def play_forks(trainer: Trainer, forks: Sequence[Fork], iteration: int) -> list[Episode]:
    """Replay many forks at once, which fills the engine's batches, and score them. Returns one episode per fork, in their order.

    Each process replays and scores a share and gets all results. Replays that failed are not scored: their reward is None. Raises ValueError
    for episodes that older weights played, and for forks with "base" if an adapter took over a part of the base.
    """
    if any(fork.how == "base" for fork in forks):
        check_base_alone(trainer.peft_model, "Fork with how='resample' or 'twin'.")
    present = trainer.state.global_step
    trained = trained_roles(trainer)
    turns = (turn for fork in forks for turn in fork.episode.turns if turn.role in trained)
    if any(turn.version not in (None, present) for turn in turns):
        raise ValueError(
            f"With `max_staleness={trainer.args.max_staleness}` episodes were played under older weights, so they cannot be replayed. "
            "Set it to 0, or use a credit without replays, such as 'outcome'."
        )
    attempts, replays = replays_of(trainer.workflow, forks)
    episodes = trainer.play(attempts, iteration, replays=replays)
    trainer.score(episodes)
    return episodes
