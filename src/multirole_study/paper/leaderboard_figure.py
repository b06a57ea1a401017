"""Draw the leaderboard of credit estimators (`studies/credit.yaml`)."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multirole_study.compare.rules import ALPHA, MARGIN
from multirole_study.compare.verdicts import UNEQUAL
from multirole_study.labels import BASE_NAMES, SETUP_COLOURS, SINGLE_COLOUR
from multirole_study.paper.leaderboard import (
    PLACEBO,
    SCORES,
    Board,
    Comparison,
    placebo_answer,
)
from multirole_study.paper.output import Plate, how_many, interval_text, labelled, say_below, styled

PLACEBO_COLOUR = "#b5651d"


def draw_arm(axes: Axes, height: int, comparison: Comparison) -> None:
    """Draw an arm's difference from the reference as a point with its interval; hollow if its tokens are unequal."""
    gap, is_placebo = comparison.gap, comparison.arm.credit == PLACEBO
    colour = PLACEBO_COLOUR if is_placebo else SETUP_COLOURS[1]
    face = "white" if comparison.verdict == UNEQUAL else colour
    if gap.seeds > 1:
        axes.hlines(height, 100 * gap.low, 100 * gap.high, color=colour, lw=1.4)
    if gap.seeds:
        marker, label = ("D", "placebo") if is_placebo else ("o", "estimator")
        label += " with unequal tokens" if comparison.verdict == UNEQUAL else ""
        axes.plot(100 * gap.mean, height, marker, ms=5, color=colour, mfc=face, ls="", label=label)


def draw_board(axes: Axes, board: Board, name: str) -> None:
    """Draw all arms of a workflow under a score, the single agent as a line across."""
    comparisons = board.against_reference[name]
    axes.axvspan(-100 * MARGIN, 100 * MARGIN, color="0.9", lw=0, label=f"within {100 * MARGIN:.0f} points: equivalent")
    axes.axvline(0, color="0.5", lw=0.8)
    for height, comparison in enumerate(comparisons):
        draw_arm(axes, height, comparison)
    if name == "accuracy" and board.single and (single := board.unjudged(board.single, name)).gap.seeds:
        label = f"single agent with {'unequal' if single.verdict == UNEQUAL else 'equal'} tokens"
        axes.axvline(100 * single.gap.mean, color=SINGLE_COLOUR, ls="--", lw=1.4, label=label)
        interval = "its 95 % t interval"
        axes.axvspan(
            100 * single.gap.low,
            100 * single.gap.high,
            fc="none",
            ec=SINGLE_COLOUR,
            hatch="////",
            alpha=0.35,
            lw=0,
            label=interval,
        )
    labels = [f"{part.arm.name}{'' if part.gap.seeds else ' (not run)'}" for part in comparisons]
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_title(f"{board.title}: {SCORES[name].title}", fontsize=8)
    axes.set_xlabel(f"difference from {board.reference.name} at the end (points)")


@styled
def leaderboard_figure(boards: list[Board], scale: str) -> Plate:
    """Draw differences from the reference: a row for every score and a column for every workflow."""
    most = max(len(board.arms) for board in boards)
    figure = Figure(figsize=(4.6 * len(boards), 2 * (1 + 0.24 * most)), layout="constrained")
    rows = figure.subplots(len(SCORES), len(boards), squeeze=False, sharex="row")
    for panels, name in zip(rows, SCORES, strict=True):
        for axes, board in zip(panels, boards, strict=True):
            draw_board(axes, board, name)
    if handles := labelled(figure):
        figure.legend(handles.values(), handles, loc="outside upper center", ncols=4)
    seeds = how_many(
        [part.gap.seeds for board in boards for part in board.against_reference["accuracy"] if part.gap.seeds] or [0]
    )
    say_below(
        figure,
        f"{BASE_NAMES.get(scale, scale)}; n = {seeds} seeds; points are means over seeds, lines 95 % t intervals",
    )
    gains = [f"{board.title} {interval_text(placebo_answer(board).interval, 'difference')}" for board in boards]
    caption = (
        f"Credit estimators at {scale}, with as many sampled tokens and optimizer steps as {boards[0].reference.name}: each arm minus {boards[0].reference.name} of the same seed at the "
        f"last iteration, with {100 * (1 - ALPHA):.0f} % t intervals over seeds, not corrected for their number. Diamonds are a placebo; hollow marks have unequal tokens. Grey is the margin of equivalence. Dashed: the single agent "
        f"with a workflow's tokens, with its interval. The placebo gains over the untrained workflow, in points: {'; '.join(gains)}. Verdicts are in the tables."
    )
    return Plate("leaderboard", figure, caption)
