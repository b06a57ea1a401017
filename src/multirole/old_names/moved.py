"""Old names of modules, so that code written for 0.3 still imports. They go with 1.0; CHANGELOG.md has the same table."""

import sys
import warnings
from importlib import import_module

MOVED = {
    "multirole.core.trainer": "multirole.trainer",
    "multirole.core.config": "multirole.options",
    "multirole.core.types": "multirole.types",
    "multirole.core.policy": "multirole.policy",
    "multirole.core.hooks": "multirole.callbacks",
    "multirole.core.extras": "multirole.extras",
    "multirole.core.stock": "multirole.trl_parts",
    "multirole.core.access": "multirole.access",
    "multirole.core.arguments": "multirole.inputs.arguments",
    "multirole.core.validation": "multirole.inputs.problems",
    "multirole.core.streams": "multirole.inputs.streams",
    "multirole.core.epochs": "multirole.inputs.epochs",
    "multirole.core.chat": "multirole.chat.templates",
    "multirole.core.messages": "multirole.chat.messages",
    "multirole.core.tool_calls": "multirole.chat.tool_calls",
    "multirole.core.replies": "multirole.chat.replies",
    "multirole.core.rollout": "multirole.rollout.rollout",
    "multirole.core.event_loop": "multirole.rollout.event_loop",
    "multirole.core.call_order": "multirole.rollout.call_order",
    "multirole.core.replay": "multirole.rollout.replay",
    "multirole.core.forks": "multirole.rollout.forks",
    "multirole.core.ahead": "multirole.rollout.play_ahead",
    "multirole.core.engine": "multirole.engines.protocol",
    "multirole.core.rows": "multirole.update.rows",
    "multirole.core.adapter_update": "multirole.update.adapter_gradient",
    "multirole.core.gradients": "multirole.update.gradients",
    "multirole.core.importance": "multirole.update.importance",
    "multirole.core.entropy": "multirole.update.entropy",
    "multirole.core.scoring": "multirole.update.scoring",
    "multirole.core.reference": "multirole.update.reference",
    "multirole.core.noise": "multirole.update.noise",
    "multirole.core.distributed": "multirole.update.processes",
    "multirole.core.threads": "multirole.update.threads",
    "multirole.core.model_passes": "multirole.update.passes.model_passes",
    "multirole.core.advantages": "multirole.credit.advantages",
    "multirole.core.credit": "multirole.credit",
    "multirole.core.episode_rewards": "multirole.credit.rewards",
    "multirole.diagnostics.process_reward": "multirole.credit.process_reward",
    "multirole.core.completions_table": "multirole.metrics.completions_table",
    "multirole.core.episode_metrics": "multirole.metrics.episodes",
    "multirole.core.evaluation_metrics": "multirole.metrics.evaluation",
    "multirole.core.iteration_metrics": "multirole.metrics.iteration",
    "multirole.core.checkpoints": "multirole.saving.checkpoints",
    "multirole.core.model_card": "multirole.saving.model_card",
    "multirole.diagnostics.role_diagnostics": "multirole.roles.diagnostics",
    "multirole.diagnostics.role_skill": "multirole.roles.skill",
    "multirole.diagnostics.role_value": "multirole.roles.value",
    "multirole.diagnostics.gradient_parts": "multirole.roles.gradient_parts",
    "multirole.diagnostics.turn_grading": "multirole.credit.turn_grading",
    "multirole.endpoint.app": "multirole.openai_api.app",
    "multirole.endpoint.arguments": "multirole.openai_api.arguments",
    "multirole.endpoint.dialect": "multirole.openai_api.dialect",
    "multirole.endpoint.responses": "multirole.openai_api.responses",
    "multirole.endpoint.serving": "multirole.openai_api.serving",
    "multirole.endpoint.session": "multirole.openai_api.session",
    "multirole.endpoint.workflow": "multirole.openai_api.workflow",
}
"""Old module -> new module."""


def import_moved(package: str) -> None:
    """Make the old modules of a package, such as "multirole.core", importable; one that needs a package that is not installed stays unknown."""
    warnings.warn(
        f"The modules of `{package}` have moved; CHANGELOG.md lists where to.", DeprecationWarning, stacklevel=3
    )
    for old, new in MOVED.items():
        if old.startswith(f"{package}."):
            try:
                module = import_module(new)
            except ModuleNotFoundError:
                continue
            sys.modules[old] = module
            setattr(sys.modules[package], old.rpartition(".")[2], module)
