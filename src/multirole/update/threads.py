"""Choose torch's number of CPU threads, unless the user has chosen it.

torch uses one thread per core. That is slow in two cases. The matrix products of a small model take less time than waking
threads. And where other processes use the cores, a thread that waits for a core holds up the others in every product: on two
cores with a load of 10 (torch 2.13, 4 repetitions, the best of each, `benchmarks/bench_threads.py`), a forward and backward
pass of 2,048 tokens takes

    parameters   1 thread   2 threads
    0.5M           0.36 s       7.3 s
    2.7M           2.3  s      13.3 s
    51M            3.0  s      13.0 s

An idle machine was not measured.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

SMALL_MODEL = 20_000_000
"""Largest model, in parameters, that gets one thread: between the embedded models (0.5M) and those of 135M and more."""
_chosen: list[int] = []
"""The number of threads that this module has set in this process, if any."""
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables from which torch takes its number of threads when it is imported."""


def fitting_threads(n_parameters: int, n_cores: int, load: float, n_processes: int = 1) -> int:
    """Return the threads for one of `n_processes` that train a model on `n_cores` cores with a load of `load`, this process included."""
    if n_parameters <= SMALL_MODEL:
        return 1
    n_free = n_cores - max(0.0, load - n_processes)
    return max(1, round(n_free / n_processes))


def use_fitting_threads(n_parameters: int) -> None:
    """Set torch's threads for training a model on this process's cores and log the number, unless the user has chosen it."""
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
    logger.info("torch uses %d of %d threads: the model has %.2fM parameters, and the load of this machine is %.1f. "
                "Set OMP_NUM_THREADS to choose another number.", n_threads, n_cores, n_parameters / 1e6, load_average())  # fmt: skip


def are_given(n_threads: int, defaults: set[int], environment: Mapping[str, str]) -> bool:
    """Return whether the user has chosen the number of threads: by a variable, or by `torch.set_num_threads`.

    `defaults` are torch's possible default numbers. A call of `torch.set_num_threads` with one of them cannot be detected.
    """
    return any(environment.get(name) for name in VARIABLES) or n_threads not in defaults


def available_cores() -> set[int]:
    """Return the processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def n_physical(cores: set[int]) -> int:
    """Return the number of physical cores of these processors; the number of processors if the system does not tell."""
    files = [Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in cores]
    return len({file.read_text() if file.exists() else str(file) for file in files})


def load_average() -> float:
    """Return the mean number of processes that ran or waited for a core in the last minute; 0 if the system does not count them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
