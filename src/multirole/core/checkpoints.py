"""Checkpoints of several adapters: which of them a run resumes from, how they are pushed, and what serving them takes.

A checkpoint belongs to a run if it holds the run's adapters and, if it records a policy map, the run's map.
"""

import functools
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import PeftModel
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from multirole.core.policy import saved_adapters

OF_WHOLE, OF_SHARDED = "optimizer.pt", "pytorch_model_fsdp*"
"""Files of a checkpoint whose model was whole in each process, and of one whose model FSDP2 had sharded."""
SERVING = "serving.json"
"""File beside saved adapters that tells how they were used in training: the roles, the sampling and the prompts (`multirole.serve`)."""


class PolicyMap(TrainerCallback, ExportableState):
    """Callback that saves the policy map in the `trainer_state.json` of every checkpoint."""

    def __init__(self, policy: dict[str, str]) -> None:
        self.policy = policy

    def state(self) -> dict[str, Any]:
        return {"args": {"policy": self.policy}, "attributes": {}}


def check_checkpoint(folder: Path, policy: dict[str, str], model_adapters: set[str], is_sharded: bool) -> None:
    """Raise ValueError if a run would resume from a checkpoint of another run.

    Args:
        folder: the checkpoint.
        policy: role -> adapter of the run that resumes.
        model_adapters: all adapters of its model, which may hold more than it trains.
        is_sharded: FSDP2 shards the model. Its checkpoints hold adapters and moments in files of their own.
    """
    if not folder.is_dir():
        raise ValueError(
            f"There is no checkpoint {folder}. Pass the folder of one, or True for the last one of `output_dir`."
        )
    saved = set(saved_adapters(folder))
    if any(folder.glob(OF_WHOLE if is_sharded else OF_SHARDED)):
        was, now = ("without", "with") if is_sharded else ("with", "without")
        raise ValueError(
            f"{folder} was saved {was} FSDP2, and this run is {now} it. Resume it as it was trained; the number of processes may change."
        )
    adapters = set(policy.values())
    if not saved and (inside := get_last_checkpoint(str(folder))):
        raise ValueError(
            f"{folder} is not a checkpoint but contains checkpoints. Resume from {inside}, or pass True for the last one of `output_dir`."
        )
    advice = "Resume with the policy map that it was trained with, or train into another folder."
    if saved == {"default"} and adapters != saved:
        advice += " The one adapter of a run of TRL or PEFT is loaded by `PeftModel.from_pretrained(base, folder)` and passed as `model`."
    if missing := adapters - saved:
        raise ValueError(f"{folder} holds the adapters {sorted(saved)} and none for {sorted(missing)}. {advice}")
    if unknown := saved - model_adapters:
        raise ValueError(f"{folder} also holds the adapters {sorted(unknown)}, which this run does not have. {advice}")
    if (before := saved_policy(folder)) not in (None, policy):
        raise ValueError(f"{folder} was trained with the policy map {before}, but this run has {policy}. {advice}")


def saved_policy(folder: Path) -> dict[str, str] | None:
    """Return the policy map saved in a checkpoint, or None if there is none."""
    file = folder / "trainer_state.json"
    if not file.exists():
        return None
    record = json.loads(file.read_text())["stateful_callbacks"].get(PolicyMap.__name__)
    return record and record["args"]["policy"]


@contextmanager
def loading_on_host(model: PeftModel) -> Iterator[None]:
    """Context manager: `model.load_adapter` reads files into host memory.

    Its default device is "cuda", which safetensors takes for the first GPU, whichever this process uses: every process of a node would
    keep a CUDA context there.
    """
    model.load_adapter = functools.partial(model.load_adapter, torch_device="cpu")
    try:
        yield
    finally:
        del model.load_adapter


def copy_adapters(checkpoint: Path, target: Path, adapters: Iterable[str]) -> None:
    """Copy the adapters' folders of a checkpoint to `target`, as HF copies the files of the adapter "default"."""
    for name in adapters:
        if name != "default":
            shutil.copytree(checkpoint / name, target / name, dirs_exist_ok=True)


def resume_argument(argument: str | bool | None, configured: str | None) -> str | bool | None:
    """Return what `train` resumes from: its argument, or else the configured `resume_from_checkpoint`, where "true" is the last checkpoint and "false" none."""
    if argument is not None:
        return argument
    return {"true": True, "false": None}.get(str(configured).lower(), configured)
