"""Credit among replies to the same prompt, from forks (AT-GRPO with its tree)."""

import math
from collections.abc import Sequence
from typing import Self

from multirole.callbacks import Trainer
from multirole.credit.advantages import compared
from multirole.credit.estimator import CreditEstimator
from multirole.options import MultiRoleGRPOConfig
from multirole.rollout.forks import play_forks, trained_roles
from multirole.rollout.replay import Fork, same_turn
from multirole.types import Episode
from multirole.update.rows import Row, role_in_turn


class BranchCredit(CreditEstimator):
    """A = (R - mean) / (std + 1e-6) over `n_branches` replies to the same prompt (AT-GRPO, arXiv:2510.11062), all of which are trained.

    Every turn that is trained is forked: it gets `n_branches` - 1 other replies. The rest of the episode is replayed with its seeds, so that the rewards of a
    group differ by one turn and what follows from it. AT-GRPO's tree goes on from the best branch; here the episode goes on as it was
    sampled, so that its turns stay samples of the policy. Its local rewards are not implemented. Where no branch could be scored, the advantage is 0.

    Needs replays and no grades, and excludes older weights. An iteration has `n_branches` times the rows, and one more replay for each row
    that is added.
    """

    replays_episodes = has_branches = True

    def __init__(self, n_branches: int = 4) -> None:
        if not (isinstance(n_branches, int) and n_branches >= 2):
            raise ValueError(
                f"`credit_branches` must be at least 2, to compare replies with each other, got {n_branches!r}."
            )
        self.n_branches = n_branches
        self.branches: dict[int, list[Episode]] = {}

    @classmethod
    def from_args(cls, args: MultiRoleGRPOConfig) -> Self:
        return cls(args.credit_branches)

    @staticmethod
    def compare(rewards: Sequence[float]) -> list[float]:
        """Return the advantages of replies to the same prompt; 0 for a single one."""
        return compared(rewards, [0] * len(rewards))

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        role = role_in_turn(trainer.args.role_order, trainer.state.global_step)
        trained = trained_roles(trainer) if role is None else [role]
        forks = [
            Fork(episode, turn, "resample", draw)
            for episode in episodes
            if episode.reward is not None
            for turn in episode.turns
            if turn.role in trained
            for draw in range(1, self.n_branches)
        ]
        played = play_forks(trainer, forks, trainer.state.global_step)
        self.branches = {}
        for fork, branch in zip(forks, played, strict=True):
            self.branches.setdefault(id(fork.at), []).append(branch)

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        grown: list[Row] = []
        for row in rows:
            group = [row]
            scored_branches = [b for b in self.branches.get(id(row.turn), []) if b.reward is not None]
            for branch in scored_branches:
                turn = same_turn(row.episode, row.turn, branch)
                if turn is None:  # a prompt beside it was too long
                    continue
                is_masked = trainer.args.mask_truncated_completions and turn.finish_reason == "length"
                group.append(Row(branch, turn, row.adapter, is_masked=is_masked))
            rewards = [member.episode.reward_of(member.turn) for member in group]
            scored = [member for member, reward in zip(group, rewards, strict=True) if not math.isnan(reward)]
            advantages = self.compare([reward for reward in rewards if not math.isnan(reward)])
            for member, advantage in zip(scored, advantages, strict=True):
                member.advantage = advantage
            grown += scored or group
        self.branches = {}
        return grown
