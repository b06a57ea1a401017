"""The reference of KL: the frozen base, or adapters with the weights that training began with, if the base alone is not the initial policy."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from peft import PeftModel
from torch import Tensor, nn

from multirole.inputs.adapters import adapter_parameters

Weights = list[tuple[nn.Parameter, Tensor]]
"""Parameters, each with the values that replace its own."""


@dataclass(frozen=True)
class Reference:
    """The policy that KL is measured from: the base of `model`, or its adapters with `initial_weights` if there are any."""

    model: PeftModel
    initial_weights: Weights

    @classmethod
    def before_training(cls, model: PeftModel, adapters: Iterable[str], is_sharded: bool) -> "Reference":
        """Return the reference that the current weights of `adapters` are: the base if there are none, or if they leave its output as it is.

        Raises ValueError for weights under FSDP2.
        """
        weights = initial_weights(model, adapters)
        if weights and is_sharded:
            raise ValueError(
                "`beta` measures KL from the initial weights of the adapters, which FSDP2 would have to shard as well. Use data parallelism "
                "alone, merge the adapters into the base and pass a `peft_config`, or leave out an `init_lora_weights` that changes the base."
            )
        return cls(model, weights)

    @property
    def is_base(self) -> bool:
        """Return whether the reference is the base model without adapters."""
        return not self.initial_weights

    def applied(self) -> AbstractContextManager[None]:
        """Return the context in which the model computes with the reference's weights."""
        return self.model.disable_adapter() if self.is_base else swapped(self.initial_weights)


@torch.no_grad()
def initial_weights(model: PeftModel, adapters: Iterable[str]) -> Weights:
    """Copies of the adapters' weights, on the host; empty where they all leave the base's output as it is (fresh ones do)."""
    parts = [named for adapter in adapters for named in adapter_parameters(model, adapter)]
    if not any(bool(p.any()) for name, p in parts if ".lora_B." in name or ".lora_embedding_B." in name):
        return []
    return [(p, p.detach().cpu().clone()) for _, p in parts]


@contextmanager
def swapped(weights: Weights) -> Iterator[None]:
    """Context manager: swap the parameters' values."""
    present = [p.data for p, _ in weights]
    for p, value in weights:
        p.data = value.to(p.device)
    try:
        yield
    finally:
        for (p, _), value in zip(weights, present, strict=True):
            p.data = value
