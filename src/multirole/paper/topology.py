"""Figure 1: who speaks to whom in each workflow, and with which adapter, drawn with matplotlib patches.

Roles, slots and routing come from the workflows and policies themselves; `MESSAGES` says whose text enters whose
prompt, and `tests/test_figures.py` holds it against what the workflows do.
"""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path

from multirole.core.policy import SHARED
from multirole.experiment.cell import Cell
from multirole.inspector.report import ROLE_COLOURS


class Message(NamedTuple):
    """A text that enters a role's prompt. From "problem" it enters the workflow, to "answer" it leaves it."""

    source: str
    target: str
    label: str = ""


MESSAGES = {
    "eval_opt": (
        Message("problem", "generator"),
        Message("generator", "evaluator", "draft"),
        Message("evaluator", "generator", "verdict"),
        Message("generator", "answer", "last draft"),
    ),
    "voting": (
        Message("problem", "generator"),
        Message("generator", "aggregator", "candidates"),
        Message("aggregator", "answer", "its choice of candidate"),
    ),
    "orch_workers": (
        Message("problem", "orchestrator"),
        Message("orchestrator", "worker", "one strategy each"),
        Message("orchestrator", "synthesizer", "strategies"),
        Message("worker", "synthesizer", "solutions"),
        Message("synthesizer", "answer", "its text"),
    ),
}
"""Besides these, every role reads the problem."""

SHARED_COLOUR = "#3ba3c7"
"""Of the one adapter of Shared-Policy; an isolated adapter has the colour of its role."""
INK, REWARD, PAPER = "#404040", "#9b2226", "#fafafa"
WIDTH, HEIGHT = 10.0, 8.4  # of a panel, in its own units
MIDDLE, ADAPTERS, RETURN = 3.9, 8.4, 9.7  # x: of the roles, of the adapters, of the reward's way back
PROBLEM, ANSWER = 7.85, 0.6  # y
SMALL = {"fontsize": 7, "style": "italic", "color": INK}


class Box(NamedTuple):
    """A box by its centre and size."""

    x: float
    y: float
    width: float
    height: float = 0.82

    @property
    def left(self) -> float:
        return self.x - self.width / 2

    @property
    def right(self) -> float:
        return self.x + self.width / 2

    @property
    def top(self) -> float:
        return self.y + self.height / 2

    @property
    def bottom(self) -> float:
        return self.y - self.height / 2


def boxes(roles: dict[str, int]) -> dict[str, list[Box]]:
    """The boxes of every role's slots: a row per role, from the problem at the top to the answer at the bottom."""
    step = (PROBLEM - ANSWER) / (len(roles) + 1)
    found = {"problem": [Box(MIDDLE, PROBLEM, 1.9, 0.62)]}
    for row, (role, slots) in enumerate(roles.items(), start=1):
        width = 2.7 if slots == 1 else 2.0
        first = MIDDLE - (width + 0.2) * (slots - 1) / 2
        found[role] = [Box(first + (width + 0.2) * slot, PROBLEM - step * row, width) for slot in range(slots)]
    return found | {"answer": [Box(MIDDLE, ANSWER, 1.9, 0.62)]}


def draw(figure: Figure, cells: list[list[Cell]], rows: list[str], columns: list[str]) -> None:
    """A panel per cell, in rows of one policy and columns of one workflow."""
    grid = figure.subplots(len(rows), len(columns), squeeze=False)
    for line, of_policy, name in zip(grid, cells, rows, strict=True):
        line[0].text(-0.3, HEIGHT / 2, name, rotation=90, ha="right", va="center", fontsize=10, weight="bold")
        for axes, cell in zip(line, of_policy, strict=True):
            _panel(axes, cell)
    for axes, name in zip(grid[0], columns, strict=True):
        axes.set_title(name, fontsize=10, weight="bold", pad=4)


def _panel(axes: Axes, cell: Cell) -> None:
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
    axes.set_axis_off()
    _draw_box(axes, Box(WIDTH / 2, HEIGHT / 2, WIDTH - 0.1, HEIGHT - 0.1), "", PAPER, "0.88")
    roles = cell.make_workflow().roles
    found = boxes(roles)
    messages = MESSAGES[cell.workflow_name]
    for message in messages:
        is_answered = any((m.source, m.target) == (message.target, message.source) for m in messages)
        _draw_message(axes, message, found, 0.7 if is_answered else 0.0)
    for name in ("problem", "answer"):
        _draw_box(axes, found[name][0], name, "white", INK)
    for role, slots in roles.items():
        for number, box in enumerate(found[role], start=1):
            colour = _colour(cell.policy[role])
            _draw_box(axes, box, role if slots == 1 else f"{role} {number}", _tint(colour), colour, 1.6)
    _draw_adapters(axes, cell.policy, found)


def _draw_message(axes: Axes, message: Message, found: dict[str, list[Box]], shift: float) -> None:
    """An arrow from every slot to every slot; `shift` keeps a message and its reply apart."""
    order = list(found)
    sources, targets = found[message.source], found[message.target]
    down = order.index(message.target) - order.index(message.source)
    if down > 1:  # around the rows in between, on the left
        x = min(1.3, *(box.left - 0.4 for boxes in found.values() for box in boxes))
        start, end = (sources[0].left, sources[0].y), (targets[0].left, targets[0].y)
        _draw_line(axes, [start, (x, start[1]), (x, end[1]), end], INK)
        axes.text((x + end[0]) / 2, end[1] + 0.1, message.label, ha="center", va="bottom", **SMALL)
        return
    shift = shift if down < 0 else -shift
    for source in sources:
        for target in targets:
            start, end = (source.top, target.bottom) if down < 0 else (source.bottom, target.top)
            _draw_line(axes, [(source.x + shift, start), (target.x + shift, end)], INK)
    y = (sources[0].y + targets[0].y) / 2
    if len(sources) == len(targets) == 1:
        aside = 0.18 if shift >= 0 else -0.18
        axes.text(MIDDLE + shift + aside, y, message.label, ha="left" if aside > 0 else "right", va="center", **SMALL)
    else:
        axes.text(MIDDLE, y + 0.06, message.label, ha="center", va="center", **SMALL, zorder=5,
                  bbox={"boxstyle": "round,pad=0.12", "fc": PAPER, "ec": "none"})  # fmt: skip


def _draw_adapters(axes: Axes, policy: dict[str, str], found: dict[str, list[Box]]) -> None:
    """Every adapter beside the rows of its roles, and the outcome reward on its way back to it."""
    reward = Box(ADAPTERS, ANSWER, 1.9)
    _draw_box(axes, reward, "outcome\nreward", "white", REWARD)
    _draw_line(axes, [(found["answer"][0].right, ANSWER), (reward.left, ANSWER)], REWARD)
    for adapter in dict.fromkeys(policy.values()):
        rows = [found[role][-1] for role in policy if policy[role] == adapter]
        top, bottom = rows[0].top, rows[-1].bottom
        chip = Box(ADAPTERS, (top + bottom) / 2, 1.9, top - bottom)
        for box in rows:
            axes.plot([box.right, chip.left], [box.y, box.y], ls=":", lw=1.2, color=_colour(adapter), zorder=1)
        _draw_box(axes, chip, f"$\\pi$\n{adapter}", _tint(_colour(adapter), 0.55), _colour(adapter), size=6.6)
        _draw_line(axes, [(reward.right, ANSWER), (RETURN, ANSWER), (RETURN, chip.y), (chip.right, chip.y)], REWARD)


def _draw_line(axes: Axes, points: list[tuple[float, float]], colour: str) -> None:
    """An arrow along straight segments."""
    arrow = {"arrowstyle": "-|>,head_length=0.4,head_width=0.18", "mutation_scale": 9, "shrinkA": 0, "shrinkB": 0}
    axes.add_patch(FancyArrowPatch(path=Path(points), lw=1, color=colour, joinstyle="round", zorder=2, **arrow))


def _draw_box(
    axes: Axes, box: Box, name: str, face: str | tuple, edge: str, lw: float = 1.0, size: float = 7.3
) -> None:
    style = "round,pad=0,rounding_size=0.18"
    patch = FancyBboxPatch((box.left, box.bottom), box.width, box.height, style, fc=face, ec=edge, lw=lw)
    patch.set_zorder(0 if not name else 3)
    axes.add_patch(patch)
    axes.text(box.x, box.y, name, ha="center", va="center", fontsize=size, color="#202020", zorder=4, linespacing=1.05)


def _colour(adapter: str) -> str:
    return SHARED_COLOUR if adapter == SHARED else ROLE_COLOURS[adapter]


def _tint(colour: str, share: float = 0.22) -> tuple[float, ...]:
    return tuple(1 - share * (1 - part) for part in to_rgb(colour))
