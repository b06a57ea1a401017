"""Measure what each role is worth: the change of an evaluation's outcomes if the role is changed.

Every episode is replayed with the turns of one role resampled, played by the base model, or replaced by the role's trivial twin
(`rollout.replay`); all other turns keep their seeds, so the difference is the effect of the role and of what follows from it.

* `change` is the mean outcome of the replays minus that of the episodes. A role's worth is what is lost without it: minus `change`
  under "base" (what its training adds) or "twin" (what it adds over a trivial one). Under "resample" its expectation is 0.
* `moved` is the mean of |replay - episode|: with outcomes of 0 and 1, how often the outcome flips. Under "resample" it says how much
  the outcome depends on the random draw of this role's replies.

Both are means over problems. `changes` and `moves` hold the problems' own values, for an interval, which accounts for other problems and draws, but
not for other training seeds.

`turn_effects` changes single turns instead, and counts the replays whose outcome differs from the episode's: it says which turn decided.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from peft import PeftModel

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.inputs.adapters import check_base_alone
from multirole.rollout.forks import play_forks
from multirole.rollout.replay import Fork, How, has_twin
from multirole.types import Episode, structure_of


@dataclass(frozen=True)
class RoleEffect:
    """The effect of changing one role on the outcome.

    Args:
        role, how: which turns were forked, and how (`rollout.replay.Fork`).
        replays: number of replayed episodes in all.
        before, after: mean outcome of the episodes and of their replays, with equal weight for each problem.
        changes, moves: `change` and `moved` of each problem, see the module.
    """

    role: str
    how: str
    replays: int
    before: float
    after: float
    changes: tuple[float, ...]
    moves: tuple[float, ...]

    @property
    def problems(self) -> int:
        """Return the number of problems."""
        return len(self.changes)

    @property
    def change(self) -> float:
        """Return the mean outcome of the replays minus that of the episodes."""
        return _mean(self.changes)

    @property
    def moved(self) -> float:
        """Return the mean of |replay - episode|."""
        return _mean(self.moves)


def outcome(episode: Episode) -> float:
    """Return 1 or 0 for a right or wrong answer, or the reward if correctness is not defined; NaN for an episode without reward."""
    if episode.reward is None:
        return math.nan
    right = episode.reward.is_correct
    return episode.reward.value if right is None else float(right)


def role_values(
    trainer: Trainer, episodes: Sequence[Episode], iteration: int = -1, how: Iterable[How] = get_args(How), n_draws: int = 1
) -> list[RoleEffect]:  # fmt: skip
    """Replay scored episodes with each role changed, and compare outcomes. Collective: every process must call it.

    Args:
        trainer: a `MultiRoleGRPOTrainer` that holds the weights that played the episodes, and scores the replays.
        episodes: scored episodes; those without a reward are left out.
        iteration: the iteration in which the episodes were played, -1 for an evaluation.
        how: interventions. "twin" is skipped for roles that have none.
        n_draws: replays of each episode under "resample" and "base"; a twin needs one.

    Returns:
        One effect per role and intervention, roles in the order of the workflow.

    Raises:
        ValueError: if no episode has a reward, or for "base" if an adapter took over a part of the base (PiSSA and its kind).
    """
    known = [episode for episode in episodes if episode.reward is not None]
    if not known:
        raise ValueError(
            "None of the given episodes has a reward, so there is no outcome to compare. Score them first."
        )
    structure, effects, forks, how = structure_of(trainer.workflow), [], [], tuple(how)
    for role in trainer.workflow.roles:
        for kind in how:
            if kind == "twin" and not has_twin(structure, role):
                continue
            first, n = int(kind == "resample"), 1 if kind == "twin" else n_draws
            effects.append((role, kind, n))
            forks += [Fork(episode, role, kind, first + draw) for episode in known for draw in range(n)]
    replays = iter(play_forks(trainer, forks, iteration))
    return [effect_of(role, kind, known, [[next(replays) for _ in range(n)] for _ in known]) for role, kind, n in effects]  # fmt: skip


def effect_of(role: str, how: str, episodes: Sequence[Episode], replays: Sequence[Sequence[Episode]]) -> RoleEffect:
    """Compute the effect from scored episodes and the scored replays of each. A replay without a reward is left out."""
    before: dict[str, list[float]] = {}
    after: dict[str, list[float]] = {}
    moved: dict[str, list[float]] = {}
    for episode, group in zip(episodes, replays, strict=True):
        outcomes = [value for value in map(outcome, group) if not math.isnan(value)]
        if outcomes:
            before.setdefault(episode.problem.id, []).append(outcome(episode))
            after.setdefault(episode.problem.id, []).append(_mean(outcomes))
            moved.setdefault(episode.problem.id, []).append(_mean([abs(v - outcome(episode)) for v in outcomes]))
    changes = tuple(_mean(after[problem]) - _mean(before[problem]) for problem in before)
    return RoleEffect(
        role, how, sum(map(len, replays)), _mean(list(map(_mean, before.values()))), _mean(list(map(_mean, after.values()))),
        changes, tuple(map(_mean, moved.values())),
    )  # fmt: skip


@dataclass(frozen=True)
class TurnEffect:
    """How often the outcome of one episode changes if one of its turns is played differently: `changed` of `replays`.

    `before` is the episode's outcome and `after` the mean outcome of its replays.
    """

    problem: str
    index: int
    role: str
    slot: int
    round: int
    how: str
    before: float
    after: float
    changed: int
    replays: int


def turn_effects(
    trainer: Trainer, episodes: Sequence[Episode], iteration: int = -1, how: Iterable[How] = get_args(How), n_draws: int = 4
) -> list[TurnEffect]:  # fmt: skip
    """Replay scored episodes with each turn changed. Collective: every process must call it.

    The arguments are those of `role_values`, but only "resample" is replayed `n_draws` times. Returns one effect per turn and
    intervention, in the order of the episodes and their turns; replays without a reward are not counted.
    """
    structure, cases, how = structure_of(trainer.workflow), [], tuple(how)
    for episode in episodes:
        for turn in episode.turns if episode.reward is not None else ():
            for kind in how:
                if kind != "twin" or has_twin(structure, turn.role):
                    cases.append((episode, turn, kind, n_draws if kind == "resample" else 1))
    forks = [
        Fork(episode, turn, kind, int(kind == "resample") + draw)
        for episode, turn, kind, n in cases
        for draw in range(n)
    ]
    replays, effects = iter(play_forks(trainer, forks, iteration)), []
    for episode, turn, kind, n in cases:
        before = outcome(episode)
        values = [value for value in (outcome(next(replays)) for _ in range(n)) if not math.isnan(value)]
        changed = sum(not math.isclose(value, before) for value in values)
        effects.append(
            TurnEffect(
                episode.problem.id,
                episode.index,
                turn.role,
                turn.slot,
                turn.round,
                kind,
                before,
                _mean(values),
                changed,
                len(values),
            )
        )
    return effects


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


class RoleValue(MultiRoleCallback):
    """Callback that measures each role's worth at each evaluation: `effects`, and `<prefix>_<role>_<how>_change` and `..._moved`.

    It replays evaluation episodes, so it costs rollouts: with r roles, about 2 r `n_draws` replays of each episode that it reads. Only what follows
    from the role is generated again.

    Args:
        n_problems: the first problems of the evaluation, whose episodes are replayed.
        how, n_draws: see `role_values`.
    """

    replays_episodes = True

    def __init__(self, n_problems: int = 64, how: Iterable[How] = get_args(How), n_draws: int = 1) -> None:
        if n_problems < 2 or n_draws < 1:
            raise ValueError(
                f"`n_problems` must be at least 2, for an interval, and `n_draws` at least 1; got {n_problems} and {n_draws}."
            )
        self.n_problems, self.how, self.n_draws = n_problems, tuple(how), n_draws
        if unknown := [kind for kind in self.how if kind not in get_args(How)]:
            raise ValueError(f"`how` must be among {list(get_args(How))}, got {unknown}.")
        self.effects: list[RoleEffect] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: PeftModel, **_: Any) -> None:
        """Refuse "base" before training if the base alone is not the untrained model (ValueError)."""
        if "base" in self.how:
            check_base_alone(model, 'Leave "base" out of `how`: RoleValue(..., how=["resample", "twin"]).')

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float], prefix: str
    ) -> None:
        problems = list(dict.fromkeys(episode.problem.id for episode in episodes))[: self.n_problems]
        read = [episode for episode in episodes if episode.problem.id in problems and episode.reward is not None]
        self.effects = role_values(trainer, read, -1, self.how, self.n_draws) if read else []
        for effect in self.effects:
            metrics[f"{prefix}_{effect.role}_{effect.how}_change"] = effect.change
            metrics[f"{prefix}_{effect.role}_{effect.how}_moved"] = effect.moved
