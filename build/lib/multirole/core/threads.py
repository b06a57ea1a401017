"""How many threads torch computes with on a CPU, chosen unless the user has.

torch takes a thread per core. That is wrong in two cases. A small model's matrix products end sooner than threads can be woken.
And where other processes have the cores, a thread that has to wait for its turn holds up all others in every product: on two
cores with a load of 10 (torch 2.13, 4 repetitions, the best of each, `benchmarks/bench_threads.py`), a forward and backward
pass of 2,048 tokens takes

    parameters   1 thread   2 threads
    0.5M           0.36 s       7.3 s
    2.7M           2.3  s      13.3 s
    51M            3.0  s      13.0 s

A machine that is idle was not measured.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SMALL = 20_000_000
"""Parameters of a model up to which one thread is used. It lies between the embedded models (0.5M) and those of 135M and more."""
_chosen: list[int] = []
"""The number that was chosen here for this process, if one was."""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables from which torch takes its number of threads when it is imported."""


def fitting_threads(n_parameters: int, n_cores: int, load: float, n_processes: int = 1) -> int:
    """Threads for one of `n_processes` that train a model on `n_cores` cores, where `load` processes have run, this one included."""
    if n_parameters <= SMALL:
        return 1
    n_free = n_cores - max(0.0, load - n_processes)
    return max(1, round(n_free / n_processes))


def use_fitting_threads(n_parameters: int) -> None:
    """Set torch's threads for training a model on this process's cores, and log it, unless they `are_given`."""
    cores = available_cores()
    n_cores, before = len(cores), torch.get_num_threads()
    if before not in _chosen and are_given(before, {n_cores, n_physical(cores)}, os.environ):
        return
    n_processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's
    n_threads = fitting_threads(n_parameters, n_cores, load_average(), n_processes)
    _chosen[:] = [n_threads]
    if n_threads == before:
        return
    torch.set_num_threads(n_threads)
    logger.info("torch computes with %d of %d threads: the model has %.2fM parameters, and the load of this machine is %.1f. "
                "Set OMP_NUM_THREADS to choose yourself.", n_threads, n_cores, n_parameters / 1e6, load_average())  # fmt: skip


def are_given(n_threads: int, defaults: set[int], environment: Mapping[str, str]) -> bool:
    """Whether the user has chosen the number of threads: by a variable, or by `torch.set_num_threads`.

    `defaults` are the numbers that torch may have taken by itself. A call of `torch.set_num_threads` with one of them is not seen.
    """
    return any(environment.get(name) for name in VARIABLES) or n_threads not in defaults


def available_cores() -> set[int]:
    """The processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def n_physical(cores: set[int]) -> int:
    """The number of cores, where several processors may share one; that of the processors where the system does not say."""
    files = [Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores]
    return len({file.read_text() if file.exists() else str(file) for file in files})


def load_average() -> float:
    """Processes that ran or waited for a core in the last minute, on average; 0 where the system does not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
