"""Print a run's progress: an introduction, one line per iteration and per evaluation, and a closing block.

The lines go to standard output, so that a terminal, papermill (`--log-output` or `--stdout-file -`) and a notebook show them
immediately. A stored notebook keeps only the closing block.
"""

import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import TrainerState

from multirole.callbacks import Iteration, MultiRoleCallback, Trainer
from multirole.metrics.episodes import accuracy, mean_reward, n_failed, overflow_rate
from multirole.types import Episode
from multirole_study.experiment.announce import say
from multirole_study.experiment.base_config import recorded_name
from multirole_study.experiment.base_models import shape_of
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.hardware import engine_of
from multirole_study.falls import wilson


def interval(right: int, n: int) -> str:
    """Format an accuracy with its 95 % Wilson interval, such as "43.0 % (37.1 to 49.1)"."""
    low, high = wilson(right, n)
    return f"{100 * right / n:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def introduce(cell: Cell, n_processes: int, folder: Path, counts: dict[str, int], checkpoint: Path | None) -> None:
    """Print which cell is trained and where its results go."""
    slots = cell.make_workflow().roles
    roles = ", ".join(f"{role}{f' x{slots[role]}' * (slots[role] > 1)} -> {cell.policy[role]}" for role in slots)
    n_threads = torch.get_num_threads()
    threads = "" if torch.cuda.is_available() else f", {n_threads} torch thread{'s' * (n_threads > 1)}"
    overlong = f" ({counts['train_overlong']} over the prompt cap dropped)" * (counts["train_overlong"] > 0)
    say(
        f"{cell.id}\n"
        f"  workflow    {cell.workflow_name}, {roles}\n"
        f"  task        {cell.task_label}, {counts['train']} training{overlong} and {counts['validation']} validation problems\n"
        f"  model       {recorded_name(cell.model) if cell.model else cell.scale}, {shape_of(cell).parameters / 1e6:.2f}M parameters, "
        f"LoRA rank {cell.lora_r}; {engine_of(cell)} engine, {n_processes} process{'es' * (n_processes > 1)}{threads}\n"
        f"  training    {cell.max_steps} iterations of {cell.n_problems} problems x {cell.num_generations} episodes, "
        f"validation every {cell.eval_steps}{f'; continues from {checkpoint.name}' if checkpoint else ''}\n"
        f"  folder      {folder}" + "".join(f"\n  note        {remark}" for remark in cell.remarks())
    )


class Progress(MultiRoleCallback):
    """Prints one line per iteration and per evaluation. Pass it last, because it reads other callbacks' measurements.

    The time left is extrapolated from this session's iterations, evaluations included, or from its tokens where a budget ends the run before.
    """

    def on_train_begin(self, args: object, state: TrainerState, control: object, **_: object) -> None:
        self.started, self.first, self.sampled = time.monotonic(), state.global_step, 0

    def on_iteration_end(self, trainer: Trainer, iteration: Iteration) -> None:
        number, planned, episodes = iteration.number, trainer.state.max_steps, iteration.episodes
        elapsed, self.sampled = time.monotonic() - self.started, self.sampled + iteration.sampled_tokens
        left = elapsed / (number - self.first) * (planned - number)
        if trainer.budget is not None and self.sampled:
            tokens_left = trainer.budget.budget - trainer.budget.spent["sampled_tokens"]
            left = min(left, elapsed / self.sampled * max(0, tokens_left))
        tokens = {role: values["length_mean"] for role, values in iteration.roles.items()}
        seconds = sum(iteration.seconds.values())
        scored = mean_reward(episodes), accuracy(episodes)
        say(iteration_line(number, planned, *scored, seconds, round(left), tokens, overflow_rate(episodes)))

    def on_episodes_evaluated(
        self, trainer: Trainer, episodes: list[Episode], metrics: dict[str, float], prefix: str
    ) -> None:
        step = trainer.state.global_step
        skills = [row for row in trainer.recorder.tables["skills"] if row["step"] == step]
        failed = n_failed(episodes)
        say(validation_line(step, mean_reward(episodes), accuracy(episodes), len(episodes) - failed, skills, failed))


def iteration_line(
    number: int, planned: int, reward: float, accuracy: float | None, seconds: float, left: int, tokens: dict[str, float],
    overflows: float = 0.0,
) -> str:  # fmt: skip
    """Format the line of one iteration; `left` is in seconds, `tokens` the mean completion length by role."""
    return (
        f"iteration {number:>{len(str(planned))}}/{planned}   {_scored(reward, accuracy)}   {seconds:.1f} s, "
        f"{left // 60}:{left % 60:02} left   tokens {', '.join(f'{role} {n:.0f}' for role, n in tokens.items())}"
        f"{f'   {100 * overflows:.0f} % over max_prompt_tokens' if overflows else ''}"
    )


def validation_line(
    step: int, reward: float, accuracy: float | None, n: int, skills: list[dict[str, Any]], failed: int = 0
) -> str:
    """Format the line of one evaluation of `n` scored problems, without those that `failed`.

    `skills` are rows of `skills.parquet`, shown as gains over the trivial role.
    """
    gains = {f"{row['role']} {row['measure']}": 100 * (row["skill"] - row["trivial"]) for row in skills if row["role"]}
    shown = ", ".join(f"{name} {gain:+.1f}" for name, gain in gains.items() if not math.isnan(gain))
    line = f"validation at iteration {step}   {_scored(reward, accuracy)}   {n} problems"
    line += f"   {failed} failed" if failed else ""
    return f"{line}   skill {shown}" if shown else line


def _scored(reward: float, accuracy: float | None) -> str:
    return f"reward {reward:.3f}" + ("" if accuracy is None else f"   accuracy {100 * accuracy:.1f} %")


def conclude(folder: Path, how: str) -> None:
    """Print how a run ended, its accuracies, and where its results are. In a notebook this replaces earlier lines."""
    if "ipykernel.kernelapp" in sys.modules:
        from IPython.display import clear_output

        clear_output(wait=True)
    path = folder / "eval.parquet"
    if path.exists():
        shown = result_lines(pd.read_parquet(path, columns=["step", "correct"]))
    else:
        shown = ["  validation  no episode was scored"]
    lines = [f"  folder      {folder}", f"  to see it   multirole inspect {shlex.quote(str(folder))}"]
    say("\n".join([f"{folder.name} {how}", *shown, *lines]))


def evaluation_line(step: int, outcomes: pd.DataFrame) -> str:
    """Format the line of one evaluated step, from its rows of an evaluation's `eval.parquet`."""
    judged = outcomes["correct"].dropna()
    right, n = int(judged.sum()), len(judged)
    accuracy = (
        f"accuracy {interval(right, n)}, 95 % interval over {n} episodes" if n else "the task defines no accuracy"
    )
    return f"evaluation at iteration {step}   reward {outcomes['reward'].mean():.3f}   {accuracy}"


def result_lines(outcomes: pd.DataFrame) -> list[str]:
    """Format the accuracy before, at the best step and after; empty if the rewards do not define correctness."""
    if outcomes["correct"].isna().any():
        return []
    totals = outcomes.groupby("step")["correct"].agg(["sum", "count", "mean"])
    steps = {"before": totals.index[0], "best": totals["mean"].idxmax(), "after": totals.index[-1]}
    return [
        f"  {name:<11} accuracy {interval(*map(int, totals.loc[step, ['sum', 'count']]))} at iteration {step}, "
        f"95 % interval over {totals.loc[step, 'count']:.0f} problems"
        for name, step in steps.items()
    ]
