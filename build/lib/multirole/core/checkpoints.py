"""Whether a checkpoint is one of this run: it must hold the run's adapters, and its policy map where it names one."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState


class PolicyMap(TrainerCallback, ExportableState):
    """Writes the policy map into the `trainer_state.json` of every checkpoint, as callbacks with a state are."""

    def __init__(self, policy: dict[str, str]) -> None:
        self.policy = policy

    def state(self) -> dict[str, Any]:
        return {"args": {"policy": self.policy}, "attributes": {}}


def check_checkpoint(folder: Path, policy: dict[str, str], held: set[str], is_sharded: bool) -> None:
    """Refuse to resume a run from the checkpoint of another (ValueError).

    Args:
        folder: the checkpoint.
        policy: role -> adapter of the run that resumes.
        held: all adapters of its model, which may hold more than it trains.
        is_sharded: FSDP2, whose checkpoints may hold shards of the whole model instead of adapters.
    """
    saved = {path.parent.name for path in folder.glob("*/adapter_config.json")}
    if (folder / "adapter_config.json").exists():
        saved.add("default")
    if not saved and is_sharded:
        return
    adapters = set(policy.values())
    advice = "Resume with the policy map that it was trained with, or train into another folder."
    if saved == {"default"} and adapters != saved:
        advice += " The one adapter of a run of TRL or PEFT is loaded by `PeftModel.from_pretrained(base, folder)` and passed as `model`."
    if missing := adapters - saved:
        raise ValueError(f"{folder} holds the adapters {sorted(saved)} and none for {sorted(missing)}. {advice}")
    if unknown := saved - held:
        raise ValueError(f"{folder} also holds the adapters {sorted(unknown)}, which this run does not have. {advice}")
    if (before := saved_policy(folder)) not in (None, policy):
        raise ValueError(f"{folder} was trained with the policy map {before}, and this run has {policy}. {advice}")


def saved_policy(folder: Path) -> dict[str, str] | None:
    """The policy map that a checkpoint names; None where it was written without one."""
    file = folder / "trainer_state.json"
    if not file.exists():
        return None
    record = json.loads(file.read_text())["stateful_callbacks"].get(PolicyMap.__name__)
    return record and record["args"]["policy"]
