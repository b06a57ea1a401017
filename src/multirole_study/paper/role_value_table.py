"""Measure what each role of a trained cell is worth, at checkpoints of its run (`multirole role_value`).

Plays the first validation problems with the run's adapters, as an evaluation does, replays them with every role resampled, played by the
base and replaced by its trivial twin (`multirole.roles.value`), and puts the role's share of tokens and gradient
beside it, from the run's `roles.parquet`.
"""

from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.figure import Figure

from multirole.roles.value import RoleEffect, role_values, turn_effects
from multirole.types import Episode
from multirole.update.threads import use_fitting_threads
from multirole_study.compare.intervals import t_interval
from multirole_study.experiment.base_models import check_base_of_run, shape_of
from multirole_study.experiment.cell_trainer import load_adapters, make_trainer
from multirole_study.experiment.evaluation import Evaluation, steps_of
from multirole_study.experiment.launch import Launch
from multirole_study.experiment.run_folder import (
    ROLE_VALUE_FILE,
    TURN_EFFECTS_FILE,
    adapters_folder,
    claim,
    folder_of,
    recorded_start,
)
from multirole_study.experiment.storage import add_steps
from multirole_study.labels import POLICY_NAMES, WORKFLOW_NAMES, cell_name
from multirole_study.paper.output import STYLE, Plate, Table, how_many

POINTS = ("before", "after", "change", "change_low", "change_high", "moved", "moved_low", "moved_high")
"""Columns that are accuracies or differences of them; printed in percent."""
N_TURN_DRAWS = 4
"""Replays of a turn under "resample" in `TURN_EFFECTS_FILE`."""


def measure(
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
    task, run = cell.make_task(), folder_of(cell, launch.results_dir)
    check_base_of_run(run, cell)
    about = {
        "run": cell.id,
        "workflow": cell.workflow,
        "policy": cell.policy_name,
        "task": cell.task,
        "seed": cell.seed,
    }
    problems = task.problems("validation", cell.n_validation)[:n_problems]
    with claim(run):  # two measurements would erase each other's rows
        trainer = make_trainer(cell, str(run), launch, problems=(problems, problems), started=recorded_start(run))
        attempts = [(problem, index) for problem in problems for index in range(evaluation.num_generations_eval)]
        shares, rows = shares_of(run), list[dict[str, object]]()
        try:
            for step in steps:
                if step:
                    load_adapters(trainer.peft_model, adapters_folder(run, step))
                trainer.state.global_step = step  # tells `play` to publish the new weights
                episodes = trainer.play(attempts, -1)
                trainer.score(episodes)
                measured = role_values(trainer, episodes, -1, n_draws=n_draws)
                new = [about | {"step": step, **row_of(one), **shares.get(one.role, {})} for one in measured]
                inspected = as_recorded(run, step, episodes[:: evaluation.num_generations_eval][:n_inspected])
                turns = turn_effects(trainer, inspected, -1, n_draws=N_TURN_DRAWS)
                add_steps(run / ROLE_VALUE_FILE, new)  # at once, so that an interruption loses no finished step
                if turns:
                    add_steps(run / TURN_EFFECTS_FILE, [{"step": step, **asdict(turn_effect)} for turn_effect in turns])
                rows += new
        finally:
            trainer.engine.close()
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


def as_text(table: pd.DataFrame) -> str:
    """Format the table of one run as Markdown."""
    return pd.DataFrame(lines_of(table)).to_markdown(index=False, disable_numparse=True)


def lines_of(table: pd.DataFrame) -> list[dict[str, object]]:
    """Format the rows for a reader: accuracies and differences in percent with their intervals, shares in percent."""

    def percent(value: float, sign: str = "") -> str:
        return "" if pd.isna(value) else f"{100 * value:{sign}.1f}".replace("-", "−")

    def interval(value: float, low: float, high: float, sign: str = "") -> str:
        return percent(value, sign) + ("" if pd.isna(low) else f" [{percent(low, sign)}, {percent(high, sign)}]")

    return [
        {
            "step": row.step, "role": row.role, "played by": row.how, "problems": row.problems, "replays": row.replays,
            "before": percent(row.before), "after": percent(row.after),
            "change": interval(row.change, row.change_low, row.change_high, "+"),
            "moved": interval(row.moved, row.moved_low, row.moved_high),
            "token share": percent(row.token_share), "gradient share": percent(row.grad_share),
        }
        for row in table.itertuples()
    ]  # fmt: skip


def value_table(rows: pd.DataFrame, scale: str) -> Table:
    """Build the table of all measured runs of a scale."""
    runs = [
        {
            "workflow": WORKFLOW_NAMES.get(row.workflow, row.workflow),
            "policy": POLICY_NAMES.get(row.policy, row.policy),
            "seed": row.seed,
        }
        for row in rows.itertuples()
    ]
    lines = [about | line for about, line in zip(runs, lines_of(rows), strict=True)]
    caption = (
        f"Not in the paper. Validation accuracy at {scale} when all turns of a role are drawn again, played by the untrained base, or replaced by a trivial role; "
        "everything that follows from them is played again with its seeds. `change` is the difference in points, `moved` how often the outcome turns. Brackets are 95 % t intervals over "
        "problems, of one seed each. Not corrected for their number, and judged by no declared rule."
    )
    return Table("role_value", "What each role is worth", caption, pd.DataFrame(lines), rows)


MARKS = {"resample": "another draw", "base": "the base plays it", "twin": "a trivial role plays it"}
"""Intervention -> its name in the figure."""


@plt.rc_context(STYLE)
def plot(table: pd.DataFrame) -> Figure:
    """Plot the change of accuracy and how often the outcome turns, by role and intervention, beside the role's shares of tokens and gradient.

    There is one row of panels per run and checkpoint. Lines are 95 % intervals over problems.
    """
    parts, roles = list(table.groupby(["run", "step"], sort=False)), list(table["role"].unique())
    figure, grid = plt.subplots(
        len(parts), 3, figsize=(7.5, 1.0 + (0.4 + 0.4 * len(roles)) * len(parts)), sharex="col", sharey=True, squeeze=False,
        layout="constrained",
    )  # fmt: skip
    for axes, ((_, step), here) in zip(grid, parts, strict=True):
        for i, (how, name) in enumerate(MARKS.items()):
            rows = here[here["how"] == how]
            heights = [roles.index(role) + 0.22 * (i - 1) for role in rows["role"]]
            for ax, column in zip(axes, ("change", "moved"), strict=False):
                (dots,) = ax.plot(100 * rows[column], heights, "os^"[i], markersize=4.5, color=f"C{i}", label=name)
                ax.hlines(
                    heights, 100 * rows[f"{column}_low"], 100 * rows[f"{column}_high"], color=dots.get_color(), lw=1.3
                )
        axes[0].axvline(0, color="0.8", lw=0.8)
        shares = here.drop_duplicates("role").set_index("role").loc[roles]
        for i, (column, name) in enumerate(
            {"token_share": "tokens of all roles", "grad_share": "its adapter's gradient"}.items()
        ):
            axes[2].barh(
                [r + 0.3 * (i - 0.5) for r in range(len(roles))],
                100 * shares[column],
                0.28,
                color=("0.35", "0.7")[i],
                label=name,
            )
        axes[0].set_yticks(range(len(roles)), roles)
        axes[0].set_ylim(len(roles) - 0.5, -0.5)
        name = cell_name(here["workflow"].iloc[0], here["policy"].iloc[0])
        accuracy = f"accuracy {100 * here['before'].iloc[0]:.1f} %"
        axes[0].set_title(f"{name}, iteration {step}, {accuracy}", loc="left")
    titles = ("change of accuracy (points)", "episodes whose outcome turns (%)", "share of the role over the run (%)")
    for ax, title in zip(grid[-1], titles, strict=True):
        ax.set_xlabel(title)
    handles, labels = grid[0][0].get_legend_handles_labels()
    more, names = grid[0][2].get_legend_handles_labels()
    figure.legend(
        [*handles, *more], [*labels, *names], loc="outside upper center", ncols=5, columnspacing=1.2, handletextpad=0.4
    )
    return figure


def value_figure(rows: pd.DataFrame, scale: str) -> Plate:
    """Draw `plot` of all measured runs of a scale."""
    caption = (
        f"What each role is worth at {scale}: the change of validation accuracy when all turns of the role are drawn again, played by the base or replaced by a trivial role, and how "
        f"often the outcome turns. Lines are 95 % t intervals over {how_many(rows['problems'])} problems, of one seed each."
    )
    return Plate("role_value", plot(rows), caption)
