"""Use gradient checkpointing only for micro-batches whose activations do not fit into free memory, and free what is not used.

On a GPU, micro-batches with a gradient are cut so that they fit (`activation_memory`): a larger one costs a third pass over its tokens.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import psutil
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from multirole.update.passes.activation_memory import bytes_per_token
from multirole.update.passes.prefix_tree import MIN_PARAMETERS

USABLE_FRACTION = 0.6
"""Fraction of free memory that activations may take; the estimate is rough."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads the settings of its CUDA allocator from."""
GROWING_SEGMENTS = "expandable_segments:True"
"""Setting with which memory that was freed in pieces of one length serves pieces of another, as rows of other lengths need."""


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


def fits(model: PreTrainedModel, n_tokens: int, is_half: bool, added_bytes: int = 0) -> bool:
    """Return whether the activations of a micro-batch of `n_tokens`, and `added_bytes`, fit without gradient checkpointing."""
    return activation_bytes(model, n_tokens, is_half) + added_bytes <= USABLE_FRACTION * free_bytes(model.device)


def recomputed_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Return the layers with gradient checkpointing."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]


@contextmanager
def recomputation(model: PreTrainedModel, is_on: bool | None) -> Iterator[None]:
    """Context manager: layers recompute their activations, keep them, or with None do what the model's settings say.

    Run forward and backward pass inside it. Layers that have no gradient checkpointing always keep them.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and is_on is not None]
    changed = [layer for layer in layers if layer.gradient_checkpointing != is_on]
    added = [layer for layer in changed if is_on and "_gradient_checkpointing_func" not in vars(layer)]
    for layer in added:
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    for layer in changed:
        layer.gradient_checkpointing = bool(is_on)
    try:
        yield
    finally:
        for layer in changed:
            layer.gradient_checkpointing = not is_on
        for layer in added:
            del layer._gradient_checkpointing_func


# ---- out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the device, or the host, has too little memory."""
    is_known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return (
        is_known
        or isinstance(error, RuntimeError)
        and (
            should_reduce_batch_size(error)
            or "out of memory" in str(error)
            or "_ALLOC_FAILED" in str(error)  # cuBLAS, cuDNN
        )
    )


def free_memory(model: PreTrainedModel) -> None:
    """Collect garbage, and return what torch's allocator keeps to the device."""
    clear_device_cache(garbage_collection=True)
    return_freed_memory(model)


def use_growing_segments() -> None:
    """Let torch's CUDA allocator use segments that grow, unless the environment configures it; for a process with a GPU.

    vLLM switches the setting off while it fills the pool of its sleep mode, which needs fixed segments.
    """
    if not torch.cuda.is_available() or any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        return
    # read when CUDA is initialised, here or in a process that is started
    os.environ[ALLOCATOR_VARIABLES[0]] = GROWING_SEGMENTS
    if torch.cuda.is_initialized():
        torch._C._accelerator_setAllocatorSettings(GROWING_SEGMENTS)
