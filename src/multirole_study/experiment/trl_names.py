"""TRL's names of a cell's settings. A cell takes either name; its id, record and parameter list have the cell's name."""

from collections.abc import Mapping
from typing import Any

TRL_NAMES = {
    "max_steps": "iterations",
    "num_generations": "n_episodes",
    "max_completion_length": "max_response_tokens",
    "warmup_steps": "warmup_iterations",
    "epsilon": "clip_low",
    "epsilon_high": "clip_high",
    "delta": "dual_clip",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
}
"""Field of TRL's `GRPOConfig` -> the setting of a cell with the same values. `MultiRoleGRPOConfig` counts steps in iterations."""


def with_cell_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values under the cell's names; None counts as not given. Raises ValueError for a setting with both names."""
    renamed: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            continue
        setting = TRL_NAMES.get(name, name)
        if setting in renamed:
            trl_name = next(trl for trl, cell_name in TRL_NAMES.items() if cell_name == setting)
            raise ValueError(
                f"`{trl_name}` is TRL's name of the setting `{setting}`, and both have a value. Write one of them."
            )
        renamed[setting] = value
    return renamed
