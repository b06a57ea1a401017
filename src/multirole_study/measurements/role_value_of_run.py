"""Measure what each role of a trained cell is worth, at checkpoints of its run (`multirole role_value`, `role_value`).

Plays the first validation problems with the run's adapters, as an evaluation does, replays them with every role resampled, played by the
base and replaced by its trivial twin (`multirole.roles.value`), and puts the role's share of tokens and gradient
beside it, from the run's `roles.parquet`.
"""

from dataclasses import asdict
from pathlib import Path

import pandas as pd
import torch

from multirole.roles.value import RoleEffect, role_values, turn_effects
from multirole.types import Episode
from multirole.update.threads import use_fitting_threads
from multirole_study.compare.intervals import t_interval
from multirole_study.experiment.base_models import check_base_of_run, shape_of
from multirole_study.experiment.evaluation import Evaluation, steps_of
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run_folder import ROLE_VALUE_FILE, TURN_EFFECTS_FILE, folder_of
from multirole_study.experiment.storage import add_steps
from multirole_study.measurements.runs import MeasuredRun, adapters_of

N_TURN_DRAWS = 4
"""Replays of a turn under "resample" in `TURN_EFFECTS_FILE`."""


def measure_roles(
    evaluation: Evaluation, launch: Launch, n_problems: int, n_draws: int, n_inspected: int = 0
) -> pd.DataFrame:  # fmt: skip
    """Return one row per checkpoint, role and intervention (`row_of`), with the run and `token_share` and `grad_share` of the role.

    Also writes the table into the run's folder, and with `n_inspected` the effect of every single turn (`turn_effects`). Checkpoints
    that were measured before stay in both files.

    Args:
        evaluation: the cell, and which checkpoints of its own run.
        n_problems: the first validation problems, with `evaluation.num_generations_eval` episodes each.
        n_draws: replays of each episode under "resample" and "base".
        n_inspected: number of these problems, from the first, whose turns are changed one by one. Episodes that the run did not record,
            or that play differently from the record, are left out.

    Raises:
        ValueError: for another run's adapters, for fewer than two problems, if the run or a checkpoint is missing, and if another
            process is writing to the run's folder.
    """
    if evaluation.adapters != "own":
        raise ValueError(f"`adapters` must be 'own', the adapters of the cell's run, got {evaluation.adapters!r}.")
    if n_problems < 2 or n_draws < 1:
        raise ValueError(
            f"`--problems` must be at least 2, for an interval, and `--draws` at least 1; got {n_problems} and {n_draws}."
        )
    if not 0 <= n_inspected <= n_problems:
        raise ValueError(f"`--turns` must be between 0 and the number of problems, {n_problems}, got {n_inspected}.")
    cell, steps = evaluation.cell, steps_of(evaluation, launch.results_dir)
    if not torch.cuda.is_available():
        use_fitting_threads(shape_of(cell).parameters)
    folder = folder_of(cell, launch.results_dir)
    check_base_of_run(folder, cell)
    run = MeasuredRun(folder, cell, adapters_of(folder, steps), launch)
    problems = cell.make_task().problems("validation", cell.n_validation)[:n_problems]
    attempts = [(problem, index) for problem in problems for index in range(evaluation.num_generations_eval)]
    shares, rows = shares_of(folder), list[dict[str, object]]()
    with run.open(problems) as trainer:
        for step in run.adapters:
            run.load(trainer, step)
            episodes = trainer.play(attempts, -1)
            trainer.score(episodes)
            measured = role_values(trainer, episodes, -1, n_draws=n_draws)
            new = [run.columns(step) | row_of(one) | shares.get(one.role, {}) for one in measured]
            inspected = as_recorded(folder, step, episodes[:: evaluation.num_generations_eval][:n_inspected])
            turns = turn_effects(trainer, inspected, -1, n_draws=N_TURN_DRAWS)
            add_steps(folder / ROLE_VALUE_FILE, new)  # at once, so that an interruption loses no finished step
            if turns:
                add_steps(folder / TURN_EFFECTS_FILE, [{"step": step, **asdict(turn_effect)} for turn_effect in turns])
            rows += new
    return pd.DataFrame(rows)


def row_of(effect: RoleEffect) -> dict[str, object]:
    """Return an effect as one flat row of a table, with the 95 % intervals of `change` and `moved` over problems."""
    row: dict[str, object] = {
        "role": effect.role, "how": effect.how, "problems": effect.problems, "replays": effect.replays, "before": effect.before,
        "after": effect.after,
    }  # fmt: skip
    for name, mean, values in (("change", effect.change, effect.changes), ("moved", effect.moved, effect.moves)):
        interval = t_interval(values)
        row |= {name: mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
    return row


def as_recorded(run: Path, step: int, episodes: list[Episode]) -> list[Episode]:
    """Return the episodes whose turns have the texts that the run recorded at this step; the page could not show the effects of others."""
    path = run / "turns" / f"step_{step:05d}.parquet"
    if not path.exists():
        return []
    texts = {problem: sorted(rows["text"]) for problem, rows in pd.read_parquet(path).groupby("problem")}
    return [episode for episode in episodes if texts.get(episode.problem.id) == sorted(t.text for t in episode.turns)]


def shares_of(run: Path) -> dict[str, dict[str, float]]:
    """Return role -> its share of the completion tokens of all roles (`token_share`), and its mean share of its adapter's gradient (`grad_share`).

    Both are over all iterations of the run. The share of the gradient is mostly a share of its noise (METRICS.md).
    """
    table = pd.read_parquet(run / "roles.parquet").groupby("role", sort=False)
    tokens, gradient = table["tokens"].sum(), table["grad_share"].mean()
    return {role: {"token_share": tokens[role] / tokens.sum(), "grad_share": gradient[role]} for role in tokens.index}
