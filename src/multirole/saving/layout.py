"""What a folder of saved adapters or of checkpoints holds. Reads names and JSON alone, and loads neither torch nor transformers."""

import json
import logging
import re
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

NAME = re.compile(r"checkpoint-\d+")
STATE_FILE = "trainer_state.json"
"""File that is written last of a checkpoint: a folder without it is what a killed process has left."""
SERVING = "serving.json"
"""File beside saved adapters that tells how they were used in training: the roles, the sampling and the prompts (`multirole.serve`)."""
SAVED_PREFIX = "adapter_frozen_"
"""How the name of a saved adapter begins that plays or teaches a role, in the model and in its checkpoints."""
STATE_OF_RUN = "PolicyMap"
"""Name of the callback (`checkpoints.PolicyMap`) whose state a checkpoint's `trainer_state.json` holds."""

OWES_EVALUATION = "owes_evaluation"
"""Key of that state in a checkpoint whose step is still to be evaluated, since its evaluation failed."""


def saved_adapters(folder: Path) -> dict[str, Path]:
    """Return the adapters in a folder that `save_model` or a checkpoint wrote, with their folders.

    PEFT writes the adapter "default" into the folder itself.
    """
    named = {path.parent.name: path.parent for path in sorted(folder.glob("*/adapter_config.json"))}
    return named | ({"default": folder} if (folder / "adapter_config.json").is_file() else {})


def saved_args(folder: Path, callback: str = STATE_OF_RUN) -> dict[str, Any]:
    """Return what a callback, by default `PolicyMap`, saved in a checkpoint; {} if there is nothing."""
    return _saved_state(folder, callback).get("args", {})


def owes_evaluation(folder: Path) -> bool:
    """Return whether a run that resumes from a checkpoint must evaluate first."""
    return OWES_EVALUATION in _saved_state(folder, STATE_OF_RUN)


def _saved_state(folder: Path, callback: str) -> dict[str, Any]:
    file = folder / STATE_FILE
    return json.loads(file.read_text())["stateful_callbacks"].get(callback, {}) if file.exists() else {}


def is_complete(checkpoint: Path) -> bool:
    """Return whether a checkpoint was saved to its end."""
    return (checkpoint / STATE_FILE).is_file()


def last_checkpoint(folder: Path) -> Path | None:
    """Return the complete checkpoint with the highest step in a folder, None if there is none; ValueError if they belong to several runs."""
    numbered = numbered_checkpoints(folder)
    checkpoints = {step: path for step, path in numbered.items() if is_complete(path)}
    if incomplete := [path.name for step, path in numbered.items() if step not in checkpoints]:
        logger.warning("%s without %s, which is written last, so saving was interrupted: %s. A run is not resumed from there.",
                       folder, STATE_FILE, ", ".join(incomplete))  # fmt: skip
    last_of_run = {saved_args(path).get("started"): path.name for path in checkpoints.values()}
    last_of_run.pop(None, None)  # of a version that did not save it
    if len(last_of_run) > 1:
        raise ValueError(
            f"`resume_from_checkpoint=True` asks for the last checkpoint of {folder}, which holds those of {len(last_of_run)} runs: the last of "
            f"each are {', '.join(last_of_run.values())}. Pass the folder of one of them."
        )
    return newest_of(checkpoints)


def numbered_checkpoints(folder: Path) -> dict[int, Path]:
    """Return step -> folder of the checkpoints in a folder, in ascending order. Copies with other names are none."""
    steps = {step_of(path): path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name)}
    return {step: steps[step] for step in sorted(steps) if steps[step].is_dir()}


def step_of(checkpoint: Path) -> int:
    """Return the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.rpartition("-")[2])


def newest_of(checkpoints: dict[int, Path]) -> Path | None:
    """Return the checkpoint with the highest step; None if there is none."""
    return checkpoints[max(checkpoints)] if checkpoints else None
