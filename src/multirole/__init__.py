"""Multi-role GRPO: reinforcement learning of multi-agent LLM workflows on stock TRL.

The names below are imported at their first use, so that `import multirole` and the command line start fast.
"""

# ruff: noqa: F401
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

__path__ = [*__path__, f"{__path__[0]}/old_names"]  # modules of 0.3, such as `multirole.core.types`; until 1.0

if TYPE_CHECKING:  # the same names again, because type checkers do not read strings
    from multirole.callbacks import Iteration, MultiRoleCallback, OptimizerStep
    from multirole.credit.estimator import CreditEstimator
    from multirole.environments.mcp import MCPTools
    from multirole.environments.textarena import from_textarena
    from multirole.environments.verifiers import from_verifiers
    from multirole.openai_api.workflow import from_openai
    from multirole.options import MultiRoleGRPOConfig
    from multirole.roles.diagnostics import RoleDiagnostics
    from multirole.roles.skill import SkillWatch
    from multirole.roles.value import RoleEffect, RoleValue, role_values
    from multirole.rollout.forks import fork, play_forks
    from multirole.rollout.replay import Fork
    from multirole.trainer import MultiRoleGRPOTrainer
    from multirole.types import (
        Answer,
        Duty,
        Edge,
        Episode,
        Problem,
        Reward,
        Structure,
        Tool,
        ToolUnavailable,
        Turn,
        Workflow,
        assistant,
        user,
    )
    from multirole.update.rows import Row
    from multirole.workflows import EvalOpt, OrchWorkers, Single, Voting

_HOME = {
    "multirole.options": ("MultiRoleGRPOConfig",),
    "multirole.credit.estimator": ("CreditEstimator",),
    "multirole.rollout.forks": ("fork", "play_forks"),
    "multirole.callbacks": ("Iteration", "MultiRoleCallback", "OptimizerStep"),
    "multirole.rollout.replay": ("Fork",),
    "multirole.update.rows": ("Row",),
    "multirole.trainer": ("MultiRoleGRPOTrainer",),
    "multirole.types": (
        "Answer",
        "Duty",
        "Edge",
        "Episode",
        "Problem",
        "Reward",
        "Structure",
        "Tool",
        "ToolUnavailable",
        "Turn",
        "Workflow",
        "assistant",
        "user",
    ),
    "multirole.openai_api.workflow": ("from_openai",),
    "multirole.environments.mcp": ("MCPTools",),
    "multirole.environments.textarena": ("from_textarena",),
    "multirole.environments.verifiers": ("from_verifiers",),
    "multirole.roles.diagnostics": ("RoleDiagnostics",),
    "multirole.roles.skill": ("SkillWatch",),
    "multirole.roles.value": ("RoleEffect", "RoleValue", "role_values"),
    "multirole.workflows": ("EvalOpt", "OrchWorkers", "Single", "Voting"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

_OPTIONAL = ("from_openai", "MCPTools", "from_textarena", "from_verifiers")
"""Names that need an extra; `from multirole import *` would need them all."""
__all__ = [name for name in _MODULE_OF if name not in _OPTIONAL]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'multirole' has no attribute {name!r}")
    from multirole.extras import needed_by

    with needed_by(f"`{name}`"):
        return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return [*_MODULE_OF]
