"""Earlier names of settings, which commands, declarations and records of runs may still have.

Settings have TRL's names. Whatever reads a user's or a record's settings reads them through this table: `with_current_names`. A run's
id is a hash of settings under their earlier names (`with_old_names`), so that a renaming moves no run's folder.
"""

from collections.abc import Mapping
from typing import Any

OLD_NAMES = {
    "iterations": "max_steps",
    "n_episodes": "num_generations",
    "max_response_tokens": "max_completion_length",
    "warmup_iterations": "warmup_steps",
    "clip_low": "epsilon",
    "clip_high": "epsilon_high",
    "dual_clip": "delta",
    "eval_every": "eval_steps",
    "save_every": "save_steps",
    "lora_rank": "lora_r",
    "kl_anchor": "beta",  # or `role_beta`, for weights by role
    "n_rollouts": "num_generations_eval",
    "vllm_memory": "vllm_gpu_memory_utilization",
}
"""Earlier name -> the name, which is that of TRL's `GRPOConfig` or `ModelConfig`, where steps are optimizer steps and here iterations."""


def current_name(name: str, value: object = None) -> str:
    """Return the name of a setting that may have an earlier one. The value distinguishes `beta` from `role_beta`."""
    if name == "kl_anchor" and (isinstance(value, dict) or str(value).lstrip().startswith("{")):
        return "role_beta"
    return OLD_NAMES.get(name, name)


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the settings' names. None under one of two names does not count; ValueError for a setting with two values."""
    renamed: dict[str, Any] = {}
    for name_in_use, value in values.items():
        name = current_name(name_in_use, value)
        if renamed.get(name) is not None and value is not None:
            old = next(old for old in values if old != name and current_name(old, values[old]) == name)
            raise ValueError(f"`{old}` is an earlier name of `{name}`, and both have a value. Write {name!r} only.")
        if name not in renamed or value is not None:
            renamed[name] = value
    return renamed


def merged(*groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return groups of settings as one, by the settings' names; the last group that has a setting decides."""
    return {name: value for group in groups for name, value in with_current_names(group).items()}


def with_old_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the earlier names of their settings, for ids of runs."""
    earlier = {name: old for old, name in OLD_NAMES.items()}
    if "beta" not in values:
        earlier["role_beta"] = "kl_anchor"
    return {earlier.get(name, name): value for name, value in values.items()}
