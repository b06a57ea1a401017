"""Reading saved adapters back into a model."""

import json
from pathlib import Path

from peft import PeftModel
from peft.utils import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError
from torch import Tensor

WEIGHTS = "adapter_model.safetensors"


def load_adapters(model: PeftModel, folder: Path) -> None:
    """The weights of every adapter of `model`, from a run's `adapters/step_*`.

    Raises ValueError, before any is loaded, where one is missing, damaged, or of another base or rank.
    """
    states = {name: _fitting(model, name, folder / name) for name in model.peft_config}
    for name, state in states.items():
        set_peft_model_state_dict(model, state, adapter_name=name)


def _fitting(model: PeftModel, name: str, folder: Path) -> dict[str, Tensor]:
    """A saved adapter's tensors; ValueError where they are not those of the adapter `name` of `model`."""
    instead = "Put the adapters of this cell's own run there, or set the results_dir that holds them."
    if missing := [file for file in ("adapter_config.json", WEIGHTS) if not (folder / file).is_file()]:
        raise ValueError(f"{folder} lacks {missing}, so it does not hold the saved adapter {name!r}. {instead}")
    try:
        held = json.loads((folder / "adapter_config.json").read_text())
        state = load_peft_weights(str(folder), device="cpu")
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{folder} is cut off or damaged ({error}), so it cannot be loaded. {instead}") from error
    own = model.peft_config[name].to_dict()
    for what, theirs, ours in (
        ("base model", *(Path(config.get("base_model_name_or_path") or "").name for config in (held, own))),
        ("lora_rank", held.get("r"), own.get("r")),
        ("lora_alpha", held.get("lora_alpha"), own.get("lora_alpha")),
    ):
        if theirs != ours:
            raise ValueError(f"{folder} was trained with {what} {theirs}, but this cell has {ours}. {instead}")
    shapes = {key: tensor.shape for key, tensor in get_peft_model_state_dict(model, adapter_name=name).items()}
    if wrong := sorted(key for key in shapes | state if key not in state or shapes.get(key) != state[key].shape):
        raise ValueError(
            f"{folder} was trained on a base of another shape: {len(wrong)} tensors differ, the first is {wrong[0]}. {instead}"
        )
    return state
