"""Checkpoints of several adapters: which of them a run resumes from, how they are pushed, and what serving them takes.

A checkpoint belongs to a run if it holds the run's adapters and, if it records a policy map, the run's map.
"""

import functools
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers.trainer
from peft import PeftModel
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from multirole.chat.templates import StartClock
from multirole.saving.layout import (
    OWES_EVALUATION,
    SAVED_PREFIX,
    STATE_FILE,
    is_complete,
    newest_of,
    numbered_checkpoints,
    saved_adapters,
    saved_args,
)

OF_WHOLE, OF_SHARDED = "optimizer.pt", "pytorch_model_fsdp*"
"""Files of a checkpoint whose model was whole in each process, and of one whose model FSDP2 had sharded."""


class PolicyMap(TrainerCallback, ExportableState):
    """Callback that saves the policy map and what a run has found out since its start in the `trainer_state.json` of every checkpoint.

    Attributes:
        clock: the start of the run.
        kernels: those of `fast_passes.choose_kernels`, set when they have been chosen.
        has_trained: whether an optimizer step was taken.
        sampler_gaps: role -> the gap between the log-probs of engine and trainer in the role's first iteration (`importance.WeightSums`).
        owes_evaluation: whether the evaluation of the checkpoint's step is still to be done.
    """

    def __init__(self, policy: dict[str, str], started: str | None = None, past: list[int] | None = None) -> None:
        self.policy, self.clock, self.past, self.owes_evaluation = policy, StartClock(started), past, False
        self.kernels: dict[str, object] = {}
        self.has_trained = False
        self.sampler_gaps: dict[str, float] = {}

    def state(self) -> dict[str, Any]:
        args: dict[str, Any] = {
            "policy": self.policy, "started": self.clock.started, "kernels": self.kernels, "has_trained": self.has_trained,
            "sampler_gaps": self.sampler_gaps,
        }  # fmt: skip
        due = {OWES_EVALUATION: True} if self.owes_evaluation else {}
        return {"args": args | ({"past": self.past} if self.past else {}), "attributes": {}} | due


def check_checkpoint(
    folder: Path, policy: dict[str, str], model_adapters: set[str], is_sharded: bool, served: Collection[str] = (),
    past: list[int] | None = None,
) -> None:  # fmt: skip
    """Raise ValueError if a run would resume from a checkpoint of another run.

    Args:
        folder: the checkpoint.
        policy: role -> adapter or partner of the run that resumes.
        model_adapters: all adapters of its model, which may hold more than it trains.
        served: the adapters that play in it, where `policy` also has partners.
        past: `past_every` and `past_selves`, where past selves play.
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
    adapters = set(served or policy.values())
    if not saved and (inside := newest_of(numbered_checkpoints(folder))):
        raise ValueError(
            f"{folder} is not a checkpoint but contains checkpoints. Resume from {inside}, or pass True for the last one of `output_dir`."
        )
    if not is_complete(folder):
        raise ValueError(
            f"{folder} holds no {STATE_FILE}, which is written last, so saving it was interrupted. Resume from an earlier checkpoint, or pass True for "
            "the last complete one of `output_dir`."
        )
    advice = "Resume with the policy map that it was trained with, or train into another folder."
    if saved == {"default"} and adapters != saved:
        advice += " The one adapter of a run of TRL or PEFT is loaded by `PeftModel.from_pretrained(base, folder)` and passed as `model`."
    if (before := saved_args(folder).get("past", past)) != past:
        raise ValueError(
            f"{folder} has past selves by `past_every` and `past_selves` {before}, but this run has {past}. Resume with the same numbers."
        )
    if missing := adapters - saved:
        raise ValueError(f"{folder} holds the adapters {sorted(saved)} and none for {sorted(missing)}. {advice}")
    if unknown := saved - model_adapters:
        if all(name.startswith(SAVED_PREFIX) for name in unknown):
            advice = "Saved adapters played or taught a role in it. Resume with the same `policy` and `teacher`, or train into another folder."
        raise ValueError(f"{folder} also holds the adapters {sorted(unknown)}, which this run does not have. {advice}")
    if (before := saved_args(folder).get("policy", policy)) != policy:
        raise ValueError(f"{folder} was trained with the policy map {before}, but this run has {policy}. {advice}")


def remove_oldest(
    newest: int, output_dir: str, save_total_limit: int | None, best_model_checkpoint: str | None
) -> None:
    """Remove checkpoints until `save_total_limit` are left, the oldest first; never the one of step `newest`, which was just saved, nor the best.

    Those of later steps are of an earlier run in the same folder, and older than any of this run. The times of the folders do not matter:
    clocks are set back, and a copy has the time of its copying.
    """
    if not save_total_limit or save_total_limit < 0:
        return
    checkpoints = numbered_checkpoints(Path(output_dir))
    best_name = Path(best_model_checkpoint).name if best_model_checkpoint else ""
    protected = {newest} | {step for step, path in checkpoints.items() if path.name == best_name}
    removable = [step for step in sorted(checkpoints, key=lambda s: (s <= newest, s)) if step not in protected]
    for step in removable[: max(0, len(checkpoints) - max(save_total_limit, len(protected)))]:
        shutil.rmtree(checkpoints[step], ignore_errors=True)


@contextmanager
def rotating_by_step(newest: int) -> Iterator[None]:
    """Context manager: transformers removes old checkpoints by `remove_oldest`, instead of by the time when their folders changed."""
    usual = transformers.trainer.rotate_checkpoints
    transformers.trainer.rotate_checkpoints = lambda use_mtime, **options: remove_oldest(newest, **options)
    try:
        yield
    finally:
        transformers.trainer.rotate_checkpoints = usual


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
