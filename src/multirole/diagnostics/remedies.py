"""Remedies that act between the gradients of roles and the weights; each is one field of `Cell`, and neutral by default.

Others act elsewhere: `process_reward` in `advantages`, `kl_anchor` in the trainer's loss, `train_after` in the choice of rows.
"""

import functools
import json
import logging
import math
from pathlib import Path

import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor

from multirole.core.distributed import add_up, gather_objects
from multirole.core.gradients import Part, Updates
from multirole.experiment.cell import Cell
from multirole.experiment.launch import Launch
from multirole.experiment.record import Recorder

logger = logging.getLogger(__name__)

EPS = 1e-8
WEIGHTS = "adapter_model.safetensors"


def needs_parts(cell: Cell) -> bool:
    """Whether the parts of a gradient are needed one by one."""
    return cell.balance_roles > 0 or cell.slot_scaling > 0


def part_factors(parts: list[Part], norms: dict[str, float], slots: dict[str, int], cell: Cell) -> list[float]:
    """What each part of an optimizer step's gradient is multiplied by; `norms` are of the roles' parts, unscaled.

    `balance_roles`: (mean norm / own norm) ** balance over the roles that have a gradient. `slot_scaling`: slots ** -scaling.
    """
    positive = [norm for norm in norms.values() if norm > 0]
    mean = sum(positive) / max(1, len(positive))
    balance = {role: (mean / norm) ** cell.balance_roles if norm > 0 else 1.0 for role, norm in norms.items()}
    return [balance[role] * slots[role] ** -cell.slot_scaling for role, _ in parts]


def role_norms(parts: list[Part], gradients: Tensor, is_sharded: bool) -> dict[str, float]:
    """role -> norm of the sum of its parts (K, n)."""
    roles = list(dict.fromkeys(role for role, _ in parts))
    sums = [sum(gradients[i] for i, part in enumerate(parts) if part[0] == role) for role in roles]
    squares = torch.stack([whole.square().sum() for whole in sums])
    if is_sharded:
        add_up([squares])
    return dict(zip(roles, squares.sqrt().tolist(), strict=True))


def coherence_factor(gradient: Tensor, average: Tensor, cell: Cell, is_sharded: bool) -> float:
    """max(floor, 1 - penalty * cosine of the gradient (n,) and its running mean, cut to [0, 1])."""
    products = torch.stack([gradient @ average, gradient @ gradient, average @ average])
    if is_sharded:
        add_up([products])
    inner, mine, its = products.tolist()
    cosine = inner / (mine**0.5 * its**0.5 + EPS)
    return max(cell.coherence_floor, 1.0 - cell.coherence_penalty * min(max(cosine, 0.0), 1.0))


def damped(gradient: Tensor, adapter: str, cell: Cell, updates: Updates) -> Tensor:
    """The gradient (n,) after the coherence penalty; the running mean then moves towards it.

    The mean starts at the adapter's first gradient, whose cosine with itself is 1.
    """
    average = updates.averages.get(adapter, gradient).to(gradient.device)
    scaled = gradient * coherence_factor(gradient, average, cell, updates.is_sharded)
    updates.averages[adapter] = torch.lerp(scaled, average, 1.0 - 1.0 / cell.coherence_window)
    return scaled


def combined(
    parts: list[Part], gradients: Tensor, slots: dict[str, int], adapter: str, cell: Cell, updates: Updates
) -> Tensor:
    """The gradient (n,) that is applied: the sum of the parts (K, n), which a remedy of roles or slots scales in place."""
    if needs_parts(cell):
        factors = part_factors(parts, role_norms(parts, gradients, updates.is_sharded), slots, cell)
        gradients.mul_(gradients.new_tensor(factors)[:, None])
    whole = functools.reduce(torch.add, gradients)
    return damped(whole, adapter, cell, updates) if cell.coherence_penalty else whole


def refuse_sharded(cell: Cell, launch: Launch) -> None:
    """Refuse a rollback of weights that FSDP2 has sharded (ValueError)."""
    if cell.on_alarm == "rollback" and launch.is_sharded:
        raise ValueError(
            f"on_alarm='rollback' stands beside sharding={launch.sharding!r}, and saved adapters are not read back into sharded "
            "weights. Write sharding='none', or on_alarm='stop'."
        )


def _restorable(recorder: Recorder | None, cell: Cell) -> dict[int, tuple[float, Path]]:
    """step -> validation accuracy and adapters of the steps that a run has evaluated and, on its schedule, saved so far.

    Steps that were saved for another reason do not count: a resumed run would have others than an unbroken one.
    """
    found: dict[int, tuple[float, Path]] = {}
    if recorder is not None:
        outcomes: dict[int, list[bool]] = {}
        for row in recorder.tables["eval"]:
            outcomes.setdefault(row["step"], []).append(row["correct"])
        for step, right in outcomes.items():
            folder = recorder.folder / "adapters" / f"step_{step:05d}"
            if step % cell.save_every == 0 and folder.is_dir():
                found[step] = sum(right) / len(right), folder
    return gather_objects(found)[0]  # the first process has the record


def rate_factor(alarms: list[dict], recorder: Recorder | None, cell: Cell) -> float:
    """What rollbacks have left of the learning rate: `rollback_rate` for each iteration with an alarm and a step to return to."""
    if cell.on_alarm != "rollback" or not alarms:
        return 1.0
    first = min(_restorable(recorder, cell), default=math.inf)
    return cell.rollback_rate ** len({alarm["iteration"] for alarm in alarms if alarm["iteration"] > first})


def roll_back(model: PeftModel, optimizer: torch.optim.Optimizer, recorder: Recorder | None, cell: Cell) -> None:
    """Give the adapters the weights of the step of the highest validation accuracy, the earlier of equals, and no moments.

    Where there is no such step yet, nothing happens.
    """
    if steps := _restorable(recorder, cell):
        best = max(steps, key=lambda step: (steps[step][0], -step))
        load_adapters(model, steps[best][1])
        optimizer.state.clear()
        logger.warning("rolled back to the adapters of iteration %d; rate times %g", best, cell.rollback_rate)


def load_adapters(model: PeftModel, folder: Path) -> None:
    """The weights of every adapter of `model`, from a run's `adapters/step_*`.

    Raises ValueError, before any is loaded, where one is missing, damaged, or of another base or rank.
    """
    states = {name: _fitting(model, name, folder / name) for name in model.peft_config}
    for name, state in states.items():
        set_peft_model_state_dict(model, state, adapter_name=name)


def _fitting(model: PeftModel, name: str, folder: Path) -> dict[str, Tensor]:
    """A saved adapter's tensors; ValueError where they are not those of the adapter `name` of `model`."""
    instead = "Put the adapters of this cell's own run there, or write the results_dir that holds them."
    if missing := [file for file in ("adapter_config.json", WEIGHTS) if not (folder / file).is_file()]:
        raise ValueError(f"{folder} lacks {missing}, so it is no saved adapter {name!r}. {instead}")
    try:
        held = json.loads((folder / "adapter_config.json").read_text())
        state = load_peft_weights(str(folder), device="cpu")
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} is cut off or damaged ({error}), so it cannot be loaded. {instead}") from error
    own = model.peft_config[name].to_dict()
    for what, theirs, ours in (
        ("base model", *(Path(config.get("base_model_name_or_path") or "").name for config in (held, own))),
        ("lora_rank", held.get("r", 0), own.get("r", 0)),  # full copies have none
        ("lora_alpha", held.get("lora_alpha"), own.get("lora_alpha")),
    ):
        if theirs != ours:
            raise ValueError(f"{folder} was trained with {what} {theirs}, and this cell has {ours}: its weights mean "
                             f"nothing here. {instead}")  # fmt: skip
    shapes = {key: tensor.shape for key, tensor in get_peft_model_state_dict(model, adapter_name=name).items()}
    if wrong := sorted(key for key in shapes | state if key not in state or shapes.get(key) != state[key].shape):
        raise ValueError(
            f"{folder} was trained on a base of another shape: {len(wrong)} tensors differ, the first is {wrong[0]}. {instead}"
        )
    return state
