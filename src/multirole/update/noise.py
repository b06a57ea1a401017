"""Switch off randomness in forward passes: dropout of every kind, router jitter, NEFTune.

The ratio of the loss divides the trainer's probabilities by those of the engine, which samples without noise. Noise in either of
the trainer's passes moves the ratio of an untouched policy off 1 and clips tokens of it (huggingface/trl#3234).
"""

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

NOISE_NAMES = ("drop", "jitter")
"""Substrings of the attributes that hold a noise probability or amplitude in the models of transformers."""


def disable_noise(model: nn.Module, neftune_noise_alpha: float | None = None) -> list[str]:
    """Set the noise of every module and model configuration to 0; return the nonzero settings, such as "lora_dropout=0.1".

    NEFTune is only named: the trainer keeps HF's loop from it.

    TRL's `disable_dropout` reaches `nn.Dropout` alone. Attention takes its dropout from an attribute of its layer, and a few models
    read their configuration in the forward pass.
    """
    switched_off: dict[str, None] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p:
            words = [word for word in path.split(".") if any(part in word for part in NOISE_NAMES)]
            switched_off[f"{words[-1] if words else 'dropout'}={module.p}"] = None
            module.p = 0.0
        holders: list[Any] = [module, module.config] if isinstance(module, PreTrainedModel) else [module]
        for holder in holders:
            for name, value in list(_noisy(holder)):
                switched_off[f"{name}={value}"] = None
                setattr(holder, name, 0.0)
    if neftune_noise_alpha is not None:
        switched_off[f"neftune_noise_alpha={neftune_noise_alpha}"] = None
    return list(switched_off)


def warn_of_noise(names: list[str]) -> None:
    """Log which noise has been switched off, if there was any."""
    if names:
        logger.warning(
            "%s: switched off. The ratio of the loss compares the trainer's log-probs with those of the engine, which samples without "
            "noise.", ", ".join(names),
        )  # fmt: skip


def _noisy(holder: Any) -> Iterator[tuple[str, float]]:
    """Yield the noise attributes of a module or configuration that are not 0."""
    for name, value in vars(holder).items():
        if isinstance(value, float) and value and any(part in name for part in NOISE_NAMES):
            yield name, value
