"""Define `CreditEstimator`, the base class of credit estimators."""

from collections.abc import Sequence
from typing import ClassVar, Self

from multirole.callbacks import MultiRoleCallback, Trainer
from multirole.credit.turn_grading import grade_by_duty
from multirole.options import MultiRoleGRPOConfig
from multirole.types import Episode, Workflow, structure_of
from multirole.update.rows import Row


class CreditEstimator(MultiRoleCallback):
    """Callback that sets the advantage of every row of an iteration. A subclass implements `advantages`, and says what it needs.

    `MultiRoleGRPOConfig(credit="module:Class")` names one, which is made by `from_args`. An instance may also be passed among the
    trainer's `callbacks`; it then starts from the advantages of `credit`.

    Attributes:
        needs_grades: it reads `Turn.is_right`. The reward functions grade a reply as if it were the answer, so one of them must set `episode.reward`
            to a [`Reward`] with `is_correct`. By the workflow's `structure`, a verdict is right if it agrees with the grade of the reply that it
            judges, a selection has the grade of its episode, and a plan has None.
        replays_episodes: it plays episodes again (`play_forks`) under the weights that played them, so it excludes `max_staleness`.
        why_one_reward: why it is defined for one reward of the episode only, to follow its name in a message; "" if reward functions may also
            reward single roles and turns. Then `row.episode.reward_of(row.turn)` is the reward of a row.
        has_branches: it samples `credit_branches` replies to every prompt and trains on all of them.
    """

    needs_grades: ClassVar[bool] = False
    replays_episodes: ClassVar[bool] = False
    has_branches: ClassVar[bool] = False
    why_one_reward: ClassVar[str] = ""

    @classmethod
    def from_args(cls, args: MultiRoleGRPOConfig) -> Self:
        """Return the estimator that a configuration asks for."""
        return cls()

    @classmethod
    def check(cls, workflow: Workflow) -> None:
        """Raise ValueError for a workflow whose turns this estimator cannot tell apart. Called before a model is loaded; by default, every workflow will do."""

    def advantages(self, trainer: Trainer, rows: Sequence[Row]) -> Sequence[float]:
        """Return one advantage per row.

        `rows` are those of the iteration, in the order of the episodes. `row.advantage` is the turn's group-relative advantage (its episode's, unless a
        reward function rewards turns), or what an estimator before this one has made of it. `row.episode.reward` is None where no reward function scored the episode; such a row
        should get 0. `row.episode.group(trainer.args.num_generations)` identifies the episodes that attempt the same problem.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement `advantages(self, trainer, rows)`.")

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        graders = [c for c in trainer.multirole_callbacks if isinstance(c, CreditEstimator) and c.needs_grades]
        if self not in graders[:1]:  # the first grades for all
            return
        grade_by_duty(episodes, trainer.score, structure_of(trainer.workflow))
        is_scored = any(episode.reward is not None and episode.turns for episode in episodes)
        if is_scored and all(turn.is_right is None for episode in episodes for turn in episode.turns):
            raise ValueError(
                f"{type(self).__name__} reads which turns are right, but no reward function says so. Add the parameter `episodes` to one, and set "
                "`episode.reward = Reward(value, is_correct=...)` in it."
            )

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        advantages = self.advantages(trainer, rows)
        if advantages is None or len(advantages) != len(rows):
            n = "None" if advantages is None else f"{len(advantages)} numbers"
            raise ValueError(
                f"`{type(self).__name__}.advantages` must return one number for each of the {len(rows)} rows, got {n}."
            )
        for row, advantage in zip(rows, advantages, strict=True):
            row.advantage = advantage
        return rows
