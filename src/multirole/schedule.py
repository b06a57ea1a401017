"""Where an iteration stands in the learning-rate schedule, and when a budget of sampled tokens ends training.

TRL's schedule is a function of ticks: one per iteration, `max_steps` until its end. `ScheduleClock` gives an iteration several ticks, and
`TokenBudget` reads the schedule at the share of the budget that is spent.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from multirole.callbacks import Iteration, MultiRoleCallback, Trainer
from multirole.options import MultiRoleGRPOConfig
from multirole.saving.layout import saved_args, step_of
from multirole.update.rows import Row, Steps

logger = logging.getLogger(__name__)


def rate_at(trainer: Trainer, tick: float) -> float:
    """Return the learning rate of the trainer's schedule at a tick, which may lie beyond its end. Raises TypeError for one without a formula."""
    schedule = with_formula(trainer.lr_scheduler)
    factor: Any = schedule.lr_lambdas[0]  # whose type in torch takes whole steps only
    return float(schedule.base_lrs[0]) * factor(tick)


def with_formula(schedule: Any) -> LambdaLR:
    """Return a schedule that is a function of the step; TypeError for another one."""
    if not isinstance(schedule, LambdaLR):
        raise TypeError(
            f"`lr_ticks` and `max_sampled_tokens` need a schedule that is a function of the step, got a {type(schedule).__name__}. Use "
            "`lr_scheduler_type='cosine'`, 'linear' or 'constant_with_warmup'."
        )
    return schedule


class ReadsSchedule(MultiRoleCallback):
    """A callback that asks the schedule for other steps than HF's, and refuses one that cannot tell them before anything is sampled."""

    def on_train_begin(self, args: Any, state: Any, control: Any, *, lr_scheduler: Any, **_: Any) -> None:
        with_formula(lr_scheduler)


@dataclass
class ScheduleClock(ReadsSchedule):
    """Callback that gives an iteration several ticks of the schedule, shared by its adapters: see `MultiRoleGRPOConfig.lr_ticks`."""

    ticks: int
    wraps: bool = False
    steps: Steps = field(default_factory=dict, init=False, compare=False)  # of the update, if there is one

    def on_update_begin(self, trainer: Trainer, rows: list[Row], steps: Steps) -> None:
        self.steps = steps  # later callbacks may change the order of the adapters

    def on_update_end(self, trainer: Trainer, rows: list[Row]) -> None:
        self.steps = {}

    def on_learning_rate(self, trainer: Trainer, adapter: str, lr: float) -> float:
        place = [*self.steps, *trainer.adapters].index(adapter)
        tick = trainer.state.global_step * self.ticks + place * self.ticks // len(trainer.adapters)
        return rate_at(trainer, tick if self.wraps else min(tick, trainer.state.max_steps))


class TokenBudget(ReadsSchedule, ExportableState):
    """Callback that ends training at a budget of sampled tokens, and counts what was spent: see `MultiRoleGRPOConfig.max_sampled_tokens`.

    The counts are saved in the `trainer_state.json` of every checkpoint.
    """

    COUNTS = ("sampled_tokens", "read_tokens", "optimizer_steps")

    def __init__(self, budget: int) -> None:
        self.budget, self.spent = budget, dict.fromkeys(self.COUNTS, 0)

    @property
    def share(self) -> float:
        """Return the share of the budget that is spent; above 1 if the last iteration went beyond it."""
        return self.spent["sampled_tokens"] / self.budget

    def state(self) -> dict[str, Any]:
        return {"args": dict(self.spent), "attributes": {}}

    def begin(self, checkpoint: Path | None) -> int | None:
        """Set the counts for a call of `train`. Returns the step of a checkpoint whose run has spent the budget, and None where training is left."""
        saved = {} if checkpoint is None else saved_args(checkpoint, type(self).__name__)
        if checkpoint is not None and not saved:
            raise ValueError(
                f"{checkpoint} is of a run without `max_sampled_tokens`, which counted no tokens, so it is not known what is left of the budget of "
                f"{self.budget}. Resume it without a budget, or train from the start."
            )
        self.spent = dict.fromkeys(self.COUNTS, 0) | saved
        return step_of(checkpoint) if checkpoint is not None and self.share >= 1 else None

    def on_learning_rate(self, trainer: Trainer, adapter: str, lr: float) -> float:
        return rate_at(trainer, min(self.share, 1.0) * trainer.state.max_steps)

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        steps = len(iteration.steps)
        for name, n in zip(self.COUNTS, (iteration.sampled_tokens, iteration.read_tokens, steps), strict=True):
            self.spent[name] += n

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End training once the budget is spent, with a checkpoint and an evaluation as at any other end."""
        is_spent = self.share >= 1
        if is_spent:
            control.should_training_stop = control.should_log = True
            control.should_evaluate = args.eval_strategy != "no"
            control.should_save = args.save_strategy != "no"
        if (is_spent or state.global_step >= state.max_steps) and state.is_world_process_zero:
            text = "{sampled_tokens:,} tokens sampled, {read_tokens:,} read, {optimizer_steps:,} optimizer steps"
            logger.log(
                logging.INFO if is_spent else logging.WARNING, "Training ends after %d iterations: %s. The budget was %s sampled tokens%s.",
                state.global_step, text.format(**self.spent), f"{self.budget:,}",
                "" if is_spent else ", and `max_steps` ends the run before, so that the schedule has not come to its end",
            )  # fmt: skip


def schedule_callbacks(args: MultiRoleGRPOConfig) -> list[MultiRoleCallback]:
    """Return the callbacks that `lr_ticks` and `max_sampled_tokens` ask for."""
    callbacks: list[MultiRoleCallback] = []
    if args.lr_ticks != 1:
        callbacks.append(ScheduleClock(args.lr_ticks, args.lr_wraps))
    if args.max_sampled_tokens is not None:
        callbacks.append(TokenBudget(args.max_sampled_tokens))
    return callbacks
