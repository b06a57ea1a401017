"""Names and colours of workflows, policies, tasks and roles, for every table, every figure and the inspector."""

import re

from multirole.workflows import WORKFLOWS

WORKFLOW_NAMES = {
    "eval_opt": "Eval-Opt",
    "voting": "Voting",
    "orch_workers": "Orch-Workers",
    "single": "Single agent",
}
POLICY_NAMES = {"ip": "IP", "sp": "SP"}
TASK_NAMES = {"math": "math", "code": "code"}
"""At tiny-r, math is arithmetic from left to right and code is list programs."""

ROLES = tuple(dict.fromkeys(role for workflow in WORKFLOWS.values() for role in workflow().roles))
"""The roles of the built-in workflows, in order."""
PALETTE = ("#0173b2", "#029e73", "#de8f05", "#d55e00", "#cc78bc", "#ca9161")
ROLE_COLOURS = dict(zip(ROLES, PALETTE, strict=True))
SPARE_COLOURS = ("#3f7fb5", "#6b6b6b", "#a3386c", "#7a7000", "#5b4bb3", "#00796b")
"""Colours for the roles of a user's workflow, in order."""
POLICY_COLOURS = {"ip": "#7a1f5c", "sp": "#3ba3c7"}
"""The colour of "sp" is also that of its one shared adapter."""
POLICY_STYLES = {"ip": "-", "sp": "--"}
TASK_COLOURS = {"math": "#30343f", "code": "#c99700"}
WORKFLOW_MARKERS = {"single": "D", "eval_opt": "o", "voting": "s", "orch_workers": "^"}
SINGLE_COLOUR, SINGLE_STYLE = "#4d4d4d", ":"
"""The single agent's, which has no policy."""
MAP_COLOUR = "#8c613c"
"""The colour of an arm whose policy is another map than SP or IP."""
SETUP_COLOURS = ("#9a9a9a", "#111111")
"""Colours of the grid's setup and of a variant."""
SETUP_STYLES = ("--", "-")
BASE_COLOURS = ("#222222", "#5b4bb3", "#7a7000", "#a3386c")
"""Colours of base models that are compared, in order."""
MARKERS = ("o", "s", "^", "D", "v", "P")
"""Markers for what is neither a workflow nor a policy, in order."""
BASE_NAMES = {"tiny-r": "miniature (0.45M)", "smollm2": "SmolLM2-135M", "qwen-0.5b": "Qwen2.5-Coder-0.5B"}
"""Base -> its name in figures; another one keeps its own."""
TASKS_OF_BASES = {
    ("tiny-r", "math"): "arithmetic",
    ("tiny-r", "code"): "list programs",
    ("smollm2", "math"): "sums",
    ("smollm2", "code"): "functions",
    ("qwen-0.5b", "math"): "word problems",
    ("qwen-0.5b", "code"): "programs",
}
"""(scale, task) -> what the task is there."""


def colours_of(roles: list[str]) -> dict[str, str]:
    """Map every role to its colour; roles of a user's workflow take the spare colours in turn."""
    unknown = [role for role in roles if role not in ROLE_COLOURS]
    spare = {role: SPARE_COLOURS[i % len(SPARE_COLOURS)] for i, role in enumerate(unknown)}
    return {role: ROLE_COLOURS.get(role) or spare[role] for role in roles}


def task_name(task: str) -> str:
    """Name a task in figures; one that is not the paper's is named as it was declared, such as "gym:products"."""
    return TASK_NAMES.get(task, task)


def file_name(text: str) -> str:
    """Return a text as the name of a file: that of "figure_4_examples/debate.py:task" is "figure_4_examples_debate.py_task"."""
    return re.sub(r"[/:?&]", "_", text)


def task_colour(task: str) -> str:
    """Return the colour of a task; all that are not the paper's share one."""
    return TASK_COLOURS.get(task, SPARE_COLOURS[0])


def cell_name(workflow: str, policy: str, task: str | None = None) -> str:
    """Name a cell as the paper does: "Voting-IP, math", "Single agent, code"; a policy map is written out."""
    name = WORKFLOW_NAMES.get(workflow, workflow)
    if workflow != "single":
        name += f"-{POLICY_NAMES[policy]}" if policy in POLICY_NAMES else f" ({policy})"
    return name if task is None else f"{name}, {task_name(task)}"


MISSING = "–"
"""Text of a number that is missing."""
FORMS = {  # unit -> (factor, format)
    "accuracy": (100, ",.1f"),
    "difference": (100, "+,.1f"),
    "change": (100, "+,.1f"),
    "gain": (100, "+,.1f"),
    "rate": (100, ",.1f"),
    "tokens": (1, ",.1f"),
    "similarity": (1, ",.2f"),
    "count": (1, ",.0f"),
    "million": (1e-6, ",.2f"),
    "hours": (1 / 3600, "significant"),
    "ratio": (1, "significant"),
}
"""How numbers of a unit are shown: accuracies and rates, which are fractions, in percent; differences of accuracies in points;
durations, which are in seconds, in hours. The other changes: of a rate in points, of a length in percent."""


def formatted(value: float, unit: str) -> str:
    """Format one number with a true minus sign."""
    factor, form = FORMS[unit]
    value *= factor
    if form != "significant":
        text = format(value, form)
    elif value and not 1e-3 <= abs(value) < 1e5:
        text = f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    else:
        text = f"{value:,.0f}" if abs(value) >= 100 or not value else f"{value:#.3g}".rstrip(".")
    return text.replace("-", "−")
