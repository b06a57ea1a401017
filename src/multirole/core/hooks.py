"""The events of an iteration, for callbacks: what watches, records or changes training without being known to the trainer.

Pass instances to `MultiRoleGRPOTrainer(callbacks=[...])` like any transformers callback; they are called in that order, on
every process. `trainer` gives access to everything else (`trainer.state.global_step` is the number of finished iterations).
"""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from multirole.core.gradients import Part
from multirole.core.rows import Row, Steps
from multirole.core.types import Episode

Trainer = Any
"""A `MultiRoleGRPOTrainer`, whose module imports this one."""


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of one adapter. The norms are of the gradient that was applied, before and after clipping."""

    adapter: str
    rows: list[Row]
    lr: float
    grad_norm: float
    grad_norm_clipped: float


@dataclass
class Iteration:
    """What happened in one iteration. Callbacks may add to `roles` (role -> metric -> value), which is then logged."""

    number: int
    """1-based."""
    episodes: list[Episode]
    rows: list[Row]
    steps: list[OptimizerStep]
    seconds: dict[str, float]
    """Wall time of "rollout" and "update"."""
    roles: dict[str, dict[str, float]] = field(default_factory=dict)


class MultiRoleCallback(TrainerCallback):
    """Base class of callbacks that take part in an iteration. Every event does nothing unless overridden."""

    def on_episode_end(self, trainer: Trainer, episode: Episode) -> None:
        """An episode that this process plays has its answer and no reward yet, while others may go on; evaluations too.

        It is called in the rollout's thread, which drives the engine: return at once.
        """

    def on_rollout_end(self, trainer: Trainer, episodes: list[Episode]) -> None:
        """Episodes have been played and scored; each has its reward and its advantage."""

    def on_rows(self, trainer: Trainer, rows: list[Row]) -> list[Row]:
        """Return the rows to train on, before they are put in order: change advantages, or leave rows out."""
        return rows

    def on_update_begin(self, trainer: Trainer, rows: list[Row], steps: Steps) -> None:
        """`steps` maps each adapter to its optimizer steps, (rows, divisor) each. No weight has moved yet."""

    def on_micro_batch(
        self, trainer: Trainer, rows: list[Row], batch: dict[str, Tensor], logps: Tensor, entropies: Tensor
    ) -> None:  # fmt: skip
        """The loss of one micro-batch of one adapter's rows has been taken.

        `batch` holds what TRL's loss was given, `logps` and `entropies` (N, C) what the model said of the completions.
        """

    def on_gradient_parts(
        self, trainer: Trainer, adapter: str, parts: list[Part], gradients: Tensor
    ) -> None:  # fmt: skip
        """An optimizer step's gradient by (role, slot), one part per row of `gradients` (K, n). May scale rows in place."""

    def on_adapter_step(self, trainer: Trainer, step: OptimizerStep) -> None:
        """An adapter has taken one optimizer step."""

    def on_update_end(self, trainer: Trainer, rows: list[Row]) -> None:
        """All optimizer steps of the iteration have been taken."""

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        """The iteration is over; `iteration.roles` is logged after the last callback."""

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float]
    ) -> None:  # fmt: skip
        """The evaluation problems have been attempted and scored with the current adapters."""
