"""Multi-role GRPO: reinforcement learning of multi-agent LLM workflows on stock TRL.

The names below are imported at their first use, so that `import multirole` and the command line start fast.
"""

# ruff: noqa: F401, PLE0604
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

if TYPE_CHECKING:  # the same names again, because type checkers do not read strings
    from multirole.core.config import MultiRoleGRPOConfig
    from multirole.core.credit import credit_callback
    from multirole.core.forks import fork, play_forks
    from multirole.core.hooks import Iteration, MultiRoleCallback, OptimizerStep
    from multirole.core.replay import Fork
    from multirole.core.rows import Row
    from multirole.core.trainer import MultiRoleGRPOTrainer
    from multirole.core.types import (
        Answer,
        Duty,
        Edge,
        Episode,
        Problem,
        Reward,
        Structure,
        Turn,
        Workflow,
        assistant,
        user,
    )
    from multirole.diagnostics.role_diagnostics import RoleDiagnostics
    from multirole.diagnostics.role_value import RoleEffect, RoleValue, role_values
    from multirole.endpoint.workflow import from_openai
    from multirole.workflows import EvalOpt, OrchWorkers, Single, Voting

_HOME = {
    "multirole.core.config": ("MultiRoleGRPOConfig",),
    "multirole.core.credit": ("credit_callback",),
    "multirole.core.forks": ("fork", "play_forks"),
    "multirole.core.hooks": ("Iteration", "MultiRoleCallback", "OptimizerStep"),
    "multirole.core.replay": ("Fork",),
    "multirole.core.rows": ("Row",),
    "multirole.core.trainer": ("MultiRoleGRPOTrainer",),
    "multirole.core.types": (
        "Answer",
        "Duty",
        "Edge",
        "Episode",
        "Problem",
        "Reward",
        "Structure",
        "Turn",
        "Workflow",
        "assistant",
        "user",
    ),
    "multirole.endpoint.workflow": ("from_openai",),
    "multirole.diagnostics.role_diagnostics": ("RoleDiagnostics",),
    "multirole.diagnostics.role_value": ("RoleEffect", "RoleValue", "role_values"),
    "multirole.workflows": ("EvalOpt", "OrchWorkers", "Single", "Voting"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'multirole' has no attribute {name!r}")
    from multirole.core.extras import needed_by

    with needed_by(f"`{name}`"):
        return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
