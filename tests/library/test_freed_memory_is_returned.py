"""Between rollout and update, memory that tensors no longer use goes back to the system."""

import platform
from types import SimpleNamespace

import psutil
import pytest
import torch

from multirole.core.passes.recomputation import return_freed_memory

N_TENSORS, SIZE = 2000, 30_000
"""Parameters of a quarter of a gigabyte, in tensors small enough for the C library's heap."""


def mib_held() -> float:
    return psutil.Process().memory_info().rss / 2**20


def model(n_parameters: int) -> SimpleNamespace:
    return SimpleNamespace(device=torch.device("cpu"), num_parameters=lambda: n_parameters)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, which keeps freed memory")
def test_a_large_models_memory_is_returned_and_a_small_ones_kept():
    """Every second tensor is freed, so that no free memory is at the end of the heap, which glibc would return by itself."""
    tensors = [torch.ones(SIZE) for _ in range(2 * N_TENSORS)]
    del tensors[::2]
    freed = N_TENSORS * SIZE * 4 / 2**20
    before = mib_held()
    return_freed_memory(model(500_000))
    kept = mib_held()
    return_freed_memory(model(135_000_000))
    assert before - kept < 0.1 * freed
    assert kept - mib_held() > 0.8 * freed
    assert all((tensor == 1).all() for tensor in tensors)
