"""Live lines of a run, for a terminal, papermill (`--log-output`) and a notebook."""

import math
import sys
import time
from typing import TYPE_CHECKING

from transformers import TrainerControl, TrainerState, TrainingArguments

from multirole.core.hooks import Iteration, MultiRoleCallback
from multirole.core.types import Episode

if TYPE_CHECKING:
    from multirole.core.trainer import MultiRoleGRPOTrainer

MAX_LINES = 100
"""Lines of iterations in all: a longer run prints every k-th, so that its executed notebook stays small."""


def accuracy(episodes: list[Episode]) -> float:
    """The fraction of episodes whose answer is right."""
    return sum(episode.reward.is_correct for episode in episodes) / len(episodes)


class Progress(MultiRoleCallback):
    """Print one line per iteration (reward, accuracy, seconds, time left) and one per evaluation."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Note the time and the iteration that training starts from."""
        self.started, self.first = time.monotonic(), state.global_step

    def on_iteration_end(self, trainer: "MultiRoleGRPOTrainer", iteration: Iteration) -> None:
        """Print the iteration, or every k-th of a long run."""
        number, planned, episodes = iteration.number, trainer.state.max_steps, iteration.episodes
        if trainer.is_world_process_zero() and number % math.ceil(planned / MAX_LINES) == 0:
            reward = sum(episode.reward.value for episode in episodes) / len(episodes)
            pace = (time.monotonic() - self.started) / (number - self.first)  # s per iteration, evaluations included
            minutes, seconds = divmod(round(pace * (planned - number)), 60)
            sys.stdout.write(
                f"iteration {number}/{planned}   reward {reward:.3f}   accuracy {accuracy(episodes):.1%}   "
                f"{sum(iteration.seconds.values()):.1f} s   {minutes}:{seconds:02} left\n"
            )
            sys.stdout.flush()

    def on_episodes_evaluated(
        self, trainer: "MultiRoleGRPOTrainer", episodes: list[Episode], metrics: dict[str, float]
    ) -> None:  # fmt: skip
        """Print the validation accuracy."""
        if trainer.is_world_process_zero():
            right, at = accuracy(episodes), trainer.state.global_step
            sys.stdout.write(f"evaluation at iteration {at}   validation accuracy {right:.1%} of {len(episodes)} problems\n")
            sys.stdout.flush()
