"""Define the events of an iteration, for callbacks that monitor, record or change training.

Pass instances to `MultiRoleGRPOTrainer(callbacks=[...])` like any transformers callback; they are called in that order, on
every process. Everything else can be read from `trainer` (`trainer.state.global_step` is the number of finished iterations).
"""

from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor
from transformers import TrainerCallback

from multirole.types import Episode
from multirole.update.gradients import Part
from multirole.update.rows import Row, Steps

T = TypeVar("T")


class Trainer(Protocol):
    """What callbacks, estimators and engines may rely on of [`MultiRoleGRPOTrainer`]. The rest of TRL's trainer is there, too.

    Attributes:
        workflow: as it was passed.
        policy: role -> the stored name of the adapter that it trains, or its partner as text (`multirole.policy`).
        adapters: the names under which the trained adapters are stored: "shared", "generator", and "adapter_a" for an adapter `a` of your own map.
        partners: what plays the roles that are not trained: `partners.roles` names these, `partners.served` all adapters that play.
        peft_model: the model without the wrappers of accelerate.
        state: HF's; `state.global_step` is the number of finished iterations.
    """

    args: Any
    state: Any
    workflow: Any
    policy: dict[str, str]
    adapters: list[str]
    peft_model: Any

    def play(self, attempts: Any, iteration: int, policy: Any = None, replays: Any = None) -> list[Episode]:
        """Play one episode per attempt under the current adapters, without scoring them."""
        ...

    def score(self, episodes: list[Episode]) -> None:
        """Set `reward` of played episodes by the reward functions."""

    def logprobs_of(self, rows: list[Row], base: bool = False) -> list[Tensor]:
        """Return the log-probs (C,) of each row's completion under its adapter's current weights, or under the reference of KL."""
        ...

    def entropies_of(self, rows: list[Row]) -> list[Tensor]:
        """Return the entropies (C,) in nats of the distributions that `logprobs_of` takes its log-probs from."""
        ...

    def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of one adapter, with the norm of its gradient before and after clipping."""

    adapter: str
    rows: list[Row]
    lr: float
    grad_norm: float
    grad_norm_clipped: float


@dataclass
class Iteration:
    """The results of one iteration. Callbacks may add to `roles` (role -> metric -> value), which is then logged."""

    number: int
    """1-based."""
    episodes: list[Episode]
    rows: list[Row]
    steps: list[OptimizerStep]
    seconds: dict[str, float]
    """Wall time of "rollout" and "update"; with `max_staleness`, "rollout" is the time that the trainer waited for its episodes."""
    roles: dict[str, dict[str, float]] = field(default_factory=dict)
    sampled_tokens: int = 0
    """Completion tokens that the engine sampled for this iteration in all processes, those of replays included."""
    read_tokens: int = 0
    """Prompt tokens of the same requests."""
    repeated_passes: dict[str, int] = field(default_factory=dict)
    """How many passes of the update, by reason, were computed again: in smaller ones ("passes_out_of_memory"), or without fast paths
    ("passes_not_finite"). Empty if none was."""


class MultiRoleCallback(TrainerCallback):
    """Base class of callbacks for the events of an iteration. An event does nothing unless it is overridden."""

    def overrides(self, event: str) -> bool:
        """Return whether the callback's class overrides an event, such as "on_learning_rate"."""
        return getattr(type(self), event) is not getattr(MultiRoleCallback, event)

    def on_episode_end(self, trainer: Trainer, episode: Episode) -> None:
        """Called as soon as an episode of this process has its answer, before it is scored and while others run.

        Evaluations and replays (`fork`) call it, too; a replay has the problem and the index of its episode. It runs in the rollout's thread, which
        steps the engine, so it must return quickly. Later events get other objects, so keep `(episode.problem.id, episode.index)` and not the episode. With `max_staleness` the episode may belong to a later
        iteration than the one that is trained meanwhile.
        """

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        """Called when all episodes are finished and scored; each has its advantage, and its reward or None, if no function scored it."""

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        """Return the rows to train on; may change advantages or leave rows out. Called before the rows are ordered.

        `rows` are in the order of the episodes. `row.advantage` is what `credit` and earlier callbacks have estimated, `row.episode.reward` the
        episode's reward.
        """
        return rows

    def on_learning_rate(self, trainer: Trainer, adapter: str, lr: float) -> float:
        """Return the learning rate of an adapter's optimizer steps in this iteration; `lr` is the schedule's, or the last callback's.

        Called once per adapter and iteration, in the order of their updates. The rate is that of the optimizer's first parameter group;
        others keep their proportion to it.
        """
        return lr

    def on_update_begin(self, trainer: Trainer, rows: list[Row], steps: Steps) -> None:
        """Called before the first optimizer step. `steps` maps each adapter to its optimizer steps; it may be changed."""

    def on_micro_batch(
        self, trainer: Trainer, rows: list[Row], batch: dict[str, Tensor], logps: Tensor, entropies: Tensor
    ) -> None:  # fmt: skip
        """Called after the loss of one micro-batch of one adapter's rows.

        `batch` holds the inputs of TRL's loss; `logps` and `entropies` (N, C) are the model's for the completions.
        """

    def on_gradient_parts(
        self, trainer: Trainer, adapter: str, parts: list[Part], gradients: Tensor
    ) -> None:  # fmt: skip
        """Called with a step's gradient by (role, slot), one part per row of `gradients` (K, n). May scale rows in place."""

    def on_adapter_step(self, trainer: Trainer, step: OptimizerStep) -> None:
        """Called after each optimizer step of an adapter."""

    def on_update_end(self, trainer: Trainer, rows: list[Row]) -> None:
        """Called after the last optimizer step of the iteration."""

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        """Called at the end of the iteration; `iteration.roles` is logged after the last callback."""

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float], prefix: str
    ) -> None:  # fmt: skip
        """Called when the episodes of an evaluation with the current adapters are finished and scored.

        Names of metrics begin with `prefix`: "eval", "eval_<name>" for one of several datasets, or "test" in `predict`.
        """


def require_value(value: T | None, callback: MultiRoleCallback, event: str, what: str) -> T:
    """Return what a callback's event returned; TypeError for None, which a method without `return` gives."""
    if value is None:
        raise TypeError(f"`{type(callback).__name__}.{event}` returned None. It must return {what}, changed or not.")
    return value
