"""Live lines of a run, for a terminal, papermill (`--log-output`) and a notebook."""

import math
import sys
import time
from statistics import fmean
from typing import TYPE_CHECKING

from transformers import TrainerControl, TrainerState, TrainingArguments

from multirole.core.hooks import Iteration, MultiRoleCallback
from multirole.core.types import Episode

if TYPE_CHECKING:
    from multirole.core.trainer import MultiRoleGRPOTrainer

MAX_LINES = 100
"""Lines of iterations in all: a longer run prints every k-th, so that its executed notebook stays small."""


def scores(episodes: list[Episode]) -> str:
    """The mean reward and, where the rewards say what is correct, the accuracy."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    right = [reward.is_correct for reward in rewards if reward.is_correct is not None]
    return f"reward {fmean(reward.value for reward in rewards):.3f}" + (f"   accuracy {fmean(right):.1%}" if right else "")


class Progress(MultiRoleCallback):
    """Print one line per iteration (reward, accuracy, seconds, time left) and one per evaluation."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Note the time and the iteration that training starts from."""
        self.started, self.first = time.monotonic(), state.global_step

    def on_iteration_end(self, trainer: "MultiRoleGRPOTrainer", iteration: Iteration) -> None:
        """Print the iteration, or every k-th of a long run."""
        number, planned = iteration.number, trainer.state.max_steps
        if trainer.is_world_process_zero() and number % math.ceil(planned / MAX_LINES) == 0:
            pace = (time.monotonic() - self.started) / (number - self.first)  # s per iteration, evaluations included
            minutes, seconds = divmod(round(pace * (planned - number)), 60)
            sys.stdout.write(
                f"iteration {number}/{planned}   {scores(iteration.episodes)}   "
                f"{sum(iteration.seconds.values()):.1f} s   {minutes}:{seconds:02} left\n"
            )
            sys.stdout.flush()

    def on_episodes_evaluated(
        self, trainer: "MultiRoleGRPOTrainer", episodes: list[Episode], metrics: dict[str, float]
    ) -> None:  # fmt: skip
        """Print the scores of the validation problems."""
        if trainer.is_world_process_zero():
            step = trainer.state.global_step
            sys.stdout.write(f"validation at iteration {step}   {scores(episodes)}   {len(episodes)} problems\n")
            sys.stdout.flush()
