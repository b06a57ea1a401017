"""Switch off what is random in a forward pass: dropout of every kind, router jitter, NEFTune.

The ratio of the loss divides the trainer's probabilities by those of the engine, which samples without noise. Noise in either of
the trainer's passes moves the ratio of an untouched policy off 1 and clips tokens of it (huggingface/trl#3234).
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

NOISE = ("drop", "jitter")
"""Parts of the names of attributes that hold a probability or an amplitude of noise in the models of transformers."""


def disable_noise(model: nn.Module) -> list[str]:
    """Set the noise of every module and of every model's configuration to 0; return what was not 0, such as "lora_dropout=0.1".

    TRL's `disable_dropout` reaches `nn.Dropout` alone. Attention takes its dropout from an attribute of its layer, and a few models
    read their configuration in the forward pass.
    """
    found: dict[str, None] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            words = [word for word in path.split(".") if any(part in word for part in NOISE)]
            found[f"{words[-1] if words else 'dropout'}={module.p}"] = None
            module.p = 0.0
        holders: list[Any] = [module, module.config] if isinstance(module, PreTrainedModel) else [module]
        for holder in holders:
            for name, value in list(_noisy(holder)):
                found[f"{name}={value}"] = None
                setattr(holder, name, 0.0)
    return list(found)


def _noisy(holder: Any) -> Iterator[tuple[str, float]]:
    """The attributes of a module or configuration that are noise and not 0."""
    for name, value in vars(holder).items():
        if isinstance(value, float) and value and any(part in name for part in NOISE):
            yield name, value
