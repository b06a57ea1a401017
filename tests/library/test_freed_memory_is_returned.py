"""Between rollout and update, memory that tensors no longer use goes back to the system."""

import importlib.util
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from multirole.update.passes import recomputation
from multirole.update.passes.recomputation import return_freed_memory

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


@pytest.mark.parametrize("is_initialized", [False, True])
def test_segments_of_a_gpu_grow_unless_the_environment_says_otherwise(monkeypatch, is_initialized):
    """Rows of other lengths fit into memory that was freed. vLLM 0.31 switches it off within its pool of sleeping memory."""
    applied = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", applied.append)
    for name in recomputation.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    recomputation.use_growing_segments()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert applied == ["expandable_segments:True"] * is_initialized, "torch reads the environment only at its start"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    recomputation.use_growing_segments()
    assert "PYTORCH_ALLOC_CONF" not in os.environ and len(applied) == is_initialized


def test_vllm_switches_growing_segments_off_within_its_pool():
    """The contract that `use_growing_segments` stands on, with vLLM's sleep mode in the trainer's process."""
    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("vLLM is not installed")
    source = (Path(found.origin).parent / "device_allocator" / "cumem.py").read_text()
    pool = source.partition("def use_memory_pool(self")[2].partition("\n    def ")[0]
    assert (
        "set_alloc_conf(with_conf_flag(prev_conf, EXPANDABLE_SEGMENTS, False))" in pool
        and "set_alloc_conf(prev_conf)" in pool
    )
