"""Alarms that ring in a training. The rules need neither torch nor TRL and stand in `alarms`."""

import logging

from transformers import TrainerControl, TrainerState, TrainingArguments

from multirole.core.hooks import Iteration, MultiRoleCallback, Trainer
from multirole.diagnostics.alarms import Alarms

logger = logging.getLogger(__name__)

ACTIONS = ("log", "checkpoint", "stop")


class AlarmCallback(MultiRoleCallback):
    """Updates the alarms after each iteration and acts once on every new one: "log" warns, "checkpoint" also saves, "stop" also
    ends the training.

    Pass it after `RoleDiagnostics`, whose metrics it reads, and on every process: the action must be the same on all.
    """

    def __init__(self, alarms: Alarms, action: str = "log") -> None:
        if action not in ACTIONS:
            raise ValueError(f"`action` must be one of {list(ACTIONS)}, got {action!r}.")
        self.alarms, self.action = alarms, action

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        new = self.alarms.update(iteration.number, iteration.roles)
        for alarm in new if trainer.is_world_process_zero() else []:
            logger.warning("iteration %(iteration)d, %(alarm)s: %(message)s", alarm)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Iteration `state.global_step` has just ended."""
        if self.action != "log" and any(alarm["iteration"] == state.global_step for alarm in self.alarms.new):
            control.should_save = True
            control.should_training_stop |= self.action == "stop"
