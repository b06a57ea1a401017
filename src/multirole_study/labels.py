"""The names and colours of workflows, policies, tasks and roles: the same in every table, every figure and the inspector."""

WORKFLOW_NAMES = {
    "eval_opt": "Eval-Opt",
    "voting": "Voting",
    "orch_workers": "Orch-Workers",
    "single": "Single agent",
}
POLICY_NAMES = {"ip": "IP", "sp": "SP"}
TASK_NAMES = {"math": "Math", "code": "Code"}

ROLE_COLOURS = {
    "generator": "#0173b2",
    "aggregator": "#de8f05",
    "evaluator": "#029e73",
    "orchestrator": "#d55e00",
    "worker": "#cc78bc",
    "synthesizer": "#ca9161",
}
SPARE_COLOURS = ("#56b4e9", "#949494", "#fbafe4", "#ece133")
"""For the roles of a user's own workflow, in their order."""
POLICY_COLOURS = {"ip": "#7a1f5c", "sp": "#3ba3c7"}
"""The colour of "sp" is also that of its one shared adapter."""
POLICY_STYLES = {"ip": "-", "sp": "--"}
TASK_COLOURS = {"math": "#30343f", "code": "#c99700"}
WORKFLOW_MARKERS = {"single": "D", "eval_opt": "o", "voting": "s", "orch_workers": "^"}
SETUP_COLOURS = ("#8a8a8a", "#0173b2")
"""The grid's own setup, and a variant of it."""
SETUP_STYLES = ("--", "-")


def colours_of(roles: list[str]) -> dict[str, str]:
    """Map every role to its colour; roles of a user's own workflow take the spare ones in turn."""
    own = [role for role in roles if role not in ROLE_COLOURS]
    spare = {role: SPARE_COLOURS[i % len(SPARE_COLOURS)] for i, role in enumerate(own)}
    return {role: ROLE_COLOURS.get(role) or spare[role] for role in roles}


def cell_name(workflow: str, policy: str, task: str | None = None) -> str:
    """Name a cell as the paper does: "Voting-IP, Math", "Single agent, Code"; a policy map is written out."""
    name = WORKFLOW_NAMES.get(workflow, workflow)
    if workflow != "single":
        name += f"-{POLICY_NAMES[policy]}" if policy in POLICY_NAMES else f" ({policy})"
    return name if task is None else f"{name}, {TASK_NAMES.get(task, task)}"
