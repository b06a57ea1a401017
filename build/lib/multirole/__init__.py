"""Multi-role GRPO: reinforcement learning of multi-agent LLM workflows on stock TRL.

The names below are imported when they are first used, so that `import multirole` and the command line cost nothing.
"""

# ruff: noqa: F401, PLE0604
from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:  # the same names once more: type checkers read no strings
    from multirole.core.config import MultiRoleGRPOConfig
    from multirole.core.hooks import Iteration, MultiRoleCallback, OptimizerStep
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
    from multirole.endpoint.workflow import from_openai
    from multirole.workflows import EvalOpt, OrchWorkers, Single, Voting

_HOME = {
    "multirole.core.config": ("MultiRoleGRPOConfig",),
    "multirole.core.hooks": ("Iteration", "MultiRoleCallback", "OptimizerStep"),
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
    "multirole.workflows": ("EvalOpt", "OrchWorkers", "Single", "Voting"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'multirole' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
