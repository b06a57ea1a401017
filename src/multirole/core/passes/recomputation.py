"""Use gradient checkpointing only for micro-batches whose activations do not fit into free memory, and free what is not used.

On a GPU, micro-batches with a gradient are cut so that they fit (`activation_memory`): a larger one costs a third pass over its tokens.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from multirole.core.passes.activation_memory import bytes_per_token
from multirole.core.passes.prefix_tree import MIN_PARAMETERS

USABLE_FRACTION = 0.6
"""Fraction of free memory that activations may take; the estimate is rough."""


def activation_bytes(model: PreTrainedModel, n_tokens: int, is_half: bool) -> int:
    """Estimate the bytes of activations that a forward pass over `n_tokens` keeps for its backward pass."""
    config = model.config.get_text_config()  # its attributes have the common names, whatever a family calls them
    hidden, sizes = config.hidden_size, config.to_dict()
    intermediate = sizes.get("intermediate_size") or 4 * hidden
    return n_tokens * bytes_per_token(hidden, intermediate, config.num_hidden_layers, is_half)


def free_bytes(device: torch.device) -> int:
    """Return the bytes on the device that are free for tensors."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    return psutil.virtual_memory().available


def return_freed_memory(model: PreTrainedModel) -> None:
    """Return the memory of freed tensors, which glibc keeps, to the operating system; for a model on a CPU.

    Otherwise the memory of an update stays with the process, and that of the next rollout is added to it: after an update of Voting on
    SmolLM2-135M 6.2 GB are held and 1.2 GB used. It takes a quarter of a second there. Small models hold little.
    """
    if model.device.type != "cpu" or model.num_parameters() < MIN_PARAMETERS:
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def fits(model: PreTrainedModel, n_tokens: int, is_half: bool) -> bool:
    """Return whether the activations of a micro-batch of `n_tokens` fit without gradient checkpointing."""
    return activation_bytes(model, n_tokens, is_half) <= USABLE_FRACTION * free_bytes(model.device)


def recomputed_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers with gradient checkpointing."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]


@contextmanager
def without_recomputation(model: PreTrainedModel, is_off: bool) -> Iterator[None]:
    """Context manager: if `is_off`, layers keep their activations. Run forward and backward pass inside it."""
    layers = recomputed_layers(model) if is_off else []
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True
