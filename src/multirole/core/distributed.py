"""Several processes, one run: every process knows every episode, and computes a shard of each mini-batch.

Rollouts and rewards are sharded over the processes and gathered, so that rows, mini-batches and metrics are made from the same
list everywhere and a run of several processes equals the run of one, but for the order of float additions. Gradients are
reduced here and not by DDP: roles and adapters have different numbers of micro-batches, which wrappers that reduce during
backward cannot handle. Under FSDP2 (torch `fully_shard`) backward itself reduces; then every process must run equally many
passes, and one without rows repeats a row with weight 0.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from multirole.core.rows import Row, even_micro_batches, micro_batches, padded

T = TypeVar("T")


def processes() -> PartialState:
    """The processes of this run, as accelerate knows them; without a GPU they communicate through gloo.

    They wait up to two hours for the slowest rollout among them; torch's default of ten minutes would end healthy runs.
    """
    timeout = {"timeout": timedelta(hours=2)} if "WORLD_SIZE" in os.environ else {}
    return PartialState(cpu=not torch.cuda.is_available(), **timeout)


def gather_objects(item: object) -> list:
    """`item` of every process, in the order of their ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [item]
    items: list = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def own_share(items: list[T]) -> list[T]:
    """This process's part of a list that all of them have; the parts, in the order of the ranks, are the whole."""
    n, rank, size = len(items), processes().process_index, processes().num_processes
    return items[n * rank // size : n * (rank + 1) // size]


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded over the processes; all of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_reduce(tensors: list[Tensor]) -> None:
    """Sum each tensor over the processes, in place. Gradients of sharded parameters are sums already and are left alone."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for tensor in tensors:
            if not isinstance(tensor, DTensor):
                dist.all_reduce(tensor)


def shard(
    rows: list[Row], max_tokens: int, rank: int, loads: list[float], is_sharded: bool, cost: float = 1.0,
    cut: Callable[[list[Row], int], list[list[Row]]] = micro_batches, size: Callable[[list[Row]], int] = padded,
) -> list[tuple[list[Row], float]]:  # fmt: skip
    """One process's micro-batches and their weights: 1, or 0 for a row that is repeated to keep FSDP2's processes in step.

    `cut` makes micro-batches of at most so many tokens, which `size` counts.

    `loads` holds the work of every process so far; a micro-batch goes to the one with the least, and adds `cost` times its
    tokens. Under FSDP2 every pass ends for all at once, and its micro-batches are of a size.
    """
    n = len(loads)
    if n == 1:
        return [(batch, 1.0) for batch in cut(rows, max_tokens)]
    batches = even_micro_batches(rows, max_tokens, n, cut, size)
    if is_sharded:
        missing = -len(batches) % n
        dealt = [(batch, 1.0) for batch in batches] + [(batches[-1][-1:], 0.0)] * missing
        return dealt[rank::n]
    own = []
    for batch in batches:
        least = loads.index(min(loads))
        loads[least] += cost * size(batch)
        if least == rank:
            own.append((batch, 1.0))
    return own


def keep_float32(accelerator: Accelerator) -> None:
    """Under FSDP2, compute in the run's mixed precision, but return log-probs and reduce gradients in float32.

    accelerate's own policy casts both to bfloat16.
    """
    if accelerator.mixed_precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy


@contextmanager
def local_metrics(accelerator: Accelerator) -> Iterator[None]:
    """Within it, TRL's metrics stay local: it gathers them on every micro-batch, which needs equal shapes on all processes."""
    gather, reduce = accelerator.gather, accelerator.reduce
    accelerator.gather, accelerator.reduce = lambda tensor: tensor, lambda tensor, reduction="sum": tensor
    try:
        yield
    finally:
        accelerator.gather, accelerator.reduce = gather, reduce
