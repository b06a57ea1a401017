"""Decide, call by call, how an episode is played again with some of its turns changed.

Every turn has its own sampling seed (`seeds.turn_seed`), so a replay that changes only one seed shows the causal effect of that
turn. A turn that is not forked and has the same prompt would get the same reply, so that reply is copied from the episode instead of being
generated: this covers turns before the fork, concurrent ones, and later ones that do not depend on it. A turn with another prompt
is generated again with its old seed.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from multirole.engines.protocol import Request
from multirole.types import OVERFLOW, Answer, Episode, Problem, Structure, Turn, Workflow, structure_of

How = Literal["resample", "base", "twin"]


@dataclass(frozen=True, eq=False)
class Fork:
    """One replay of an episode.

    Args:
        episode: an episode that was played to its end.
        at: the turn to change, which must be one of the episode's, or the role (or roles) whose turns are all changed.
        how: "resample" draws the turn's reply with another seed, "base" lets the base model reply without an adapter, and
            "twin" takes the reply of the role's trivial twin (`Duty.twin`).
        draw: the index of the replay among those of the same turns. Each has other seeds; draw 0 keeps the turn's seed.
    """

    episode: Episode
    at: Turn | str | tuple[str, ...]
    how: How = "resample"
    draw: int = 1

    @property
    def roles(self) -> tuple[str, ...]:
        """Return the roles whose turns are all forked; none if `at` is a turn."""
        return () if isinstance(self.at, Turn) else (self.at,) if isinstance(self.at, str) else tuple(self.at)


def replays_of(workflow: Workflow, forks: Sequence[Fork]) -> tuple[list[tuple[Problem, int]], list["Replay"]]:
    """Return the arguments of `Rollout.run` that play forks: the attempts, and how each is replayed. ValueError for a fork that cannot be played."""
    structure = structure_of(workflow)
    for fork in forks:
        check_fork(fork, list(workflow.roles), structure)
    return [(fork.episode.problem, fork.episode.index) for fork in forks], [Replay(fork, structure) for fork in forks]


def check_fork(fork: Fork, roles: list[str], structure: Structure) -> None:
    """Refuse a fork that cannot be played (ValueError)."""
    if fork.how not in get_args(How):
        raise ValueError(f"`how` must be one of {list(get_args(How))}, got {fork.how!r}.")
    if fork.how == "resample" and fork.draw == 0:
        raise ValueError("`draw=0` keeps the turn's own seed, so nothing would be resampled. Count draws from 1.")
    if fork.episode.failure is not None or fork.episode.answer is None:
        raise ValueError(f"{fork.episode!r} was not played to its end, so it cannot be replayed. Leave it out.")
    if isinstance(fork.at, Turn) and not any(turn is fork.at for turn in fork.episode.turns):
        raise ValueError(
            f"`at` must be a turn of the episode, got another: {fork.at.role} {fork.at.slot}.{fork.at.round}. Take it from `episode.turns`."
        )
    if unknown := [role for role in fork.roles if role not in roles]:
        raise ValueError(f"`at` must name roles among {roles}, got {unknown}.")
    if fork.how == "twin":
        for role in fork.roles or (fork.at.role,):  # type: ignore[union-attr]
            if not has_twin(structure, role):
                raise ValueError(
                    f"The role {role!r} has no trivial twin. Declare its reply as `Duty(..., twin=...)` in the workflow's `structure`, or "
                    "fork with how='base'."
                )


def has_twin(structure: Structure, role: str) -> bool:
    """Return whether `twin_reply` knows the reply of a role's trivial twin."""
    duty = structure.duties.get(role)
    return duty is not None and (duty.twin is not None or duty.kind == "merges")


def twin_reply(structure: Structure, role: str, turns: Sequence[Turn]) -> str:
    """Return the reply of a role's trivial twin after the given turns of its episode: `Duty.twin`, or for a role that merges the reply of slot 0."""
    duty = structure.duties[role]
    if duty.twin is not None:
        return duty.twin(turns)
    merged = [turn for turn in turns if turn.role == duty.of]
    return min(merged, key=lambda turn: (turn.slot, -turn.round)).text if merged else ""


def same_turn(episode: Episode, turn: Turn, other: Episode) -> Turn | None:
    """Return the turn of a replayed episode that corresponds to a turn of the episode and has its prompt; None if there is none."""

    def with_its_prompt(turns: Sequence[Turn]) -> list[Turn]:
        return [
            candidate for candidate in turns if (candidate.role, candidate.prompt_ids) == (turn.role, turn.prompt_ids)
        ]

    nth = next(i for i, candidate in enumerate(with_its_prompt(episode.turns)) if candidate is turn)
    return next(iter(with_its_prompt(other.turns)[nth:]), None)


def fork_seed(seed: int, draw: int) -> int:
    """Derive the 63-bit sampling seed of a forked turn from its old seed; draw 0 keeps the old seed."""
    if draw == 0:
        return seed
    digest = hashlib.blake2b(repr((seed, "fork", draw)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Replay:
    """Decides at each call of a replayed episode whether to generate a reply or which recorded one to use."""

    def __init__(self, fork: Fork, structure: Structure) -> None:
        self.fork, self.structure = fork, structure
        self.n_forked = 0
        ordered = sorted(fork.episode.turns, key=lambda turn: (turn.round, turn.slot))
        self._at_place = {(turn.role, turn.slot, turn.round): turn for turn in ordered}
        self._of_prompt: dict[tuple[str, tuple[int, ...]], list[Turn]] = defaultdict(list)
        for turn in ordered:
            self._of_prompt[turn.role, tuple(turn.prompt_ids)].append(turn)

    def step(
        self, request: Request, role: str, slot: int | None, round: int, nth: int, turns: Sequence[Turn]
    ) -> Request | Turn | str:
        """Decide how one call is answered: by generating a request, by a recorded turn's reply, or by a text.

        `nth` counts the calls of the role with this prompt from 0; `turns` are those that have been answered.
        """
        recorded = self._recorded(request.prompt_ids, role, slot, round, nth)
        if not (role in self.fork.roles or recorded is not None and recorded is self.fork.at):
            return request if recorded is None or not _is_reply_to(recorded, request) else recorded
        self.n_forked += 1
        if self.fork.how == "twin":
            return twin_reply(self.structure, role, turns)
        adapter = None if self.fork.how == "base" else request.adapter
        return replace(request, adapter=adapter, seed=fork_seed(request.seed, self.fork.draw))

    def _recorded(self, prompt_ids: list[int], role: str, slot: int | None, round: int, nth: int) -> Turn | None:
        """Return the episode's turn of the same call with the same prompt; None if there is none."""
        if slot is None:
            same = self._of_prompt.get((role, tuple(prompt_ids)), [])
            return same[nth] if nth < len(same) else None
        turn = self._at_place.get((role, slot, round))
        return turn if turn is not None and turn.prompt_ids == prompt_ids else None

    def has_missed_its_turn(self, answer: Answer) -> bool:
        """Return whether the replay, which ended with `answer`, lacks the forked call although it should have made it.

        If a prompt was too long beside the forked call, the replay may end before it: recorded replies take no time.
        """
        was = self.fork.episode.answer
        has_overflowed = was is not None and was.reason == answer.reason == OVERFLOW
        return isinstance(self.fork.at, Turn) and not self.n_forked and not has_overflowed


def _is_reply_to(turn: Turn, request: Request) -> bool:
    """Return whether a recorded turn's reply is the one that the request would get; its `max_tokens` may differ from the recorded call's."""
    n = len(turn.completion_ids)
    return n == request.max_tokens or n < request.max_tokens and turn.finish_reason != "length"
