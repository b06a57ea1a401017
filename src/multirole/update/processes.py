"""Share one run between several processes: each knows every episode and computes a shard of each mini-batch.

Rollouts and rewards are sharded over the processes and gathered, so that rows, mini-batches and metrics are made from the same
list everywhere and a run of several processes equals the run of one, except for the order of float additions. This module
reduces gradients, not DDP, which reduces during backward and cannot handle different numbers of micro-batches per role and
adapter. Under FSDP2 (torch `fully_shard`) backward itself reduces; then every process must run the same number of passes,
and one without rows repeats a row with weight 0.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from multirole.update.rows import Row, even_micro_batches, micro_batches, padded

T = TypeVar("T")
TIMEOUT = timedelta(hours=2)
"""Limit of a collective. Rollouts differ in length, so torch's ten minutes would end healthy runs."""
_of_thread = threading.local()
"""`group`: the process group of a thread's `gather_objects`. Threads without one use the default group."""


def processes() -> PartialState:
    """Return accelerate's state of this run's processes; without a GPU they communicate through gloo."""
    timeout = {"timeout": TIMEOUT} if "WORLD_SIZE" in os.environ else {}
    return PartialState(cpu=not torch.cuda.is_available(), **timeout)


def has_several() -> bool:
    """Return whether this run has several processes."""
    return dist.is_initialized() and dist.get_world_size() > 1


def gather_objects(item: object) -> list:
    """Collective: return the `item` of every process, ordered by rank."""
    if not has_several():
        return [item]
    items: list = [None] * dist.get_world_size()
    dist.all_gather_object(items, item, getattr(_of_thread, "group", None))
    return items


def gather_results(work: Callable[[], T], *kinds: type[Exception]) -> list[T]:
    """Collective: call `work` in every process and return all results, ordered by rank. An error of one of `kinds` is raised in every process.

    The process in which it occurred raises the error itself. The others, which would wait for its result, raise the kind with the error's message.
    """
    result, failure, named = None, None, None
    try:
        result = work()
    except kinds as error:
        failure = error
        named = next(kind for kind in kinds if isinstance(error, kind)), f"{type(error).__name__}: {error}"
    outcomes = gather_objects((result, named))
    if failure is not None:
        raise failure
    for rank, (_, of_other) in enumerate(outcomes):
        if of_other is not None:
            kind, message = of_other
            raise kind(f"Process {rank} of this run failed. {message}")
    return [result for result, _ in outcomes]


def new_thread_group() -> dist.ProcessGroup | None:
    """Collective: return a group of all processes for the objects that one thread gathers; None in a single process.

    Two threads must not share a group, because each process would run their collectives in another order. It is gloo's, which needs no GPU and
    so cannot wait for a collective of the update.
    """
    return dist.new_group(backend="gloo", timeout=TIMEOUT) if has_several() else None


def use_thread_group(group: dist.ProcessGroup | None) -> None:
    """Make `gather_objects` use a group of `new_thread_group` in the calling thread."""
    _of_thread.group = group


def own_share(items: Sequence[T]) -> Sequence[T]:
    """Return this process's slice of a list that every process has; the slices ordered by rank make up the list."""
    n, rank, size = len(items), processes().process_index, processes().num_processes
    return items[n * rank // size : n * (rank + 1) // size]


def raise_out_of_memory(messages: Sequence[str]) -> None:
    """Raise torch.OutOfMemoryError for the first process that ran out of memory; `messages` has one of each, "" if its memory sufficed."""
    for rank, message in enumerate(messages):
        if message:
            raise torch.OutOfMemoryError(f"Process {rank}: {message}" if len(messages) > 1 else message)


def full_tensor(tensor: Tensor) -> Tensor:
    """Collective: return the full tensor of one that may be sharded. Every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def all_reduce(tensors: list[Tensor]) -> None:
    """Sum each tensor over the processes, in place. Gradients of sharded parameters are summed already and stay as they are."""
    if has_several():
        for tensor in tensors:
            if not isinstance(tensor, DTensor):
                dist.all_reduce(tensor)


def shard(
    rows: list[Row], max_tokens: int, rank: int, loads: list[float], is_sharded: bool, cost: float = 1.0,
    cut: Callable[[list[Row], int], list[list[Row]]] = micro_batches, size: Callable[[list[Row]], int] = padded,
) -> list[tuple[list[Row], float]]:  # fmt: skip
    """Return one process's micro-batches and their weights: 1, or 0 for a row repeated to give FSDP2 equally many passes.

    `cut(rows, max_tokens)` makes the micro-batches and `size` counts their tokens.

    `loads` holds the work of every process so far; a micro-batch goes to the process with the least, and adds `cost` times its
    tokens. Under FSDP2 a pass ends at the same time on every process, so its micro-batches are made equally large.
    """
    n = len(loads)
    if n == 1:
        return [(batch, 1.0) for batch in cut(rows, max_tokens)]
    batches = even_micro_batches(rows, max_tokens, n, cut, size)
    if is_sharded:
        missing = -len(batches) % n
        dealt = [(batch, 1.0) for batch in batches] + [(batches[-1][-1:], 0.0)] * missing
        return dealt[rank::n]
    assigned = []
    for batch in batches:
        least_loaded = loads.index(min(loads))
        loads[least_loaded] += cost * size(batch)
        if least_loaded == rank:
            assigned.append((batch, 1.0))
    return assigned


def check_launch(accelerator: Accelerator, is_sharded: bool, is_deepspeed: bool) -> None:
    """Refuse a launch that cannot take several optimizer steps per iteration, or that shares a row between processes (ValueError)."""
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and (parallelism.tp_enabled or parallelism.cp_enabled or parallelism.sp_enabled):
        raise ValueError(
            "This run was launched with tensor, context or sequence parallelism, in which several processes compute one row. Here every process "
            "computes its own rows. Launch it with FSDP2 (`fsdp_version: 2`) or with data parallelism alone."
        )
    if is_deepspeed or accelerator.scaler or (is_sharded and not accelerator.is_fsdp2):
        raise ValueError(
            "This run was launched with DeepSpeed, FSDP1 or float16, none of which can take several optimizer steps per iteration. "
            "Launch it with FSDP2 (`fsdp_version: 2`) or with data parallelism alone, in bfloat16 or float32."
        )


def keep_float32(accelerator: Accelerator) -> None:
    """Make FSDP2 return log-probs and reduce gradients in float32, while it computes in the run's mixed precision.

    accelerate's own policy casts both to bfloat16.
    """
    if accelerator.mixed_precision == "bf16":
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
        accelerator.state.fsdp_plugin.mixed_precision_policy = policy


def save_every_adapter(accelerator: Accelerator) -> None:
    """Make FSDP2's checkpoints hold all adapters: those in shards, accelerate's default with FSDP2, hold the active one alone."""
    plugin = accelerator.state.fsdp_plugin
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # of shards, perhaps
    plugin.set_state_dict_type("FULL_STATE_DICT")


@contextmanager
def local_metrics(accelerator: Accelerator) -> Iterator[None]:
    """Context manager: keep TRL from gathering metrics, which it does on every micro-batch and needs equal shapes for."""
    gather, reduce = accelerator.gather, accelerator.reduce
    accelerator.gather, accelerator.reduce = lambda tensor: tensor, lambda tensor, reduction="sum": tensor
    try:
        yield
    finally:
        accelerator.gather, accelerator.reduce = gather, reduce
