"""Measure what each role of a trained cell is worth, at checkpoints of its run (`multirole role_value`).

Plays the first validation problems with the run's adapters, as an evaluation does, replays them with every role resampled, played by the
base and replaced by its trivial twin (`multirole.diagnostics.role_value`), and puts the role's share of tokens and gradient
beside it, from the run's `roles.parquet`.
"""

from pathlib import Path

import pandas as pd
import torch

from multirole.core.threads import use_fitting_threads
from multirole.diagnostics.role_value import role_values
from multirole_study.experiment.base_models import shape_of
from multirole_study.experiment.cell_trainer import TaskReward, load_adapters, make_trainer
from multirole_study.experiment.evaluation import Evaluation, steps_of
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run_folder import adapters_folder, folder_of

POINTS = ("before", "after", "change", "change_low", "change_high", "moved", "moved_low", "moved_high")
"""Columns that are accuracies or differences of them; printed in percent."""


def measure(evaluation: Evaluation, launch: Launch, n_problems: int, n_draws: int) -> pd.DataFrame:
    """Return one row per checkpoint, role and intervention (`RoleEffect.row`), with `token_share` and `grad_share` of the role.

    Args:
        evaluation: the cell, and which checkpoints of its own run.
        n_problems: the first validation problems, with `evaluation.n_rollouts` episodes each.
        n_draws: replays of each episode under "resample" and "base".

    Raises:
        ValueError: for another run's adapters, for fewer than two problems, and if the run or a checkpoint is missing.
    """
    if evaluation.adapters != "own":
        raise ValueError(f"`adapters` must be 'own', the adapters of the cell's run, got {evaluation.adapters!r}.")
    if n_problems < 2 or n_draws < 1:
        raise ValueError(
            f"`--problems` must be at least 2, for an interval, and `--draws` at least 1; got {n_problems} and {n_draws}."
        )
    cell, steps = evaluation.cell, steps_of(evaluation, launch.results_dir)
    if not torch.cuda.is_available():
        use_fitting_threads(shape_of(cell).parameters)
    task, run = cell.make_task(), folder_of(cell, launch.results_dir)
    problems = task.problems("validation", cell.n_validation)[:n_problems]
    reward = TaskReward(task, problems)
    trainer = make_trainer(cell, str(run), launch, problems=(problems, problems))
    attempts = [(problem, index) for problem in problems for index in range(evaluation.n_rollouts)]
    shares, rows = shares_of(run), []
    try:
        for step in steps:
            if step:
                load_adapters(trainer.peft_model, adapters_folder(run, step))
            trainer.state.global_step = step  # tells `play` to publish the new weights
            episodes = trainer.play(attempts, -1)
            reward.score_answers(episodes)
            for effect in role_values(trainer, episodes, reward.score_answers, -1, n_draws=n_draws):
                rows.append({"step": step, **effect.row(), **shares.get(effect.role, {})})
    finally:
        trainer.engine.close()
    return pd.DataFrame(rows)


def shares_of(run: Path) -> dict[str, dict[str, float]]:
    """Return role -> its share of the completion tokens of all roles (`token_share`), and its mean share of its adapter's gradient (`grad_share`).

    Over all iterations of the run. The share of the gradient is mostly of its noise (METRICS.md).
    """
    table = pd.read_parquet(run / "roles.parquet").groupby("role", sort=False)
    tokens, gradient = table["tokens"].sum(), table["grad_share"].mean()
    return {role: {"token_share": tokens[role] / tokens.sum(), "grad_share": gradient[role]} for role in tokens.index}


def as_text(table: pd.DataFrame) -> str:
    """Format the table as Markdown: accuracies and differences in percent with their intervals, shares in percent."""

    def percent(value: float, sign: str = "") -> str:
        return "" if pd.isna(value) else f"{100 * value:{sign}.1f}"

    lines = [
        {
            "step": row.step, "role": row.role, "played by": row.how, "problems": row.problems, "replays": row.replays,
            "before": percent(row.before), "after": percent(row.after),
            "change": f"{percent(row.change, '+')} [{percent(row.change_low, '+')}, {percent(row.change_high, '+')}]",
            "moved": f"{percent(row.moved)} [{percent(row.moved_low)}, {percent(row.moved_high)}]",
            "token share": percent(row.token_share), "gradient share": percent(row.grad_share),
        }
        for row in table.itertuples()
    ]  # fmt: skip
    return pd.DataFrame(lines).to_markdown(index=False, disable_numparse=True)
