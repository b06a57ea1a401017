"""What KL is measured from where adapters were trained before: their weights as they were given."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch import Tensor, nn

Weights = list[tuple[nn.Parameter, Tensor]]
"""Parameters and the values that stand in for theirs."""


@torch.no_grad()
def given_adapters(model: PeftModel, adapters: Iterable[str]) -> Weights:
    """Copies of the adapters' weights, on the host; empty where they all leave the base's output as it is (fresh ones do)."""
    named = list(model.named_parameters())
    parts = [
        (name, p) for adapter in adapters for name, p in named if f".{adapter}." in name or name.endswith(f".{adapter}")
    ]
    if not any(bool(p.any()) for name, p in parts if ".lora_B." in name or ".lora_embedding_B." in name):
        return []
    return [(p, p.detach().cpu().clone()) for _, p in parts]


@contextmanager
def swapped(weights: Weights) -> Iterator[None]:
    """Within it, the parameters hold the other values."""
    present = [p.data for p, _ in weights]
    for p, value in weights:
        p.data = value.to(p.device)
    try:
        yield
    finally:
        for (p, _), value in zip(weights, present, strict=True):
            p.data = value
