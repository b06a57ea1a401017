"""Show what each role of trained cells is worth, which `multirole role_value` has measured, as a table and a figure."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from multirole_study.labels import BASE_COLOURS, BASE_NAMES, POLICY_NAMES, WORKFLOW_NAMES, cell_name
from multirole_study.paper.output import STYLE, Plate, Table, bounded, how_many, say_below


def as_text(table: pd.DataFrame) -> str:
    """Format the table of one run as Markdown."""
    return pd.DataFrame(lines_of(table)).to_markdown(index=False, disable_numparse=True)


def lines_of(table: pd.DataFrame) -> list[dict[str, object]]:
    """Format the rows for a reader: accuracies and differences in percent with their intervals, shares in percent."""
    return [
        {
            "step": row.step, "role": row.role, "played by": row.how, "problems": row.problems, "replays": row.replays,
            "before": bounded(row.before, "accuracy", missing=""), "after": bounded(row.after, "accuracy", missing=""),
            "change": bounded(row.change, "difference", row.change_low, row.change_high, missing=""),
            "moved": bounded(row.moved, "rate", row.moved_low, row.moved_high, missing=""),
            "token share": bounded(row.token_share, "rate", missing=""),
            "gradient share": bounded(row.grad_share, "rate", missing=""),
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
                (dots,) = ax.plot(
                    100 * rows[column], heights, "os^"[i], markersize=4.5, color=BASE_COLOURS[i], label=name
                )
                ax.hlines(
                    heights, 100 * rows[f"{column}_low"], 100 * rows[f"{column}_high"], color=dots.get_color(), lw=1.3
                )
        axes[0].axvline(0, color="0.8", lw=0.8)
        shares = here.drop_duplicates("role").set_index("role").reindex(roles)  # a run of another workflow lacks some
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
    figure = plot(rows)
    say_below(
        figure,
        f"{BASE_NAMES.get(scale, scale)}; one seed each; lines are 95 % t intervals over {how_many(rows['problems'])} problems",
    )
    return Plate("role_value", figure, caption)
