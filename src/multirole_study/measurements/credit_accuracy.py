"""Bias and variance of credit estimators against the exact effect of each turn, at fixed weights.

A turn's *context* is what the other turns said that came before it or were made at the same time. The exact effect of a reply a in its
context c is A(c, a) = Q(c, a) - V(c): Q is the expected reward over all that follows, and V the mean of Q over replies that the policy
could give. With it as the advantage, the mean gradient is the gradient of the expected reward. Both are measured by replaying the episode:
several replies in the same context, and after each of them several draws of what follows.

An estimator's advantage X(c, a) also depends on chance: on the draw of what follows, on the other episodes of its group, on its forks. With a
few replies per context, and two independent draws of that chance for each, the mean square of X splits into four parts:

- *effect*: beta^2 E[A^2], the part that is proportional to the exact effect (beta = Cov(X, A) / Var(A) within contexts);
- *bias*: the other part of E[X | c, a] that depends on the reply, which changes the direction of the mean gradient;
- *baseline*: E[E[X | c]^2], a part that depends on the context alone. It does not change the mean gradient, but adds variance;
- *noise*: E[Var(X | c, a)], of other draws.

The share of the effect is the squared correlation of the advantage with the exact effect, if the advantage has the mean zero.
Baseline and noise are estimated without bias, so that they may be negative where there is nothing. The effect is a squared estimate: it is never
negative and slightly too large, and bias too small by as much.

Not covered: the length of a gradient's step, which the scale beta changes and AdamW normalises; rows that share their noise; several processes.
"""

import itertools
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from multirole.callbacks import Trainer
from multirole.credit import ESTIMATORS, load_estimator
from multirole.credit.advantages import compared, group_advantages
from multirole.credit.advantages import outcome as reward_of
from multirole.credit.estimators.branches import BranchCredit
from multirole.credit.estimators.leave_one_out import LeaveOneOutCredit
from multirole.credit.estimators.shapley import shapley_values
from multirole.credit.turn_grading import grade_by_duty
from multirole.engines.protocol import Request
from multirole.policy import trained_part
from multirole.rollout.errors import WorkflowError
from multirole.rollout.replay import Fork, Replay, fork_seed
from multirole.types import Episode, Problem, Structure, Turn, structure_of
from multirole.update.rows import episode_rows
from multirole_study.measurements.credit_moments import Moments, moments_of

Place = tuple[str, int, int]
"""Role, slot and round of a turn."""
ITERATION = 2 * 10**6
"""Iteration number of the measured episodes. Sampling seeds follow from it, so that none repeats an episode of the training run."""
FORKED = ("branches", "leave_one_out", "shapley")
"""The estimators with forks that are measured. Here each of their draws comes from replays that also serve the exact effect."""
MEASURED = (*(name for name in ESTIMATORS if not load_estimator(name).replays_episodes), *FORKED)
TAIL, COALITION = 1000, 5000
"""First draw numbers of what follows and of other roles' turns in a coalition. Draws of a reply have smaller numbers."""


def place_of(turn: Turn) -> Place:
    """Return role, slot and round of a turn."""
    return turn.role, turn.slot, turn.round


def stage_end(episode: Episode, turn: Turn) -> int:
    """Return the number of turns up to the end of the turn's stage: those before it, and those of its role and round."""
    stage = turn.role, turn.round
    return 1 + max(i for i, other in enumerate(episode.turns) if (other.role, other.round) == stage)


@dataclass(frozen=True)
class Seeds:
    """The sampling seeds of an episode with a changed turn `at`: those of its `context` are kept, the others are numbered draws."""

    at: Place | None = None
    context: frozenset[Place] = frozenset()
    reply: int = 0
    tail: int = 0

    def draw(self, place: Place) -> int:
        """Return the draw (`replay.fork_seed`) of a turn; 0 keeps its seed."""
        if place == self.at:
            return self.reply
        return 0 if place in self.context or not self.tail else TAIL + self.tail


class SeededReplay(Replay):
    """Replays an episode: turns at `kept` places that get the same prompt keep their reply, all others are sampled by `seeds`.

    Roles in `base` are played by the base model. `sampled` has the places of the turns that were sampled.
    """

    def __init__(
        self, episode: Episode, seeds: Seeds, kept: frozenset[Place], base: frozenset[str] = frozenset()
    ) -> None:  # fmt: skip
        super().__init__(Fork(episode, ()), Structure())
        self.seeds, self.kept, self.base = seeds, kept, base
        self.sampled: set[Place] = set()

    def step(
        self, request: Request, role: str, slot: int | None, round: int, nth: int, turns: Sequence[Turn]
    ) -> Request | Turn | str:
        """See `Replay.step`."""
        recorded = self._recorded(request.prompt_ids, role, slot, round, nth)
        place = (role, slot or 0, round) if recorded is None else place_of(recorded)
        if recorded is not None and place in self.kept and role not in self.base:
            return recorded
        self.sampled.add(place)
        seed = fork_seed(request.seed, self.seeds.draw(place))
        if role in self.base:  # whose replies are no draws of the role's
            return replace(request, adapter=None, seed=fork_seed(seed, 1 + self.seeds.tail))
        return replace(request, seed=seed)


@dataclass
class Variant:
    """An episode, the seeds that it was played with, and the number of tokens that were sampled for it."""

    episode: Episode
    seeds: Seeds = field(default_factory=Seeds)
    tokens: int = 0


class Sizes(NamedTuple):
    """Numbers of draws: target replies per context, draws of what follows each, replies that a fork estimator compares, episodes of a group."""

    replies: int = 4
    tails: int = 6
    branches: int = 4
    episodes: int = 8


SIZES = Sizes()


@dataclass(frozen=True)
class Context:
    """The moments of every estimator in one context, a turn of one problem's episode."""

    problem: str
    place: Place
    moments: dict[str, Moments]


class Measurement(NamedTuple):
    """The contexts, and for each estimator the sampled tokens per trained row, forks included."""

    contexts: list[Context]
    tokens_per_row: dict[str, float]


def measure_credit(trainer: Trainer, problems: Sequence[Problem], sizes: Sizes = SIZES) -> Measurement:
    """Measure every estimator in `MEASURED` at every turn of one episode per problem, under the trainer's current weights.

    A turn beside a prompt that was too long is left out if one of its replays ended before it.

    Args:
        trainer: a `MultiRoleGRPOTrainer` in a single process, whose reward functions score episodes and grade turns.
        problems: the units of any interval; each is attempted 1 + 2 (`sizes.episodes` - 1) times.
        sizes: numbers of draws.

    Raises:
        ValueError: for fewer than two target replies or branches, or fewer than four draws of what follows.
        WorkflowError: where an episode fails, whatever `max_failed_episodes` is.
    """
    if sizes.replies < 2 or sizes.tails < 4 or sizes.branches < 2 or sizes.episodes < 2:
        raise ValueError(
            f"`sizes` needs 2 replies, 4 tails, 2 branches and 2 episodes or more, got {sizes}: two draws of an estimator and two of the "
            "exact effect are compared."
        )
    return _Measurer(trainer, sizes).measure(problems)


class _Measurer:
    """Plays the episodes of `measure_credit` and evaluates the estimators on them."""

    def __init__(self, trainer: Trainer, sizes: Sizes) -> None:
        self.trainer, self.sizes = trainer, sizes
        self.row_estimators = {name: load_estimator(name)() for name in MEASURED if name not in FORKED}
        self.roles, self.trained = list(trainer.policy), trained_part(trainer.policy)
        self.structure = structure_of(trainer.workflow)
        self.coalitions = [frozenset(c) for n in range(len(self.roles)) for c in itertools.combinations(self.roles, n)]

    def measure(self, problems: Sequence[Problem]) -> Measurement:
        n_pool = 2 * (self.sizes.episodes - 1)
        attempts = [(problem, index) for problem in problems for index in range(1 + n_pool)]
        played = [Variant(episode, tokens=_tokens(episode)) for episode in self.trainer.play(attempts, ITERATION)]
        self._grade(played)
        firsts, pools = played[:: 1 + n_pool], {}
        for i, problem in enumerate(problems):
            rest = played[i * (1 + n_pool) + 1 : (i + 1) * (1 + n_pool)]
            pools[problem.id] = rest[: n_pool // 2], rest[n_pool // 2 :]
        turns = [(first.episode, turn) for first in firsts for turn in self._trained_turns(first.episode)]
        # where a prompt beside the turn is too long, a replay may end before it
        repeated = [
            (at, by_tail)
            for at, by_tail in zip(turns, self._variants(turns), strict=True)
            if None not in map(_turn_at, by_tail.values())
        ]
        variants = [by_tail for _, by_tail in repeated]
        drawn = [
            (by_tail[reply, draw + 1], draw)
            for by_tail, reply, draw in itertools.product(variants, range(self.sizes.replies), range(2))
        ]
        everyone = [
            (variant, draw) for halves in pools.values() for draw, half in enumerate(halves) for variant in half
        ]
        values, shapley_tokens = self._shapley([*drawn, *everyone])
        contexts = []
        for i, ((episode, turn), by_tail) in enumerate(repeated):
            draws = self._draws(turn, by_tail, pools[episode.problem.id], values, i)
            exact = self._exact(by_tail)
            moments = {name: moments_of(draws[name], exact) for name in MEASURED}
            contexts.append(Context(episode.problem.id, place_of(turn), moments))
        return Measurement(contexts, self._costs([variant for variant, _ in everyone], variants, shapley_tokens))

    def _trained_turns(self, episode: Episode) -> list[Turn]:
        """Return the turns of an episode whose roles are trained."""
        return [turn for turn in episode.turns if turn.role in self.trained]

    def _play(self, replays: Iterable[SeededReplay]) -> list[Variant]:
        """Play and score replays; each result has the seeds of its replay."""
        replays = list(replays)
        attempts = [(replay.fork.episode.problem, replay.fork.episode.index) for replay in replays]
        episodes = self.trainer.play(attempts, ITERATION, replays=replays)
        variants = [
            Variant(episode, replay.seeds, _tokens(episode, replay.sampled))
            for episode, replay in zip(episodes, replays, strict=True)
        ]
        self._grade(variants)
        return variants

    def _grade(self, variants: Sequence[Variant]) -> None:
        episodes = [variant.episode for variant in variants]
        if failures := [episode.failure for episode in episodes if episode.failure is not None]:
            raise WorkflowError(
                f"{len(failures)} of {len(episodes)} measured episodes failed. They have no outcome to compare. The last: {failures[-1]}"
            )
        if episodes:
            self.trainer.score(episodes)
            grade_by_duty(episodes, self.trainer.score, self.structure)

    def _variants(self, at: Sequence[tuple[Episode, Turn]]) -> list[dict[tuple[int, int], Variant]]:
        """Return for each turn (reply, draw of what follows) -> the episode.

        Reply 0 is the episode's own. Target replies come first and get all draws of what follows; then, for each of the first two
        draws, those that fork estimators compare with.
        """
        n, n_compared = self.sizes.replies, self.sizes.branches - 1
        keys = [(reply, 1) for reply in range(n)]
        keys += [(n + tail * n_compared + i, tail + 1) for tail in range(2) for i in range(n_compared)]
        replays = []
        for (episode, turn), (reply, tail) in itertools.product(at, keys):
            place = place_of(turn)
            context = frozenset(map(place_of, episode.turns[: stage_end(episode, turn)])) - {place}
            places = context | ({place} if reply == 0 else frozenset())
            replays.append(SeededReplay(episode, Seeds(place, context, reply, tail), places))
        played = iter(self._play(replays))
        variants = [{key: next(played) for key in keys} for _ in at]
        later = []
        for by_tail, reply, tail in itertools.product(variants, range(n), range(2, self.sizes.tails + 1)):
            first = by_tail[reply, 1]
            if self._is_last(first):
                by_tail[reply, tail] = first  # nothing follows, so that there is nothing to draw
                continue
            seeds = replace(first.seeds, tail=tail)
            later.append(
                (
                    by_tail,
                    (reply, tail),
                    SeededReplay(first.episode, seeds, seeds.context | frozenset(filter(None, [seeds.at]))),
                )
            )
        for (by_tail, key, _), variant in zip(later, self._play(replay for *_, replay in later), strict=True):
            by_tail[key] = variant
        return variants

    def _is_last(self, variant: Variant) -> bool:
        turn = _turn_at(variant)
        return turn is not None and stage_end(variant.episode, turn) == len(variant.episode.turns)

    def _exact(self, by_tail: dict[tuple[int, int], Variant]) -> np.ndarray:
        """Return two estimates (K, 2) of Q of each target reply, from the draws of what follows that no estimator has."""
        tails = range(3, self.sizes.tails + 1)
        values = np.array([
            [reward_of(by_tail[reply, tail].episode) for tail in tails] for reply in range(self.sizes.replies)
        ])  # fmt: skip  # (K, tails - 2)
        return np.stack([values[:, ::2].mean(1), values[:, 1::2].mean(1)], axis=1)

    def _shapley(
        self, drawn: Sequence[tuple[Variant, int]]
    ) -> tuple[dict[tuple[int, int], dict[str, float]], dict[int, int]]:
        """Return (id of an episode, draw) -> the Shapley value of each role, and id -> the tokens that were sampled for it.

        As in training, the base's replies have seeds of their own, and so have the turns beside that of the context: they differ in the two
        draws, since what is said there is chance, not a part of the context.
        """
        replays = []
        for (variant, draw), coalition in itertools.product(drawn, self.coalitions):
            seeds = variant.seeds
            if seeds.at is not None:
                seeds = Seeds(seeds.at, reply=seeds.reply, tail=COALITION + draw)
            places = frozenset(map(place_of, variant.episode.turns))
            replays.append(SeededReplay(variant.episode, seeds, places, frozenset(self.roles) - coalition))
        played = iter(self._play(replays))
        values, tokens = {}, {}
        for variant, draw in drawn:
            replayed = {coalition: next(played) for coalition in self.coalitions}
            worth = {coalition: reward_of(replay.episode) for coalition, replay in replayed.items()}
            worth[frozenset(self.roles)] = reward_of(variant.episode)
            values[id(variant.episode), draw] = shapley_values(worth, self.roles)
            tokens[id(variant.episode)] = sum(replay.tokens for replay in replayed.values())
        return values, tokens

    def _draws(
        self, turn: Turn, by_tail: dict[tuple[int, int], Variant], pools: tuple[list[Variant], list[Variant]],
        values: dict[tuple[int, int], dict[str, float]], context: int,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Return two draws (K, 2) of every estimator's advantage for the target replies of one context."""
        n, n_compared = self.sizes.replies, self.sizes.branches - 1
        draws = {name: np.empty((n, 2)) for name in MEASURED}
        for reply, draw in itertools.product(range(n), range(2)):
            drawn = by_tail[reply, draw + 1].episode
            others = [variant.episode for variant in pools[draw]]
            shapley = [values[id(episode), draw][turn.role] for episode in (drawn, *others)]
            advantages = self.row_advantages(drawn, others, place_of(turn), 1000 * context + 10 * reply + draw)
            compares = [by_tail[n + draw * n_compared + i, draw + 1].episode for i in range(n_compared)]
            rewards = [reward_of(episode) for episode in (drawn, *compares)]
            advantages |= {
                "branches": BranchCredit.compare(rewards)[0], "leave_one_out": LeaveOneOutCredit.compare(rewards)[0],
                "shapley": compared(shapley, [0] * len(shapley))[0],
            }  # fmt: skip
            for name, value in advantages.items():
                draws[name][reply, draw] = value
        return draws

    def row_advantages(self, own: Episode, others: Sequence[Episode], place: Place, seed: int) -> dict[str, float]:
        """Return what each estimator without forks gives a turn of an episode that is compared with others at its problem."""
        n = 1 + len(others)
        group = [replace(episode, index=i) for i, episode in enumerate((own, *others))]
        same: list[Hashable] = [0] * n
        advantages = group_advantages([reward_of(episode) for episode in group], same)
        for episode, advantage in zip(group, advantages, strict=True):
            episode.advantage = advantage
        rows = episode_rows(group, self.trained, masks_truncated=False)
        at = next(i for i, turn in enumerate(self._trained_turns(own)) if place_of(turn) == place)
        # the parts of a trainer that they read, for one group of n episodes in an iteration of this number
        group_of_n: Any = SimpleNamespace(
            workflow=self.trainer.workflow,
            args=SimpleNamespace(num_generations=n),
            state=SimpleNamespace(global_step=seed),
        )
        return {name: estimator.advantages(group_of_n, rows)[at] for name, estimator in self.row_estimators.items()}

    def _costs(
        self, pool: Sequence[Variant], variants: Sequence[dict[tuple[int, int], Variant]], shapley_tokens: dict[int, int]
    ) -> dict[str, float]:  # fmt: skip
        """Return the sampled tokens per trained row of each estimator."""
        turns = _mean(len(self._trained_turns(v.episode)) for v in pool)
        per_row, n_branches = _mean(v.tokens for v in pool) / turns, self.sizes.branches
        forked = _mean(
            v.tokens for by_tail in variants for (reply, _), v in by_tail.items() if reply >= self.sizes.replies
        )
        costs = dict.fromkeys(MEASURED, per_row)
        for name in (
            name for name in FORKED if load_estimator(name).has_branches
        ):  # each turn is trained once, and each of its forks
            costs[name] = (per_row + (n_branches - 1) * forked) / n_branches
        costs["shapley"] += _mean(shapley_tokens[id(v.episode)] for v in pool) / turns
        return costs


def _turn_at(variant: Variant) -> Turn | None:
    """Return the changed turn of a variant; None if its replay ended before it."""
    return next((turn for turn in variant.episode.turns if place_of(turn) == variant.seeds.at), None)


def _tokens(episode: Episode, places: set[Place] | None = None) -> int:
    """Count the completion tokens of an episode, or of its turns at some places."""
    return sum(len(t.completion_ids) for t in episode.turns if places is None or place_of(t) in places)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
